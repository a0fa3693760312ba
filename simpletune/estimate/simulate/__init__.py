"""Run a job on fake tensors to find what a step and every stage allocate, compute, copy and wait for.

simulate.py runs the training step; trained.py keeps it for later stages; simulate_stages.py runs these;
simulate_text.py runs the text encoders; equal_updates.py runs one of several equal updates and counts the others alike;
without_values.py replaces parts that would need values; step_memory.py counts a step like CUDA's allocator.

May import step, pipeline, timing and what is below them. estimate, evaluation and the benchmarks import it.
"""
