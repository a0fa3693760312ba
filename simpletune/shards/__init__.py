"""The cache of latents and prompt embeddings as shards with an index, in a folder or in an object store.

May import data, stores and system. What lies above data may import this one.
"""
