"""Draw one picture with the base model. Without arguments: the newest run's base, prompt, seed and precision."""

from _venv import enter

enter()

from simpletune.apps.cli.main import run_verb  # noqa: E402

if __name__ == "__main__":
    run_verb("generate", "--base")
