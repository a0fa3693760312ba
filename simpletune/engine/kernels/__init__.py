"""Operations of a block between its matmuls and attention, each in one kernel: Triton's on CUDA, torch's elsewhere.

May import the modules directly in simpletune/ and system. Families may import this one.
"""
