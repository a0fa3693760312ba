"""Rows of data sets in shards (parquet, MDS), read one by one, and the order in which an epoch visits them. May import
``system`` and ``options``. ``data`` and the packages above may import this one.
"""
