"""The command line's verbs: each a function and what fills its parser. Nothing heavy is imported before one is run."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from simpletune.verbs import lora, measuring, pictures, sharing, training

Verb = tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None]]
VERBS: dict[str, Verb] = {**training.VERBS, **pictures.VERBS, **lora.VERBS, **sharing.VERBS, **measuring.VERBS}
