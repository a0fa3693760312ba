"""Generate with any weights in one session; load nothing before it is needed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from pydantic import TypeAdapter
from torch import Tensor

from simpletune.adapters.files.attach import holds_hypernetwork, load_loras
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.methods.layers import detach, move_updates, rescale
from simpletune.config.compute import compute_to_generate
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import DEMO, TrainConfig
from simpletune.engine.compile import compile_blocks
from simpletune.engine.denoiser import Denoiser
from simpletune.engine.quant import Precision
from simpletune.models.families import family_by_name, family_of
from simpletune.models.shared.buckets import Size
from simpletune.runs.folder import newest_run
from simpletune.runs.stack import require_lora_of, require_stack, without_assistants
from simpletune.runs.text_side import stand_ins_of, text_side_of
from simpletune.runs.weights import BASE, Weights, load_weights, precision_of
from simpletune.runs.weights_names import CheckpointRef, find_run, run_config
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.load import load_autoencoder
from simpletune.stages.modulation_plan import DetachedModulation
from simpletune.stages.sample import (
    EncodedImage,
    ImageRequest,
    Sampler,
    decode,
    encode_inputs,
    paste_original,
    reads_images,
)
from simpletune.stages.text_cache import PromptStore
from simpletune.system.devices import capability_of, choose_device
from simpletune.system.options import Json, UserError, plural
from simpletune.system.stage_timer import StageTimer
from simpletune.system.threads import choose_threads

MEMORY = ("modulation", "resident_blocks", "vae_tile")


@dataclass(frozen=True)
class GenerationSpeed:
    """Settings that may make generation faster."""

    batch_size: int = 1  # pictures per pass through the denoiser
    reuse_guidance: int = 1  # steps that share one guidance difference; above 1 the pictures change
    compiled: bool = False  # the denoiser's blocks

    def lossy(self) -> dict[str, str]:
        """Describe settings that change the pictures, for their metadata."""
        if self.reuse_guidance == 1:
            return {}
        return {"lossy": f"guidance difference reused for {plural(self.reuse_guidance, 'step')}"}


@dataclass(frozen=True)
class GeneratedImages:
    """The pictures of one model."""

    weights: Weights
    images: list[Image.Image]  # one for each request
    latents: list[Tensor]  # [1, c, h, w], fp32
    denoise: float  # seconds per picture in the denoiser
    decode: float  # seconds per picture in the autoencoder


class SharedBase:
    """A denoiser that is loaded once and used by itself or with one set of LoRAs at a time.

    Switching between LoRAs on one base replaces only the LoRA. To generate with the base, all LoRAs are detached, so it
    computes exactly as loaded, not with updates of zero."""

    def __init__(self, config: TrainConfig, device: torch.device, sizes: Collection[Size], compiled: bool = False):
        self.config = config
        self.device = device
        self.sizes = sizes
        self.compiled = compiled
        self._denoiser: Denoiser | None = None
        self._modulation: DetachedModulation | None = None
        self._loaded: Weights | None = None
        self._active: Weights = BASE

    def use(self, weights: Weights) -> tuple[Denoiser, DetachedModulation | None]:
        """Return the denoiser with these weights, and its modulation if it was detached. The denoiser of an earlier
        call then has these weights too, or is freed."""
        base = self.base_of(weights)
        if self._denoiser is None or base != self._loaded:
            self.free()
            self._denoiser, self._modulation = load_weights(self.config, base, self.device, self.sizes)
            self._loaded, self._active = base, base
            if self.compiled:
                compile_blocks(self._denoiser, self.device)
        if base == replace(BASE, label=""):  # others are loaded with their LoRAs
            if weights.lora == self._active.lora and not (weights.more or self._active.more):
                rescale(self._denoiser, weights.scale)
            else:
                detach(self._denoiser)
                if weights.loras:
                    load_loras(self._denoiser, weights.loras)
                    move_updates(self._denoiser, self.device)
            self._active = weights
        return self._denoiser, self._modulation

    def group_by_base(self, models: Iterable[Weights]) -> list[Weights]:
        """Reorder models so that those on one base are adjacent and no base is loaded twice."""
        bases: dict[Weights, list[Weights]] = {}
        for weights in models:
            bases.setdefault(self.base_of(weights), []).append(weights)
        return [weights for group in bases.values() for weights in group]

    def base_of(self, weights: Weights) -> Weights:
        """Return the weights to load before these can be applied; equal for all that can share a base."""
        shared = weights.lora is not None and not weights.merged
        if shared and self.config.memory.modulation == "plan":
            # Not for a LoRA that changes layers which the modulation plan detached from the denoiser.
            detached = self.config.model.architecture.modulation
            assert detached is not None, "Memory.model_rules refuses it"
            # A hypernetwork changes no layer.
            files = [file for file, _ in weights.loras if not holds_hypernetwork(file)]
            shared = not any(detached.serves(layer) for file in files for layer in read_lora(file))
        return replace(BASE, label="") if shared else replace(weights, label="", short="", embeddings=())

    def free(self) -> None:
        self._denoiser = self._modulation = self._loaded = None
        free_memory(self.device)


@dataclass
class GenerationSession:
    """Everything for generation that does not depend on the weights: configuration, device, prompts, autoencoder."""

    config: TrainConfig  # configuration of the run, changed by arguments, with folders resolved
    run: Path | None
    device: torch.device
    reason: str  # the device and why it was chosen
    stages: StageTimer
    speed: GenerationSpeed = GenerationSpeed()
    step: int | None = None  # step of the run's checkpoint to use; None: the run's result
    strength: float = 1.0  # of the run's LoRA, if none is given

    def generate_all(self, models: Sequence[Weights], requests: Sequence[ImageRequest]) -> list[GeneratedImages]:
        """Generate the same requests with several models, from the same noise.

        Text encoders, denoiser and autoencoder are never in memory together: prompts are encoded first, then all
        latents are generated, then the denoiser is freed and they are decoded. A base is loaded once for all its LoRAs.
        """
        config = self.config
        texts = self.encode_prompts(models, [text for request in requests for text in request.texts])
        latents: dict[Weights, tuple[list[Tensor], float]] = {}
        for weights, _, z, seconds in self.generate_latents({weights: [requests] for weights in models}, texts):
            latents[weights] = z, seconds / len(requests)
        with self.stages.stage("load"):
            vae = self.autoencoder()
        done: dict[Weights, GeneratedImages] = {}
        for weights, (z, denoise) in latents.items():
            with self.stages.stage("decode"):
                clock = time.perf_counter()
                decoded = decode(vae, config.model, z)
                images = [paste_original(image, request) for image, request in zip(decoded, requests, strict=True)]
            done[weights] = GeneratedImages(weights, images, z, denoise, (time.perf_counter() - clock) / len(z))
        del vae
        free_memory(self.device)
        return [done[weights] for weights in models]

    def _encode_inputs(self, groups: Iterable[Sequence[ImageRequest]]) -> dict[int, list[EncodedImage]]:
        """Encode the pictures and masks of groups of requests, by the groups' ids; empty if generation reads none. The
        autoencoder is freed again."""
        model, found = self.config.model, dict[int, list[EncodedImage]]()
        different = {id(group): group for group in groups}
        if not any(reads_images(model, group) for group in different.values()):
            return found
        with self.stages.stage("encode"):
            vae = self.autoencoder()
            found = {key: encode_inputs(vae, model, group) for key, group in different.items()}
            del vae
            free_memory(self.device)
        return found

    def generate_latents(
        self,
        groups: Mapping[Weights, Sequence[Sequence[ImageRequest]]],
        texts: Mapping[Weights, PromptStore],
    ) -> Iterator[tuple[Weights, int, list[Tensor], float]]:
        """Generate every model's groups of requests; yield the model, the number of the group, its latents and the
        seconds that they took. A base is loaded once for all its LoRAs, and the last denoiser is freed at the end.

        ``texts`` come from ``encode_prompts``."""
        encoded = self._encode_inputs(group for own in groups.values() for group in own)
        config = self.config
        sizes = {(each.width, each.height) for own in groups.values() for group in own for each in group}
        shared = SharedBase(config, self.device, sizes, self.speed.compiled)
        for weights in shared.group_by_base(groups):
            with self.stages.stage("load"):
                denoiser, modulation = shared.use(weights)
            sampler = Sampler(
                denoiser,
                config.model,
                precision_of(config, weights),
                modulation,
                self.speed.batch_size,
                self.speed.reuse_guidance,
                objective=config.objective,
            )
            for number, group in enumerate(groups[weights]):
                with self.stages.stage("denoise"):
                    clock = time.perf_counter()
                    latents = sampler.latents(group, texts[weights].load, encoded.get(id(group)))
                    seconds = time.perf_counter() - clock
                yield weights, number, latents, seconds
            del denoiser, modulation, sampler  # before the next one is loaded
        shared.free()

    def encode_prompts(self, models: Sequence[Weights], prompts: Sequence[str]) -> dict[Weights, PromptStore]:
        """Encode prompts as every model reads them: with its embeddings, and with its updates of the text encoders.
        Before anything is loaded, LoRAs of another family are refused."""
        for file in dict.fromkeys(file for weights in models for file, _ in weights.loras):
            if not holds_hypernetwork(file):
                require_lora_of(str(file), file, self.config)
        config, stand_ins = self.config, stand_ins_of(models, self.config.text)
        stores: dict[str, PromptStore] = {}
        found: dict[Weights, PromptStore] = {}
        with self.stages.stage("text"):
            for weights in dict.fromkeys(models):
                side = text_side_of(weights, stand_ins)
                if side.key not in stores:
                    dtype, cache = config.precision.encoder_dtype(), config.output.place
                    stores[side.key] = PromptStore(config.model, dtype, cache, side)
                    stores[side.key].fill(prompts, self.device)
                found[weights] = stores[side.key]
        return found

    def autoencoder(self) -> torch.nn.Module:
        return load_autoencoder(self.config, self.device)

    def memory(self) -> str:
        peak = self.stages.peak("peak_allocated_gib")
        on_device = f"{peak:.2f} GiB on the GPU, " if peak is not None else ""
        return f"{on_device}{self.stages.peak('peak_rss_gib'):.2f} GiB in host memory"


def _resolve_run_name(runs: Path | None, name: str) -> str:
    """Resolve a run's name, or RUN@STEP, in the folder of the runs if only that one has it."""
    own = Path(name.partition("@")[0])
    if runs is None or own.is_absolute() or own.exists() or Path(name).exists() or not (runs / own).is_dir():
        return name
    return str(runs / name)


def open_session(args: argparse.Namespace) -> GenerationSession:
    """Open the run that the arguments name, or the newest, and apply their changes; ``--model`` alone needs no run."""
    run: CheckpointRef | None = None
    if args.run:
        run = find_run(_resolve_run_name(args.runs, str(args.run)), "--run: ", strength=True)
    elif not args.model:
        run = CheckpointRef(newest_run(args.runs))
    if run is None:
        family = family_of(args.model) or family_by_name(args.model)
        model = {"family": family.family} if family else {}
        data = {"path": "demo:pictures", **({"resolution": 64} if str(args.model).startswith(DEMO) else {})}
        bare: Json = {"name": "generate", "model": model, "data": data}
        if objective := given_arguments(args, "objective"):
            bare["objective"] = {"name": objective["objective"]}
        config = validate(bare, "generate", needs_model=False)
    elif given_arguments(args, "objective"):
        raise UserError(f"--objective: {run.folder} says what it was trained by. Leave it out, or give --model alone")
    else:
        config = run_config(run.folder, "--run: " if args.run else "")
        config = without_assistants(config)
        require_stack(config, run.folder)
    config = config.model_copy(update=_changes(config, args))
    device, reason = choose_device(config.device, "auto", config.is_demo)
    config = resolve_folders(compute_to_generate(config, capability_of(device)))
    threads, _ = choose_threads(config.speed.threads, config.model.architecture.parameter_count(), device.type == "cpu")
    torch.set_num_threads(threads)
    if given_arguments(args, "compile") and args.compile and given_arguments(args, "resident_blocks"):
        raise UserError(
            "--compile: compiled blocks need their weights in one place, but --resident-blocks moves them. Leave out "
            "one of the two"
        )
    resident, blocks = config.memory.resident_blocks, config.model.architecture.blocks()
    if resident is not None and resident >= blocks:
        raise UserError(
            f"--resident-blocks: {resident} leaves none of the model's {plural(blocks, 'block')} to stream. "
            f"Use 0 to {blocks - 1}"
        )
    if resident is not None and not config.precision.can_offload:
        raise UserError(
            f"--resident-blocks: {config.precision.weights} weights cannot be offloaded block by block. Use "
            "another --precision"
        )
    speed = GenerationSpeed(
        **given_arguments(args, "batch_size", "reuse_guidance"), compiled=bool(vars(args).get("compile"))
    )
    stages = StageTimer(cuda=device.type == "cuda")
    folder, step, strength = (None, None, 1.0) if run is None else run
    return GenerationSession(config, folder, device, reason, stages, speed, step, strength)


def given_arguments(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return those of the named arguments that were given."""
    return {name: value for name in names if (value := vars(args).get(name)) is not None}


def _changes(config: TrainConfig, args: argparse.Namespace) -> dict[str, object]:
    """Return the sections of a run's configuration that the arguments change."""
    changes: dict[str, object] = {}
    model: dict[str, object] = {"pretrained": args.model, "init": "pretrained"} if args.model else {}
    if given_arguments(args, "no_t5"):
        if "model.t5=false" not in config.model.text.optional.values():
            titles = " and ".join(encoder.title for encoder in config.model.text.encoders)
            raise UserError(
                f"--no-t5: {config.model.words.title} has no T5 text encoder that it can do without; it reads prompts "
                f"with {titles}. Leave --no-t5 out"
            )
        model["t5"] = False
    if model:
        changes["model"] = config.model.model_copy(update=model)
    if args.precision:
        compute = {} if args.precision in ("bf16", "fp32") else {"compute": config.precision.compute}
        changes["precision"] = TypeAdapter(Precision).validate_python({"weights": args.precision, **compute})
    memory = given_arguments(args, *MEMORY)
    if memory.get("modulation") == "plan" and config.model.architecture.modulation is None:
        raise UserError(f"--modulation: plan, but {config.model.words.title} has no adaLN modulations. Leave it out")
    if memory:
        changes["memory"] = config.memory.model_copy(update=memory)
    if args.device:
        changes["device"] = args.device
    return changes
