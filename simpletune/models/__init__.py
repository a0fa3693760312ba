"""Which architectures and objectives exist: what families share, the families, how noise is added and removed."""
