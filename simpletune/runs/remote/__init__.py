"""How is a run's folder kept in an object store, uploaded while it trains and fetched where it continues?"""
