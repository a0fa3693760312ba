"""LoRA files: told apart by their keys, read, written, converted, merged into a base, mixed, extracted, resized.

| module | what |
|---|---|
| ``names`` | the layouts and their keys: whose layer is this? |
| ``families`` | of which model a file is, by its keys and shapes |
| ``header`` | a file's keys, ranks and alphas, without its weights |
| ``compatibility`` | what diffusers, ComfyUI, Forge and simpletune do with a file |
| ``describe`` | all of that in words: ``simpletune inspect`` |
| ``updates`` | the weights of one layer's update; fused and taken apart |
| ``read``, ``write`` | whole files |
| ``values`` | values that are NaN, infinite or all zero |
| ``attach`` | a file's updates put on a model's layers |
| ``bases``, ``merge``, ``extract`` | checkpoints, layer by layer |
| ``factors``, ``mix`` | arithmetic on updates |

May import adapters and what is below it. Runs and the rooms above may import it.
"""
