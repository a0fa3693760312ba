"""How alike are two pictures, or a picture and a prompt, to DINO, DINOv2, CLIP and SigLIP?

A new kind takes one file, and one line in `loading.KINDS`.
"""
