"""The dataset report: unusable, small, duplicate and uncaptioned pictures, buckets, crops, captions and truncation.

May import report, config and the packages below them. The command line and the page import it.
"""
