"""The figure of methods side by side can be drawn: each method changes the demo as it says."""

from __future__ import annotations

from pathlib import Path

from benchmarks.methods_grid import METHODS, TARGETS, words_of
from simpletune.config.load import read_config


def test_each_method_is_a_configuration_of_the_demo(tmp_path: Path) -> None:
    found = {name: read_config(Path("demo"), words_of(name, tmp_path))[0] for name in METHODS}
    methods = {name: config.adapter.method for name, config in found.items()}
    assert methods == {"LoRA": "lora", "LoKr": "lokr", "DoRA": "dora", "full": "full", "embeddings": "none"}
    assert all(config.adapter.targets == TARGETS for name, config in found.items() if name in ("LoRA", "LoKr", "DoRA"))
    assert found["embeddings"].text.embeddings is not None and found["full"].precision.weights == "bf16"
    assert len({config.model_dump_json(include={"data", "train", "objective"}) for config in found.values()}) == 1
