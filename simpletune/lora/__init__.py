"""LoRA files: told apart by their keys, read, written, converted, merged into a base, mixed, extracted, resized.

| module | what |
|---|---|
| ``names`` | the layouts and their keys: whose layer is this? |
| ``families`` | of which model a file is, by its keys and shapes |
| ``header`` | a file's keys, ranks and alphas, without its weights |
| ``readers`` | what diffusers, ComfyUI, Forge and simpletune do with a file |
| ``describe`` | all of that in words: ``simpletune inspect`` |
| ``updates`` | the weights of one layer's update; fused and taken apart |
| ``reading``, ``writing`` | whole files |
| ``bases``, ``merging``, ``extracting`` | checkpoints, layer by layer |
| ``factors``, ``mixing`` | arithmetic on updates |
"""
