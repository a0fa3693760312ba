"""Rows of data sets in shards (parquet, MDS), read one by one, and the order in which an epoch visits them.

May import the machine (``system``) and ``options``. ``data`` and what lies above it may import it.
"""
