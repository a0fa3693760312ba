"""What model families share: parts and their files, layer-by-layer loading, buckets, compiling, the quantised cache.

May import memory, quant and the packages below them. Families and the packages above may import this one.
"""
