"""What is Qwen-Image, whose blocks have two streams with their own modulations, and a Qwen2.5-VL's states as text?"""
