"""LoRA files: identify, read, write, convert, merge into a base, mix, extract and resize them.

| module | purpose |
|---|---|
| ``layouts`` | the layouts of files: map keys to layers |
| ``families`` | identify a file's model by its keys and shapes |
| ``header`` | a file's keys, ranks and alphas, without its weights |
| ``compatibility`` | how diffusers, ComfyUI, Forge and simpletune load a file |
| ``describe`` | ``simpletune inspect`` |
| ``updates`` | the weights of one layer's update; fuse and split q, k, v |
| ``read``, ``write`` | whole files |
| ``values`` | find values that are NaN, infinite or all zero |
| ``attach`` | add a file's updates to a model's layers |
| ``bases``, ``merge``, ``extract`` | checkpoints, layer by layer |
| ``factors``, ``mix`` | arithmetic on updates |

May import adapters and the packages below it. Runs and the packages above may import this one.
"""
