"""What are Stable Diffusion 1.x and 2.x, whose UNet predicts noise or v?"""
