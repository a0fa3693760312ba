"""Which pictures a run trains on, when, and from where: sources, the plan of every step, the cache."""
