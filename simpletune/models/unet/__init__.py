"""What is the UNet that Stable Diffusion 1.5, 2 and XL share: its layers, its files, its names in LoRA files?"""
