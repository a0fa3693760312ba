"""Families' conventions under flow: time and sign of the network, and noise levels against diffusers' pipelines."""

from __future__ import annotations

import copy
import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from torch import Tensor, nn

from simpletune.commands.importers.translation import KeyRule, Translation, number
from simpletune.config.load import validate
from simpletune.engine.quant.precision import FP32
from simpletune.models.objectives.conventions import USUAL, FlowConventions, empirical_mu
from simpletune.models.objectives.flow import SCHEDULE, Flow
from simpletune.models.objectives.objective import Solver, TrainingObjective
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.shared.autoencoder import STABLE_DIFFUSION, Autoencoder
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.text.family_text import FamilyText
from simpletune.models.unet.unet_family import UNetFamily
from simpletune.stages.sample import ImageRequest, Sampler
from simpletune.stages.step.variant import PlainStep
from simpletune.system.options import ConfigError, UserError
from simpletune.training.train import train

KLEIN = FlowConventions(time_at_1=1.0, mu=empirical_mu, from_one=True)
QWEN = FlowConventions(time_at_1=1.0, from_one=True)
Z_IMAGE = FlowConventions(time_at_0=1.0, time_at_1=0.0, sign=-1, from_one=True)

CONSTANT = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
DYNAMIC = CONSTANT | {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
                      "max_image_seq_len": 4096, "time_shift_type": "exponential", "shift_terminal": None}  # fmt: skip
SCHEDULES: dict[str, tuple[dict[str, Any], FlowConventions]] = {
    "SD3": (CONSTANT, USUAL),
    "SD3 dynamic": (DYNAMIC, USUAL),
    "Z-Image": (CONSTANT | {"use_dynamic_shifting": False, "shift": 6.0}, Z_IMAGE),
    "klein": (DYNAMIC, KLEIN),
    "Qwen-Image": (DYNAMIC | {"max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}, QWEN),
    "linear": (DYNAMIC | {"time_shift_type": "linear"}, QWEN),
    "Karras": (DYNAMIC | {"use_karras_sigmas": True}, KLEIN),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_noise_levels_are_those_of_the_pipelines(name: str) -> None:
    """What a pipeline passes to its scheduler: a shift from the tokens, or from tokens and steps, and the levels."""
    config, conventions = SCHEDULES[name]
    for tokens, steps in product((16, 1024, 3952, 4096, 4301, 6889, 16384), (2, 4, 20, 28, 50, 200)):
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
        given: dict[str, Any] = {}
        if conventions is KLEIN:
            given = {"mu": compute_empirical_mu(tokens, steps)}
        elif config.get("use_dynamic_shifting"):
            sizes = config["base_image_seq_len"], config["max_image_seq_len"]
            given = {"mu": calculate_shift(tokens, *sizes, config["base_shift"], config["max_shift"])}
        if conventions is USUAL:
            scheduler.set_timesteps(steps, **given)
        else:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), **given)
        solver = Flow().solver(config, steps, 1, conventions, lambda tokens=tokens: tokens)
        torch.testing.assert_close(solver.sigmas, scheduler.sigmas[1:], rtol=0, atol=2e-7)
        network = scheduler.timesteps[1:] / (1 if conventions is USUAL else 1000)
        network = 1 - network if conventions is Z_IMAGE else network
        torch.testing.assert_close(solver.times, network, rtol=1e-6, atol=2e-7)


def test_one_step_has_no_end_at_another_noise_level_than_its_own() -> None:
    with pytest.raises(UserError, match="level 0.02 .shift_terminal., for which 1 step is too few. Use at least 2"):
        Flow().solver(SCHEDULES["Qwen-Image"][0], 1, 0, QWEN, lambda: 4096)
    assert Flow().solver(CONSTANT, 1, 0, QWEN, lambda: 4096).sigmas.tolist() == [1, 0]


def test_a_scheduler_with_dynamic_shifting_follows_the_pictures_size(tiny_pipeline: Path, tmp_path: Path) -> None:
    folder, size = tmp_path / "pipeline", (96, 64)
    shutil.copytree(tiny_pipeline, folder)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(DYNAMIC))
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(DYNAMIC)
    scheduler.set_timesteps(6, mu=calculate_shift(6 * 4))
    found = SD3(pretrained=str(folder)).solver(Flow(), size, 6, 2)
    assert torch.equal(found.times, scheduler.timesteps[2:])


def test_the_keys_of_the_schedule_are_those_that_diffusers_knows() -> None:
    arguments = inspect.signature(FlowMatchEulerDiscreteScheduler.__init__).parameters
    assert {*arguments} - {"self"} == SCHEDULE


def test_a_schedule_that_is_not_known_is_refused(tiny_config: dict, tiny_pipeline: Path, tmp_path: Path) -> None:
    message = r"scheduler config: time_scale 2.0 may change the noise levels.*Remove it there, or use a model"
    odd = CONSTANT | {"time_scale": 2.0, "_time_scale": 2.0, "no_scale": None, "not_scaled": False}
    with pytest.raises(ConfigError, match=message):
        Flow().solver(odd, 4, 0, USUAL, lambda: 16)
    other = odd | {"_class_name": "UniPCMultistepScheduler"}  # its own options, unless they make it draw a flow
    assert Flow().solver(other, 4, 0, USUAL, lambda: 16).levels[0] == 1
    with pytest.raises(ConfigError, match="scheduler config: use_flow_sigmas True may change"):
        Flow().solver(other | {"use_flow_sigmas": True}, 4, 0, USUAL, lambda: 16)
    shutil.copytree(tiny_pipeline, tmp_path / "pipeline")
    (tmp_path / "pipeline" / "scheduler" / "scheduler_config.json").write_text(json.dumps(odd))
    tiny_config["model"]["pretrained"] = str(tmp_path / "pipeline")
    with pytest.raises(ConfigError, match=rf"objective.name: flow cannot use the model's {message}"):
        validate(tiny_config, "x")


class KnownField(nn.Module):
    """Predicts ``strength`` times z_0 - noise, the velocity with the other sign, from z_t and 1 - sigma."""

    units = ()

    def __init__(self, z_0: Tensor, strength: float):
        super().__init__()
        self.z_0, self.strength = z_0, nn.Parameter(torch.tensor(strength))

    def forward(self, z_t: Tensor, time: Tensor) -> Tensor:
        return self.strength * (self.z_0 - z_t) / (1 - time).view(-1, 1, 1, 1)


@dataclass(frozen=True)
class MadeUp:
    """A family like none that there is, with Z-Image's time and sign."""

    flow: ClassVar[FlowConventions] = Z_IMAGE
    inpaints: ClassVar[bool] = False

    @property
    def files(self) -> Any:
        return SimpleNamespace(scheduler_config=lambda: CONSTANT)

    @property
    def autoencoder(self) -> Autoencoder:
        nothing: Any = None
        return Autoencoder(STABLE_DIFFUSION, nothing, nothing, lambda: 4, {})

    def solver(self, objective: TrainingObjective, size: tuple[int, int], steps: int, skipped: int) -> Solver:
        return objective.solver(CONSTANT, steps, skipped, self.flow, lambda: 0)

    def skipped_steps(self, steps: int, strength: float) -> int:
        return 0

    @property
    def text(self) -> FamilyText[Any]:
        return FamilyText(self)  # type: ignore[type-var]

    def predict(self, model: nn.Module, z_t: Tensor, time: Tensor, *_: object) -> Tensor:
        return model(z_t, time)

    def rescale(self, guided: Tensor, positive: Tensor) -> Tensor:
        return guided


def test_a_family_of_another_time_and_sign_learns_and_draws() -> None:
    """A perfect network of it draws z_0 with any number of steps, and a training step brings another one nearer."""
    z_0, noise = (torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    text = [Conditioning(torch.empty(3, 5))]

    def distance(network: nn.Module, steps: int = 5) -> float:
        request = ImageRequest("", 3, width=64, height=48, steps=steps, guidance=1.0)
        drawn = Sampler(network, MadeUp(), FP32(), objective=Flow()).denoise([request], text, text)
        return float((drawn - z_0[:1]).norm())

    assert max(distance(KnownField(z_0[:1], 1.0), steps) for steps in (1, 2, 5, 50)) < 1e-4 * float(z_0.norm())
    network = KnownField(z_0, 0.0)
    before = distance(KnownField(z_0[:1], 0.0))
    config = SimpleNamespace(
        model=MadeUp(), objective=Flow(), precision=FP32(), speed=SimpleNamespace(attention="auto")
    )
    step = PlainStep(config, network, torch.optim.SGD(network.parameters(), 0.1), SimpleNamespace())
    batch = SimpleNamespace(z_0=z_0, noise=noise, level=torch.tensor([0.3, 0.8]), weight=None, fillers=0,
                            conditioning=Conditioning(torch.empty(0)), inpainting=None)  # fmt: skip
    for _ in range(2):
        network.zero_grad()
        loss = step.loss(step.predict(network, batch), batch)
        loss.backward()
        step.update()
        after = distance(KnownField(z_0[:1], network.strength.item()))
        assert after < 0.8 * before
        before = after


def test_another_objective_of_a_family_is_a_name_in_its_list(
    unet_pipeline: Callable[..., Path], tiny_config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks, the noising and drawing ask the run's objective: a UNet trains and draws by flow."""
    data = copy.deepcopy(tiny_config) | {"objective": {"name": "flow"}}
    data["model"] = {"family": "sdxl", "pretrained": str(unet_pipeline("sdxl"))}
    data["data"] |= {"resolution": 64}
    data["train"] |= {"steps": 1}
    data["validation"] = {"prompts": ["a red disc"], "steps": 2, "loss_samples": 0, "width": 64, "height": 64}
    asked: list[object] = []
    solver = SDXL.solver
    monkeypatch.setattr(SDXL, "solver", lambda *given: asked.append(solver(*given)) or asked[-1])
    run = train(validate(data, "x"))
    assert len(list((run / "samples").rglob("prompt-00.png"))) == 2
    assert [found.times.tolist() for found in asked] == [[1000.0, pytest.approx(1000 * 2.5 / 3.5)]] * 2
    monkeypatch.setattr(UNetFamily, "objectives", ("ddpm", "other"))
    with pytest.raises(ConfigError, match="trained with ddpm or other. Leave it out, or use ddpm or other$"):
        validate(data, "x")


def test_an_import_asks_the_runs_objective() -> None:
    """Keys of flow count for a family of ddpm once the file has chosen flow; those of ddpm no longer do."""
    rules = [KeyRule("shift", "objective.shift", number), KeyRule("gamma", "objective.min_snr_gamma", number)]
    for chosen, kept in ((None, {"min_snr_gamma": 5.0}), ("flow", {"name": "flow", "shift": 2.5})):
        found = Translation({"shift": 2.5, "gamma": 5.0})
        found.set("model.family", "sdxl")
        if chosen is not None:
            found.set("objective.name", chosen)
        found.by_table(rules)
        assert found.objective == (chosen or "ddpm") and found.config["objective"] == kept
    assert Translation({}).objective == "flow"
