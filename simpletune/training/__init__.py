"""How does one run go from set-up to finish?"""
