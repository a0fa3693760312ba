"""Draw one picture with a LoRA. Without arguments: the newest run's result, prompt, seed and precision."""

from _venv import enter

enter()

from simpletune.apps.cli.main import run_verb  # noqa: E402

if __name__ == "__main__":
    run_verb("generate")
