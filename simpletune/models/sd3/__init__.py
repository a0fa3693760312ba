"""What are Stable Diffusion 3 and 3.5, whose transformer predicts a velocity?"""
