"""Caption pictures with image-to-text models from transformers (Florence-2, BLIP, Qwen-VL), without torchvision.

A new kind takes one file, and one line in `loading.KINDS`. May import estimate, config, data, models, quant and what is
below them; the command line and the page import it.
"""
