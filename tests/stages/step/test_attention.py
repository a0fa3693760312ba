"""``speed.attention`` concerns the transformer alone, and is tried with every shape before the first step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import run_with
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from simpletune.config.load import read_config, validate
from simpletune.stages.step.attention import AttentionCall, attention_calls, choose_kernel, settle_attention
from simpletune.system.options import UserError
from simpletune.training import set_up as setting_up

CPU = torch.device("cpu")
HEAD = 64  # width of the tiny transformer's heads; its autoencoder's only head is narrower, as SD3's is wider


@dataclass
class Call:
    """One call of attention: its shape, and whether any kernel but flash was allowed."""

    batch: int
    tokens: int
    width: int
    free: bool


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """On this CPU every width does; here, as on a GPU, flash cannot do the autoencoder's."""
    found: list[Call] = []
    honest = F.scaled_dot_product_attention

    def attention(query: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        free = torch.backends.cuda.math_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
        found.append(Call(query.shape[0], query.shape[2], query.shape[3], free))
        if not free and query.shape[3] != HEAD:
            raise RuntimeError("No available kernel. Aborting execution.")
        return honest(query, *more, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    return found


def test_the_autoencoder_and_the_encoders_keep_their_own_kernels(
    tiny_config: dict, tmp_path: Path, calls: list[Call]
) -> None:
    """Training, recomputation, evaluation and sampling by flash; the rest as PyTorch chooses. Pictures come out."""
    drawn = {"prompts": ["a dot"], "steps": 2, "loss_samples": 2, "width": 48, "height": 32}
    run = run_with(
        tiny_config,
        validation=drawn,
        memory={"checkpointing": "all"},
        speed={"attention": "flash"},
        output={"cache": str(tmp_path / "cache")},  # so that pictures and prompts are encoded here
    )
    summary = json.loads((run / "summary.json").read_text())
    assert summary["warnings"] == [] and summary["attention"] == "flash" and summary["eval_loss_after"] is not None
    assert len(list((run / "samples").glob("*/prompt-00.png"))) == 2
    ours = [call for call in calls if call.width == HEAD]
    assert ours and not any(call.free for call in ours)
    assert {call.batch for call in ours} == {1, 2}  # 2: the halves of guidance
    others = [call for call in calls if call.width != HEAD]
    assert others and all(call.free for call in others)


def test_every_shape_is_tried_before_anything_is_encoded(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that can do the training's shapes, but not the wider batch of a validation picture of another size."""
    honest = F.scaled_dot_product_attention

    def attention(query: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        if query.shape[0] == 2 and not query.requires_grad:
            raise RuntimeError("No available kernel. Aborting execution.")
        return honest(query, *more, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(setting_up, "encode", lambda *_: pytest.fail("encoded before the kernel was tried"))
    with pytest.raises(UserError, match="speed.attention: flash cannot .*batch of 2, .*validation.* 48x32 .*Use auto"):
        run_with(tiny_config, validation={"prompts": ["a dot"], "width": 48}, speed={"attention": "flash"})


SD3 = Path("configs/more/sd3_medium_lora_r16_int8.json")


def test_the_shapes_of_a_run() -> None:
    """SD3 Medium: 24 heads of 64, 333 tokens of text, one of the picture for each 16 x 16 pixels."""

    def calls_of(*more: str) -> list[AttentionCall]:
        size = ["train.batch_size=4", "validation.width=512", "validation.height=768"]
        config, _ = read_config(SD3, ["data.path=demo:pictures", *size, *more])
        return attention_calls(config, [(1024, 1024), (768, 1344)])

    assert {(s.batch, s.heads, s.tokens, s.width, s.trained) for s in calls_of() if s.keys == s.tokens} == {
        (4, 24, 333 + 64 * 64, 64, True),
        (4, 24, 333 + 48 * 84, 64, True),
        (1, 24, 333 + 64 * 64, 64, False),  # the validation loss
        (1, 24, 333 + 48 * 84, 64, False),
        (2, 24, 333 + 32 * 48, 64, False),  # guidance
    }
    assert {shape.trained for shape in calls_of("validation.prompts=[]", "validation.loss_samples=0")} == {True}
    assert max(shape.batch for shape in calls_of("validation.guidance=1") if not shape.trained) == 1


def test_blocks_with_a_second_attention_are_tried_without_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """SD3.5 Medium's first blocks let the picture also attend to itself alone."""
    config, _ = read_config(SD3, ["data.path=demo:pictures"])
    known = config.model.files.known_config() | {"dual_attention_layers": [0, 1]}
    monkeypatch.setattr(type(config.model.files), "known_config", lambda self: known)
    tokens = {shape.tokens for shape in attention_calls(config, [(1024, 1024)])}
    assert tokens == {64 * 64, 333 + 64 * 64}


def test_a_trial_includes_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, *_: Any) -> torch.Tensor:
            return q * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError("no backward kernel")

    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *_: Broken.apply(q))
    trained = AttentionCall(1, 2, 20, 20, 64, True, "training")
    with pytest.raises(UserError, match="no backward kernel"):
        choose_kernel("flash", trained, CPU, torch.float32)
    assert choose_kernel("flash", trained._replace(trained=False), CPU, torch.float32) == "flash"


@pytest.mark.parametrize("outer", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_the_choice_ends_with_the_step(outer: SDPBackend, tiny_config: dict, calls: list[Call]) -> None:
    """What the caller allows is restored."""

    def flags() -> tuple[bool, bool]:
        return torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()

    config = validate(tiny_config | {"speed": {"attention": "flash"}}, "flash")
    with sdpa_kernel(outer):
        before = flags()
        settle_attention(config, [(32, 32)], CPU)
        assert flags() == before
    assert flags() == (True, True)
