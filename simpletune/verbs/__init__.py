"""The command line's verbs: each a function and what fills its parser. Nothing heavy is imported before one is run."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from simpletune.verbs import dataset, estimating, lora, measuring, pictures, reporting, serving, sharing, training

Verb = tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None]]
GROUPS = (training, dataset, estimating, pictures, reporting, serving, lora, sharing, measuring)
VERBS: dict[str, Verb] = {name: verb for group in GROUPS for name, verb in group.VERBS.items()}
