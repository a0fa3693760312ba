"""Draw one picture with a full model: the newest run's transformer; a LoRA is folded into the base."""

from _venv import enter

enter()

from simpletune.scripts import draw_one  # noqa: E402

if __name__ == "__main__":
    draw_one(__doc__, "full")
