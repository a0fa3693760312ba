"""What does one training step compute? Batches on the device, the step, its attention kernel, synthetic batches."""
