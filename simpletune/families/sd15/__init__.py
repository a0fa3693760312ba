"""Stable Diffusion 1.x and 2.x, whose UNet predicts noise or v: option, shapes, text, files and operations.

``families/__init__.py`` imports its option; nothing else outside imports from here.
"""
