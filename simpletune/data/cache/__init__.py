"""Latents and prompt embeddings, encoded once and read by key: as files, or as shards with an index."""
