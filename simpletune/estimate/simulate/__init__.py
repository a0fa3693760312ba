"""What does each stage of a job allocate, compute, copy and wait for? Runs it on fake tensors."""
