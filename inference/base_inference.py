"""Draw one picture with the base model. Without arguments: the newest run's base, prompt, seed and precision."""

import argparse

from _venv import enter

enter()

from simpletune.scripts import run_script  # noqa: E402

if __name__ == "__main__":
    run_script(argparse.ArgumentParser(description=__doc__), base=True)
