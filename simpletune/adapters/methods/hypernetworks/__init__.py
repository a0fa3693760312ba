"""What is inside a hypernetwork, and in its files?"""
