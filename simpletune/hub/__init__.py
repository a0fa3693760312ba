"""The Hugging Face hub: what to fetch, fetching it, and each failure in words.

May import system and what lies below it; models, data and runs import it.
"""
