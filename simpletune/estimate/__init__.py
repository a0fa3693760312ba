"""What a run takes, predicted before it runs, and the settings that fit.

job.py: the whole job's prediction, cached by its configuration; simulate.py, simulate_stages.py, step_memory.py: the
step and the stages on fake tensors; needs.py, disk_needs.py: host memory, download, disk. levers.py: what saves memory;
auto_checkpointing.py: as few checkpointed blocks as fit; planning.py: the combination of levers that fits and should be
fastest; step_time.py: seconds by arithmetic. forecast.py: a run's prediction before it starts, and beside what was
measured. estimate_command.py, plan_command.py, terminal.py, chart.py: what the two verbs print and draw.

May import step, runs and what is below them. Training and the command line may import it.
"""
