"""How are the files of a place listed, read and written: a folder, an object store, a web server, the hub?"""
