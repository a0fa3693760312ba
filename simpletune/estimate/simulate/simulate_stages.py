"""Predict peak memory of the whole job without a GPU, stage by stage: text, latents, train, validate.

Runs the project's own code on fake tensors, as simulate.py does. Needs only configurations; SD3 Medium's are bundled.
cuDNN's workspaces for convolutions are an allowance (``kernel_workspace.convolution_workspace``): their size depends on
the algorithm that cuDNN chooses on the device.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from simpletune.config.prior import ClassImages
from simpletune.config.schema import TrainConfig
from simpletune.engine.denoiser import Denoiser, model_device, model_units
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.cuda_libraries import cublas_workspaces
from simpletune.engine.memory.fake import autocast_like_cuda, fake_tensors
from simpletune.engine.memory.kernel_workspace import cuda_layouts, temporaries
from simpletune.engine.memory.snapshot import HOST, MemorySnapshot, largest_of
from simpletune.engine.optim.ema import use_average
from simpletune.engine.tensors import all_tensors
from simpletune.estimate.simulate.reports import (
    SIMULATED,
    STAGE_THREADS,
    JobReport,
    parts_in_steps,
    square_size,
    with_workspace,
)
from simpletune.estimate.simulate.simulate import SimulatedTraining, accounting_like_cuda, simulated_attention, train
from simpletune.estimate.timing.recorder import Recorder
from simpletune.estimate.timing.sections import StreamWork
from simpletune.models.families import Model
from simpletune.models.objectives.flow import Euler
from simpletune.models.objectives.objective import TrainingObjective
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.text.encoder import BATCH, OpenEncoder, Tokens
from simpletune.stages.load import empty_autoencoder, empty_base, modulation_of
from simpletune.stages.modulation_plan import ModulationSource
from simpletune.stages.sample import ImageRequest, Sampler
from simpletune.stages.step.attention import use_attention
from simpletune.stages.step.synthetic import CPU
from simpletune.system.console import silence
from simpletune.system.phases import phase
from simpletune.system.startup import pause_collection

Recorders = defaultdict[str, Recorder]  # for the parts of a job, by name
TextReport = tuple[str, int, MemorySnapshot]  # a text encoder's part, its size at 2 bytes per parameter, its peak


def simulate_parts(
    config: TrainConfig,
    size: Size | None = None,
    capability: tuple[int, int] | None = None,
    trained: SimulatedTraining | None = None,
    begin: Callable[[str], object] = lambda stage: None,
) -> JobReport:
    """Predict each stage's peak memory on the device without weights, data or a GPU, and without the libraries'
    workspaces (``with_workspaces``), so that the result holds for all cards with the same attention.

    Args:
        config: the run's configuration, demo names resolved.
        size: width and height of the training images in pixels; None: the square of ``data.resolution``.
        capability: see ``simulate``.
        trained: the training stage of the same run, if it was simulated before; can be used only once.
        begin: told the stage that begins.

    Raises:
        UserError: a part's configuration cannot be read.
    """
    size = size or square_size(config)
    recorders = Recorders(partial(Recorder, cuda=True))
    with fake_tensors(trained.mode if trained else None), pause_collection(), silence():
        begin("text")
        vae = empty_autoencoder(config)
        texts, work = texts_of(config)
        parts = {name: size for name, size, _ in texts} | {"vae": bytes_in_16_bit(vae)}
        resident = parts_in_steps(config)
        work = {name: sections for name, sections in work.items() if name.removeprefix("text.") not in resident}
        begin("train")
        trained = trained or train(config, size, capability, Recorder(cuda=True))
        begin("validate")
        validate = simulate_validation(config, trained, recorders)
        snapshots = {"text": largest_snapshot([each for each in texts if each[0] not in resident])}
        if isinstance(config.prior, ClassImages):
            begin("class")
            snapshots["class"] = simulate_class_images(config, capability, recorders)
        if config.concept is None:
            begin("latents")
            snapshots["latents"] = simulate_encoding(config.model, vae, size, recorders)
        snapshots["train"] = trained.report.peak
        if validate is not None:
            snapshots["validate"] = validate
    return JobReport(snapshots, trained.report, parts, work | {name: each.sections for name, each in recorders.items()})


def simulate_stage(
    config: TrainConfig, stage: str, capability: tuple[int, int], recorders: Recorders | None = None
) -> MemorySnapshot:
    """Predict ``text``, ``class``, ``latents`` or ``validate`` for the square image of ``data.resolution``;
    ``recorders`` record the parts of ``text``."""
    with fake_tensors(), pause_collection(), silence():
        if stage == "text":
            snapshot = largest_snapshot(text_snapshots(config, recorders))
        elif stage == "class":
            snapshot = simulate_class_images(config, capability)
        elif stage == "latents":
            snapshot = simulate_encoding(config.model, empty_autoencoder(config), square_size(config))
        else:
            found = simulate_validation(config, train(config, capability=capability))
            assert found is not None, "the run draws nothing"
            snapshot = found
    return with_workspace(snapshot, cublas_workspaces(capability, STAGE_THREADS[stage], config.speed.deterministic))


@contextmanager
def accounting_of(weights: Iterable[Tensor], recorder: Recorder | None = None) -> Iterator[Accounting]:
    """Make the accounting of a stage without training, where everything allocated counts as activations."""
    layouts = cuda_layouts("flash")
    with Accounting(temporaries(), layouts=layouts) as accounting, accounting.allocating("activations"):
        accounting.register(weights, "weights")
        with recorder.watching(accounting) if recorder else nullcontext():
            yield accounting


def recording(accounting: Accounting, recorders: Recorders | None, name: str) -> AbstractContextManager[None]:
    """Record what an accounting sees, under a name."""
    return nullcontext() if recorders is None else recorders[name].watching(accounting)


def bytes_in_16_bit(model: nn.Module) -> int:
    """Return the size of a model's parameters at 2 bytes each."""
    return 2 * sum(parameter.numel() for parameter in model.parameters())


_TEXTS: dict[str, tuple[list[TextReport], dict[str, list[StreamWork]]]] = {}


def texts_of(config: TrainConfig) -> tuple[list[TextReport], dict[str, list[StreamWork]]]:
    """Return the text encoders' ``text_snapshots`` and their work, cached for runs with the same encoders."""
    model = config.model
    encoders = [(encoder.model, model.files.known_part(encoder.model).config()) for encoder in model.text.encoders]
    about = [model.model_dump(mode="json"), str(config.precision.encoder_dtype()), encoders]
    key = json.dumps(about, sort_keys=True, default=str)
    if key not in _TEXTS:
        recorders = Recorders(partial(Recorder, cuda=True))
        texts = list(text_snapshots(config, recorders))
        _TEXTS[key] = texts, {name: each.sections for name, each in recorders.items()}
    return _TEXTS[key]


def text_snapshots(config: TrainConfig, recorders: Recorders | None = None) -> Iterator[TextReport]:
    """Run every text encoder over two batches of prompts."""
    dtype = config.precision.encoder_dtype()
    for encoder in config.model.text.encoders:
        recorder = None if recorders is None else recorders[f"text.{encoder.model}"]
        part = config.model.files.known_part(encoder.model)
        opened = encoder.open_empty(part, dtype, CPU)
        snapshot = encoder_snapshot(opened, encoder.longest(part.config()), recorder)
        yield encoder.model, 2 * opened.parameter_count(), replace(snapshot, phase="text", module=encoder.name)


def encoder_snapshot(opened: OpenEncoder, length: int, recorder: Recorder | None = None) -> MemorySnapshot:
    """Run a text encoder over two batches of prompts of ``length`` tokens; the first batch's outputs live until the
    second's exist."""
    with accounting_of(opened.resident(), recorder) as accounting:
        ids = torch.zeros((2 * BATCH, length), dtype=torch.int64)
        if opened.layered:  # whose inputs stay on the host
            accounting.register([ids], HOST)
        for _ in opened.encode(Tokens(ids), BATCH):
            pass
    return accounting.peak


def largest_snapshot(texts: Iterable[TextReport]) -> MemorySnapshot:
    """Return the largest snapshot of ``text_snapshots``; an empty one without any."""
    return largest_of(snapshot for _, _, snapshot in texts) or MemorySnapshot(phase="text", in_products=0)


def simulate_encoding(model: Model, vae: nn.Module, size: Size, recorders: Recorders | None = None) -> MemorySnapshot:
    """Encode one image with a loaded autoencoder."""
    with (
        accounting_of(all_tensors(vae), None if recorders is None else recorders["latents"]) as accounting,
        torch.no_grad(),
        phase("encode"),
    ):
        model.autoencoder.encode(vae, torch.zeros(1, 3, size[1], size[0]))
    return accounting.peak


def simulate_validation(
    config: TrainConfig, trained: SimulatedTraining, recorders: Recorders | None = None
) -> MemorySnapshot | None:
    """Simulate sampling and evaluation with the training state still allocated; None if the run does neither."""
    vae, core, denoiser = empty_autoencoder(config), trained.core, trained.denoiser
    autocast = autocast_like_cuda() if config.precision.autocast else nullcontext()
    with autocast, trained.accounting as accounting, accounting.allocating(HOST), use_average(trained.average):
        denoiser.eval()
        snapshots = []
        if config.validation.loss_samples:
            accounting.forget_peak()
            with (
                recording(accounting, recorders, "evaluate"),
                accounting.allocating("activations"),
                torch.no_grad(),
                phase("evaluate"),
            ):
                core.loss(denoiser, trained.batches.single_batch())
            snapshots.append(accounting.peak)
        if config.validation.prompts != []:
            option, (width, height) = config.validation, config.image_size()
            request = ImageRequest("", 0, "", width, height, option.steps, option.guidance)
            batch = trained.batches.batch(1)
            text = config.model.text.blank(batch.conditioning.embeds.dtype)
            with recording(accounting, recorders, "draw"):
                generated = simulate_generation(accounting, config, request, denoiser, vae, core.modulation, text)
                snapshots.append(generated)
    return largest_of(snapshots)


def simulate_class_images(
    config: TrainConfig,
    capability: tuple[int, int] | None = None,
    recorders: Recorders | None = None,
    images: int = 1,
) -> MemorySnapshot:
    """Generate class images in one batch with the base alone."""
    prior = config.prior
    assert isinstance(prior, ClassImages)
    memory, side, dtype = config.memory, config.resolution, config.precision.encoder_dtype()
    denoiser = empty_base(config.model, memory, config.precision, CPU, [(side, side)])
    vae = empty_autoencoder(config)
    with accounting_like_cuda(config, capability) as accounting:
        accounting.register(all_tensors(denoiser), "weights")
        modulation = modulation_of(denoiser, config, CPU)
        memory.attach(model_units(denoiser), model_device(denoiser))
        request = ImageRequest("", 0, "", side, side, prior.steps, prior.guidance)
        text = config.model.text.blank(dtype)
        with recording(accounting, recorders, "class"):
            return simulate_generation(accounting, config, request, denoiser.eval(), vae, modulation, text, images)


def simulate_generation(
    accounting: Accounting,
    config: TrainConfig,
    request: ImageRequest,
    denoiser: Denoiser,
    vae: nn.Module,
    modulation: ModulationSource | None,
    text: Conditioning,  # of one prompt
    images: int = 1,
) -> MemorySnapshot:
    """Generate images in one batch; load the autoencoder before sampling begins, and decode one by one."""
    wanted, request = request.steps, replace(request, steps=min(SIMULATED, request.steps))
    accounting.register(all_tensors(vae), "weights")
    accounting.forget_peak()
    model = ShapesOnlyModel(config.model)
    whole = None if modulation is None else WholeWindowModulation(modulation, wanted, request.steps)
    with accounting.allocating("activations"), torch.no_grad():
        with phase("sample"):
            kernel = partial(use_attention, simulated_attention(config))
            sampler = Sampler(denoiser, model, config.precision, whole, attention=kernel, objective=config.objective)
            read = inpainting_input(config.model, (request.width, request.height), images)
            away = shorten(config.model, text)
            z = sampler.denoise([request] * images, [text] * images, [away] * images, inpainting=read)
        with phase("decode"):
            for one in z.split(1):
                config.model.autoencoder.decode(vae, one)
    return accounting.peak


def shorten(model: Model, text: Conditioning) -> Conditioning:
    """Shorten a prompt's conditioning, if a family's prompts have lengths of their own."""
    # guidance away from a prompt of another length takes a mask
    return text if model.text.one_length else replace(text, embeds=text.embeds[:-1])


def inpainting_input(model: Model, size: Size, images: int) -> Tensor | None:
    """Make what a model that inpaints reads beside z_t [b, 1 + c, h, w], without values; None for another."""
    c, h, w = model.autoencoder.shape(*size)
    return torch.zeros(images, 1 + c, h, w) if model.inpaints else None


class ShapesOnlyModel:
    """A family for sampling whose noise levels have no values."""

    def __init__(self, family: Model):
        self.autoencoder = family.autoencoder
        self.predict = family.predict
        self.rescale = family.rescale
        self.flow = family.flow
        self.skipped_steps = family.skipped_steps
        self.text = family.text
        self.inpaints = family.inpaints

    def solver(self, objective: TrainingObjective, size: Size, steps: int, skipped: int) -> Euler:
        """Return a solver whose levels have no values; a real one keeps at most two more latents."""
        return Euler(torch.zeros(steps + 1 - skipped), self.flow)


class WholeWindowModulation:
    """The modulation of the whole window of an image of ``steps`` sampling steps, of which it returns the part for the
    few simulated ones."""

    def __init__(self, modulation: ModulationSource, steps: int, simulated: int):
        self.modulation = modulation
        self.window = modulation.window
        self.fact = modulation.fact
        self.ratio = min(self.window, steps) / min(self.window, simulated)

    def __call__(self, time: Tensor, pooled: Tensor | None) -> Tensor:  # [n], [n, p] -> [n, m]
        rows = round(len(time) * self.ratio)
        prompts = None if pooled is None else pooled[:1].expand(rows, -1)
        return self.modulation(time[:1].expand(rows), prompts)[: len(time)]
