"""What do given weights generate? Pictures from base, LoRA or a full model, and side by side."""
