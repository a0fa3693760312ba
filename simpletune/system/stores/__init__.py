"""Object stores and web servers: list, read, and write objects and parts of them.

May import system and the modules directly in simpletune/. Everything that reads or writes a store may import this one.
"""
