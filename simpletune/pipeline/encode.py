"""The prepare stages: encode each prompt and picture once with the frozen encoders, into the cache."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from simpletune.config.schema import TrainConfig
from simpletune.data.cache import Cache, view_key
from simpletune.data.evaluation import drift_prompts
from simpletune.data.pictures import cut, decode
from simpletune.data.plan import Plan, make_plan
from simpletune.data.samples import View, without
from simpletune.data.shares import SourceShare, shares
from simpletune.data.source import Rejected, UnusablePicture
from simpletune.families import Model
from simpletune.models.buckets import Size
from simpletune.models.prompts import Encoder
from simpletune.options import UserError
from simpletune.pipeline.masks import MaskCache
from simpletune.pipeline.plan_data import PlannedData, plan_data, report_rejected
from simpletune.pipeline.sample import Request
from simpletune.system.atomic import remove_stale
from simpletune.system.console import progress
from simpletune.system.failpoints import failpoint
from simpletune.system.signals import poll
from simpletune.system.stage_timer import StageTimer
from simpletune.text.inputs import TextInputs, Tokens
from simpletune.text.option import NO_TEXT, Text


class TextCache:
    """Prompt embeddings by prompt, in one folder per encoder.

    Args:
        model: the model, with folders resolved.
        dtype: the type of the encoders' weights and of the embeddings.
        cache: the cache's root folder.
        text: what trains on the text side. The words of a new token stand in its place; encoders that run in every step
            are not cached, and zeros stand for their embeddings.
    """

    def __init__(self, model: Model, dtype: torch.dtype, cache: Path, text: Text = NO_TEXT):
        self.prompts, self.dtype = model.prompts(dtype), dtype
        self.tokens = Tokens(text, model, self.prompts)
        self.encoders = [e for e in self.prompts.encoders if e.name not in self.tokens.resident]
        self.caches = {e.name: Cache(cache / "text" / self.prompts.fingerprint(e)) for e in self.encoders}
        self._regions = model.text_regions() if self.tokens.resident else {}

    def fill(self, prompts: Iterable[str], device: torch.device) -> int:
        """Encode the prompts that are not cached yet, one encoder at a time.

        Returns:
            How many prompts at least one encoder has encoded.
        """
        encoded: set[str] = set()
        wanted = list(dict.fromkeys(map(self.tokens.expanded, prompts)))
        for encoder in self.encoders:
            cache = self.caches[encoder.name]
            if not cache.lacking(wanted):
                continue
            with cache.filling():
                missing = [prompt for prompt in wanted if prompt not in cache]
                if missing:
                    self._encode(encoder, missing, device)
            encoded |= set(missing)
            free_memory(device)
        return len(encoded)

    def lacking(self, prompts: Iterable[str]) -> set[str]:
        """The prompts that at least one encoder has to encode."""
        wanted = {self.tokens.expanded(prompt): prompt for prompt in prompts}
        return {wanted[prompt] for cache in self.caches.values() for prompt in cache.lacking(wanted)}

    def _encode(self, encoder: Encoder, missing: list[str], device: torch.device) -> None:
        """Encode prompts with one encoder.

        Raises:
            UserError: an embedding is not finite.
        """
        remove_stale(self.caches[encoder.name].folder)
        with progress(f"text  {encoder.name}", len(missing), "prompts") as advance:
            for prompt, parts in zip(missing, self.prompts.encode(encoder, missing, device), strict=True):
                if not _all_finite(parts.values()):
                    raise UserError(
                        f"{encoder.name} encodes the caption {prompt[:80]!r} to NaN or infinity. Its weights may be "
                        "damaged, or overflow in this precision. Download it again, or use precision.compute=fp32",
                        code=4,
                    )
                self.caches[encoder.name].save(prompt, parts)
                advance()
                failpoint("text.encoded")
                poll()

    def load(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Load (prompt_embeds [t, e], pooled [p]) of one prompt."""
        return self.prompts.assemble({encoder.name: self.part(encoder, prompt) for encoder in self.prompts.encoders})

    def pooled(self, prompt: str) -> Tensor:
        """Load the pooled embedding [p] of one prompt, reading only the encoders that give it."""
        return self.prompts.pool({encoder.name: self.part(encoder, prompt) for encoder in self.prompts.pooling})

    def part(self, encoder: Encoder, prompt: str) -> dict[str, Tensor]:
        """Load one encoder's output of one prompt; zeros for one that runs in every step."""
        if encoder.name in self.caches:
            return self.caches[encoder.name].load(self.tokens.expanded(prompt))
        region, length = self._regions[encoder.name], self.tokens.length(encoder.name)
        pooled = torch.zeros(0 if region.pooled is None else region.pooled[1], dtype=self.dtype)
        return {"hidden": torch.zeros(length, region.width, dtype=self.dtype), "pooled": pooled}

    def inputs(self, prompts: Sequence[str]) -> TextInputs | None:
        """What the trained text side reads of a micro-batch's prompts; None if nothing trains there."""
        return self.tokens.of(prompts) if self.tokens.text.trains else None

    def too_long(self, prompts: Iterable[str], limit: int = 77) -> list[str]:
        """The prompts that CLIP truncates, at 77 tokens by default."""
        first = self.caches.get(self.prompts.encoders[0].name)
        if first is None:
            return [prompt for prompt in prompts if self.tokens.count(prompt) > limit]
        return [prompt for prompt in prompts if int(first.load(self.tokens.expanded(prompt))["tokens"]) > limit]


class LatentCache:
    """Latents by picture and crop.

    Args:
        model: the model, with folders resolved.
        dtype: the type in which the autoencoder runs.
        cache: the cache's root folder.
        tile: ``memory.vae_tile``.
    """

    def __init__(self, model: Model, dtype: torch.dtype, cache: Path, tile: int | None = None):
        self.model, self.dtype, self.tile = model, dtype, tile
        name = f"{model.vae_fingerprint()}-{str(dtype).removeprefix('torch.')}"
        self.cache = Cache(cache / "latents" / (name if tile is None else f"{name}-tile{tile}"))

    def fill(self, views: Sequence[View], device: torch.device) -> tuple[int, list[Rejected]]:
        """Encode the crops that are not cached yet.

        Returns:
            How many were encoded, and the pictures that could not be decoded.
        """
        if not self.cache.lacking(view_key(view) for view in views):
            return 0, []
        with self.cache.filling():
            missing = [view for view in views if view_key(view) not in self.cache]
            return self._encode(missing, device) if missing else (0, [])

    def _encode(self, missing: Sequence[View], device: torch.device) -> tuple[int, list[Rejected]]:
        """Encode crops. Rejects pictures that cannot be decoded or whose latents are not finite."""
        remove_stale(self.cache.folder)
        encoded, rejected = 0, dict[tuple[int, str], Rejected]()
        vae = self.model.load_vae(device, self.dtype, self.tile)
        with progress("latents", len(missing), "pictures") as advance, torch.no_grad():
            for view in missing:
                try:
                    encoded += self._encode_one(view, vae, device)
                except UnusablePicture as reason:
                    place = view.picture.source, view.picture.name
                    rejected[place] = Rejected(view.picture.name, str(reason), source=view.picture.source)
                advance()
                failpoint("latents.encoded")
                poll()
        del vae
        free_memory(device)
        return encoded, list(rejected.values())

    def _encode_one(self, view: View, vae: nn.Module, device: torch.device) -> int:
        """Encode a crop unless it is cached, and return the number of new files.

        Raises:
            UnusablePicture: it cannot be decoded, or its latents are not finite.
        """
        pixels = _pixels(view)
        if view_key(view) in self.cache:  # an identical file under another name may have been encoded
            return 0
        z_0 = self.model.encode_pictures(vae, pixels[None].to(device))[0]
        if not _all_finite([z_0]):
            raise UnusablePicture(f"is encoded to NaN or infinity by the autoencoder in {self.dtype}")
        self.cache.save(view_key(view), {"z_0": z_0})
        return 1

    def load(self, view: View) -> Tensor:
        """Load z_0 [c, h, w] in fp32."""
        return self.cache.load(view_key(view))["z_0"]


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no floating-point tensor contains NaN or infinity."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def _pixels(view: View) -> Tensor:
    """Read and crop a picture to [3, h, w] in -1..1.

    Raises:
        UnusablePicture: it cannot be read or decoded.
    """
    try:
        data = view.picture.read_same()
    except OSError as error:
        raise UnusablePicture(f"cannot be read ({error.strerror or error})") from None
    return torch.from_numpy(cut(decode(data), view.bucket, view.offset, view.flip))


def free_memory(device: torch.device) -> None:
    """Free the memory of a stage's deleted models."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class Prepared:
    """The result of the prepare stages.

    Args:
        plan: the run's plan.
        text: the cached prompt embeddings.
        latents: the cached latents of the pictures.
        masks: their cached masks.
        requests: the validation pictures to draw.
        captions: a description of where the captions come from.
        left_out: the unusable entries that training skips.
    """

    plan: Plan
    text: TextCache
    latents: LatentCache
    masks: MaskCache
    requests: list[Request]
    captions: str
    left_out: list[Rejected] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """The training data and the skipped entries, for the run's folder."""
        left_out = [asdict(each) for each in self.left_out]
        rows = self.plan.manifest()
        return {
            "captions": self.captions,
            "sources": [asdict(share) for share in self.sources()],
            "samples": [row for row in rows if not row.get("held_out")],
            "held_out": [row for row in rows if row.get("held_out")],
            "left_out": left_out,
        }

    def sources(self) -> list[SourceShare]:
        """What each data source contributes to an epoch."""
        return shares(self.plan)

    def sizes(self) -> set[Size]:
        """(width, height) in pixels of every picture that the transformer will see."""
        return {*self.plan.sizes(), *((request.width, request.height) for request in self.requests)}


def encode(config: TrainConfig, data: PlannedData, accelerator: Accelerator, stages: StageTimer) -> Prepared:
    """Fill the caches. The main process goes first; the others reuse its files.

    Args:
        config: the configuration, with folders resolved.
        data: the scanned data and its plan.
        accelerator: provides the processes and the device.
        stages: records the time and memory of each stage.

    Raises:
        UserError: pictures cannot be decoded and ``data.on_error`` is ``stop``, or none are left.
    """
    cache, dtype, plan = Path(config.output.cache), config.precision.encoder_dtype(), data.plan
    text = TextCache(config.model, dtype, cache, config.text)
    latents, masks = LatentCache(config.model, dtype, cache, config.memory.vae_tile), MaskCache(cache)
    with accelerator.main_process_first():
        requests = validation_requests(config, plan)
        with stages.stage("text"):
            text.fill(prompts_of(config, plan, requests), accelerator.device)
        with stages.stage("latents"):
            _, rejected = latents.fill(plan.views(), accelerator.device)
            rejected += masks.fill(plan.views())
    report_rejected(rejected, config.data)
    if rejected:
        plan = make_plan(config, without(data.usable, rejected), accelerator.num_processes)
    return Prepared(plan, text, latents, masks, requests, data.captions, [*data.left_out, *rejected])


def prepare(config: TrainConfig, accelerator: Accelerator, stages: StageTimer) -> Prepared:
    """Run ``plan_data``, then ``encode``."""
    return encode(config, plan_data(config, accelerator.num_processes), accelerator, stages)


def prompts_of(config: TrainConfig, plan: Plan, requests: Sequence[Request]) -> list[str]:
    """Every prompt whose embeddings a run needs."""
    captions = plan.captions()
    of_class = [config.prior.class_prompt(caption) for caption in captions] if config.prior.second_pass else []
    drawn = [*(r.prompt for r in requests), *(r.negative_prompt for r in requests)]
    return [*captions, *of_class, *drawn, *drift_prompts(config.validation)]


def validation_requests(config: TrainConfig, plan: Plan) -> list[Request]:
    """The fixed prompts and seeds of a run's validation pictures."""
    option = config.validation
    prompts = [plan.example()] if option.prompts is None else option.prompts
    width, height = config.picture_size()
    return [
        Request(prompt, option.seed + number, option.negative_prompt, width, height, option.steps, option.guidance)
        for number, prompt in enumerate(prompts)
    ]
