"""A job executed on fake tensors: what a step and every stage allocate, compute, copy and wait for, without values.

simulate.py runs the training step; trained.py keeps it for the stages that follow; simulate_stages.py runs these;
simulate_text.py the text encoders; equal_updates.py counts updates of equal parameters by what the first did;
without_values.py stands in for parts that would need values; step_memory.py counts a step like CUDA's allocator.

May import step, pipeline, timing and what is below them. estimate, evaluation and the benchmarks import it.
"""
