"""What is FLUX.2 klein, whose transformer reads tokens of 16 x 16 pixels, and a Qwen3's states as text?"""
