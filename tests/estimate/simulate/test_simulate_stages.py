"""The simulated stages: real and fake tensors take the same bytes, and the bytes are what must hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.memory.snapshot import MemorySnapshot, round_to_block
from simpletune.engine.tensors import all_tensors
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.simulate.simulate_stages import (
    WholeWindowModulation,
    accounting_of,
    encoder_snapshot,
    simulate_encoding,
    simulate_parts,
    text_snapshots,
)
from simpletune.models.sd3.sd3_architecture import SD3Architecture
from simpletune.models.text.layered_t5 import LayeredT5
from simpletune.models.text.prompts import Prompts
from simpletune.stages.step.synthetic import CPU
from simpletune.system.startup import pause_collection

SIZE = (192, 128)


def with_options(tiny_config: dict, weights: str = "fp32", **memory: object) -> TrainConfig:
    data = tiny_config | {"precision": {"weights": weights}, "memory": {"checkpointing": "all", **memory}}
    drawn = {"prompts": ["a"], "steps": 20, "width": SIZE[0], "height": SIZE[1], "loss_samples": 0}
    return validate(data | {"validation": drawn}, "stages")


def load_vae(config: TrainConfig) -> torch.nn.Module:
    return config.model.autoencoder.load(CPU, config.precision.encoder_dtype(), config.memory.vae_tile)


def bytes_of(snapshot: MemorySnapshot) -> dict[str, int]:
    return {kind: size for kind, size in snapshot.by_kind.items() if size}


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_text_encoders_take_the_same_bytes_real_and_fake(weights: str, tiny_config: dict) -> None:
    config = with_options(tiny_config, weights)
    dtype, part = config.precision.encoder_dtype(), config.model.files.part
    with fake_tensors(), pause_collection():
        clip_l, clip_g, t5 = (bytes_of(snapshot) for _, _, snapshot in text_snapshots(config))
    prompts = Prompts(config.model.text, dtype)
    for encoder, found in zip(prompts.encoders, (clip_l, clip_g, t5), strict=True):
        tokenizer = prompts.tokenizer(encoder)
        opened = encoder.open(part(encoder.model), dtype, CPU, tokenizer)
        assert found == bytes_of(encoder_snapshot(opened, encoder.length or tokenizer.model_max_length)), encoder.name


@pytest.mark.parametrize("tile", [None, 128])
def test_the_autoencoder_takes_the_same_bytes_real_and_fake(tile: int | None, tiny_config: dict) -> None:
    config = with_options(tiny_config, vae_tile=tile)
    stages, vae = simulate_parts(config, SIZE).stages, load_vae(config)
    assert bytes_of(stages["latents"]) == bytes_of(simulate_encoding(config.model, vae, SIZE))
    weights = sum(round_to_block(tensor.nbytes) for tensor in all_tensors(vae))
    training = simulate(config, SIZE)
    steady = training.steady
    assert stages["train"] == training.peak
    assert stages["validate"].by_kind["weights"] == steady.by_kind["weights"] + weights
    assert stages["validate"].bytes > steady.bytes + weights
    with accounting_of(all_tensors(vae)) as accounting, torch.no_grad():
        config.model.autoencoder.decode(vae, torch.zeros(1, 16, SIZE[1] // 8, SIZE[0] // 8))
    assert stages["validate"].bytes >= steady.bytes + accounting.peak.bytes  # and the prompt's tokens


def test_layers_of_t5_stand_on_the_device_one_at_a_time(tiny_pipeline: Path, tiny_config: dict) -> None:
    config = with_options(tiny_config)
    t5 = LayeredT5(config.model.files.part("text_encoder_3"), torch.float32, CPU)
    with accounting_of(()) as accounting:
        for number, block in enumerate(t5.model.encoder.block):
            with t5._loaded(block, f"encoder.block.{number}."):
                loaded = accounting.current.bytes
                assert loaded == sum(round_to_block(parameter.nbytes) for parameter in block.parameters())
            assert accounting.current.bytes == 0


def test_a_run_without_pictures_has_no_validation(tiny_config: dict) -> None:
    tiny_config["validation"]["loss_samples"] = 0
    assert list(simulate_parts(validate(tiny_config, "none")).stages) == ["text", "latents", "train"]


def test_sampling_with_a_plan_holds_a_whole_window() -> None:
    seen: list[int] = []

    def modulation(time: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        seen.append(len(time))
        return torch.zeros(len(time), 5)

    modulation.window, modulation.fact = 16, SD3Architecture.modulation  # type: ignore[attr-defined]
    whole = WholeWindowModulation(modulation, steps=20, simulated=3)  # type: ignore[arg-type]
    assert whole(torch.zeros(6), torch.zeros(6, 4)).shape == (6, 5)  # three steps with guidance
    assert seen == [2 * 16]
    fewer = WholeWindowModulation(modulation, steps=10, simulated=3)  # type: ignore[arg-type]
    assert fewer(torch.zeros(6), None).shape == (6, 5)
    assert seen[1:] == [2 * 10]
