"""How is the cache kept as shards with an index, in a folder or in an object store?"""
