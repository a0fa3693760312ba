"""What a block does between its products and attention, each step in one kernel: Triton's on CUDA, torch's elsewhere.

May import the modules directly in simpletune/ and system. Families may import this one.
"""
