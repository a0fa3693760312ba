"""Where are latents and prompt embeddings, encoded once? In files, or in shards with an index."""
