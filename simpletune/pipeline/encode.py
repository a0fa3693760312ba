"""The prepare stages: encode each prompt and picture once with the frozen encoders, into the cache.

Several processes divide prompts and pictures by the hash of what their files depend on (``Cache.claimed``).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from simpletune.config.schema import TrainConfig
from simpletune.data.cache import ALONE, Cache, Share, view_key
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
from simpletune.system.console import progress
from simpletune.system.failpoints import failpoint
from simpletune.system.signals import poll
from simpletune.system.stage_timer import StageTimer

PROMPTS = 512  # claimed together, for each of which the layers of T5 are loaded once
PICTURES = 16  # claimed together
NOT_FINITE = (
    "Its weights may be damaged, or overflow in this precision. Download it again, or use precision.compute=fp32"
)


class TextCache:
    """Prompt embeddings by prompt, in one folder per encoder.

    Args:
        model: the model, with folders resolved.
        dtype: the type of the encoders' weights and of the embeddings.
        cache: the cache's root folder.
    """

    def __init__(self, model: Model, dtype: torch.dtype, cache: Path):
        self.prompts = model.prompts(dtype)
        self.caches = {e.name: Cache(cache / "text" / self.prompts.fingerprint(e)) for e in self.prompts.encoders}

    def fill(self, prompts: Iterable[str], device: torch.device, share: Share = ALONE) -> int:
        """Encode the prompts that are not cached yet, one encoder at a time.

        Args:
            prompts: the prompts.
            device: where the encoders run.
            share: what this process encodes first, if others fill the cache too; all prompts are there afterwards.

        Returns:
            How many prompts at least one encoder has encoded in this process.
        """
        encoded: set[str] = set()
        wanted = list(dict.fromkeys(prompts))
        for encoder in self.prompts.encoders:
            missing = self.caches[encoder.name].lacking(wanted, share)
            if missing:
                encoded |= self._encode(encoder, missing, device, share)
                free_memory(device)
        return len(encoded)

    def lacking(self, prompts: Iterable[str]) -> set[str]:
        """The prompts that at least one encoder has to encode."""
        wanted = list(prompts)
        return {prompt for cache in self.caches.values() for prompt in cache.lacking(wanted)}

    def _encode(self, encoder: Encoder, missing: list[str], device: torch.device, share: Share) -> set[str]:
        """Encode prompts with one encoder, and return those that no other process has encoded.

        Raises:
            UserError: an embedding is not finite.
        """
        encoded, cache = set[str](), self.caches[encoder.name]
        with progress(f"text  {encoder.name}", share.count(len(missing)), "prompts") as advance:
            for prompts in cache.claimed(missing, share, PROMPTS):
                for prompt, parts in zip(prompts, self.prompts.encode(encoder, prompts, device), strict=True):
                    if not _all_finite(parts.values()):
                        said = f"{encoder.name} encodes the caption {prompt[:80]!r} to NaN or infinity."
                        raise UserError(f"{said} {NOT_FINITE}", code=4)
                    cache.save(prompt, parts)
                    encoded.add(prompt)
                    advance()
                    failpoint("text.encoded")
                    poll()
        return encoded

    def load(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Load (prompt_embeds [t, e], pooled [p]) of one prompt."""
        return self.prompts.assemble({name: cache.load(prompt) for name, cache in self.caches.items()})

    def pooled(self, prompt: str) -> Tensor:
        """Load the pooled embedding [p] of one prompt, reading only the encoders that give it."""
        return self.prompts.pool({e.name: self.caches[e.name].load(prompt) for e in self.prompts.pooling})

    def too_long(self, prompts: Iterable[str], limit: int = 77) -> list[str]:
        """The prompts that CLIP truncates, at 77 tokens by default."""
        first = self.caches[self.prompts.encoders[0].name]
        return [prompt for prompt in prompts if int(first.load(prompt)["tokens"]) > limit]


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

    def fill(self, views: Sequence[View], device: torch.device, share: Share = ALONE) -> tuple[int, list[Rejected]]:
        """Encode the crops that are not cached yet.

        Args:
            views: the crops.
            device: where the autoencoder runs.
            share: what this process encodes first, if others fill the cache too; all crops but the rejected ones are
                there afterwards.

        Returns:
            How many this process has encoded, and the pictures that could not be decoded.
        """
        by_key: dict[str, list[View]] = {}
        for view in views:
            by_key.setdefault(view_key(view), []).append(view)
        missing = self.cache.lacking(by_key, share)
        return self._encode({key: by_key[key] for key in missing}, device, share) if missing else (0, [])

    def _encode(
        self, missing: Mapping[str, list[View]], device: torch.device, share: Share
    ) -> tuple[int, list[Rejected]]:
        """Encode crops by key. Rejects pictures that cannot be decoded or whose latents are not finite."""
        encoded, rejected = 0, list[Rejected]()
        vae: nn.Module | None = None  # loaded by a process that has something to encode
        with progress("latents", share.count(len(missing)), "pictures") as advance, torch.no_grad():
            for keys in self.cache.claimed(missing, share, PICTURES):
                vae = self.model.load_vae(device, self.dtype, self.tile) if vae is None else vae
                for view in (view for key in keys for view in missing[key]):
                    try:
                        encoded += self._encode_one(view, vae, device)
                    except UnusablePicture as reason:
                        rejected.append(Rejected(view.picture.name, str(reason), source=view.picture.source))
                    advance()
                    failpoint("latents.encoded")
                    poll()
        del vae
        free_memory(device)
        return encoded, rejected

    def _encode_one(self, view: View, vae: nn.Module, device: torch.device) -> int:
        """Encode a crop unless it is cached, and return the number of new files.

        Raises:
            UnusablePicture: it cannot be decoded, or its latents are not finite.
        """
        pixels = _pixels(view)
        if view_key(view) in self.cache:  # an identical file under another name has been encoded
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
    """Fill the caches. Each process encodes its share, and waits at the end until all is there.

    Args:
        config: the configuration, with folders resolved.
        data: the scanned data and its plan.
        accelerator: provides the processes and the device.
        stages: records the time and memory of each stage.

    Raises:
        UserError: pictures cannot be decoded and ``data.on_error`` is ``stop``, or none are left.
    """
    cache, dtype, plan = Path(config.output.cache), config.precision.encoder_dtype(), data.plan
    text = TextCache(config.model, dtype, cache)
    latents, masks = LatentCache(config.model, dtype, cache, config.memory.vae_tile), MaskCache(cache)
    share, device = Share(accelerator.process_index, accelerator.num_processes), accelerator.device
    requests = validation_requests(config, plan)
    with stages.stage("text"):
        text.fill(prompts_of(config, plan, requests), device, share)
    with stages.stage("latents"):
        _, found = latents.fill(plan.views(), device, share)
        rejected = agreed([*found, *masks.fill(plan.views(), share)], plan.views(), accelerator)
    report_rejected(rejected, config.data)
    if rejected:
        plan = make_plan(config, without(data.usable, rejected), accelerator.num_processes)
    return Prepared(plan, text, latents, masks, requests, data.captions, [*data.left_out, *rejected])


def agreed(found: Sequence[Rejected], views: Sequence[View], accelerator: Accelerator) -> list[Rejected]:
    """What any process has rejected, one entry a picture in the order of the views, equal in all processes.

    Waits for all processes; afterwards the caches are full.
    """
    everyone: list[Rejected] = gather_object(list(found)) if accelerator.num_processes > 1 else list(found)
    first = {(each.source, each.name): each for each in sorted(everyone, key=lambda each: each.reason, reverse=True)}
    places = dict.fromkeys((view.picture.source, view.picture.name) for view in views)
    return [first[place] for place in places if place in first]


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
