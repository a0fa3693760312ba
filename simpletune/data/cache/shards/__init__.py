"""The cache of latents and prompt embeddings as shards with an index, in a folder or in an object store.

May import data, stores and system. The packages above data may import this one.
"""
