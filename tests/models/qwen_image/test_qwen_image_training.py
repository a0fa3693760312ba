"""Trainings of a tiny Qwen-Image: every method, precision and lever."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated import assert_same_bytes
from sliders import assert_slider_resumes
from tiny_runs import merged, resumed_from, run_with, saved_weights
from torch import Tensor

from simpletune.config.load import validate
from simpletune.config.resolve import require_model_rules
from simpletune.engine.denoiser import model_units
from simpletune.engine.memory.block_offload import BlockOffload
from simpletune.estimate import run_estimate
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.simulate.simulate_stages import encoder_snapshot, simulate_encoding, simulate_parts
from simpletune.models.objectives.flow import Flow
from simpletune.models.qwen_image.qwen_image_option import QwenImage
from simpletune.runs.folder import read_metrics
from simpletune.stages.load import load_base
from simpletune.stages.step.synthetic import CPU
from simpletune.system.options import ConfigError, UserError

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "rank": 2, "targets": "attention"}, "dora": {"method": "dora", "rank": 2},
    "lokr": {"method": "lokr"}, "oft": {"method": "oft"}, "full": {"method": "full"},
}  # fmt: skip
STREAMED, PLAN = {"resident_blocks": 1, "checkpointing": "all"}, {"modulation": "plan", "modulation_window": 3}
NETWORKS: dict[str, Any] = {"checkpointing": "all", "feed_forward": "alone", "keep_attention": "all"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {"train": {"batch_size": 3}, "validation": {"prompts": ["a dot"], "every": 4, "steps": 2}}),
    "dora": ("dora", {}),
    "oft": ("oft", {"adapter": {"targets": "attention_mlp"}}),
    "full": ("full", {}),
    "int8-streamed": ("lora", {"precision": {"weights": "int8"}, "memory": STREAMED, "train": {"batch_size": 3}}),
    "nf4-plan": ("lora", {"precision": {"weights": "nf4"}, "memory": PLAN}),
    "int8-streamed-plan": ("lokr", {"precision": {"weights": "int8"}, "memory": STREAMED | PLAN}),
    "int8-mapped": ("lora", {"precision": {"weights": "int8"}, "memory": STREAMED | PLAN | {"host_weights": "mapped"}}),
    "int8-levels": ("lora", {"precision": {"weights": "int8"}, "memory": STREAMED | PLAN, "objective": {"levels": 5}}),
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


def in_file(tensors: Mapping[str, Tensor], cache: Path) -> set[str]:
    """Return the names of those tensors that lie in the pages of the cache's files."""
    files = {str(file) for file in (cache / "quantised").rglob("*.safetensors")}
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.split()[-1] in files]
    spans = [range(*(int(end, 16) for end in line[0].split("-"))) for line in maps]
    return {name for name, each in tensors.items() if each.numel() and any(each.data_ptr() in span for span in spans)}


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

    def every(name: str) -> bool:
        return True

    read, cache = validate(data, "mapped"), tmp_path / "cache"
    whole = read.model.load_denoiser(read.precision, CPU, on_host=every, cache=cache, mapped=every)
    tensors = {name: tensor for name, tensor in whole.state_dict().items() if tensor.numel()}
    assert tensors and in_file(tensors, cache) == tensors.keys()
    places = [tensor.data_ptr() for tensor in tensors.values()]
    offload = BlockOffload(model_units(whole), [0, 1, 2], CPU, mapped=True)
    assert {home.data_ptr() for block in offload.homes.values() for home in block.at_home.values()} < set(places)


def test_modulations_of_a_few_levels_are_a_table_and_their_weights_stay_in_their_file(
    qwen_config: dict[str, Any], tmp_path: Path
) -> None:
    """Losses are those of the same levels with modulations computed in the blocks, and no others stay there."""
    data, cache = of_case(qwen_config, CASES["int8-levels"]), tmp_path / "cache"
    data |= {"output": data["output"] | {"cache": str(cache)}, "validation": data["validation"] | {"loss_samples": 3}}
    memory = {"plan": data["memory"], "resident": {"checkpointing": "all"}}
    runs = {kind: run_with(data, memory=own) for kind, own in memory.items()}
    losses = {kind: [row["loss"] for row in read_metrics(run)] for kind, run in runs.items()}
    assert losses["plan"] == pytest.approx(losses["resident"], rel=1e-4)
    after = {kind: json.loads((run / "summary.json").read_text())["eval_loss_after"] for kind, run in runs.items()}
    assert after["plan"] == pytest.approx(after["resident"], rel=1e-4), "at levels that the table lacks"

    read, fact = validate(data, "levels"), QwenImage().architecture.modulation
    assert fact is not None
    for levels, found in ((5, True), (None, False)):
        objective = read.objective.model_copy(update={"levels": levels})
        base = load_base(read.model_copy(update={"objective": objective}), CPU, [(64, 64)], cache)
        names = in_file(base.state_dict(), cache)
        assert bool(names) == found and all(fact.serves(name.rpartition(".")[0]) for name in names)


@pytest.mark.parametrize(
    "changes",
    [{"objective": {"levels": None}}, {"memory": {"modulation": "resident"}}, {"memory": {"cache_quantised": False}},
     {"precision": {"weights": "bf16"}}, {"model": {"init": "random"}}],
)  # fmt: skip
def test_only_a_plan_of_a_cached_base_has_a_table(changes: dict[str, Any], qwen_config: dict[str, Any]) -> None:
    data = of_case(qwen_config, CASES["int8-levels"])
    levels = validate(data, "levels").tabulated_levels
    assert len(levels) == 5 and levels == list(Flow(levels=5).levels_at(1.0))  # of 64 px
    assert validate(merged(data, **changes), "levels").tabulated_levels == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [({}, False), ({"objective": {"levels": None}}, True), ({"memory": {"modulation": "resident"}}, False)],
)
def test_a_machine_with_too_little_memory_is_told_of_a_table(
    changes: dict[str, Any], named: bool, qwen_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validate(merged(of_case(qwen_config, CASES["int8-levels"]), **changes), "levels")
    monkeypatch.setattr(run_estimate, "usable_memory", lambda: 2**30)
    with pytest.raises(UserError, match="main memory: this run needs 2.0 GiB .* Use a larger") as refused:
        run_estimate._require_host_memory(config, SimpleNamespace(host={"levers (pinned)": 2**31}), force=False)  # type: ignore[arg-type]
    assert ("objective.levels=256" in str(refused.value)) == named


def test_a_table_takes_the_plans_weights_out_of_the_published_models_host_memory(qwen_config: dict[str, Any]) -> None:
    """6,826 million numbers of 8 bits, for 256 levels in bf16; a step takes its own of the card, not those of 16."""
    data = qwen_config | {"model": {"family": "qwen_image", "text_length": 64}}
    data |= {"memory": {"checkpointing": "all", "modulation": "plan"}, "precision": {"weights": "int8"}}
    found = {levels: simulate(validate(merged(data, objective={"levels": levels}), "levels"), (256, 256))
             for levels in (None, 256)}  # fmt: skip
    level = (120 * 6 + 2) * 3072 * 2
    assert found[None].host_bytes - found[256].host_bytes == pytest.approx(6_826e6 - 256 * level, rel=0.01)
    assert found[None].peak.bytes - found[256].peak.bytes == pytest.approx(15 * level, rel=0.02)


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
    "int8-levels": CASES["int8-levels"],
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
