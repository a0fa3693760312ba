"""Predict a run's memory, disk and time before it runs, and find settings that fit a card.

- predict.py: the whole job, simulated and cached by its configuration; needs.py, disk_needs.py: host memory, download
  and disk; drawn.py: a picture beside training.
- levers.py: settings that save memory; auto_checkpointing.py: the fewest checkpointed blocks that fit; planning.py:
  the fastest combination of levers that fits, among others of block_options.py; best_card.py: the card on which it is
  cheapest; job_time.py: hours of the whole job on a card.
- forecast.py: predict a run before it starts, compare with what was measured.
- estimate_command.py, plan_command.py, terminal.py, chart.py: output of ``estimate`` and ``plan``.

May import simulation, runs and what is below them. Training and the command line may import it.
"""
