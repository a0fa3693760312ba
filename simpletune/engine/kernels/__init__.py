"""How does a block compute between its matmuls and attention? One kernel each: Triton's on CUDA, else torch's."""
