"""The result of the prepare stages, the caches that they fill, and the prompts beside those of the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image, ImageOps

from simpletune.config.schema import TrainConfig
from simpletune.config.validation_schedule import drift_prompts
from simpletune.data.plan import Plan
from simpletune.data.samples import Crop
from simpletune.data.sources.holes import hole_pixels
from simpletune.data.sources.image_files import crop_to_bucket, decode_image
from simpletune.data.sources.source import RejectedEntry
from simpletune.data.storage.cache import Cache
from simpletune.data.storage.claims import KeyRange
from simpletune.models.shared.buckets import Size
from simpletune.stages.latent_cache import LatentCache
from simpletune.stages.sample import ImageRequest, mask_pixels
from simpletune.stages.text_cache import TextCache
from simpletune.system.options import UserError
from simpletune.system.stage_timer import StageTimer


@dataclass
class PreparedData:
    """The result of the prepare stages.

    Args:
        plan: the run's plan.
        text: the cached prompt embeddings.
        latents: the cached latents of the pictures, with their masks.
        requests: the validation pictures to generate.
        captions: a description of where the captions come from.
        left_out: the unusable entries that training skips.
        notes: further remarks on the data, for a plan that lists no samples to derive them from.
    """

    plan: Plan
    text: TextCache
    latents: LatentCache
    requests: list[ImageRequest]
    captions: str
    left_out: list[RejectedEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """Return the training data and the skipped entries, for the run's folder."""
        rows = self.plan.manifest()
        return {
            "captions": self.captions,
            "sources": [asdict(share) for share in self.plan.shares()],
            "samples": [row for row in rows if not row.get("held_out")],
            "held_out": [row for row in rows if row.get("held_out")],
            "left_out": [asdict(each) for each in self.left_out],
        }

    @property
    def remote(self) -> list[Cache]:
        """The caches in an object store."""
        return [cache for cache in (self.latents.cache, *self.text.caches) if cache.remote]

    def sizes(self) -> set[Size]:
        """Return (width, height) in pixels of every picture that the denoiser will see."""
        return {*self.plan.sizes(), *((request.width, request.height) for request in self.requests)}


class Caches:
    """The caches of a run, filled in their stages.

    Args:
        config: the configuration, with folders resolved.
        accelerator: provides the processes and the device.
        stages: records the time and memory of each stage.
    """

    def __init__(self, config: TrainConfig, accelerator: Accelerator, stages: StageTimer):
        place, dtype = config.output.place, config.precision.encoder_dtype()
        self.text = TextCache(config.model, dtype, place, config.text)
        self.latents = LatentCache.from_config(config, place)
        self._share = KeyRange(accelerator.process_index, accelerator.num_processes)
        self._accelerator, self._stages = accelerator, stages

    def fill_text(self, prompts: Iterable[str]) -> None:
        """Encode the prompts that are not cached."""
        with self._stages.stage("text"):
            self.text.fill(prompts, self._accelerator.device, self._share)

    def fill_images(self, parts: Sequence[Sequence[Crop]]) -> list[RejectedEntry]:
        """Encode the crops that are not cached, one part after the other.

        Returns:
            What any process has rejected, one entry per picture in the order of the crops; equal in all processes.
        """
        found: list[RejectedEntry] = []
        with self._stages.stage("latents"):
            for views in parts:
                found += self.latents.fill(views, self._accelerator.device, self._share)[1]
            if self._accelerator.num_processes > 1:  # waits for all of them
                found = gather_object(found)
        found.sort(key=lambda each: each.reason, reverse=True)
        first = {(each.source, each.name): each for each in found}  # whichever process has met the picture
        places = dict.fromkeys((view.image.source, view.image.name) for views in parts for view in views)
        return [first[place] for place in places if place in first]


def with_class(config: TrainConfig, captions: Sequence[str]) -> list[str]:
    """Return the captions, and their class prompts if every micro-batch has a second pass with them."""
    of_class = [config.prior.class_prompt(caption) for caption in captions] if config.prior.second_pass else []
    return [*captions, *of_class]


def prompts_outside_data(config: TrainConfig, requests: Sequence[ImageRequest]) -> list[str]:
    """Return the prompts that do not come from the data: validation prompts, and those for which drift is measured."""
    return [*(text for request in requests for text in request.texts), *drift_prompts(config.validation)]


def validation_requests(config: TrainConfig, plan: Plan) -> list[ImageRequest]:
    """Return the fixed prompts and seeds of a run's validation pictures, with their own pictures and masks if it names
    any."""
    option = config.validation
    if option.prompts is not None:
        prompts = option.prompts
    else:  # of the picture that is painted into
        prompts = [plan.evaluation(1)[0].caption if config.model.inpaints else plan.example()]
    (width, height), negative = config.image_size(), config.model.text.steered_from(option.negative_prompt)
    requests = [
        ImageRequest(prompt, option.seed + number, negative, width, height, option.steps, option.guidance)
        for number, prompt in enumerate(prompts)
    ]
    if option.images is None or option.masks is None:
        return requests
    return [
        replace(request, image=Path(image), mask=Path(mask), strength=1.0)
        for request, image, mask in zip(requests, option.images, option.masks, strict=True)
    ]


def require_inputs(requests: Sequence[ImageRequest], place: int) -> None:
    """Check the pictures and masks that validation names, before anything is encoded; ``place`` as for
    ``mask_pixels``.

    Raises:
        UserError: one of them cannot be used.
    """
    for number, request in enumerate(requests):
        try:
            if request.mask is not None:
                mask_pixels(request, place)
        except UserError as error:
            named = str(error).replace("--mask", f"validation.masks.{number}")
            raise UserError(named.replace("--image", f"validation.images.{number}")) from None


def with_inputs(config: TrainConfig, plan: Plan, requests: list[ImageRequest]) -> list[ImageRequest]:
    """Take the pictures of the validation loss if validation names none and the model inpaints, cropped as they are
    there, with their own masks or of the middle."""
    if config.validation.images is not None or not config.model.inpaints:
        return requests
    samples, place = plan.evaluation(len(requests)), config.model.autoencoder.downsampling
    return [_add_inputs(request, sample.view, place) for request, sample in zip(requests, samples, strict=True)]


def _add_inputs(request: ImageRequest, view: Crop, place: int) -> ImageRequest:
    image, own = _crop(view), view.hole is not None and view.hole.kind == "own"
    if own:
        found = replace(request, image=image, mask=Image.fromarray(hole_pixels(view, place)), strength=1.0)
        with suppress(UserError):  # the mask lies outside of the centre that is generated
            mask_pixels(found, place)
            return found
    size = (request.width, request.height)  # of the mask, too: the middle of what is generated, not of the crop
    image = ImageOps.fit(image, size, Image.Resampling.LANCZOS)
    return replace(request, image=image, mask=_middle_mask(size), strength=1.0)


def _crop(view: Crop) -> Image.Image:
    """Crop a picture as training does."""
    pixels = crop_to_bucket(
        decode_image(view.image), view.bucket, view.offset, view.flip, view.augmentation
    )  # [3, h, w] in -1..1
    return Image.fromarray(((pixels + 1) * 127.5).round().astype("uint8").transpose(1, 2, 0))


def _middle_mask(size: Size) -> Image.Image:
    """Build a mask of the middle half of each side."""
    mask, (width, height) = Image.new("L", size), size
    mask.paste(255, (width // 4, height // 4, width - width // 4, height - height // 4))
    return mask
