"""Equal operations and updates are simulated once: every figure stays that of the whole simulation."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import ALLOWED, case_json
from slow_cases import drawn
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.tiny_models import tiny_sd3
from simpletune.config.load import shipped_files, validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory import fake, fake_results
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.memory.fake_results import FakeResults
from simpletune.estimate.auto_settings import with_checkpointed
from simpletune.estimate.estimate_command import read_for_estimate
from simpletune.estimate.simulate import simulate
from simpletune.estimate.simulate.simulate_stages import simulate_parts
from simpletune.system.options import ConfigError, Json, UserError

CONFIGS = [*shipped_files()]
LEVERS = (
    {}, {"checkpointing": "none"}, {"checkpointing": 2}, {"checkpointing": "all", "offload_checkpoint_inputs": True},
    {"resident_blocks": 1}, {"modulation": "plan", "modulation_window": 3}, {"crop_positions": False},
    {"modulation": "plan", "resident_blocks": 0}, {"vae_tile": 64}, {"keep_attention": 2, "feed_forward": "alone"},
)  # fmt: skip


@pytest.fixture(scope="module")
def five_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pipeline with five blocks."""
    folder = tmp_path_factory.mktemp("five") / "pipeline"
    tiny_sd3.build(folder, replace(tiny_sd3.MINIMAL, layers=5, heads=5), seed=1, dtype="fp32")
    return folder


class Whole(FakeResults):
    """Remembers nothing; torch may, by its own cache, which takes a third of the time."""

    def __init__(self, torch_remembers: bool = False):
        super().__init__()
        self.torch_remembers = torch_remembers

    def call(self, mode, op, args, kwargs, otherwise):  # type: ignore[no-untyped-def]
        mode.cache_enabled = self.torch_remembers
        return otherwise()


def report_of(config: TrainConfig, whole: Whole | None, monkeypatch: pytest.MonkeyPatch) -> Json:
    """Everything that a simulation says, but for how long it took."""
    with monkeypatch.context() as patch:
        patch.setattr("simpletune.estimate.simulate.simulate_stages._TEXTS", {})
        if whole is not None:
            patch.setattr(fake, "RESULTS", whole)
            patch.setattr(simulate, "count_equal_updates", lambda optimizer: None)
        found = simulate_parts(config, None, (8, 9)).as_json()
    found["train"]["seconds"] = 0
    for section in found["train"]["sections"]:
        section["work"].sort()  # counted by operation; what is counted again may come first in another order
    return found


def with_validation(data: dict) -> dict:
    return data | {"validation": {"prompts": ["a"], "steps": 4, "loss_samples": 2}}


def assert_equal_to_the_whole(config: TrainConfig, whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report_of(config, None, monkeypatch) == report_of(config, whole, monkeypatch)


def a_random_run(seed: int, tiny_config: dict, pipeline: Path) -> TrainConfig:
    """A configuration that the rules allow: adapter, precision, optimizer, lever, batch, targets in some blocks."""
    draw = random.Random(seed)
    cases = [case for case in ALLOWED if case[3]["family"] == "sd3"]
    for _ in range(1000):
        data = with_validation(case_json(tiny_config, draw.choice(cases)))
        data["model"] = {**data.get("model", {}), "pretrained": str(pipeline)}
        data["memory"] = copy.deepcopy(draw.choice(LEVERS))
        data["train"] = {"steps": 4, "batch_size": draw.choice((1, 2, 3)), "gradient_accumulation": draw.choice((1, 2))}
        if data["adapter"]["method"] == "lora" and draw.random() < 0.5:
            data["adapter"]["targets"] = [f"transformer_blocks.{draw.randrange(5)}.attn.to_q"]
        if data["adapter"]["method"] == "full" and draw.random() < 0.5:
            data["memory"]["optimizer_in_backward"] = True
            data["train"] |= {"clip": "per_parameter", "gradient_accumulation": 1}
        try:
            return validate(data, "random")
        except ConfigError:
            continue
    raise AssertionError("the rules allow nothing")


def test_a_run_of_every_stage_counts_as_the_whole(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a streamed block and updates in the backward pass."""
    data = with_validation(tiny_config) | {"adapter": {"method": "full"}}
    data["memory"] = {"optimizer_in_backward": True, "resident_blocks": 0}
    data["train"] = {"steps": 4, "clip": "per_parameter"}
    assert_equal_to_the_whole(validate(data, "test"), Whole(torch_remembers=True), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", drawn(range(60), 8))
def test_a_random_run_counts_as_the_whole(
    seed: int, tiny_config: dict, five_blocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_equal_to_the_whole(a_random_run(seed, tiny_config, five_blocks), Whole(), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn(CONFIGS, 8))
def test_every_shipped_configuration_counts_as_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        config = read_for_estimate(Path(name), ["precision.compute=bf16"])
    except UserError as error:
        pytest.skip(str(error))
    if config.train.global_batch is not None:  # the whole of 128 equal micro-batches takes half an hour
        train = config.train.model_copy(update={"global_batch": None, "gradient_accumulation": 2})
        config = config.model_copy(update={"train": train})
    if config.memory.checkpointing == "auto":
        config = with_checkpointed(config, 7)
    assert_equal_to_the_whole(config, Whole(), monkeypatch)


def test_a_view_of_another_type_starts_where_it_should() -> None:
    with fake_tensors():
        flat = torch.empty(4096, dtype=torch.uint8)
        for start in (0, 512, 1024):  # the second and third are remembered
            view = flat[start : start + 512].view(torch.float32)
            assert view.storage_offset() == start // 4 and view.untyped_storage().nbytes() == 4096
            part = view.view(8, 16)[2:]
            assert part.storage_offset() == start // 4 + 32 and part.shape == (6, 16)


def test_a_remembered_result_has_its_own_storage_and_shares_what_a_view_shares() -> None:
    with fake_tensors():
        x = torch.empty(8, 8)
        for _ in range(2):
            y, z, t = x + 1, x.add_(1), x.t()
            assert y.untyped_storage()._cdata != x.untyped_storage()._cdata
            assert z is x and t.untyped_storage()._cdata == x.untyped_storage()._cdata and t.stride() == (1, 8)
        assert (x + 1.0).dtype == torch.float32 and (torch.ones(2, dtype=torch.int64) + 1).dtype == torch.int64
        assert (torch.ones(2, dtype=torch.int64) + 1.0).dtype == torch.float32


def test_complex_tensors_are_not_remembered() -> None:
    with fake_tensors():
        for dtype, usual in ((torch.float32, True), (torch.complex64, False)):
            tensor = torch.empty(2, dtype=dtype)
            assert isinstance(tensor, FakeTensor)
            assert fake_results._add([], [tensor], tensor.fake_mode, []) is usual
