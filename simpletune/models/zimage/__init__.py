"""What is Z-Image, whose blocks read picture and text as one sequence, each padded to a multiple of 32 tokens?"""
