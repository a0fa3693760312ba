"""``simpletune doctor``: is this machine right? Checks, 20 training steps of each precision, a file for bug reports.

- finding.py: what a check found; command.py: order, output and file.
- machine.py: what checks ask the machine; system_checks.py, card_checks.py, hub_checks.py, step_checks.py: the checks.
- probe.py: asks and answers in a child process, which may crash; probe_steps.py: the training steps there.

The parent process imports no torch. May import estimate, step, hub and what is below them. Only the command line and
init import it.
"""
