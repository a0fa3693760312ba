"""Products in fp16: who computes in it, the scale of the loss, undone steps, and blocks that overflow."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.config.compute import compute_to_generate, settle_compute
from simpletune.config.load import read_config, validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.engine.fp16_blocks import Fp16Blocks, fp16_blocks_of
from simpletune.engine.optim import loss_scale
from simpletune.engine.optim.ema import Ema
from simpletune.engine.optim.loss_scale import LossScale
from simpletune.engine.optim.options import AdamW
from simpletune.engine.optim.state import begin_step
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.models.shared.conditioning import Conditioning
from simpletune.runs import checkpoint
from simpletune.runs.folder import OVERFLOWS, read_metrics, read_rows
from simpletune.runs.report import report_at_end
from simpletune.stages.step.fp16 import is_overflow
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.options import ConfigError, UserError, option_classes
from simpletune.training.train import train

CPU = torch.device("cpu")
HUGE = 2.0**23
T4, L4 = (7, 5), (8, 9)
FP16 = {"weights": "int8", "compute": "fp16"}
OPTIMIZERS = [option for option in option_classes(TrainConfig.model_fields["optimizer"].annotation) if option.undoes]


def inside(weights: dict[str, Tensor]) -> None:
    """Activations inside of the feed-forward of block 1 exceed fp16; what it adds to the residual does not."""
    for name, factor in (("net.0.proj.weight", 1.5e5), ("net.0.proj.bias", 1.5e5), ("net.2.weight", 1 / 1500)):
        weights[f"transformer_blocks.1.ff.{name}"].mul_(factor)
    for name in ("weight", "bias"):
        weights[f"transformer_blocks.1.norm1.linear.{name}"].chunk(6)[5].mul_(0.01)  # the gate (arXiv:2212.09748)


def between(weights: dict[str, Tensor]) -> None:
    """The residual stream exceeds fp16 from block 1 on."""
    bias = weights["transformer_blocks.1.ff.net.2.bias"]
    bias.copy_(torch.linspace(-6e4, 6e4, len(bias)))
    weights["transformer_blocks.1.norm1.linear.bias"].chunk(6)[5].fill_(4.0)


def changed_pipeline(
    pipeline: Path, factory: pytest.TempPathFactory, change: Callable[[dict[str, Tensor]], None]
) -> Path:
    """A copy of a pipeline with other weights of the transformer."""
    copied = factory.mktemp(change.__name__) / "pipeline"
    shutil.copytree(pipeline, copied)
    (file,) = (copied / "transformer").glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    return copied


@pytest.fixture(scope="module")
def inside_blocks(three_blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed_pipeline(three_blocks, tmp_path_factory, inside)


@pytest.fixture(scope="module")
def between_blocks(three_blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed_pipeline(three_blocks, tmp_path_factory, between)


@pytest.fixture
def run(tiny_config: dict) -> Callable[..., Path]:
    """Train the tiny run in fp16 with some sections changed."""

    def training(pretrained: Path | None = None, resume: str | None = None, **sections: object) -> Path:
        data = copy.deepcopy(tiny_config) | {"precision": FP16}
        if sections.get("adapter", {}).get("method") == "full":
            del data["adapter"]
        if pretrained is not None:
            data["model"]["pretrained"] = str(pretrained)
        for name, value in sections.items():
            data[name] = {**data.get(name, {}), **value} if isinstance(value, dict) and name != "precision" else value
        return train(validate(data, "fp16"), resume=resume)

    return training


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder)}


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    return load_file(checkpoint.checkpoint_folder(folder, step) / checkpoint.TRAINABLE)


def cut_after(whole: Path, last: int) -> Path:
    """A copy of a run named ``half``, without checkpoints of later steps."""
    half = whole.with_name("half")
    shutil.copytree(whole, half)
    for step, folder in checkpoint.list_checkpoints(whole):
        if step > last:
            shutil.rmtree(half / "checkpoints" / folder.name)
    return half


# --- who computes in what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "capability", "compute"),
    [
        ({"weights": "int8"}, None, "bf16"), ({"weights": "int8"}, L4, "bf16"), ({"weights": "int8"}, T4, "fp16"),
        ({"weights": "nf4"}, T4, "fp16"), ({"weights": "bf16"}, T4, "fp16"), ({"weights": "bf16"}, None, "bf16"),
        ({"weights": "fp32"}, None, "fp32"), ({"weights": "fp32"}, L4, "fp32"), ({"weights": "fp32"}, T4, "fp32"),
        ({"weights": "int8", "compute": "fp32"}, T4, "fp32"), ({"weights": "fp32", "compute": "fp16"}, L4, "fp16"),
    ],
)  # fmt: skip
def test_auto_follows_the_device(precision: dict, capability: tuple | None, compute: str, tiny_config: dict) -> None:
    config = settle_compute(validate(tiny_config | {"precision": precision}, "auto"), capability)
    assert config.precision.compute == config.precision.settled_compute == compute
    encoders = {"bf16": torch.bfloat16, "fp16": torch.float32, "fp32": torch.float32}  # T5 and the VAE overflow in fp16
    assert config.precision.encoder_dtype() == encoders[compute]


def test_a_run_writes_what_auto_became_and_keeps_it(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from simpletune.training import set_up

    monkeypatch.setattr(set_up, "capability_of", lambda device: T4)
    folder = run(precision={"weights": "int8"}, train={"steps": 2})
    written = json.loads((folder / "config.json").read_text())
    assert written["precision"]["compute"] == "fp16" and all("loss_scale" in row for row in read_metrics(folder))
    monkeypatch.undo()
    again = run(precision={"weights": "int8"}, train={"steps": 2}, resume="auto")
    assert again == folder  # finished, on a device with bf16
    run(precision={"weights": "int8"}, resume="latest", train={"steps": 3})
    assert json.loads((folder / "config.json").read_text())["precision"]["compute"] == "fp16"


@pytest.mark.parametrize("weights", ["int8", "fp32"])  # over fp32 weights auto is fp32, which is no reason to refuse
def test_a_run_begun_in_bf16_is_continued_where_bf16_is(weights: str, tiny_config: dict) -> None:
    config, started = validate(tiny_config | {"precision": {"weights": weights}}, "auto"), {"compute": "bf16"}
    with pytest.raises(UserError, match="started with precision.compute bf16, which sm_75 lacks.*new run"):
        settle_compute(config, T4, {"precision": started})
    for capability in (None, L4):
        assert settle_compute(config, capability, {"precision": started}).precision.compute == "bf16"
    if weights == "int8":
        assert compute_to_generate(settle_compute(config, L4), T4).precision.compute == "fp16"
        assert compute_to_generate(settle_compute(config, T4), L4).precision.compute == "fp16"


def test_what_fp16_cannot_train_is_refused_with_the_reason(tiny_config: dict) -> None:
    """``auto`` may be fp16 only on this device, whose rules the file did not have to keep."""
    full = {"adapter": {"method": "full"}, "precision": {"weights": "bf16"}}
    paged = {"optimizer": {"name": "paged_adamw8bit"}, "precision": {"weights": "int8"}}
    for changes, words in (
        (full, r"(?s)fp16.*sm_75.*16-bit weights.*precision.weights fp32"),
        (paged, "fp16 .auto on sm_75.: 1 problem\n.*paged_adamw8bit cannot undo"),
    ):
        config = validate(tiny_config | changes, "auto")
        assert settle_compute(config, L4).precision.compute == "bf16"
        with pytest.raises(ConfigError, match=words):
            settle_compute(config, T4)
    alone = {"adapter": {"method": "lora"}, "memory": {"feed_forward": "alone"}, "precision": {"weights": "int8"}}
    config = validate(tiny_config | alone, "auto")
    ways = [settle_compute(config, capability).memory.feed_forward for capability in (L4, T4)]
    assert ways == ["alone", "block"], "what is exact either way is not refused"
    with pytest.raises(ConfigError, match="paged_adamw8bit cannot undo.*adamw8bit"):
        validate(tiny_config | paged | {"precision": FP16}, "paged")


# --- the scale of the loss --------------------------------------------------------------------------------------------


def test_the_scale_and_the_updates_are_those_of_torch_s_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ten steps, the first two of which overflow, with growth every three steps."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizers = [AdamW(lr=0.1).make(model.parameters()) for model in (ours, theirs)]
    scale, scaler = LossScale(CPU), torch.amp.GradScaler("cpu", growth_interval=3)
    scaled = []
    for step in range(10):
        x = torch.randn(4, 5) * (3e38 if step in (0, 1) else 1)
        for model in (ours, theirs):
            model.zero_grad()
        (ours(x).square().mean() * scale.scale).backward()
        scale.unscale([parameter.grad for parameter in ours.parameters()])
        scale.update(torch.stack([parameter.grad.norm() for parameter in ours.parameters()]).norm())
        scale.step(optimizers[0])
        scaler.scale(theirs(x).square().mean()).backward()
        scaler.step(optimizers[1])
        scaler.update()
        scaled.append(scale.scale.item())
        assert scaled[-1] == scaler.get_scale()
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    assert len(set(scaled)) > 2 and scaled[0] == 2.0**15
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("option", OPTIMIZERS, ids=lambda option: option.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("first", [0, 1], ids=["first", "second"])
def test_an_overflow_changes_neither_weights_nor_state(option: type, dtype: torch.dtype, first: int) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((70, 64), (8,))]
    more = {"d0": 0.1} if "d0" in option.model_fields else {}
    optimizer, scale = option(lr=0.05, weight_decay=0.1, **more).build(parameters), LossScale(CPU)

    def step(value: float) -> None:
        begin_step(optimizer)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, value)
        scale.unscale([parameter.grad for parameter in parameters])
        scale.update(torch.stack([parameter.grad.float().norm() for parameter in parameters]).norm())
        scale.step(optimizer)

    for _ in range(first):
        step(65536.0)
    before = [parameter.detach().clone() for parameter in parameters]
    states = [copy.deepcopy(dict(optimizer.state[parameter])) for parameter in parameters]
    step(torch.inf)
    torch.testing.assert_close([p.detach() for p in parameters], before, rtol=0, atol=0)
    for parameter, old in zip(parameters, states, strict=True):
        for name, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and (name in old or name in ("step", "exp_avg", "state1")):
                torch.testing.assert_close(value, old.get(name, torch.zeros_like(value)), rtol=0, atol=0)
    step(65536.0)
    assert all((p != old).any() and p.isfinite().all() for p, old in zip(parameters, before, strict=True))


def test_the_average_stays_where_it_is() -> None:
    parameter = nn.Parameter(torch.ones(4))
    average, plain = (Ema(decay=0.5).build({"p": parameter}) for _ in range(2))
    for undone in (False, True, False):
        with torch.no_grad():
            parameter += 1.0
        average.update(torch.tensor(undone))
        if not undone:
            plain.update()
        else:
            plain._ema.optimization_step += 1
            torch.testing.assert_close(average.tensors(), plain.tensors(), rtol=0, atol=0)
    torch.testing.assert_close(average.tensors(), plain.tensors())


LEVERS = {
    "plain": {},
    "accumulation": {"train": {"steps": 8, "gradient_accumulation": 2}},
    "per-parameter": {"train": {"steps": 8, "clip": "per_parameter", "clip_norm": 0.1}},
    "average": {"ema": {"decay": 0.9}},
    "skip": {"train": {"steps": 8, "on_nonfinite": "skip"}},
    "8-bit": {"optimizer": {"name": "adamw8bit"}, "adapter": {"dtype": "bf16"}},
    "8-bit, accumulation, skip": {
        "train": {"steps": 8, "gradient_accumulation": 2, "on_nonfinite": "skip"},
        "optimizer": {"name": "adamw8bit"}, "adapter": {"dtype": "bf16"},
    },
}  # fmt: skip


@pytest.mark.parametrize("lever", slow_but(["8-bit, accumulation, skip"], LEVERS))
def test_steps_that_overflow_are_undone_counted_and_repeatable(
    lever: str, run: Callable[..., Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", HUGE)  # too large for the tiny run: its first steps overflow
    sections = {"train": {"steps": 8}, "checkpoint": {"every": 1, "keep_last": 9}} | LEVERS[lever]
    whole = run(**sections)
    skipped = [row["step"] for row in read_rows(whole / OVERFLOWS)]
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["overflow_steps"] == len(skipped) and 2 <= len(skipped) <= 6 and skipped[0] == 1
    assert "skipped_steps" not in summary and "fp32_blocks" not in summary
    assert sorted([*skipped, *losses(whole)]) == list(range(1, 9))
    scales = [row["loss_scale"] for row in read_rows(whole / OVERFLOWS)]
    assert scales[:2] == [HUGE, HUGE / 2]
    for step in range(2, 9):
        same = all((weights(whole, step)[name] == tensor).all() for name, tensor in weights(whole, step - 1).items())
        assert same == (step in skipped)

    half = cut_after(whole, 2)
    run(**sections, name="half", resume="latest")
    torch.testing.assert_close(weights(half, 8), weights(whole, 8), rtol=0, atol=0)
    assert losses(half) == losses(whole) and list(read_rows(half / OVERFLOWS)) == list(read_rows(whole / OVERFLOWS))
    assert "lacks" not in capsys.readouterr().out


def test_updates_in_the_backward_pass_are_undone_one_by_one(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", HUGE)
    full = {
        "adapter": {"method": "full"}, "precision": {"weights": "fp32", "compute": "fp16"},
        "train": {"steps": 8, "clip": "per_parameter"}, "optimizer": {"lr": 1e-4},
    }  # fmt: skip
    folder = run(memory={"optimizer_in_backward": True}, **full)
    skipped = [row["step"] for row in read_rows(folder / OVERFLOWS)]
    assert skipped and skipped[0] == 1 and len(losses(folder)) == 8 - len(skipped) > 0
    assert all(tensor.isfinite().all() for tensor in weights(folder, 8).values())


def test_a_step_that_overflows_without_a_scale_is_not_finite() -> None:
    nan, inf = float("nan"), float("inf")
    assert is_overflow(0.5, inf, [2.0, 0, 0]) and not is_overflow(0.5, inf, [1.0, 0, 0])
    assert is_overflow(nan, nan, [1.0, 0, 1.0]) and not is_overflow(nan, nan, [65536.0, 0, 0])
    assert not is_overflow(0.5, inf, []) and not is_overflow(0.5, 1.0, [65536.0, 1.0])


def test_what_is_nan_by_itself_still_ends_the_run(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from simpletune.stages.step.batch_loader import BatchLoader

    honest = BatchLoader.fetch

    def fetch(self: BatchLoader, number: int) -> list:
        batches = honest(self, number)
        return [replace(batch, z_0=batch.z_0 * torch.nan) for batch in batches] if number == 1 else batches

    monkeypatch.setattr(BatchLoader, "fetch", fetch)
    with pytest.raises(UserError, match="step 2: the loss is nan.*cached latents"):
        run()


# --- blocks that overflow ---------------------------------------------------------------------------------------------


def test_a_block_that_overflows_is_computed_in_fp32(inside_blocks: Path, run: Callable[..., Path]) -> None:
    """Block 1 is found in the first step and computed in fp32 from the third on; the weights hardly change."""
    sections = {"train": {"steps": 5}, "optimizer": {"lr": 1e-6}}
    folder = run(inside_blocks, **sections)
    rows = list(read_rows(folder / OVERFLOWS))
    assert [(row["step"], row["blocks"]) for row in rows] == [(1, [1]), (2, [])]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["fp32_blocks"] == [1] and summary["overflow_steps"] == 2
    assert any("1 block overflows fp16 (1), computed in fp32 from step 3 on" in each for each in summary["warnings"])
    report_at_end(folder)
    assert "2 steps undone, 1 block in fp32 since (1)" in (folder / "report.md").read_text()
    plain = losses(run(inside_blocks, precision={"weights": "int8", "compute": "fp32"}, name="plain", **sections))
    found = losses(folder)
    assert found == pytest.approx({step: plain[step] for step in (3, 4, 5)}, rel=2e-3)


MORE = {
    "plain": {},
    "streamed": {"memory": {"checkpointing": "all", "resident_blocks": 1, "offload_checkpoint_inputs": True}},
    "plan": {"memory": {"modulation": "plan", "modulation_window": 4}},
    "full": {"adapter": {"method": "full"}, "precision": {"weights": "fp32", "compute": "fp16"}},
}


@pytest.mark.parametrize(
    ("more", "start"), slow_but([("streamed", 1)], [("plain", 2), ("streamed", 1), ("plan", 1), ("full", 1)])
)
def test_resuming_repeats_when_a_block_becomes_fp32(
    more: str, start: int, between_blocks: Path, run: Callable[..., Path]
) -> None:
    """The stop after step 1 reads the flags earlier than the whole run does; the change comes at the same step."""
    sections = {"train": {"steps": 5}, "checkpoint": {"every": start, "keep_last": 9}} | MORE[more]
    whole = run(between_blocks, **sections)
    blocks = [block for row in read_rows(whole / OVERFLOWS) for block in row["blocks"]]
    assert blocks == [1, 2] and losses(whole)
    half = cut_after(whole, start)
    run(between_blocks, name="half", resume="latest", **(sections | {"checkpoint": {"every": 3}}))
    torch.testing.assert_close(weights(half, 5), weights(whole, 5), rtol=0, atol=0)
    assert losses(half) == losses(whole)


@pytest.mark.parametrize(
    ("change", "weights"),
    slow_but(
        [("inside_blocks", "bf16"), ("between_blocks", "nf4")],
        product(("inside_blocks", "between_blocks"), ("int8", "nf4", "int8-quanto", "bf16", "fp32")),
    ),
)
def test_velocities_with_such_blocks_are_those_of_fp32(
    weights: str, change: str, request: pytest.FixtureRequest, tiny_config: dict
) -> None:
    from simpletune.stages.sample import ImageRequest, Sampler

    tiny_config["model"]["pretrained"] = str(request.getfixturevalue(change))
    wanted = ImageRequest("a red circle", 0, width=32, height=32, steps=2, guidance=2.0)
    torch.manual_seed(0)
    found = {}
    for compute in ("fp16", "fp32"):
        if (weights, compute) == ("bf16", "fp32"):
            weights = "fp32"
        config = resolve_folders(
            validate(tiny_config | {"precision": {"weights": weights, "compute": compute}}, "draw")
        )
        model = config.model.load_denoiser(config.precision, CPU)
        width = model.config.joint_attention_dim
        text = torch.randn(20, width, generator=torch.Generator().manual_seed(1))
        pooled = torch.randn(model.config.pooled_projection_dim, generator=torch.Generator().manual_seed(2))
        dtype = config.precision.encoder_dtype()
        given = Conditioning(text.to(dtype), pooled=pooled.to(dtype))
        found[compute] = Sampler(model, config.model, config.precision, objective=config.objective).denoise(
            [wanted], [given], [given]
        )
        blocks = fp16_blocks_of(model)
        if compute == "fp16":
            assert blocks is not None and blocks.wide == frozenset()
            assert blocks.wide_in_generation == ({1} if change == "inside_blocks" else {1, 2})
    assert found["fp16"].isfinite().all()
    torch.testing.assert_close(found["fp16"], found["fp32"], rtol=0.02, atol=0.02)


class Named(nn.Module):
    """A block, and an output norm that is called by keyword, as Z-Image's is."""

    units, after_units = ("blocks.0",), "final"

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.final = nn.ModuleList([nn.Linear(4, 4)]), nn.Bilinear(4, 4, 4)
        self.half().requires_grad_(False)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:  # [b, n, d] each
        result: Tensor = self.final(input1=self.blocks[0](x), input2=c)
        return result


def test_an_output_norm_may_be_called_by_keyword() -> None:
    model = Named()
    blocks = Fp16Blocks(model)  # type: ignore[arg-type]
    x, c = torch.full((1, 3, 4), 6e4, dtype=torch.float16), torch.full((1, 3, 4), 1e-4, dtype=torch.float16)
    model.blocks[0].weight.fill_(1.0)
    assert not model(x, c).isfinite().all() and blocks.flags(CPU).tolist() == [True]
    blocks.wide = frozenset({0})
    wide = copy.deepcopy(model).float()
    assert model(x, c).dtype == torch.float16
    del wide.blocks[0].forward, wide.final.forward
    torch.testing.assert_close(model(x, c).float(), wide(x.float(), c.float()), rtol=1e-3, atol=1e-3)


# --- the embedded model -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "method", "lr", "tolerance"),
    [("int8", "lora", 0.004, 1e-3), ("nf4", "lora", 0.004, 1e-3), ("fp32", "full", 0.0002, 5e-3)],  # 0.004 diverges
)
def test_losses_of_the_demo_are_close_to_those_of_fp32(
    weights: str, method: str, lr: float, tolerance: float, shared_cache: Path, tmp_path: Path
) -> None:
    """Relative to fp32's, within 0.1% in fp16 for LoRA and 0.5% for full fine-tuning, and nearer than bf16's."""
    found = {}
    for compute in ("fp32", "fp16", "bf16"):
        overrides = {
            "name": compute, "adapter.method": method, "precision.weights": weights, "precision.compute": compute,
            "validation.prompts": "[]", "validation.loss_samples": 0, "profile.max_traces": 0, "train.steps": 4,
            "optimizer.lr": lr, "schedule.warmup_steps": 0, "device": "cpu", "output.report": "false",
            "output.cache": shared_cache, "output.runs": tmp_path / "runs", "output.profiles": tmp_path / "profiles",
        }  # fmt: skip
        config, _ = read_config(Path("configs/demo.json"), [f"{path}={value}" for path, value in overrides.items()])
        found[compute] = torch.tensor([row["loss"] for row in read_metrics(train(config))])
    off = {compute: ((values - found["fp32"]).abs() / found["fp32"]).max().item() for compute, values in found.items()}
    print("DEMO", weights, method, {compute: f"{value:.2e}" for compute, value in off.items()})
    assert len(found["fp16"]) == 4 and 0 < off["fp16"] < tolerance and off["fp16"] < off["bf16"]


def test_pictures_of_a_run_with_such_blocks_are_finite(
    between_blocks: Path, run: Callable[..., Path], capsys: pytest.CaptureFixture
) -> None:
    """Base and tuned are drawn, the validation loss computed, and the result drawn again by generate."""
    from PIL import Image

    from simpletune.apps.cli.main import main

    folder = run(
        between_blocks,
        train={"steps": 3},
        validation={"prompts": ["a red circle"], "loss_samples": 1, "steps": 1, "guidance": 2.0},
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["eval_loss_before"] > 0 and summary["eval_loss_after"] > 0 and summary["overflow_steps"] >= 2
    drawn = [*(folder / "samples").glob("*/prompt-00.png")]
    out = folder.parent / "drawn.png"
    assert main(["generate", "--run", str(folder), "--prompt", "a red circle", "--steps", "1", "--out", str(out)]) == 0
    drawn += [*out.parent.glob("drawn*.png")]
    assert len(drawn) >= 3 and "fp16" in capsys.readouterr().out
    for image in drawn:
        assert len(set(Image.open(image).convert("L").tobytes())) > 8  # NaN decodes to one colour


def test_fp16_takes_the_bytes_of_bf16(tiny_config: dict, simulate_once: Callable) -> None:
    """Besides the flags, the scale and the copies with which an update is undone, which the peak does not see."""
    sections = {"memory": {"checkpointing": "all"}, "data": tiny_config["data"] | {"resolution": 512}}
    peaks = {}
    for compute in ("bf16", "fp16"):
        data = tiny_config | sections | {"precision": {"weights": "int8", "compute": compute}}
        peaks[compute] = simulate_once(resolve_folders(validate(data, "peak"))).peak.bytes
    assert peaks["fp16"] == pytest.approx(peaks["bf16"], rel=0.01)


def test_an_int8_weight_is_unpacked_before_a_product_in_fp16() -> None:
    """x q^T alone would exceed fp16, and the weights' scales are subnormal in it."""
    torch.manual_seed(0)
    linear = nn.Linear(512, 64)
    with torch.no_grad():
        linear.weight.mul_(1e-3)
    twin = Int8Linear.from_linear(linear, torch.float16)
    x = (50 * torch.randn(40, 512)).half().requires_grad_()
    y = twin(x)
    wide = x.detach().float().requires_grad_()
    expected = twin(wide)
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=5e-3)
    y.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad.float(), wide.grad, rtol=0.02, atol=1e-5)


@pytest.mark.parametrize("sections", [{}, MORE["full"]], ids=["lora", "full"])
def test_a_step_reads_nothing_from_the_device(
    sections: dict, run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
                found.append(str(func))
            return func(*args, **(kwargs or {}))

    honest = TrainStep.step

    def step(self: TrainStep, *args: object) -> tuple[Tensor, Tensor]:
        with Reads():
            return honest(self, *args)

    monkeypatch.setattr(TrainStep, "step", step)
    run(**sections, train={"steps": 2})
    assert found == []
