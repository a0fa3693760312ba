"""Replayed passes on the GPU in software (make softgpu): a run has the bits that it has without graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import failpoints
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_runs import fail_at, merged, run_with
from torch import Tensor

from benchmarks.tiny_models import tiny_klein
from simpletune.engine import graphs
from simpletune.engine.kernels import rotary
from simpletune.runs.control import GenerateRequest, ask, read_answers
from simpletune.runs.folder import read_metrics
from softgpu import levers as softgpu_levers

pytestmark = [
    pytest.mark.softgpu,
    pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "soft_push"), reason="needs tests/gpu/softgpu/run"),
]
SEEDS_ALONE, SEEDS = 8, 50
SIZES = [(96, 96), (128, 64), (64, 128), (112, 80), (80, 112)]


@pytest.fixture(autouse=True)
def no_adversary() -> Iterator[None]:
    from softgpu import queues

    queues.seed(queues.AT_ONCE)
    yield
    queues.seed(queues.AT_ONCE)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of passes that were replayed, in one element, and of captures in another."""
    counts, replay, end = [0, 0], torch.cuda.CUDAGraph.replay, torch.cuda.CUDAGraph.capture_end

    def counted_replay(graph: torch.cuda.CUDAGraph) -> None:
        counts[0] += 1
        replay(graph)

    def counted_end(graph: torch.cuda.CUDAGraph) -> None:
        counts[1] += 1
        end(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted_replay)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", counted_end)
    return counts


def wrong_seeds(levers: softgpu_levers.Levers, seeds: int) -> list[int]:
    """The seeds with which a replayed run differs from the CPU's."""
    from softgpu import queues

    expected, found = softgpu_levers.run(levers, "cpu"), []
    for seed in [queues.AT_ONCE, *range(seeds)]:
        queues.seed(seed)
        if not softgpu_levers.run(levers).equals(expected):
            found.append(seed)
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", softgpu_levers.GRAPHS)
def test_replayed_steps_have_the_cpus_bits(name: str, replays: list[int]) -> None:
    levers, runs = softgpu_levers.GRAPHS[name], SEEDS_ALONE + 1
    assert wrong_seeds(levers, SEEDS_ALONE) == []
    plain = 2 if levers.accumulation == 1 else 1  # steps: graphs take two passes of the kind and one step
    assert replays == [runs * (levers.steps - plain) * levers.accumulation, runs]


@pytest.mark.timeout(3600)
def test_replayed_steps_with_all_levers_have_the_cpus_bits() -> None:
    assert wrong_seeds(softgpu_levers.ALL_GRAPHS, SEEDS) == []


def stale_inputs(patch: pytest.MonkeyPatch) -> None:
    """The inputs of a replay are those of the one before."""
    patch.setattr(torch, "_foreach_copy_", lambda to, of: None)


def freed_gradients(patch: pytest.MonkeyPatch) -> None:
    """The tensors to which the graph adds are let go after the capture."""
    honest = graphs.Graphs.end_step

    def end_step(self: graphs.Graphs) -> None:
        self._sums = {parameter: total.clone() for parameter, total in self._sums.items()}
        honest(self)

    patch.setattr(graphs.Graphs, "end_step", end_step)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("wrong", [stale_inputs, freed_gradients])
def test_a_wrong_replay_is_noticed(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    assert wrong_seeds(softgpu_levers.GRAPHS["graphs"], 1)


@pytest.fixture
def five_sizes(tiny_config: dict, tmp_path: Path) -> dict:
    """20 steps over pictures of five sizes, an evaluation and a picture after every fifth."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, size in enumerate(SIZES * 2):
        Image.linear_gradient("L").resize(size).convert("RGB").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    return merged(
        tiny_config,
        device="cuda",
        data={"path": str(folder), "resolution": 64, "max_aspect": 2.0},
        precision={"weights": "int8"},
        train={"steps": 20},
        checkpoint={"every": 10},
        validation={"prompts": ["a red disc"], "steps": 1, "loss_samples": 1, "every": 5},
        output={"cache": str(tmp_path / "cache")},
    )


def left(run: Path) -> tuple[list[tuple[Any, ...]], dict[str, Tensor]]:
    """Every step's loss, rate and norm, and the trained weights."""
    rows: list[tuple[Any, ...]] = [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in read_metrics(run)]
    return rows, load_file(run / "pytorch_lora_weights.safetensors")


def assert_same(run: Path, other: Path) -> None:
    (rows, weights), (others, other_weights) = left(run), left(other)
    assert rows == others
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights | other_weights)


@pytest.mark.timeout(1800)
def test_a_run_with_evaluations_five_sizes_and_a_request_is_the_plain_one(five_sizes: dict, replays: list[int]) -> None:
    from softgpu import queues

    def run(name: str, replayed: bool) -> Path:
        config = merged(five_sizes, name=name, speed={"graphs": replayed})
        request = GenerateRequest(id="now", prompt="a blue disc", steps=1)
        failpoints.arm("step.begun", lambda: ask(Path(config["output"]["runs"]) / name, request), 13)
        return run_with(config)

    plain = run("plain", False)
    assert replays == [0, 0]
    for seed in (queues.AT_ONCE, 3):
        queues.seed(seed)
        replays[:] = [0, 0]
        replayed = run(f"replayed{seed}", True)
        assert_same(replayed, plain)
        assert replays[0] >= 6 and replays[1] >= 4
        for run_folder in (replayed, plain):
            assert [row["state"] for row in read_answers(run_folder)] == ["done"]
            assert len(list((run_folder / "samples").rglob("*.png"))) == 6  # four, the base's, and the sheet


@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_with_the_bits_of_a_whole_plain_one(tiny_config: dict, replays: list[int]) -> None:
    config = merged(
        tiny_config, device="cuda", precision={"weights": "int8"}, train={"steps": 10}, checkpoint={"every": 4}
    )
    plain = run_with(config, name="plain")
    fail_at("step.begun", config, 8, speed={"graphs": True})
    assert replays[0] > 3
    replayed = run_with(config, "auto", speed={"graphs": True})
    assert_same(replayed, plain)
    assert replays[0] > 6


@pytest.mark.timeout(900)
def test_a_run_of_klein_with_its_kernels_is_the_plain_one(
    tiny_config: dict, tmp_path: Path, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms with positions and SwiGLU run as Triton kernels, within the graph, too."""
    pipeline = tiny_klein.build(tmp_path / "klein")
    launched, honest = [0], rotary.CALLS["rms_norm_rotary"]

    def counted(*arguments: Any, **options: Any) -> Any:
        launched[0] += torch.cuda.is_current_stream_capturing()
        return honest(*arguments, **options)

    monkeypatch.setitem(rotary.CALLS, "rms_norm_rotary", counted)
    config = merged(
        tiny_config,
        device="cuda",
        model={"family": "klein", "pretrained": str(pipeline), "text_length": 32},
        data={"resolution": 64},
        train={"steps": 4},
        output={"cache": str(tmp_path / "cache")},
    )
    config["model"].pop("t5_length")
    plain = run_with(config, name="plain")
    replayed = run_with(config, name="replayed", speed={"graphs": True})
    assert_same(replayed, plain)
    assert replays == [2, 1] and launched[0] > 0 and not rotary.FALLBACK.failed
