"""Text encoders, and what the denoisers read of them."""
