"""On an NVIDIA GPU (``make gpu``): the same runs as on the CPU, and what only a GPU can show."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from simpletune import checkpoint
from simpletune.reading import validate
from simpletune.runs import read_metrics
from simpletune.train import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def run_on(tiny_config: dict, device: str, resume: str | None = None, **changes: dict) -> Path:
    data = copy.deepcopy(tiny_config) | {"device": device}
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return train(validate(data, "gpu"), resume)


@pytest.mark.parametrize("weights", ["fp32", "int8", "int8-quanto"])
def test_losses_equal_those_of_the_cpu(weights: str, tiny_config: dict) -> None:
    precision = {"weights": weights, "compute": "fp32"}
    losses = [
        [row["loss"] for row in read_metrics(run_on(tiny_config, device, name=device, precision=precision))]
        for device in ("cpu", "cuda")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "paged_adamw8bit", "lion8bit", "adafactor", "adamw_bf16"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_trains_and_resumes(method: str, optimizer: str, tiny_config: dict) -> None:
    config = copy.deepcopy(tiny_config)
    config["adapter"] = {"method": method}
    config["optimizer"] = {"name": optimizer, "lr": 1e-3}
    precision = {"weights": "bf16"} if method == "full" else {"weights": "int8", "compute": "bf16"}
    config["precision"] = precision
    whole = run_on(config, "cuda", name="whole")
    halves = run_on(config, "cuda", name="halves", train={"steps": 2})
    run_on(config, "cuda", "latest", name="halves", train={"steps": 4})
    ours, theirs = (load_file(checkpoint.checkpoint_folder(run, 4) / checkpoint.TRAINABLE) for run in (halves, whole))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].float(), tensor.float(), rtol=2e-2, atol=2e-3)


def test_peaks_are_reported_by_stage(tiny_config: dict) -> None:
    run = run_on(tiny_config, "cuda", precision={"weights": "int8"})
    summary = json.loads((run / "summary.json").read_text())
    stages = summary["stages"]
    assert all(stage["peak_allocated_gib"] is not None for stage in stages.values())
    assert summary["peak_allocated_gib"] == max(stage["peak_allocated_gib"] for stage in stages.values())
    assert summary["peak_reserved_gib"] >= summary["peak_allocated_gib"] > 0


def test_the_trace_holds_device_time_under_names_that_tensorboard_knows(tiny_config: dict, tmp_path: Path) -> None:
    import gzip

    run_on(tiny_config, "cuda", profile={"max_traces": 1})
    trace = next((tmp_path / "profiles" / "tiny").glob("epoch-*/*.gz"))
    categories = {event.get("cat") for event in json.loads(gzip.open(trace).read())["traceEvents"]}
    assert "kernel" in categories and "Runtime" in categories
    assert "cuda_runtime" not in categories


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "paged_adamw8bit", "adamw_bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_optimizer_in_the_backward_pass_gives_the_losses_of_the_normal_one(
    dtype: str, optimizer: str, tiny_config: dict
) -> None:
    """Draws have keys, so rounding is the same; torch's AdamW over several parameters may differ in the last bits."""
    losses = []
    for lever in (False, True):
        options = {
            "adapter": {"method": "full"},
            "precision": {"weights": dtype},
            "optimizer": {"name": optimizer, "lr": 1e-3},
            "train": {"clip": "per_parameter"},
            "memory": {"optimizer_in_backward": lever},
        }
        run = run_on({**tiny_config, "adapter": {}}, "cuda", name=f"lever-{lever}", **options)
        losses.append([row["loss"] for row in read_metrics(run)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_t5_layer_by_layer_gives_the_whole_encoders_states_and_holds_one_layer(tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    from simpletune.models.parts import Part
    from simpletune.models.t5_layers import LayeredT5

    torch.manual_seed(0)
    config = T5Config(vocab_size=4000, d_model=512, d_kv=64, d_ff=8192, num_layers=6, num_heads=8,
                      feed_forward_proj="gated-gelu")  # fmt: skip
    model = T5EncoderModel(config).bfloat16().eval()
    model.save_pretrained(tmp_path / "text_encoder_3")
    ids = torch.randint(0, 4000, (4, 32))
    with torch.no_grad():
        expected = model.cuda()(ids.cuda())[0].cpu()
    layer = sum(parameter.nbytes for parameter in model.encoder.block[1].parameters())
    del model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    part, device = Part("text_encoder_3", tmp_path / "text_encoder_3"), torch.device("cuda")
    rows = torch.stack(list(LayeredT5(part, torch.bfloat16, device).encode(ids, 4)))
    torch.testing.assert_close(rows, expected, rtol=2e-2, atol=2e-2)
    assert torch.cuda.max_memory_allocated() - before < 3 * layer
