"""What trains on the text side: the embeddings of a new token (textual inversion), LoRA on CLIP, and their files?

The options import no torch.
"""
