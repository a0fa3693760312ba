"""The command line's verbs: each a function and what fills its parser. Nothing heavy is imported before one is run."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from simpletune.verbs import measuring, pictures, reporting, sharing, training

Verb = tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None]]
VERBS: dict[str, Verb] = {**training.VERBS, **pictures.VERBS, **sharing.VERBS, **reporting.VERBS, **measuring.VERBS}
