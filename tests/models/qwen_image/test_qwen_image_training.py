"""Trainings of a tiny Qwen-Image: every method, precision and lever."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import assert_same_bytes
from sliders import assert_slider_resumes
from tiny_runs import merged, resumed_from, run_with, saved_weights

from simpletune.config.load import validate
from simpletune.config.resolve import require_model_rules
from simpletune.engine.denoiser import model_units
from simpletune.engine.memory.block_offload import BlockOffload
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.simulate.simulate_stages import encoder_snapshot, simulate_encoding, simulate_parts
from simpletune.runs.folder import read_metrics
from simpletune.stages.step.synthetic import CPU
from simpletune.system.options import ConfigError

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "rank": 2}, "dora": {"method": "dora", "rank": 2}, "lokr": {"method": "lokr"},
    "oft": {"method": "oft"}, "full": {"method": "full"},
}  # fmt: skip
STREAMED, PLAN = {"resident_blocks": 1, "checkpointing": "all"}, {"modulation": "plan", "modulation_window": 3}
NETWORKS: dict[str, Any] = {"checkpointing": "all", "feed_forward": "alone", "keep_attention": "all"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {"train": {"batch_size": 3}, "validation": {"prompts": ["a dot"], "every": 4, "steps": 2}}),
    "dora": ("dora", {"adapter": {"targets": "attention_image"}}),
    "oft": ("oft", {"adapter": {"targets": "attention_mlp"}}),
    "full": ("full", {}),
    "int8-streamed": ("lora", {"precision": {"weights": "int8"}, "memory": STREAMED, "train": {"batch_size": 3}}),
    "nf4-plan": ("lora", {"precision": {"weights": "nf4"}, "memory": PLAN}),
    "int8-streamed-plan": ("lokr", {"precision": {"weights": "int8"}, "memory": STREAMED | PLAN}),
    "int8-mapped": ("lora", {"precision": {"weights": "int8"}, "memory": STREAMED | PLAN | {"host_weights": "mapped"}}),
}
"""The method, and what else differs."""


def of_case(config: dict[str, Any], case: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    method, changes = case
    return merged(config | {"adapter": METHODS[method]}, **changes)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_and_resumes_to_the_bit(case: str, qwen_config: dict[str, Any]) -> None:
    data = of_case(qwen_config, CASES[case])
    whole = run_with(data)
    assert all(math.isfinite(row["loss"]) for row in read_metrics(whole))
    before, after = saved_weights(whole, 2), saved_weights(whole, 4)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any((before[name] != tensor).any() for name, tensor in after.items())
    torch.testing.assert_close(saved_weights(resumed_from(whole, data, 2), 4), after, rtol=0, atol=0)
    if data["validation"]["prompts"]:
        assert len(list((whole / "samples").rglob("*.png"))) >= 1


@pytest.mark.slow
def test_a_slider_trains_and_resumes_to_the_bit(qwen_config: dict[str, Any]) -> None:
    assert_slider_resumes(qwen_config)


@pytest.mark.parametrize("memory", [STREAMED, PLAN, NETWORKS], ids=["streamed", "plan", "networks"])
def test_levers_leave_its_losses(memory: dict[str, Any], qwen_config: dict[str, Any]) -> None:
    def losses(**memory: object) -> list[float]:
        run = run_with(qwen_config, memory=memory, train={"batch_size": 2}, checkpoint={"every": None})
        return [row["loss"] for row in read_metrics(run)]

    assert losses(**memory) == pytest.approx(losses(checkpointing="all"), rel=1e-5)


def test_mapped_weights_give_the_bits_of_pinned_ones_and_stay_in_their_files(
    qwen_config: dict[str, Any], tmp_path: Path
) -> None:
    """With weights of several files, too."""
    data = of_case(qwen_config, CASES["int8-mapped"])
    data["output"] = data["output"] | {"cache": str(tmp_path / "cache")}
    losses = {}
    for kind in ("mapped", "pinned"):
        run = run_with(data, memory=data["memory"] | {"host_weights": kind})
        losses[kind] = [row["loss"] for row in read_metrics(run)], saved_weights(run, 4)
    assert losses["mapped"][0] == losses["pinned"][0]
    torch.testing.assert_close(losses["mapped"][1], losses["pinned"][1], rtol=0, atol=0)

    read = validate(data, "mapped")
    model, precision = read.model, read.precision
    whole = model.load_denoiser(precision, CPU, on_host=lambda name: True, cache=tmp_path / "cache", mapped=True)
    (folder,) = (each for each in (tmp_path / "cache" / "quantised").iterdir() if each.is_dir())
    (file,) = folder.glob("*.safetensors")
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    spans = [range(*(int(end, 16) for end in line[0].split("-"))) for line in maps]
    places = [tensor.data_ptr() for tensor in whole.state_dict().values() if tensor.numel()]
    assert places and all(any(place in span for span in spans) for place in places)
    offload = BlockOffload(model_units(whole), [0, 1, 2], CPU, mapped=True)
    assert {home.data_ptr() for block in offload.homes.values() for home in block.at_home.values()} < set(places)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"memory": {"cache_quantised": False, "resident_blocks": 0}}, "memory.cache_quantised is false"),
     ({"memory": {"modulation": "resident"}}, "no weights stay in host memory"),
     ({"precision": {"weights": "bf16"}, "memory": {"resident_blocks": 0}}, "precision.weights is bf16. Use int8 or"),
     ({"model": {"init": "random"}, "memory": {"resident_blocks": 0}}, "model.init random")],
)  # fmt: skip
def test_mapped_weights_need_a_file(changes: dict[str, Any], words: str, qwen_config: dict[str, Any]) -> None:
    data = merged(qwen_config, memory={"host_weights": "mapped", "checkpointing": "all"}, precision={"weights": "int8"})
    with pytest.raises(ConfigError, match=f"memory.host_weights: .*{words}"):
        validate(merged(data, **changes), "mapped")


ESTIMATED: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("lora", {"train": {"batch_size": 2}}),
    "dora": ("dora", {"memory": {"checkpointing": "all"}}),
    "nf4": ("lora", {"precision": {"weights": "nf4"}, "memory": {"checkpointing": "all"}}),
    "int8-streamed-plan": CASES["int8-streamed-plan"],
    "int8-mapped": CASES["int8-mapped"],
    "boundaries": ("lora", {"memory": {"offload_checkpoint_inputs": True, "checkpointing": "all"}}),
}


@pytest.mark.parametrize("case", ESTIMATED)
def test_its_step_takes_the_same_bytes_real_and_fake(case: str, qwen_config: dict[str, Any]) -> None:
    assert_same_bytes(validate(of_case(qwen_config, ESTIMATED[case]), case))


def test_mapped_weights_take_no_more_of_the_card_than_pinned_ones_and_nothing_of_the_host(
    qwen_config: dict[str, Any],
) -> None:
    data = of_case(qwen_config, CASES["int8-mapped"])
    found = {
        kind: simulate(validate(merged(data, memory={"host_weights": kind}), kind)) for kind in ("pinned", "mapped")
    }
    assert found["mapped"].peak.bytes == found["pinned"].peak.bytes
    assert found["mapped"].host_bytes == 0 < found["pinned"].host_bytes


def test_its_other_stages_take_the_same_bytes_real_and_fake(qwen_config: dict[str, Any]) -> None:
    drawn = {"prompts": ["a dot"], "steps": 4, "width": 96, "height": 64, "loss_samples": 1}
    read = validate(merged(qwen_config, validation=drawn), "stages")
    stages, model = simulate_parts(read, (96, 64)).stages, read.model
    (encoder,), vae = model.text.encoders, model.autoencoder.load(CPU, torch.float32)
    opened = encoder.open(model.files.part("text_encoder"), torch.float32, CPU, None)  # type: ignore[arg-type]
    assert stages["text"].by_kind == encoder_snapshot(opened, encoder.limit).by_kind
    assert stages["latents"].by_kind == simulate_encoding(model, vae, (96, 64)).by_kind


def test_training_all_weights_of_the_published_model_is_refused_with_the_arithmetic(
    qwen_config: dict[str, Any],
) -> None:
    words = (
        "full trains 20,430,401,088 weights, which take 38 GiB, their gradients as much, and the states of adamw 152"
    )
    data = qwen_config | {"model": {"family": "qwen_image"}, "adapter": {"method": "full"}}
    data |= {"precision": {"weights": "bf16"}}
    with pytest.raises(ConfigError, match=f"adapter.method: {words} GiB: 228 GiB together.*Use adapter.method lora"):
        require_model_rules(validate(data, "full"))


def test_fp16_is_refused_with_its_reason(qwen_config: dict[str, Any]) -> None:
    words = "Qwen-Image is not computed in fp16: its tokens leave the range of fp16, at whose end diffusers clips them"
    with pytest.raises(ConfigError, match=f"precision.compute: {words}. Use bf16"):
        validate(merged(qwen_config, precision={"weights": "int8", "compute": "fp16"}), "fp16")


# MiB at 1024 px, rank 16 on both streams, prompts of 256 tokens.
FIGURES: dict[str, tuple[int, dict[str, Any]]] = {
    "int8": (15712, {"precision": {"weights": "int8"}}),
    "nf4": (9428, {"precision": {"weights": "nf4"}}),
    "streamed": (
        1862,
        {"precision": {"weights": "int8"}, "memory": {"resident_blocks": 0, "offload_checkpoint_inputs": True}},
    ),
}


@pytest.mark.parametrize("case", FIGURES)
def test_the_published_models_step_takes_no_more_than(case: str, qwen_config: dict[str, Any]) -> None:
    mib, changes = FIGURES[case]
    data = qwen_config | {"model": {"family": "qwen_image", "text_length": 256}}
    data |= {"memory": {"checkpointing": "all", "modulation": "plan"}}
    data["adapter"] = {"method": "lora", "rank": 16, "targets": "attention"}
    found = simulate(validate(merged(data, **changes), case), (1024, 1024)).peak
    assert 0.99 * mib < found.bytes / 2**20 <= mib
