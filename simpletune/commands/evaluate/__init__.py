"""Which checkpoint is good? Generate with each from the same noise, and score the pictures by encoders."""
