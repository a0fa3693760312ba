"""The dataset report: unusable, small, duplicate and uncaptioned pictures, buckets and crops.

May import report, config and the packages below them. Only the command line imports it.
"""
