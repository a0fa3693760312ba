"""Which pictures does a run train on, when, and from where?"""
