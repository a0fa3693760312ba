"""Peak memory of the whole job without a GPU, stage by stage: text, latents, train, validate.

The project's own code runs on fake tensors, as in simulate.py; only configurations are needed, and SD3 Medium's are
known without a download. What cannot be known so are cuDNN's workspaces for convolutions: they depend on the algorithm
that it chooses on the device, and come on top of what the autoencoder takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from simpletune.config.schema import TrainConfig
from simpletune.ema import averaged
from simpletune.estimate.simulate import SimulatedRun, StepReport, take_steps, with_workspace
from simpletune.memory.accounting import Accounting
from simpletune.memory.device_terms import cublas_workspace, temporaries
from simpletune.memory.fake import fake_tensors
from simpletune.memory.snapshot import HOST, MemorySnapshot
from simpletune.models.buckets import Size
from simpletune.models.parts import Part, use_tiles
from simpletune.models.sd3 import SD3, SD3_MEDIUM
from simpletune.models.sd3_sources import provider
from simpletune.models.sd3_text import BATCH, ENCODERS, clip_outputs
from simpletune.models.t5_layers import EMBEDDINGS, EmptyT5, LayeredT5
from simpletune.models.transformer import Transformer
from simpletune.pipeline.load import empty_base
from simpletune.pipeline.modulation_plan import ModulationSource
from simpletune.pipeline.sample import Request, Sampler
from simpletune.profiling import phase
from simpletune.step.synthetic import CPU, SyntheticBatches
from simpletune.system.console import silent
from simpletune.system.startup import without_collection
from simpletune.tensors import all_tensors

SIMULATED = 3  # sampling steps: the third finds all that the first two leave behind


@dataclass(frozen=True)
class JobReport:
    """What the whole job takes."""

    stages: Mapping[str, MemorySnapshot]
    """The largest snapshot of each stage: ``text``, ``latents``, ``train``, and ``validate`` where there is one.
    Text is the largest of its encoders, named as its place; validate's phase is ``sample``, ``decode`` or
    ``evaluate``."""
    train: StepReport
    """The training stage."""
    part_bytes: Mapping[str, int]
    """Parameters of the frozen parts in 2 bytes each, as the hub's files hold them, by the part's name."""

    @property
    def peak(self) -> MemorySnapshot:
        """The largest snapshot of all."""
        return max(self.stages.values(), key=lambda snapshot: snapshot.bytes)


def simulate_stages(
    config: TrainConfig, size: Size | None = None, capability: tuple[int, int] | None = None
) -> JobReport:
    """Predict each stage's peak memory on the device; no weights, no data and no GPU are needed.

    Args:
        config: of the run, demo names resolved.
        size: width and height of the training pictures in pixels; None: the square of ``data.resolution``.
        capability: of the CUDA device, for its libraries' workspaces; None: they are left out.

    Raises:
        UserError: a part's configuration cannot be read.
    """
    size = size or (config.data.resolution, config.data.resolution)
    with fake_tensors(), without_collection(), silent():
        vae = empty_autoencoder(config)
        texts = list(text_snapshots(config))
        parts = {name: size for name, size, _ in texts} | {"vae": bytes_in_16_bit(vae)}
        train, validate = train_and_validate(config, size)
        snapshots = {
            "text": max((snapshot for _, _, snapshot in texts), key=lambda snapshot: snapshot.bytes),
            "latents": of_encoding(config.model, vae, size),
            "train": train.peak,
            **({} if validate is None else {"validate": validate}),
        }
    if capability is not None:
        extra = {name: cublas_workspace(capability, 1 if name in ("text", "latents") else 2) for name in snapshots}
        snapshots = {name: with_workspace(snapshot, extra[name]) for name, snapshot in snapshots.items()}
    return JobReport(snapshots, train, parts)


def bytes_in_16_bit(model: nn.Module, without: str = "") -> int:
    """A model's parameters, each in 2 bytes.

    Args:
        without: the name of one that a file does not hold, because it is another's second name.
    """
    return 2 * sum(parameter.numel() for name, parameter in model.named_parameters() if name != without)


def known_part(model: SD3, name: str) -> Part:
    """Where a part's configuration is; SD3 Medium's own is not fetched."""
    return Part(name, None) if provider(model, name)[1] == SD3_MEDIUM else model.part(name)


@contextmanager
def accounting_of(weights: Iterable[Tensor]) -> Iterator[Accounting]:
    """Count a stage that trains nothing: what it allocates is activations."""
    with Accounting(temporaries()) as accounting, accounting.allocating("activations"):
        accounting.register(weights, "weights")
        yield accounting


def text_snapshots(config: TrainConfig) -> Iterator[tuple[str, int, MemorySnapshot]]:
    """Each text encoder's part, its size in 2 bytes a parameter, and its largest snapshot over batches of prompts."""
    dtype = config.precision.encoder_dtype()
    for encoder in ENCODERS[: 3 if config.model.t5 else 2]:
        part = known_part(config.model, encoder.model)
        if encoder.is_t5:
            t5 = LayeredT5(part, dtype, CPU, EmptyT5(part, dtype))
            t5.model.to("meta")  # accelerate's empty weights are on the CPU, if they are fake
            size, snapshot = bytes_in_16_bit(t5.model, EMBEDDINGS[1]), of_t5(t5, config.model.t5_length)
        else:
            clip = CLIPTextModelWithProjection(CLIPTextConfig.from_dict(part.config())).eval().to(dtype)
            size, snapshot = bytes_in_16_bit(clip), of_clip(clip)
        yield encoder.model, size, replace(snapshot, phase="text", module=encoder.name)


def of_clip(model: CLIPTextModelWithProjection) -> MemorySnapshot:
    """A loaded CLIP encoder over two batches of prompts: the first one's outputs live until the second's are there."""
    with accounting_of(all_tensors(model)) as accounting:
        ids = torch.zeros((2 * BATCH, model.config.max_position_embeddings), dtype=torch.int64)
        for _ in clip_outputs(model, ids, CPU, BATCH):
            pass
    return accounting.peak


def of_t5(t5: LayeredT5, length: int) -> MemorySnapshot:
    """A T5 encoder, layer by layer, over two batches of prompts of so many tokens."""
    with accounting_of(()) as accounting:
        ids = torch.zeros((2 * BATCH, length), dtype=torch.int64)
        accounting.register([ids], HOST)
        for _ in t5.encode(ids, BATCH):
            pass
    return accounting.peak


def empty_autoencoder(config: TrainConfig) -> nn.Module:
    """The run's autoencoder as ``load_vae`` gives it, without values."""
    import diffusers

    part = known_part(config.model, "vae").config()
    vae = getattr(diffusers, part["_class_name"]).from_config(part)
    nn.Module.to(vae, config.precision.encoder_dtype())  # diffusers' own warns, of nothing here
    if config.memory.vae_tile is not None:
        use_tiles(vae, config.memory.vae_tile)
    return vae.eval().requires_grad_(False)


def of_encoding(model: SD3, vae: nn.Module, size: Size) -> MemorySnapshot:
    """A loaded autoencoder over one picture."""
    with accounting_of(all_tensors(vae)) as accounting, torch.no_grad(), phase("encode"):
        model.encode_pictures(vae, torch.zeros(1, 3, size[1], size[0]))
    return accounting.peak


def train_and_validate(config: TrainConfig, size: Size) -> tuple[StepReport, MemorySnapshot | None]:
    """The training stage, and what is drawn and evaluated while all that trains stays where it is."""
    transformer = empty_base(config.model, config.memory, config.precision, CPU, [size, config.picture_size()])
    vae = empty_autoencoder(config)
    with Accounting(temporaries()) as accounting:
        report, run = take_steps(accounting, config, transformer, size)
        with accounting.allocating(HOST), averaged(run.average):
            transformer.eval()
            snapshots = []
            if config.validation.eval_samples:
                snapshots.append(of_evaluating(accounting, run, transformer))
            if config.validation.prompts != []:
                snapshots.append(of_drawing(accounting, config, run.batches, transformer, vae))
    return report, max(snapshots, key=lambda snapshot: snapshot.bytes, default=None)


def of_evaluating(accounting: Accounting, run: SimulatedRun, transformer: Transformer) -> MemorySnapshot:
    """The evaluation loss: one sample after the other, forward only."""
    accounting.forget_peak()
    with accounting.allocating("activations"), torch.no_grad(), phase("evaluate"):
        run.core.loss(transformer, run.batches.one_by_one())
    return accounting.peak


def of_drawing(
    accounting: Accounting, config: TrainConfig, batches: SyntheticBatches, transformer: Transformer, vae: nn.Module
) -> MemorySnapshot:
    """As a validation draws each of its pictures: the autoencoder is loaded before sampling begins."""
    option = config.validation
    width, height = config.picture_size()
    request = Request("", 0, "", width, height, min(SIMULATED, option.steps), option.guidance)
    batch = batches.batch(1)
    text = batch.prompt_embeds[0], batch.pooled[0]
    accounting.register(all_tensors(vae), "weights")
    accounting.forget_peak()
    model, modulation = ShapesOnlyModel(batches.shapes["in_channels"]), batches.core.modulation
    whole = None if modulation is None else WholeWindowModulation(modulation, option.steps, request.steps)
    with accounting.allocating("activations"), torch.no_grad():
        with phase("sample"):
            z = Sampler(transformer, model, config.precision, whole).denoise([request], [text], [text])
        with phase("decode"):
            config.model.decode_latents(vae, z)
    return accounting.peak


class ShapesOnlyModel:
    """A model for sampling that knows the shape of its latents; its noise levels have no values.

    Args:
        channels: of its latents.
    """

    def __init__(self, channels: int):
        self.channels = channels

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """(c, h, w) of the latents of a picture in pixels."""
        return self.channels, height // 8, width // 8

    def scheduler(self) -> EmptyNoiseLevels:
        """A schedule without values."""
        return EmptyNoiseLevels()


class EmptyNoiseLevels:
    """Noise levels without values."""

    def __init__(self) -> None:
        self.sigmas = torch.empty(0)

    def set_timesteps(self, steps: int, /) -> None:
        """As many levels as so many steps have."""
        self.sigmas = torch.zeros(steps + 1)


class WholeWindowModulation:
    """Computes the modulations of a whole window of sampling steps, and returns those of the few that are simulated.

    Args:
        modulation: of the transformer.
        steps: of a validation picture.
        simulated: how many of them are taken.
    """

    def __init__(self, modulation: ModulationSource, steps: int, simulated: int):
        self.modulation, self.window = modulation, modulation.window
        self.ratio = min(self.window, steps) / min(self.window, simulated)

    def __call__(self, sigma: Tensor, pooled: Tensor) -> Tensor:  # [n], [n, p] -> [n, m]
        """The first rows of the whole window's modulations."""
        rows = round(len(sigma) * self.ratio)
        return self.modulation(sigma[:1].expand(rows), pooled[:1].expand(rows, -1))[: len(sigma)]
