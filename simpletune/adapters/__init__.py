"""What trains, and in which files: training methods, LoRA files, the text side."""
