"""How are pictures captioned by image-to-text models of transformers (Florence-2, BLIP, Qwen-VL), without torchvision?

A new kind takes one file, and one line in `loading.KINDS`.
"""
