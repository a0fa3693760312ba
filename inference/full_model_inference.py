"""Draw one picture with a full model: the newest run's transformer, or its LoRA merged into the base."""

from _venv import enter

enter()

from simpletune.apps.cli.main import run_verb  # noqa: E402

if __name__ == "__main__":
    run_verb("generate", "--full")
