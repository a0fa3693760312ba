"""What does ``train`` do? It resolves what the configuration leaves open, prepares the data, loads the model, and hands
all of it to the trainer."""
