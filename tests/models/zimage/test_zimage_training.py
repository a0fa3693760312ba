"""Trainings of a tiny Z-Image: every method, precision and lever."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from simulated import assert_same_bytes
from sliders import assert_slider_resumes
from tiny_runs import merged, resumed_from, run_with, saved_weights
from torch import Tensor

from benchmarks.tiny_models import tiny_zimage
from simpletune.commands.inspect_data.scan import scan_dataset
from simpletune.config.compute import compute_to_generate, settle_compute
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.engine.quant.precision import FP32
from simpletune.estimate.job_estimate import counts_of
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.simulate.simulate_stages import encoder_snapshot, simulate_encoding, simulate_parts
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.shared.flops import TrainedParameters
from simpletune.models.zimage.zimage_option import ZImage
from simpletune.runs.folder import read_metrics
from simpletune.stages.plan_data import plan_data
from simpletune.stages.step.attention import attention_calls
from simpletune.stages.step.synthetic import CPU, SyntheticBatches
from simpletune.system.options import ConfigError, UserError

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "rank": 2}, "dora": {"method": "dora", "rank": 2}, "lokr": {"method": "lokr"},
    "oft": {"method": "oft"}, "full": {"method": "full"},
}  # fmt: skip
STREAMED, PLAN = {"resident_blocks": 1, "checkpointing": "all"}, {"modulation": "plan", "modulation_window": 3}
NETWORKS: dict[str, Any] = {"checkpointing": "all", "feed_forward": "alone", "keep_attention": "all"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {"train": {"batch_size": 3}, "validation": {"prompts": ["a dot"], "every": 4, "steps": 2}}),
    "dora": ("dora", {}),
    "oft": ("oft", {}),
    "full": ("full", {}),
    "int8-streamed": ("lora", {"precision": {"weights": "int8"}, "memory": STREAMED, "train": {"batch_size": 3}}),
    "nf4-plan": ("lora", {"precision": {"weights": "nf4"}, "memory": PLAN}),
    "int8-streamed-plan": ("lokr", {"precision": {"weights": "int8"}, "memory": STREAMED | PLAN}),
    "full-streamed": (
        "full",
        {"memory": STREAMED | {"optimizer_in_backward": True}, "train": {"clip": "per_parameter"}},
    ),
}
"""The method, and what else differs."""


def of_case(config: dict[str, Any], case: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    method, changes = case
    return merged(config | {"adapter": METHODS[method]}, **changes)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_and_resumes_to_the_bit(case: str, zimage_config: dict[str, Any]) -> None:
    data = of_case(zimage_config, CASES[case])
    whole = run_with(data)
    assert all(math.isfinite(row["loss"]) for row in read_metrics(whole))
    before, after = saved_weights(whole, 2), saved_weights(whole, 4)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any((before[name] != tensor).any() for name, tensor in after.items())
    torch.testing.assert_close(saved_weights(resumed_from(whole, data, 2), 4), after, rtol=0, atol=0)
    if data["validation"]["prompts"]:
        assert len(list((whole / "samples").rglob("*.png"))) >= 1
        card = (whole / "README.md").read_text()  # whose pipeline's scale is one less than guidance
        assert "ZImagePipeline" in card and "guidance_scale=4.0" in card
    if case == "full":
        theirs = ZImageTransformer2DModel.from_pretrained(whole / "transformer", local_files_only=True)
        torch.testing.assert_close(dict(theirs.named_parameters()), after, rtol=0, atol=0)


SLIDER: dict[str, dict[str, Any]] = {
    "streamed": {"precision": {"weights": "bf16"}, "memory": STREAMED},
    "nf4-plan": {"precision": {"weights": "nf4"}, "memory": PLAN},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SLIDER)
def test_a_slider_trains_and_resumes_to_the_bit(case: str, zimage_config: dict[str, Any]) -> None:
    assert_slider_resumes(merged(zimage_config | {"adapter": METHODS["lora"]}, **SLIDER[case]))


@pytest.mark.parametrize("memory", [STREAMED, PLAN, NETWORKS], ids=["streamed", "plan", "networks"])
def test_levers_leave_its_losses(memory: dict[str, Any], zimage_config: dict[str, Any]) -> None:
    def losses(**memory: object) -> list[float]:
        run = run_with(zimage_config, memory=memory, train={"batch_size": 2}, checkpoint={"every": None})
        return [row["loss"] for row in read_metrics(run)]

    assert losses(**memory) == pytest.approx(losses(checkpointing="all"), rel=1e-5)


def test_batches_of_unequal_captions_need_no_mask(
    zimage_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is predicted, shown and counted knows it; variants of other lengths take the mask."""
    seen: list[Conditioning] = []

    def recorded(self: ZImage, model: object, z_t: Tensor, time: Tensor, text: Conditioning, dtype: object) -> Tensor:
        seen.append(text)
        return predict(self, model, z_t, time, text, dtype)  # type: ignore[arg-type]

    predict = ZImage.predict
    monkeypatch.setattr(ZImage, "predict", recorded)
    folder = shutil.copytree(zimage_config["data"]["path"], tmp_path / "pictures")
    for number, file in enumerate(sorted(folder.glob("*.txt"))):
        file.write_text("a dot " * (1 + number % 3 * 8))
    more = {"data": {"path": str(folder), "caption_dropout": 0.3}, "train": {"batch_size": 2, "steps": 12}}
    data = merged(zimage_config, **more)
    summary = json.loads((run_with(data) / "summary.json").read_text())
    trained = [text for text in seen if len(text.embeds) == 2]
    assert len(trained) == 12 and len({text.embeds.shape[1] for text in trained}) >= 2
    assert all(text.mask is None for text in trained)

    read = validate(data, "lengths")
    plan, counts = plan_data(resolve_folders(read)).plan, counts_of(read)
    assert counts is not None
    told = {plan.steps_per_epoch, counts.steps, scan_dataset(read, 0).steps, summary["steps_per_epoch"]}
    assert told == {3}
    varied = validate(merged(data, data={"variants": 2}), "varied")
    for config, masked in ((read, False), (varied, True)):
        assert {call.masked for call in attention_calls(config, [(64, 64)]) if call.trained} == {masked}
        core = SimpleNamespace(modulation=None, process=None)
        made = SyntheticBatches(config, core, (64, 64)).batch()  # type: ignore[arg-type]
        assert (made.conditioning.mask is not None) is masked


def test_variants_of_unequal_lengths_train_as_each_alone(
    zimage_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the mask, also where blocks are streamed and recomputed, and modulations planned. The update is zero in the
    first step, so what is predicted is the base's."""
    seen: list[tuple[Tensor, Tensor, Conditioning, Tensor]] = []

    def recorded(self: ZImage, model: object, z_t: Tensor, time: Tensor, text: Conditioning, dtype: object) -> Tensor:
        found = predict(self, model, z_t, time, text, dtype)  # type: ignore[arg-type]
        seen.append((z_t, time, text, found.detach()))
        return found

    predict = ZImage.predict
    folder = shutil.copytree(zimage_config["data"]["path"], tmp_path / "pictures")
    for file in folder.glob("*.txt"):
        file.write_text("a dot\n" + "a dot " * 12)
    several = {"path": str(folder), "caption_lines": "several", "variants": 2}
    data = merged(zimage_config, data=several, train={"batch_size": 6, "steps": 1}, checkpoint={"every": 1})
    weights = []
    for memory in ({}, STREAMED | PLAN | {"offload_checkpoint_inputs": True}):
        monkeypatch.setattr(ZImage, "predict", recorded)
        weights.append(saved_weights(run_with(data, memory=memory), 1))
        monkeypatch.setattr(ZImage, "predict", predict)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-6)
    (z, time, text, plain), (_, _, planned, levers) = seen
    assert text.mask is not None and planned.mask is not None and planned.modulation is not None
    lengths = text.mask.sum(1).tolist()
    assert len(set(lengths)) == 2
    torch.testing.assert_close(levers, plain, rtol=1e-4, atol=1e-5)
    model = validate(data, "alone").model
    denoiser = model.load_denoiser(FP32(), CPU).eval()
    for row, length in enumerate(lengths):
        alone = replace(text.map(lambda tensor, row=row: tensor[[row]]), mask=None)
        alone = replace(alone, embeds=alone.embeds[:, :length])
        with torch.no_grad():
            wanted = model.predict(denoiser, z[[row]], time[[row]], alone, torch.float32)
        torch.testing.assert_close(plain[[row]], wanted, rtol=1e-4, atol=1e-5)


KEPT: dict[str, Any] = {"checkpointing": "all"}
PRODUCT = [
    pytest.param(method, weights, memory, marks=pytest.mark.slow)
    for method in METHODS
    for weights in ("bf16", "int8", "nf4")
    for memory in (KEPT, STREAMED, PLAN, STREAMED | PLAN)
    if method != "full" or (weights, memory) == ("bf16", KEPT)  # the levers and precisions are for frozen weights
]


@pytest.mark.parametrize(("method", "weights", "memory"), PRODUCT)
def test_every_method_with_every_precision_and_lever(
    method: str, weights: str, memory: dict[str, Any], zimage_config: dict[str, Any]
) -> None:
    data = merged(zimage_config | {"adapter": METHODS[method]}, precision={"weights": weights}, memory=memory)
    data["train"] = {"steps": 2, "batch_size": 2}
    assert all(math.isfinite(row["loss"]) for row in read_metrics(run_with(data)))
    assert_same_bytes(validate(data, "product"))


ESTIMATED: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("lora", {"train": {"batch_size": 2}}),
    "dora": ("dora", {"memory": {"checkpointing": "all"}}),
    "full": ("full", {}),
    "nf4": ("lora", {"precision": {"weights": "nf4"}, "memory": {"checkpointing": "all"}}),
    "int8-streamed-plan": CASES["int8-streamed-plan"],
    "boundaries": ("lora", {"memory": {"offload_checkpoint_inputs": True, "checkpointing": "all"}}),
}


@pytest.mark.parametrize("case", ESTIMATED)
def test_its_step_takes_the_same_bytes_real_and_fake(case: str, zimage_config: dict[str, Any]) -> None:
    assert_same_bytes(validate(of_case(zimage_config, ESTIMATED[case]), case))


def test_its_other_stages_take_the_same_bytes_real_and_fake(zimage_config: dict[str, Any]) -> None:
    drawn = {"prompts": ["a dot"], "steps": 4, "width": 96, "height": 64, "loss_samples": 1}
    read = validate(merged(zimage_config, validation=drawn), "stages")
    stages, model = simulate_parts(read, (96, 64)).stages, read.model
    (encoder,), vae = model.text.encoders, model.autoencoder.load(CPU, torch.float32)
    opened = encoder.open(model.files.part("text_encoder"), torch.float32, CPU, None)  # type: ignore[arg-type]
    assert stages["text"].by_kind == encoder_snapshot(opened, model.text.tokens).by_kind
    assert stages["latents"].by_kind == simulate_encoding(model, vae, (96, 64)).by_kind


# MiB at 1024 px, rank 16, prompts of 128 tokens. diffusers' block takes 488 more, whose norms keep fp32 copies.
FIGURES: dict[str, tuple[int, dict[str, Any]]] = {
    "int8": (7691, {"precision": {"weights": "int8"}}),
    "nf4": (4910, {"precision": {"weights": "nf4"}}),
    "streamed": (
        1410,
        {"precision": {"weights": "int8"}, "memory": {"resident_blocks": 0, "offload_checkpoint_inputs": True}},
    ),
}


@pytest.mark.parametrize("case", FIGURES)
def test_the_published_models_step_takes_no_more_than(case: str, zimage_config: dict[str, Any]) -> None:
    mib, changes = FIGURES[case]
    data = zimage_config | {"model": {"family": "zimage", "text_length": 128}}
    data |= {"memory": {"checkpointing": "all", "modulation": "plan"}}
    data["adapter"] = {"method": "lora", "rank": 16, "targets": "attention"}
    found = simulate(validate(merged(data, **changes), case), (1024, 1024)).peak
    assert 0.99 * mib < found.bytes / 2**20 <= mib


def test_a_step_s_operations_are_counted(zimage_config: dict[str, Any]) -> None:
    """On the meta device, by this package's forward pass: of each linear layer and attention, and little outside."""
    model = validate(zimage_config, "flops").model
    found, network, size = model.flops(TrainedParameters(), (48, 80), 1), model.architecture, (48, 80)
    rows = network.layer_rows(size)
    blocks = [(name, shape) for name, shape in network.known_shapes().items() if name.endswith(".weight")]
    inner = [
        (rows(name) if "adaLN" not in name else 1) * 2 * math.prod(shape)
        for name, shape in blocks
        if len(shape) == 2 and name.startswith(("noise_refiner", "context_refiner", "layers"))
    ]
    attention = sum(2 * 4 * shape.queries**2 * 48 for shape in network.attentions(size))  # of two blocks each
    assert sum(inner) + attention < found.forward < 1.05 * (sum(inner) + attention)


def test_fp16_is_refused_with_its_reason(zimage_config: dict[str, Any]) -> None:
    """Also where auto would mean it."""
    words = "Z-Image is not computed in fp16: its networks' features reach 344,064, and fp16 ends at 65,504. Use bf16"
    with pytest.raises(ConfigError, match=f"precision.compute: {words}"):
        validate(merged(zimage_config, precision={"weights": "int8", "compute": "fp16"}), "fp16")
    read = validate(merged(zimage_config, precision={"weights": "int8"}), "auto")
    with pytest.raises(ConfigError, match=words):
        settle_compute(read, (7, 5))
    with pytest.raises(UserError, match=f"sm_75 has no bf16, and {words}"):
        compute_to_generate(read, (7, 5))


@pytest.mark.slow  # 740 million weights: a minute or two of one core
def test_two_steps_at_the_published_width(zimage_config: dict[str, Any], tmp_path: Path) -> None:
    """Four of the blocks of random weights at 256 px, in int8, streamed, under a modulation plan."""
    text = {"hidden_size": 2560, "intermediate_size": 16, "num_attention_heads": 1, "head_dim": 2}
    pipeline = tiny_zimage.build(tmp_path / "wide", text=text, cap_feat_dim=2560)
    published = dict(ZImage().files.known_config()) | {"n_layers": 2, "n_refiner_layers": 1}
    shutil.rmtree(pipeline / "transformer")
    (pipeline / "transformer").mkdir()
    (pipeline / "transformer" / "config.json").write_text(json.dumps(published))
    data = merged(
        zimage_config,
        model={"pretrained": str(pipeline), "init": "random", "text_length": 512},
        data={"resolution": 256, "max_upscale": 8},
        adapter={"rank": 16},
        precision={"weights": "int8"},
        memory={**STREAMED, **PLAN, "cache_quantised": False},
        optimizer={"lr": 1e-4},
        train={"steps": 2},
        checkpoint={"every": None},
    )
    losses = [row["loss"] for row in read_metrics(run_with(data))]
    assert len(losses) == 2 and all(0.5 < loss < 3 for loss in losses)
