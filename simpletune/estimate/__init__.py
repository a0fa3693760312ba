"""What a run takes, predicted before it runs, and the settings that fit.

``simulate`` and ``simulate_stages`` run the step and the other stages on fake tensors; ``job`` puts a whole job's
prediction together; ``planning`` searches the levers. ``cli_text`` and ``plan_text`` word it for the command line.

May import step, runs and what is below them. Training and the command line may import it.
"""
