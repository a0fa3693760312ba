"""``python -m benchmarks.levels [--steps N] [--seeds N]``: what a few noise levels cost (``objective.levels``).

A tiny Qwen-Image, a third of whose weights make modulations, is trained from random weights, with the same pictures,
batches and noise. The validation loss is at evenly spaced quantiles of all levels. Results are in ``results/notes.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.quiet import ALONE
from benchmarks.tiny_models import tiny_qwen_image
from simpletune.config.load import read_config
from simpletune.runs.folder import SUMMARY
from simpletune.system.options import Json

MANY = 4096
"""As many levels as there can be, of the same draws as fewer are: what the others are compared with."""
COUNTS: tuple[int | None, ...] = (None, MANY, 4, 16, 64, 256)
SETTINGS: Json = {
    "name": "levels",
    "device": "cpu",
    "model": {"family": "qwen_image", "init": "random", "text_length": 64},
    "data": {"path": "demo:style", "resolution": 64},
    "adapter": {"method": "full"},
    "precision": {"weights": "fp32"},
    "optimizer": {"lr": 0.002},
    "schedule": {"name": "constant", "warmup_steps": 0},
    "train": {"batch_size": 8},
    "memory": {"checkpointing": "none"},
    "validation": {"loss_samples": 64},
}


def losses(folder: Path, counts: Sequence[int | None], seeds: int, steps: int) -> dict[int | None, list[float]]:
    """Train once for each number of levels and seed within a folder; return the last validation losses."""
    from simpletune.training.train import train

    pipeline = tiny_qwen_image.build(folder / "pipeline")
    (file := folder / "config.json").write_text(json.dumps(SETTINGS))
    places = [f"output.{part}={folder / part}" for part in ("runs", "profiles", "cache")]
    found: dict[int | None, list[float]] = {count: [] for count in counts}
    for seed in range(seeds):
        for count in counts:
            changes = [f"train.steps={steps}", f"train.seed={seed}", f"objective.levels={json.dumps(count)}"]
            config, _ = read_config(file, [f"model.pretrained={pipeline}", *places, *ALONE, *changes])
            found[count].append(json.loads((train(config) / SUMMARY).read_text())["eval_loss_after"])
            print(f"levels {count}, seed {seed}: {found[count][-1]:.5f}", file=sys.stderr, flush=True)
    return found


def table(found: dict[int | None, list[float]]) -> str:
    """Format losses, and their differences from those of ``MANY`` levels with the same seed."""
    lines = [f"| levels | loss | beside {MANY:,} |", "|---|---|---|"]
    for count, own in found.items():
        against = [each - usual for each, usual in zip(own, found[MANY], strict=True)]
        spread = f" ± {statistics.stdev(against):.4f}" if len(against) > 1 else ""
        beside = "" if count == MANY else f"{statistics.mean(against):+.4f}{spread}"
        lines.append(f"| {'any' if count is None else f'{count:,}'} | {statistics.mean(own):.4f} | {beside} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.levels", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(table(losses(Path(scratch), COUNTS, args.seeds, args.steps)))


if __name__ == "__main__":
    main()
