"""``simpletune doctor``: check whether this machine can train, take 20 steps in each precision, write a bug report
file.

- finding.py: a check's findings; command.py: order, output and file. - machine.py: queries to the machine;
system_checks.py, card_checks.py, hub_checks.py, step_checks.py: the checks. - probe.py: queries in a child process,
which may crash; probe_steps.py: the training steps there.

The parent process imports no torch. May import estimate, step, hub and what is below them. Only the command line and
init import it.
"""
