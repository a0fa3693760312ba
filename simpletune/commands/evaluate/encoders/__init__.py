"""Encoders for comparing pictures with pictures and prompts: DINO, DINOv2, CLIP, SigLIP.

A new kind takes one file, and one line in `loading.KINDS`. May import hub, demo, system and what is below them; drawing
and evaluation import it.
"""
