"""Training with compiled blocks: the same run up to the last bits, few graphs, the same after a resume.

The compiler's front half and its backward pass (``aot_eager``) stand for all of it here: inductor takes half a minute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import PRECISIONS, loss_of, transformer, unet, unet_loss, write_unet
from PIL import Image
from tiny_runs import run_with, saved_weights
from torch._dynamo.utils import counters

from benchmarks.tiny_models import tiny_sd3
from simpletune.config.load import validate
from simpletune.engine import compile as compiling
from simpletune.engine.quant.precision import FP32
from simpletune.estimate.simulate.simulate import simulate
from simpletune.runs.folder import read_metrics
from simpletune.system.options import UserError


@pytest.fixture(scope="module")
def blocks6(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of six blocks: the first, four alike, the last."""
    folder = tmp_path_factory.mktemp("six") / "pipeline"
    tiny_sd3.build(folder, replace(tiny_sd3.MINIMAL, layers=6, heads=6), seed=1, dtype="fp32")
    return str(folder)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the compiler counted."""
    monkeypatch.setattr(compiling, "INDUCTOR", {"backend": "aot_eager"})
    monkeypatch.setattr(compiling, "compile_problem", lambda device: None)
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def images_of(folder: Path, sizes: list[tuple[int, int]]) -> dict:
    """A data section of captioned noise in these sizes."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        Image.effect_noise(size, 60 + number).convert("RGB").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"noise {number}")
    return {"path": str(folder), "resolution": 128}


def require_close(run: Path, other: Path, tolerance: float) -> None:
    mine, others = ([(r["loss"], r["grad_norm"]) for r in read_metrics(each)] for each in (run, other))
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(others), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_many_shapes_few_graphs_and_an_exact_resume(
    tiny_config: dict, blocks6: str, tmp_path: Path, compiler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = [(128, 128), (256, 64), (64, 256), (192, 80), (128, 128)]
    tiny_config["data"] = images_of(tmp_path / "shapes", shapes) | {"max_aspect": 4.0}
    tiny_config |= {"train": {"steps": 6}, "checkpoint": {"every": 4}}
    tiny_config["model"]["pretrained"] = blocks6
    tiny_config["adapter"]["dropout"] = 0.2
    tiny_config["memory"] = {"checkpointing": 3}
    tiny_config["validation"] = {"loss_samples": 2, "prompts": ["a red disc"], "steps": 1}
    eager = run_with(tiny_config)
    whole = run_with(tiny_config, name="whole", speed={"compile": True})
    assert "compile the blocks for 4 picture sizes" in capsys.readouterr().out
    assert compiler["stats"]["unique_graphs"] <= 5 and not compiler["graph_break"]
    require_close(whole, eager, 1e-4)
    torch._dynamo.reset()
    run_with(tiny_config, name="parted", speed={"compile": True}, train={"steps": 4})
    torch._dynamo.reset()  # as in another process
    parted = run_with(tiny_config, "latest", name="parted", speed={"compile": True})
    torch.testing.assert_close(saved_weights(parted, 6), saved_weights(whole, 6), rtol=0, atol=0)


ALL = {"checkpointing": "all"}
CHANGES: dict[str, dict] = {
    "int8 plan": {"precision": {"weights": "int8"}, "memory": {"modulation": "plan"}},
    "nf4": {"precision": {"weights": "nf4"}},
    "quanto": {"precision": {"weights": "int8-quanto"}},
    "products": {"precision": {"weights": "int8", "products": "int8"}},
    "rotated products": {
        "precision": {"weights": "int8", "products": "int8", "rotation": "hadamard"}, "data": {"resolution": 64},
    },
    "rotated nf4": {"precision": {"weights": "nf4", "rotation": "hadamard"}},
    "streamed": {"memory": ALL | {"resident_blocks": 2, "offload_checkpoint_inputs": True}},
    "full": {"adapter": {"method": "full"}, "memory": ALL},
    "full streamed in backward": {
        "adapter": {"method": "full"}, "memory": ALL | {"optimizer_in_backward": True, "resident_blocks": 1},
        "train": {"clip": "per_parameter"},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CHANGES)
def test_every_lever_computes_the_same(case: str, tiny_config: dict, blocks6: str, compiler: Any) -> None:
    tiny_config["model"]["pretrained"] = blocks6
    changes = copy.deepcopy(CHANGES[case])
    changes["train"] = {"steps": 2, **changes.get("train", {})}
    if "adapter" in changes:
        tiny_config["adapter"] = {}
    eager = run_with(tiny_config, **changes)
    compiled = run_with(tiny_config, name="compiled", speed={"compile": True}, **changes)
    assert compiler["stats"]["unique_graphs"] <= 3 and not compiler["graph_break"]
    require_close(compiled, eager, 1e-3 if "precision" in changes else 1e-5)


class FeedForwards(torch.nn.Module):
    """Those of a block: of 32 rows, the picture's tokens, which multiply in int8, and of 12, the text's, which multiply
    with dequantised weights."""

    def __init__(self, block: Any):
        super().__init__()
        self.image, self.text = block.ff, block.ff_context

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.image(image), self.text(text)


@pytest.mark.parametrize("part", ["feed-forwards", pytest.param("blocks", marks=pytest.mark.slow)])
def test_rotated_layers_of_two_blocks_are_one_graph(part: str, compiler: Any) -> None:
    precision, results = PRECISIONS["int8-rotated"], []
    given = [torch.randn(1, rows, 32, generator=torch.Generator().manual_seed(rows)) for rows in (32, 12)]
    for compiled in (True, False):
        model = transformer(precision)
        blocks = model.transformer_blocks[1:3]
        precision.prepare(blocks)
        units = [FeedForwards(block) for block in blocks] if part == "feed-forwards" else list(blocks)
        if compiled:
            assert compiling.compile_training(units, torch.device("cpu"), sizes=1)
        if part == "blocks":
            first = model.pos_embed.proj.weight.requires_grad_(True)
            loss = loss_of(model, precision, 0)
        else:
            first = given[0].clone().requires_grad_(True)
            image, text = first, given[1].clone().requires_grad_(True)
            for unit in units:
                image, text = unit(image, text)
            loss = image.square().mean() + text.square().mean()
        loss.backward()
        results.append((loss.detach(), first.grad))
    assert compiler["stats"]["unique_graphs"] == 1 and not compiler["graph_break"]
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-6)


def test_without_a_compiler_the_run_goes_on_and_says_so(
    tiny_config: dict, compiler: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "compile_problem", lambda device: "no C compiler")
    run_with(tiny_config, train={"steps": 1}, speed={"compile": True})
    said = capsys.readouterr().out
    assert "NOT compiled" in said and "no C compiler" in said and "compile the blocks" not in said
    assert not compiler["stats"]


def test_a_compiler_that_fails_ends_the_run_with_the_remedy(
    tiny_config: dict, compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise OSError("as: out of registers")

    monkeypatch.setattr(compiling, "INDUCTOR", {"backend": broken})
    with pytest.raises(UserError, match=r"speed.compile: compiling a block failed \(BackendCompilerFailed.*registers"):
        run_with(tiny_config, train={"steps": 1}, speed={"compile": True})


def test_memory_is_predicted_of_the_run_that_is_not_compiled(
    tiny_config: dict, compiler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, compiled = (validate(tiny_config | {"speed": {"compile": on}}, "test") for on in (False, True))
    assert simulate(plain).peak == simulate(compiled).peak
    assert not compiler["stats"] and capsys.readouterr().out == ""


# --- U-Nets ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def unet_config(tiny_config: dict, tmp_path: Path) -> dict:
    """Pictures of three sizes."""
    data = images_of(tmp_path / "sizes", [(128, 128), (256, 64), (64, 256)])
    return copy.deepcopy(tiny_config) | {"model": write_unet(tmp_path / "model"), "data": data, "train": {"steps": 4}}


@pytest.mark.parametrize(
    "unit", ["down_blocks.0.resnets.0", pytest.param("down_blocks.0.attentions.0", marks=pytest.mark.slow)]
)
def test_one_graph_takes_every_size(unit: str, compiler: Any) -> None:
    """A resumed run may begin with another size, and has to get the same kernels."""
    results = []
    for compiled in (False, True):
        model = unet("sd15", FP32())
        model.requires_grad_(True)
        if compiled:
            assert compiling.compile_training([model.get_submodule(unit)], torch.device("cpu"), sizes=2)
        results.append([unet_loss(model, FP32(), key).item() for key in (0, 1)])
    assert compiler["stats"]["unique_graphs"] == 1 and not compiler["graph_break"]
    assert results[1] == pytest.approx(results[0], rel=1e-6) and results[0][0] != results[0][1]


def test_one_graph_takes_every_number_of_tokens(compiler: Any) -> None:
    layer = torch.nn.Linear(4, 4)
    assert compiling.compile_training([layer], torch.device("cpu"), sizes=2)
    for tokens in (12, 20, 30):
        assert layer(torch.ones(2, tokens, 4)).shape == (2, tokens, 4)
    assert compiler["stats"]["unique_graphs"] == 1


LEVERS: dict[str, dict] = {
    "streamed": {"memory": {"checkpointing": "all", "resident_blocks": 4, "offload_checkpoint_inputs": True}},
    "int8": {"precision": {"weights": "int8"}},
    "full": {"adapter": {"method": "full"}},
}


@pytest.mark.slow
@pytest.mark.parametrize(("lever", "version"), [*((lever, "sd2") for lever in LEVERS), ("streamed", "sdxl")])
def test_compiled_units_compute_the_same(
    lever: str,
    version: str,
    unet_config: dict,
    small_unet: Callable[[str], dict],
    compiler: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    unet_config["model"] = small_unet(version)
    if lever == "full":
        unet_config["adapter"] = {}
    eager = run_with(unet_config, **LEVERS[lever])
    compiled = run_with(unet_config, name="compiled", speed={"compile": True}, **LEVERS[lever])
    assert "compile the blocks for 3 picture sizes" in capsys.readouterr().out
    assert 0 < compiler["stats"]["unique_graphs"] <= 15 and not compiler["graph_break"]
    require_close(compiled, eager, 1e-3 if lever == "int8" else 1e-5)


@pytest.mark.slow
def test_a_resumed_run_gets_the_same_kernels(unet_config: dict, compiler: Any) -> None:
    whole = run_with(unet_config, name="whole", speed={"compile": True}, checkpoint={"every": 1, "keep_last": 4})
    run_with(unet_config, name="parted", speed={"compile": True}, train={"steps": 1})
    torch._dynamo.reset()  # as in another process, which sees another size first
    parted = run_with(unet_config, "latest", name="parted", speed={"compile": True})
    torch.testing.assert_close(saved_weights(parted, 4), saved_weights(whole, 4), rtol=0, atol=0)
