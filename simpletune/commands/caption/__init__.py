"""How do models of transformers (Florence-2, BLIP, Qwen-VL), without torchvision, and ONNX taggers caption pictures?

A new kind of the former takes one file, and one line in `loading.KINDS`.
"""
