"""How are objects of object stores and web servers listed, read and written, whole or in part?"""
