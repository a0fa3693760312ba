"""Predict peak memory of the whole job without a GPU, stage by stage: text, latents, train, validate.

Runs the project's own code on fake tensors, as simulate.py does. Needs only configurations; SD3 Medium's are bundled.
cuDNN's workspaces for convolutions are an allowance (``kernel_workspace.convolution_workspace``): their size depends on
the algorithm that cuDNN chooses on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from simpletune.config.prior import ClassPictures
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.memory.kernel_workspace import cublas_workspace
from simpletune.engine.memory.snapshot import HOST, MemorySnapshot
from simpletune.engine.optim.ema import use_average
from simpletune.engine.tensors import all_tensors
from simpletune.estimate.simulate.simulate import (
    SimulatedRun,
    StepReport,
    accounting_like_cuda,
    simulated_attention,
    with_workspace,
)
from simpletune.estimate.simulate.simulate_text import (
    Recorders,
    accounting_of,
    bytes_in_16_bit,
    largest,
    parts_in_steps,
    text_snapshots,
    texts_of,
)
from simpletune.estimate.simulate.training_stage import SimulatedTraining, train
from simpletune.estimate.simulate.value_stand_ins import ShapesOnlyModel, WholeWindowModulation
from simpletune.estimate.timing.recorder import Recorder, StreamWork
from simpletune.models.families import Model
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.denoiser import Denoiser, model_device, model_units
from simpletune.models.shared.parts import use_tiles
from simpletune.stages.load import empty_base, modulation_of
from simpletune.stages.modulation_plan import ModulationSource
from simpletune.stages.sample import PictureRequest, Sampler
from simpletune.stages.step.attention import attention_by
from simpletune.stages.step.synthetic import CPU
from simpletune.system.console import silent
from simpletune.system.phases import phase
from simpletune.system.startup import without_collection

STAGE_THREADS = {"text": 1, "class": 1, "latents": 1, "train": 2, "validate": 2}  # that multiply matrices on the device
SIMULATED = 3  # sampling steps: by the third, everything that earlier steps leave behind is allocated


@dataclass(frozen=True)
class JobReport:
    """Memory of the whole job."""

    stages: Mapping[str, MemorySnapshot]
    """The largest snapshot of each stage: ``text``, ``latents``, ``train``, ``class`` if the run draws class pictures,
    and ``validate`` if it validates. ``text`` is the largest encoder's snapshot, not counting encoders that run in
    every training step, and names the encoder as module; empty if there is none. The phase of ``validate`` is
    ``sample``, ``decode`` or ``evaluate``."""
    train: StepReport
    """The training stage."""
    part_bytes: Mapping[str, int]
    """Size of each frozen part at 2 bytes per parameter, as in the hub's files."""
    work: Mapping[str, Sequence[StreamWork]] = field(default_factory=dict)
    """The job's work on host and device, by part: ``text.ENCODER`` for ``2 * BATCH`` prompts, ``latents`` for one
    picture, ``evaluate`` for one sample, ``draw`` and ``class`` for a picture of ``SIMULATED`` steps."""

    @property
    def peak(self) -> MemorySnapshot:
        """The largest snapshot of all stages."""
        return max(self.stages.values(), key=lambda snapshot: snapshot.bytes)


def simulate_parts(
    config: TrainConfig,
    size: Size | None = None,
    capability: tuple[int, int] | None = None,
    trained: SimulatedTraining | None = None,
) -> JobReport:
    """Predict each stage's peak memory on the device without weights, data or a GPU, and without the libraries'
    workspaces (``with_workspaces``), so that the result holds for all cards with the same attention.

    Args:
        config: the run's configuration, demo names resolved.
        size: width and height of the training pictures in pixels; None: the square of ``data.resolution``.
        capability: the CUDA device's compute capability, see ``simulate``.
        trained: the training stage of the same run, if it was simulated before; can be used only once.

    Raises:
        UserError: a part's configuration cannot be read.
    """
    size = size or (config.data.resolution, config.data.resolution)
    recorders = Recorders()
    with fake_tensors(trained.mode if trained else None), without_collection(), silent():
        vae = empty_autoencoder(config)
        texts, work = texts_of(config)
        parts = {name: size for name, size, _ in texts} | {"vae": bytes_in_16_bit(vae)}
        resident = parts_in_steps(config)
        work = {name: sections for name, sections in work.items() if name.removeprefix("text.") not in resident}
        trained = trained or train(config, size, capability, Recorder(cuda=True))
        validate = validation(config, trained, recorders)
        snapshots = {
            "text": largest([each for each in texts if each[0] not in resident]),
            **(
                {"class": simulate_class_pictures(config, capability, recorders)}
                if isinstance(config.prior, ClassPictures)
                else {}
            ),
            "latents": simulate_encoding(config.model, vae, size, recorders),
            "train": trained.report.peak,
            **({} if validate is None else {"validate": validate}),
        }
    return JobReport(snapshots, trained.report, parts, work | {name: each.sections for name, each in recorders.items()})


def with_workspaces(job: JobReport, capability: tuple[int, int] | None) -> JobReport:
    """Add the workspaces of a CUDA device's libraries to every stage; None: there are none."""
    if capability is None:
        return job
    extra = {name: cublas_workspace(capability, STAGE_THREADS[name]) for name in job.stages}
    return replace(job, stages={name: with_workspace(each, extra[name]) for name, each in job.stages.items()})


def simulate_stage(
    config: TrainConfig, stage: str, capability: tuple[int, int], recorders: Recorders | None = None
) -> MemorySnapshot:
    """Predict one of the stages besides training, for the square picture of ``data.resolution``.

    Args:
        config: the run's configuration.
        stage: ``text``, ``class``, ``latents`` or ``validate``.
        capability: see ``simulate``.
        recorders: recorders of the parts of ``text``.
    """
    size = config.data.resolution, config.data.resolution
    with fake_tensors(), without_collection(), silent():
        if stage == "text":
            snapshot = largest(text_snapshots(config, recorders))
        elif stage == "class":
            snapshot = simulate_class_pictures(config, capability)
        elif stage == "latents":
            snapshot = simulate_encoding(config.model, empty_autoencoder(config), size)
        else:
            found = validation(config, train(config, size, capability))
            assert found is not None, "the run draws nothing"
            snapshot = found
    return with_workspace(snapshot, cublas_workspace(capability, STAGE_THREADS[stage]))


def empty_autoencoder(config: TrainConfig) -> nn.Module:
    """Build the run's autoencoder like ``load_vae``, without values."""
    import diffusers

    part = config.model.known_part("vae").config()
    vae = getattr(diffusers, part["_class_name"]).from_config(part)
    nn.Module.to(vae, config.precision.encoder_dtype())  # diffusers' own .to() prints a warning that does not apply
    if config.memory.vae_tile is not None:
        use_tiles(vae, config.memory.vae_tile)
    return vae.eval().requires_grad_(False)


def simulate_encoding(model: Model, vae: nn.Module, size: Size, recorders: Recorders | None = None) -> MemorySnapshot:
    """Encode one picture with a loaded autoencoder."""
    with (
        accounting_of(all_tensors(vae), None if recorders is None else recorders["latents"]) as accounting,
        torch.no_grad(),
        phase("encode"),
    ):
        model.encode_pictures(vae, torch.zeros(1, 3, size[1], size[0]))
    return accounting.peak


def validation(
    config: TrainConfig, trained: SimulatedTraining, recorders: Recorders | None = None
) -> MemorySnapshot | None:
    """Simulate sampling and evaluation with the training state still allocated; None if the run does neither."""
    vae, run, denoiser = empty_autoencoder(config), trained.run, trained.denoiser
    with trained.counting(config) as accounting, accounting.allocating(HOST), use_average(run.average):
        denoiser.eval()
        snapshots = []
        if config.validation.loss_samples:
            with recording(accounting, recorders, "evaluate"):
                snapshots.append(simulate_validation_loss(accounting, run, denoiser))
        if config.validation.prompts != []:
            option, (width, height) = config.validation, config.picture_size()
            request = PictureRequest("", 0, "", width, height, option.steps, option.guidance)
            batch = run.batches.batch(1)
            models = GenerationModels(denoiser, vae, run.core.modulation)
            text = batch.prompt_embeds[0], batch.pooled[0]
            with recording(accounting, recorders, "draw"):
                snapshots.append(simulate_generation(accounting, config, request, models, text))
    return max(snapshots, key=lambda snapshot: snapshot.bytes, default=None)


def recording(accounting: Accounting, recorders: Recorders | None, name: str) -> AbstractContextManager[None]:
    """Record what an accounting sees, under a name."""
    return nullcontext() if recorders is None else recorders[name].watching(accounting)


def simulate_validation_loss(accounting: Accounting, run: SimulatedRun, denoiser: Denoiser) -> MemorySnapshot:
    """Compute the validation loss: one sample at a time, forward only."""
    accounting.forget_peak()
    with accounting.allocating("activations"), torch.no_grad(), phase("evaluate"):
        run.core.loss(denoiser, run.batches.one_by_one())
    return accounting.peak


def simulate_class_pictures(
    config: TrainConfig,
    capability: tuple[int, int] | None = None,
    recorders: Recorders | None = None,
    pictures: int = 1,
) -> MemorySnapshot:
    """Draw class pictures in one batch with the base alone."""
    prior = config.prior
    assert isinstance(prior, ClassPictures)
    memory, side, dtype = config.memory, config.data.resolution, config.precision.encoder_dtype()
    denoiser = empty_base(config.model, memory, config.precision, CPU, [(side, side)])
    vae = empty_autoencoder(config)
    with accounting_like_cuda(config, capability) as accounting:
        accounting.register(all_tensors(denoiser), "weights")
        modulation = modulation_of(denoiser, memory, config.precision, CPU)
        memory.attach(model_units(denoiser), model_device(denoiser))
        request = PictureRequest("", 0, "", side, side, prior.steps, prior.guidance)
        embeds = torch.zeros(config.model.text_tokens, config.model.text_width, dtype=dtype)
        text = embeds, torch.zeros(config.model.pooled_width, dtype=dtype)
        models = GenerationModels(denoiser.eval(), vae, modulation)
        with recording(accounting, recorders, "class"):
            return simulate_generation(accounting, config, request, models, text, pictures)


class GenerationModels(NamedTuple):
    """The models that draw a picture."""

    denoiser: Denoiser
    vae: nn.Module
    modulation: ModulationSource | None


def simulate_generation(
    accounting: Accounting,
    config: TrainConfig,
    request: PictureRequest,
    models: GenerationModels,
    text: tuple[Tensor, Tensor],
    pictures: int = 1,
) -> MemorySnapshot:
    """Draw pictures in one batch; load the autoencoder before sampling begins, and decode one by one."""
    denoiser, vae, modulation = models
    wanted, request = request.steps, replace(request, steps=min(SIMULATED, request.steps))
    accounting.register(all_tensors(vae), "weights")
    accounting.forget_peak()
    model = ShapesOnlyModel(config.model)
    whole = None if modulation is None else WholeWindowModulation(modulation, wanted, request.steps)
    with accounting.allocating("activations"), torch.no_grad():
        with phase("sample"):
            kernel = partial(attention_by, simulated_attention(config))
            sampler = Sampler(denoiser, model, config.precision, whole, attention=kernel)
            z = sampler.denoise([request] * pictures, [text] * pictures, [text] * pictures)
        with phase("decode"):
            for one in z.split(1):
                config.model.decode_latents(vae, one)
    return accounting.peak
