"""What a training step asks of the device, counted under the stub of CUDA: waits, copies, memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from blocks import write_pipeline
from dry import count
from optimizers import NAMES, option_of
from tiny_runs import run_on

from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.copy_stream import PinnedPages
from simpletune.engine.memory.machine_weights import is_shared
from simpletune.engine.tensors import all_tensors
from simpletune.stages import load
from simpletune.stages.step import batch_loader
from simpletune.stages.step.train_step import TrainStep

pytestmark = pytest.mark.dry
WATCHED = ("synchronisations", "cudaDeviceSynchronize", "pageable_copies", "cudaHostAlloc", "cuMemCreate")
WARM = 3  # steps that make optimizer state, fill caches and pin memory


class Steps:
    """The counts of each step: of its work, and from its beginning to the next one's, with feeding and logging."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.inside: list[dict[str, int]] = []
        self.begun: list[dict[str, int]] = []
        self.parameters = 0
        honest = TrainStep.step

        def step(core: TrainStep, batches: list[Any], *arguments: Any) -> Any:
            if type(batches[0].z_0) is not torch.Tensor:  # the prediction's step, on fake tensors
                return honest(core, batches, *arguments)
            before = {name: count(name) for name in WATCHED}
            self.begun.append(before)
            self.parameters = len(core.parameters)
            done = honest(core, batches, *arguments)
            self.inside.append({name: count(name) - before[name] for name in WATCHED})
            return done

        patch.setattr(TrainStep, "step", step)

    def work(self, name: str) -> list[int]:
        """Within each warm step."""
        return [step[name] for step in self.inside[WARM:]]

    def apart(self, name: str) -> list[int]:
        """From the beginning of each warm step to that of the next."""
        warm = self.begun[WARM:]
        return [after[name] - before[name] for before, after in zip(warm, warm[1:], strict=False)]


class Immediately:
    """Fetches the next step's batches before the current one's are freed. In a thread, whether they are freed before,
    and their pinned memory is reused, changes from step to step."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done

    def shutdown(self, **_: object) -> None:
        pass


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    gc.collect()  # the end of an earlier test's model waits for its copies, and must not fall into a step
    return Steps(monkeypatch)


@pytest.fixture
def single_blocks(tiny_config: dict, small_unet: Callable[[str], dict]) -> dict:
    """The tiny run, 10 steps on an SDXL, whose units are single transformer blocks with layers between them."""
    data = tiny_config["data"] | {"resolution": 64}
    return tiny_config | {"model": small_unet("sdxl"), "data": data, "train": {"steps": 10}}


@pytest.fixture
def three_blocks(tiny_config: dict, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The tiny run, 10 steps on a model of three blocks."""
    folder = tmp_path_factory.mktemp("three") / "pipeline"
    write_pipeline(folder)
    return tiny_config | {"model": tiny_config["model"] | {"pretrained": str(folder)}, "train": {"steps": 10}}


STREAMED = {"checkpointing": "all", "resident_blocks": 1, "offload_checkpoint_inputs": True}
TRAINED: dict[str, dict[str, Any]] = {
    "LoRA": {"precision": {"weights": "int8"}},
    "LoRA, plan": {"precision": {"weights": "int8"}, "memory": {"modulation": "plan"}},
    "LoRA, streamed": {"precision": {"weights": "bf16"}, "memory": STREAMED},
    "all, in backward": {
        "adapter": {"method": "full"},
        "precision": {"weights": "bf16"},
        "memory": {"checkpointing": "all", "optimizer_in_backward": True},
        "train": {"steps": 10, "clip": "per_parameter"},
    },
}
TRAINED["all, in backward, streamed"] = TRAINED["all, in backward"] | {
    "memory": STREAMED | {"optimizer_in_backward": True}
}
WAITS = {"all, in backward, streamed": 1}  # a step: its pass ends when the updated weights are on the host


def trained(config: dict, how: str, **changes: Any) -> None:
    base = config | {"adapter": {}} if how.startswith("all") else config
    run_on(base, "cuda", **TRAINED[how], **changes)


@pytest.mark.parametrize("how", ["LoRA", "all, in backward"])
@pytest.mark.parametrize("name", NAMES)
def test_no_optimizer_waits_for_the_device(name: str, how: str, three_blocks: dict, steps: Steps) -> None:
    """Not once in a step; a wait for each parameter would be dozens here and hundreds with SD3 Medium."""
    if "backward" in how and not option_of(name).steps_in_backward:
        pytest.skip(f"{name} is refused with memory.optimizer_in_backward")
    trained(three_blocks, how, optimizer={"name": name, "lr": 1 if name == "prodigy" else 1e-4})
    assert steps.parameters > 20 and len(steps.inside) == 10
    assert steps.work("synchronisations") == [0] * 7
    assert set(steps.apart("synchronisations")) <= {0, 1}, "logging waits for one event of the step before"


COPIES = [("three_blocks", how) for how in TRAINED]
COPIES += [("single_blocks", "LoRA, streamed"), ("single_blocks", "all, in backward, streamed")]


@pytest.mark.parametrize(("model", "how"), COPIES)
def test_a_warm_step_copies_from_pinned_memory_and_takes_no_memory_anew(
    model: str, how: str, request: pytest.FixtureRequest, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_loader, "ThreadPoolExecutor", Immediately)
    trained(request.getfixturevalue(model), how)
    for name in ("pageable_copies", "cudaHostAlloc", "cuMemCreate", "cudaDeviceSynchronize"):
        assert (name, steps.work(name)) == (name, [0] * 7)
        assert (name, steps.apart(name)) == (name, [0] * 6)
    assert steps.work("synchronisations") == [WAITS.get(how, 0)] * 7


@pytest.mark.parametrize("weights", ["int8", "bf16"])
def test_pages_that_a_machine_shares_are_pinned_once_and_copied_from(
    weights: str, three_blocks: dict, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first of two processes: its blocks and its modulations lie in pages of which it pins all at once."""
    pinned: list[tuple[int, int]] = []
    honest, registered = load.load_base_together, PinnedPages.pin

    def together(config: TrainConfig, accelerator: Accelerator, *rest: Any) -> Any:
        of_two = SimpleNamespace(device=accelerator.device, num_processes=2, process_index=0, local_process_index=0)
        transformer = honest(config, of_two, *rest)  # type: ignore[arg-type]
        kept = [tensor for tensor in all_tensors(transformer) if tensor.device.type == "cpu"]
        shared = [tensor for tensor in kept if is_shared(tensor)]
        assert len(shared) == len(kept) > 20
        assert any(sum(t.nbytes for t in shared) <= size <= 1.5 * sum(t.nbytes for t in shared) for _, size in pinned)
        return transformer

    def pin(pages: PinnedPages, address: int, count: int) -> None:
        pinned.append((address, count))
        registered(pages, address, count)

    monkeypatch.setattr(load, "local_process_count", lambda: 2)
    monkeypatch.setattr(load, "gather_object", list)
    monkeypatch.setattr("simpletune.training.load_job.load_base_together", together)
    monkeypatch.setattr(PinnedPages, "pin", pin)
    memory = STREAMED | {"modulation": "plan"}
    run_on(three_blocks, "cuda", precision={"weights": weights}, memory=memory)
    for name in ("pageable_copies", "cudaHostAlloc", "cudaDeviceSynchronize", "synchronisations"):
        assert (name, steps.work(name)) == (name, [0] * 7)
