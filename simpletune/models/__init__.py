"""Which architectures and objectives exist?"""
