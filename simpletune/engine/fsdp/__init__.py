"""How are weights, gradients and optimizer state divided among processes, by torch's FSDP2?"""
