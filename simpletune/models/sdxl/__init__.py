"""What is Stable Diffusion XL, whose UNet also reads the sizes of pictures and a second text encoder?"""
