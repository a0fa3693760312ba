"""Which layers does a LoRA file update, and how is it read, written, converted, merged, mixed or resized?"""
