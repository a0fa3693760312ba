"""What do trainer and estimator both run? Encode prompts and pictures, load the model, step, sample."""
