"""What is wrong with a data set: unusable, small, duplicate, uncaptioned or truncated entries, odd crops?"""
