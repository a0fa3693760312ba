"""Draw one picture with a LoRA. Without arguments: the newest run's LoRA, prompt, seed and precision."""

import argparse

from _venv import enter

enter()

from simpletune.scripts import run_script  # noqa: E402

if __name__ == "__main__":
    run_script(argparse.ArgumentParser(description=__doc__))
