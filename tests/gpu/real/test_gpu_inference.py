"""Drawing on an NVIDIA GPU (``make gpu``): as on the CPU, streamed and resident alike; nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from simpletune.adapters.methods.lora import Lora
from simpletune.commands.generate.session import GenerationSession, GenerationSpeed
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.folder import Folder
from simpletune.engine.memory import Memory
from simpletune.engine.quant.precision import FP32
from simpletune.models.sd3.sd3_option import SD3
from simpletune.runs.weights import BASE, Weights
from simpletune.stages.sample import ImageRequest
from simpletune.system.stage_timer import StageTimer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
REQUESTS = [ImageRequest("a red disc", seed, "blurry", 32, 32, 4, 3.0) for seed in range(3)]


@pytest.fixture
def lora(tiny_pipeline: Path, tmp_path: Path) -> Path:
    """A LoRA with values, on the attention."""
    transformer = SD3(pretrained=str(tiny_pipeline)).load_denoiser(FP32(), torch.device("cpu"))
    adapter = Lora(rank=2)
    adapter.attach(transformer, 0)
    torch.manual_seed(0)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.2)
    return adapter.export(transformer, tmp_path, {})


def studio_on(device: str, pipeline: Path, cache: Path, speed: GenerationSpeed, **memory: object) -> GenerationSession:
    model = SD3(pretrained=str(pipeline), t5_length=8)
    config = TrainConfig(name="x", data=Folder(path="."), precision=FP32(), model=model)
    output = config.output.model_copy(update={"cache": str(cache)})
    config = config.model_copy(update={"memory": Memory().model_copy(update=memory), "output": output})
    return GenerationSession(config, None, torch.device(device), device, StageTimer(cuda=device == "cuda"), speed)


@pytest.mark.values
@pytest.mark.parametrize("memory", [{}, {"modulation": "plan"}, {"resident_blocks": 0}], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_pictures_equal_those_of_the_cpu(memory, batch: int, lora: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    models = [BASE, Weights("a", lora=lora), Weights("half", lora=lora, scale=0.5)]
    sessions = (
        studio_on(device, tiny_pipeline, tmp_path / device, GenerationSpeed(batch), **options)
        for device, options in (("cpu", {}), ("cuda", memory))
    )
    drawn = [session.generate_all(models, REQUESTS) for session in sessions]
    for ours, theirs in zip(*drawn, strict=True):
        for a, b in zip(ours.latents, theirs.latents, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert not torch.equal(drawn[1][0].latents[0], drawn[1][1].latents[0])


def test_nothing_is_left_on_the_device(lora: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    session = studio_on("cuda", tiny_pipeline, tmp_path, GenerationSpeed(2))
    session.generate_all([BASE], REQUESTS)
    before = torch.cuda.memory_allocated()
    session.generate_all([BASE, Weights("a", lora=lora), Weights("fused", lora=lora, merged=True)], REQUESTS)
    assert torch.cuda.memory_allocated() == before
    assert session.stages.peak("peak_allocated_gib") is not None


def test_compiled_blocks_draw_the_same(lora: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    models = [BASE, Weights("a", lora=lora), Weights("half", lora=lora, scale=0.5)]
    plain, compiled = (
        studio_on("cuda", tiny_pipeline, tmp_path, GenerationSpeed(compiled=on)).generate_all(models, REQUESTS)
        for on in (False, True)
    )
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a.latents[0].cpu(), b.latents[0].cpu(), rtol=1e-3, atol=1e-3)
