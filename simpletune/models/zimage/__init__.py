"""What is Z-Image, one of whose blocks reads picture and text as one sequence, each padded to a multiple of 32 tokens?"""
