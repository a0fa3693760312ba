"""Updates of equal parameters are simulated once, and ``plan`` goes on from the steps that it has simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.optim import Optimizer
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.estimate import planning
from simpletune.estimate.estimate_command import read_for_estimate
from simpletune.estimate.job_estimate import estimate
from simpletune.estimate.planning import Search
from simpletune.estimate.simulate import simulate
from simpletune.estimate.simulate.equal_updates import count_equal_updates
from simpletune.estimate.simulate.simulate import make_states
from simpletune.estimate.timing.recorder import Recorder
from simpletune.system.gpus import find_card
from simpletune.system.options import Json

SHAPES = [(96, 64), (64, 96), (70,), (96, 64), (70,), (96, 64)]  # the last and largest counts like the first


def layouts(state: dict[str, object]) -> dict[str, object]:
    """What a parameter's state consists of."""
    return {
        name: (value.shape, value.dtype, value.stride()) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def updated(option: Json, composed: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Json, int]:
    """Take two steps with fake parameters; return everything that was counted, and how many updates ran."""
    from pydantic import TypeAdapter

    runs: list[int] = []
    with fake_tensors(), Accounting() as accounting:
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        built = TypeAdapter(Optimizer).validate_python(option).build(parameters, in_backward=True)
        assert isinstance(built, RoundedOptimizer)
        plain = built.update
        built.update = lambda parameter: (runs.append(1), plain(parameter))[1]  # type: ignore[method-assign]
        if composed:
            count_equal_updates(built)
        recorder, live, peaks = Recorder(cuda=True), [], []
        with recorder.watching(accounting):
            for _ in range(2):
                built.begin_step()
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
                    built.update(parameter)
                    parameter.grad = None
                    live.append(accounting.current)
                    peaks.append(accounting.peaks.copy())
        states = [layouts(built.state[parameter]) for parameter in parameters]
        sections = [section.as_json() for section in recorder.sections]
    return {"peaks": peaks, "live": live, "states": states, "sections": sections}, len(runs)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adamw_bf16", "adafactor", "lion8bit", "prodigy"])
def test_updates_of_equal_parameters_run_once_and_count_every_time(name: str) -> None:
    (composed, ran), (whole, all_ran) = (updated({"name": name}, composed) for composed in (True, False))
    assert composed == whole and all_ran == 2 * len(SHAPES)
    if name == "prodigy":
        assert ran == all_ran  # they share an estimate
    else:  # of 12: three layouts, without and with state; Adafactor replaces a part of its state
        assert 6 <= ran <= 9


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adamw_bf16", "adafactor", "prodigy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_of_a_simulation_are_those_that_a_step_makes(name: str, dtype: torch.dtype) -> None:
    """Of every parameter by itself, where a step takes small ones together."""
    from pydantic import TypeAdapter

    found = []
    for composed in (True, False):
        with fake_tensors(), Accounting() as accounting:
            parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
            accounting.register(parameters, "weights")
            built = TypeAdapter(Optimizer).validate_python({"name": name}).build(parameters, in_backward=False)
            if composed:
                count_equal_updates(built)
                make_states(accounting, SimpleNamespace(parameters=parameters, optimizer=built))  # type: ignore[arg-type]
            else:
                with accounting.allocating("optimizer"):
                    for parameter in parameters:
                        parameter.grad = torch.zeros_like(parameter)
                    built.step()
                    built.zero_grad(set_to_none=True)
            states = [layouts(built.state[parameter]) for parameter in parameters]
            found.append((states, accounting.current.by_kind, [parameter.grad for parameter in parameters]))
    assert found[0] == found[1] and any(found[0][0])


@pytest.mark.slow
def test_a_whole_job_goes_on_from_the_steps_that_were_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_for_estimate(
        Path("configs/demo.json"),
        [f"output.cache={tmp_path / 'search'}", "precision.weights=bf16", "precision.compute=bf16", "device=cpu"],
    )
    steps, take = [], simulate.take_steps
    monkeypatch.setattr(simulate, "take_steps", lambda *args: (steps.append(1), take(*args))[1])
    card = replace(find_card("L4"), name="Test", found=1.0)
    result, *_ = Search(config, card).find_fastest()
    predicted = sum(1 for _ in (tmp_path / "search" / "estimates").glob("*-step.json"))
    assert len(steps) == predicted
    monkeypatch.setattr(planning, "train", None)
    chosen = result.choice.config
    apart = chosen.model_copy(update={"output": chosen.output.model_copy(update={"cache": str(tmp_path / "apart")})})
    alone = estimate(apart, card.capability)
    assert len(steps) == predicted + 1
    found, wanted = result.estimate.job.as_json(), alone.job.as_json()
    found["train"]["seconds"] = wanted["train"]["seconds"]
    assert found == wanted
