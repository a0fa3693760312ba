"""Draw the same pictures with the base and the newest run's result, side by side, from the same noise."""

from _venv import enter

enter()

from simpletune.apps.cli.main import run_verb  # noqa: E402

if __name__ == "__main__":
    run_verb("compare")
