"""How are rows of data sets in shards (parquet, MDS) read one by one, and in which order?"""
