"""How are files of the Hugging Face hub chosen and downloaded, and failures explained?"""
