"""What do model families share: parts and files, layer-by-layer loading, buckets, compiling, the quantised cache?"""
