"""Runs on the GPU in software (make softgpu): every lever's values are the CPU's, and 200 seeds give the same bits."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import saved_weights
from torch import nn

from simpletune.engine.memory.block_offload import BlockOffload
from simpletune.engine.memory.copy_stream import CudaCopies, PinnedPages
from simpletune.engine.memory.offload_inputs import CheckpointInputOffload
from simpletune.runs.folder import read_metrics
from softgpu import levers as softgpu_levers

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.softgpu,
    pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "soft_push"), reason="needs tests/gpu/softgpu/run"),
]
SEEDS, SEEDS_ALONE, SEEDS_OF_TWO = 200, 25, 8


@pytest.fixture(autouse=True)
def no_adversary() -> Iterator[None]:
    from softgpu import queues

    queues.seed(queues.AT_ONCE)
    yield
    queues.seed(queues.AT_ONCE)


def wrong_seeds(name: str, seeds: int) -> list[int]:
    """The seeds with which a run of softgpu_levers differs from one whose work is done at once."""
    from softgpu import queues

    expected = softgpu_levers.RUNS[name]()
    found = []
    for seed in range(seeds):
        queues.seed(seed)
        if not softgpu_levers.RUNS[name]().equals(expected):
            found.append(seed)
    return found


@pytest.mark.parametrize("name", [*softgpu_levers.ALONE, *softgpu_levers.TOGETHER])
def test_every_lever_has_the_cpus_bits(name: str) -> None:
    levers = (softgpu_levers.ALONE | softgpu_levers.TOGETHER)[name]
    assert softgpu_levers.run(levers).equals(softgpu_levers.run(levers, "cpu"))


@pytest.mark.parametrize("name", ["plain", "in-backward updates"])
def test_kernels_for_norms_and_gates_have_the_cpus_results(name: str) -> None:
    """Frozen and trained modulations, in fp32, within the roundings of both."""
    levers = softgpu_levers.ALONE[name]
    found, expected = softgpu_levers.run(levers, kernels=True), softgpu_levers.run(levers, "cpu")
    for ours, theirs in zip(found.figures, expected.figures, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert not found.equals(expected)  # the kernels did run
    for a, b in zip(found.tensors, expected.tensors, strict=True):
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [*softgpu_levers.ALONE, "LoRA poisoned", "full poisoned", "paged"])
def test_no_seed_changes_a_lever_s_bits(name: str) -> None:
    assert wrong_seeds(name, SEEDS_ALONE) == []


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["LoRA", "full"])
def test_no_seed_changes_the_bits_of_all_levers_together(name: str) -> None:
    assert wrong_seeds(name, SEEDS) == []


def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaCopies, "wait", lambda self, event: None)
    assert wrong_seeds("LoRA", 10)


LINEARS, WIDTH = 4, 64


def dropped_after(what: str) -> tuple[list[int], CheckpointInputOffload | None]:
    """Drop a streamed model, or a pass, whose copies are still queued; the addresses of the memory that they write, and
    what goes on."""
    device, blocks = torch.device("cuda"), [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(LINEARS)]
    x = torch.ones(2, WIDTH, device=device)
    if what.startswith("a fetch"):
        inputs = CheckpointInputOffload(device)
        packed = []
        for _ in range(2):
            with inputs.offloading():
                packed.append(inputs.pack(x[None] * 2))
        inputs.unpack(packed.pop())  # starts to fetch the other one
        written = [tensor.data_ptr() for tensor, _ in inputs._arriving.values()]
        if what.endswith("next pass"):
            with inputs.offloading():
                return written, inputs
        return written, None
    offload = BlockOffload(blocks, range(LINEARS), device, poison=what == "a fill")
    for index in range(LINEARS if what == "a fill" else 2):
        with offload.forward(index):
            x = blocks[index](x)
    if what == "a fill":
        offload._finish()
    return [slot.flat.data_ptr() for slot in offload._slots], None


def overwrites(what: str, seed: int) -> bool:
    """Whether copies of a dropped model write to memory that has a new owner."""
    from softgpu import queues

    queues.seed(seed)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):  # without parts of segments that earlier tests hold
        written, _on = dropped_after(what)
        new = [torch.ones(2**20, dtype=torch.uint8, device="cuda") for _ in range(2)]
    assert all(any(0 <= at - tensor.data_ptr() < tensor.nbytes for tensor in new) for at in written)
    torch.cuda.synchronize()
    return not all((tensor == 1).all() for tensor in new)


@pytest.fixture
def pages_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned pages outlive a model, as those that processes share do: unpinning them finishes all copies here."""
    pages, pin = [], PinnedPages.pin
    monkeypatch.setattr(PinnedPages, "pin", lambda self, *where: pages.append(self) or pin(self, *where))


@pytest.fixture(params=["as it is", "without the wait"])
def waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a dropped model's copies are finished before its memory is freed."""
    if request.param != "as it is":
        monkeypatch.setattr(CudaCopies, "finish", lambda self: None)
    return request.param == "as it is"


@pytest.mark.usefixtures("pages_stay")
@pytest.mark.parametrize("what", ["a fill", "a prefetch", "a fetch", "a fetch before the next pass"])
def test_a_dropped_model_s_copies_end_before_its_memory_has_a_new_owner(what: str, waits: bool) -> None:
    """A pass with poison ends with a fill; a pass that an exception ends leaves a prefetch, or an input on its way."""
    assert any(overwrites(what, seed) for seed in range(SEEDS)) is not waits


def differs_after_a_poisoned_run(seed: int, expected: softgpu_levers.Result) -> bool:
    """Whether a streamed run gives other bits than alone. It begins with the same memory, so that its slots lie where
    those of the first one lay, and the device finishes what is queued while they hold blocks."""
    from softgpu import queues

    gc.collect()
    queues.seed(seed)
    torch.cuda.empty_cache()
    softgpu_levers.run_poisoned(softgpu_levers.ALONE["streaming"])
    gc.collect()
    assembled = softgpu_levers.assembled

    def finishing(*given: Any) -> Any:
        core = assembled(*given)
        core.model.transformer_blocks[1].attn.register_forward_pre_hook(lambda *_: torch.cuda.synchronize())
        return core

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softgpu_levers, "assembled", finishing)
        return not softgpu_levers.run(softgpu_levers.ALONE["streaming"]).equals(expected)


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("pages_stay")
def test_a_run_after_a_poisoned_one_is_the_run_alone(waits: bool) -> None:
    """In one process. The first loss was NaN where the first run's fill reached a slot of the second."""
    expected = softgpu_levers.run(softgpu_levers.ALONE["streaming"])
    assert any(differs_after_a_poisoned_run(seed, expected) for seed in range(SEEDS_OF_TWO)) is not waits


def trained(config: dict, *words: str, of: Sequence[str] = ("-m", "simpletune"), **environment: str) -> str:
    """``simpletune train`` in a process of its own, or another program that takes its words; what it says."""
    file = Path(config["output"]["runs"]).parent / f"{config['name']}.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, *of, "train", str(file), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(900)
def test_a_whole_run_with_pictures_report_and_resume(tiny_config: dict) -> None:
    """Stopped after two steps and resumed, on the card and on the CPU."""
    found = {}
    for device in ("cpu", "cuda"):
        config: dict[str, Any] = tiny_config | {"name": device, "device": device}
        config["train"] = {"steps": 2}
        config["validation"] = {"prompts": ["a red disc"], "steps": 2, "loss_samples": 2, "every": 2}
        config["checkpoint"] = {"every": 2}
        config["output"] = config["output"] | {"report": True, "cache": f"{config['output']['cache']}-{device}"}
        trained(config)
        trained(config | {"train": {"steps": 4}}, "--resume", "latest", SOFT_SEED="3" if device == "cuda" else "-1")
        run = Path(config["output"]["runs"]) / device
        assert (run / "report.html").exists() and list(run.rglob("*.png"))
        found[device] = [row["loss"] for row in read_metrics(run)], saved_weights(run, 4)
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], rel=1e-5)
    torch.testing.assert_close(found["cuda"][1], found["cpu"][1], rtol=1e-2, atol=1e-4)


ON_ITS_DEVICE = """
import os, sys, torch
from simpletune.apps.cli.main import main
code = main(sys.argv[1:])
used = [number for number in range(torch.cuda.device_count()) if torch.cuda.max_memory_allocated(number)]
os.write(1, f"process {os.environ['LOCAL_RANK']} used devices {used}\\n".encode())  # at once: two processes write
sys.exit(code)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", ["-1", "5"])
def test_two_processes_on_two_devices_have_the_weights_of_two_on_the_cpu(
    seed: str, tiny_config: dict, tmp_path: Path
) -> None:
    """gloo in place of NCCL."""
    (tmp_path / "program.py").write_text(ON_ITS_DEVICE)
    both = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "program.py"))
    losses, results = {}, {}
    for device in ("cpu", "cuda"):
        config = tiny_config | {"name": device, "device": device}
        config["train"] = {"steps": 4, "gradient_accumulation": 2}  # a micro-batch for each process
        said = trained(config, of=both, DRY_DEVICES="2", SOFT_SEED=seed if device == "cuda" else "-1")
        if device == "cuda":
            assert all(f"process {process} used devices [{process}]" in said for process in (0, 1)), said
        run = Path(config["output"]["runs"]) / device
        losses[device] = [row["loss"] for row in read_metrics(run)]
        results[device] = load_file(run / "pytorch_lora_weights.safetensors")
    assert len(losses["cuda"]) == 4 and losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-5)
    torch.testing.assert_close(results["cuda"], results["cpu"], rtol=1e-2, atol=1e-4)
