"""A look at a data set before anything else: what is unusable, small, alike, uncaptioned, and how it is cut."""
