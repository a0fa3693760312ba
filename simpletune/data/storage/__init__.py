"""How are samples read, by key or in order, and written: in files, in shards, in an object store?"""
