"""``python -m benchmarks.whole_klein [key.path=value ...]``: a step of the whole FLUX.2 klein on the CPU, once.

The transformer has the published sizes and random weights, in int8 and streamed. Text encoder and autoencoder are tiny.
Results are in ``results/notes.md``.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.quiet import ALONE
from benchmarks.tiny_models import tiny_klein
from simpletune.config.load import read_config
from simpletune.models.flux2.flux2_option import Klein
from simpletune.runs.folder import SUMMARY
from simpletune.system.options import Json

SETTINGS: Json = {
    "name": "whole-klein",
    "device": "cpu",
    "model": {"family": "klein", "init": "random", "text_length": 512},
    "data": {"path": "demo:style", "resolution": 256, "max_upscale": 8},
    "adapter": {"method": "lora", "rank": 16, "targets": "attention"},
    "precision": {"weights": "int8"},
    "memory": {
        "checkpointing": "all", "resident_blocks": 0, "offload_checkpoint_inputs": True, "modulation": "plan",
        "modulation_window": 3, "cache_quantised": False,
    },
    "train": {"steps": 1},
    "optimizer": {"lr": 1e-4},
}  # fmt: skip


def build(folder: Path, **changes: object) -> Path:
    """Write a pipeline whose transformer has the published configuration but for ``changes``, and no weights."""
    text = {"hidden_size": 2560, "intermediate_size": 16, "num_attention_heads": 1, "head_dim": 2}
    pipeline = tiny_klein.build(folder, text=text, joint_attention_dim=7680)
    shutil.rmtree(pipeline / "transformer")
    (pipeline / "transformer").mkdir()
    published = Klein().files.known_config()
    (pipeline / "transformer" / "config.json").write_text(json.dumps({**published, **changes}))
    return pipeline


def measure(overrides: list[str]) -> Json:
    """Train in a scratch folder and return the run's summary."""
    from simpletune.training.train import train

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (file := folder / "config.json").write_text(json.dumps(SETTINGS))
        places = [f"output.{part}={folder / part}" for part in ("runs", "profiles", "cache")]
        pipeline = f"model.pretrained={build(folder / 'pipeline')}"
        config, _ = read_config(file, [pipeline, *places, *ALONE, "validation.loss_samples=0", *overrides])
        return dict(json.loads((train(config) / SUMMARY).read_text()))


if __name__ == "__main__":
    found = measure(sys.argv[1:])
    print(json.dumps({name: found[name] for name in ("final_loss", "peak_rss_gib", "stages")}, indent=1))
