"""A family's autoencoder: between pictures and the latents that its denoiser reads.

Shapes: b pictures, c latent channels; h and w the latents' height and width, whose every place is a square of s pixels
a side (``downsampling``). The autoencoder's own, raw latents may be arranged otherwise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import (
    Part,
    explain_load_errors,
    only_local,
    require_tensor_shapes,
    require_weights,
    tensor_shapes,
)
from simpletune.system.options import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.engine.quant.precision import WeightPrecision

LDM_VAE = "first_stage_model."  # the prefix that diffusers' converter expects
PADDING = "padding_mode"  # in config.json: torch's of convolutions; diffusers has no such key
PADDINGS = ("zeros", "reflect")


class Statistics(Protocol):
    """How raw latents become those that a denoiser reads, of mean 0 and deviation 1 or near them."""

    def normalise(self, raw: Tensor) -> Tensor:
        """Turn raw latents in any type into fp32 ones [b, c, h, w]."""

    def restore(self, z: Tensor) -> Tensor:
        """Invert ``normalise``, in fp32."""

    def arrange(self, z: Tensor) -> Tensor:
        """Put numbers [b, c, h, w] in the places of raw latents, as they are."""


class ShiftAndScale(NamedTuple):
    """One shift and one scale for all channels."""

    shift: float
    scale: float

    def normalise(self, raw: Tensor) -> Tensor:
        return (raw.float() - self.shift) * self.scale

    def restore(self, z: Tensor) -> Tensor:
        return z.float() / self.scale + self.shift

    def arrange(self, z: Tensor) -> Tensor:
        return z


class MeanAndDeviation(NamedTuple):
    """A mean and a deviation for each channel, after squares of ``patch`` x ``patch`` raw places became channels of one
    place, in the order (raw channel, row, column)."""

    mean: Tensor  # fp32 [c, 1, 1]
    deviation: Tensor  # fp32 [c, 1, 1]
    patch: int = 1

    def normalise(self, raw: Tensor) -> Tensor:
        from torch.nn.functional import pixel_unshuffle

        return (pixel_unshuffle(raw.float(), self.patch) - self.mean) / self.deviation

    def restore(self, z: Tensor) -> Tensor:
        return self.arrange(z.float() * self.deviation + self.mean)

    def arrange(self, z: Tensor) -> Tensor:
        from torch.nn.functional import pixel_shuffle

        return pixel_shuffle(z, self.patch)


class Kind:
    """One of diffusers' classes of autoencoders; by default as AutoencoderKL."""

    frames: ClassVar[bool] = False
    """Whether it reads videos [b, 3, frames, height, width], of which a picture is one frame."""

    def made(self, config: ModelConfig) -> tuple[int, int]:
        """Return (c, s) of the latents that it makes, by its ``config.json``."""
        return config.get("latent_channels", 4), _halved(config.get("block_out_channels", (64,)))

    def problem(self, config: ModelConfig) -> str | None:
        """Say why its latents have other statistics than ``statistics`` reads; None: they have these."""
        if config.get("latents_mean") is None and config.get("latents_std") is None:
            return None
        return (
            "has latents_mean and latents_std, as Playground 2.5 has; latents are only shifted and scaled here. Use a "
            "model without them"
        )

    def statistics(self, vae: Any) -> Statistics:
        """Return the statistics of a loaded one."""
        return ShiftAndScale(vae.config.shift_factor or 0.0, vae.config.scaling_factor)

    def use_tiles(self, vae: Any, pixels: int) -> None:
        """Process pictures larger than a tile of this side in tiles that overlap by a quarter (diffusers' tiling)."""
        vae.enable_tiling()
        vae.tile_sample_min_size = pixels
        vae.tile_latent_min_size = pixels // _halved(vae.config.block_out_channels)


class Tiny(Kind):
    """AutoencoderTiny, which has no posterior."""

    def made(self, config: ModelConfig) -> tuple[int, int]:
        return config.get("latent_channels", 4), _halved(config.get("num_encoder_blocks", (1, 3, 3, 3)))

    def use_tiles(self, vae: Any, pixels: int) -> None:
        """Do nothing: its tiled encoder assumes 4 latent channels, and SD3 has 16."""


class Flux2(Kind):
    """AutoencoderKLFlux2: 2 x 2 places become one, and a batch norm has the statistics, which come with the weights."""

    def made(self, config: ModelConfig) -> tuple[int, int]:
        patch = config.get("patch_size", (2, 2))
        blocks = config.get("block_out_channels", (128, 256, 512, 512))
        return math.prod(patch) * config.get("latent_channels", 32), patch[0] * _halved(blocks)

    def statistics(self, vae: Any) -> Statistics:
        mean, variance = (each.float()[:, None, None] for each in (vae.bn.running_mean, vae.bn.running_var))
        return MeanAndDeviation(mean, (variance + vae.config.batch_norm_eps).sqrt(), vae.config.patch_size[0])


class QwenImage(Kind):
    """AutoencoderKLQwenImage, made for videos (as Wan 2.1's): a mean and a deviation for each channel."""

    frames: ClassVar[bool] = True

    def made(self, config: ModelConfig) -> tuple[int, int]:
        # diffusers' spelling
        return config.get("z_dim", 16), 2 ** len(config.get("temperal_downsample", (False, True, True)))

    def problem(self, config: ModelConfig) -> str | None:
        count = self.made(config)[0]
        mean, deviation = (config.get(name) or () for name in ("latents_mean", "latents_std"))
        if len(mean) == len(deviation) == count and min(deviation) > 0:
            return None
        return f"needs {count} latents_mean and {count} latents_std above 0. Download it again"

    def statistics(self, vae: Any) -> Statistics:
        import torch

        mean, deviation = (
            torch.tensor(each, device=vae.device)[:, None, None]
            for each in (vae.config.latents_mean, vae.config.latents_std)
        )
        return MeanAndDeviation(mean, deviation)

    def use_tiles(self, vae: Any, pixels: int) -> None:
        vae.enable_tiling(pixels, pixels, pixels * 3 // 4, pixels * 3 // 4)


KINDS = {
    "AutoencoderKL": Kind(),
    "AutoencoderTiny": Tiny(),
    "AutoencoderKLFlux2": Flux2(),
    "AutoencoderKLQwenImage": QwenImage(),
}


def _halved(blocks: Any) -> int:
    """Return how many times smaller a side becomes in blocks that halve it between them."""
    return 2 ** (len(blocks) - 1)


class Latents(NamedTuple):
    """The latents that a family's denoiser reads."""

    kinds: tuple[str, ...]  # the classes that make them, of ``KINDS``
    downsampling: int  # s


STABLE_DIFFUSION = Latents(("AutoencoderKL", "AutoencoderTiny"), 8)


@dataclass(frozen=True)
class Autoencoder:
    """See the module. It owns no weights: ``load`` returns a module, which ``encode`` and ``decode`` take."""

    latents: Latents
    part: Callable[[], Part]  # locates it, downloading it if necessary
    known_part: Callable[[], Part]  # locates its configuration
    denoiser_channels: Callable[[], int]  # c, by the denoiser's configuration
    usual: ModelConfig  # the configuration of the family's own

    @property
    def downsampling(self) -> int:
        """s, the pixels a side of a latent's place."""
        return self.latents.downsampling

    @property
    def channels(self) -> int:
        """c."""
        return self.denoiser_channels()

    def shape(self, width: int, height: int) -> tuple[int, int, int]:
        """Return (c, h, w) of the latents of a picture whose size is given in pixels."""
        return self.channels, height // self.downsampling, width // self.downsampling

    def dtype(self, precision: WeightPrecision) -> torch.dtype:
        """Return the type in which it runs: that of the products, but fp32 instead of fp16 unless its own configuration
        says that it needs no upcast."""
        # SD3's and SD 1.5's say so, too, though SD3's overflows in fp16. So this counts only in a family whose own
        # autoencoder says the opposite: one that says no was then made for fp16.
        part = self.known_part()  # a single file's weights may have come with another configuration
        made_for_fp16 = self.usual.get("force_upcast") and part.file is None
        made_for_fp16 = made_for_fp16 and part.config().get("force_upcast") is False
        return precision.product_dtype() if made_for_fp16 else precision.encoder_dtype()

    def load(self, device: torch.device, dtype: torch.dtype, tile: int | None = None) -> nn.Module:
        """Load it, frozen, with tiles of ``tile`` pixels a side for larger pictures (None: none). Raises UserError if
        it is not for these latents (``autoencoder_config``), or its weights do not fit it."""
        part = self.part()
        vae = load_autoencoder(part, dtype, self.latents, self.channels)
        return _ready(vae.to(device), tile, part.config())

    def empty(self, dtype: torch.dtype, tile: int | None = None) -> nn.Module:
        """Build it as ``load`` does, without values."""
        from torch import nn

        config = autoencoder_config(self.known_part(), self.latents, self.channels)
        vae = _class_of(config).from_config(_of_diffusers(config))
        nn.Module.to(vae, dtype)  # diffusers' own .to() prints a warning that does not apply
        return _ready(vae, tile, config)

    def encode(self, vae: Any, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Encode pictures [b, 3, s h, s w] in -1..1 to fp32 latents [b, c, h, w]: the posterior's mode, normalised.

        Args:
            noise: normal noise [b, c, h, w]; if given, samples the posterior instead of taking its mode.
        """
        kind = _kind_of(vae)
        statistics = kind.statistics(vae)
        output = vae.encode(_inside(kind, pixels.to(vae.dtype)))
        if not hasattr(output, "latent_dist"):
            raw = output.latents
        elif noise is None:
            raw = output.latent_dist.mode()
        else:
            noise = _inside(kind, statistics.arrange(noise).to(vae.dtype))
            raw = output.latent_dist.mean + output.latent_dist.std * noise
        return statistics.normalise(_outside(kind, raw))

    def decode(self, vae: Any, z: Tensor) -> Tensor:
        """Decode latents [b, c, h, w] to fp32 pictures [b, 3, s h, s w] in 0..1."""
        kind = _kind_of(vae)
        raw = kind.statistics(vae).restore(z)
        pixels = _outside(kind, vae.decode(_inside(kind, raw.to(vae.dtype)), return_dict=False)[0])
        return (pixels.float() / 2 + 0.5).clamp(0, 1)


def _kind_of(vae: nn.Module) -> Kind:
    return KINDS[type(vae).__name__]


def _class_of(config: ModelConfig) -> Any:
    """Return diffusers' class, which says nothing of what FLUX.2's published configuration has and it ignores."""
    import diffusers

    logging.getLogger("diffusers.configuration_utils").addFilter(_is_news)
    return getattr(diffusers, config["_class_name"])


def _is_news(record: logging.LogRecord) -> bool:
    return "{'force_upcast': True} were passed to AutoencoderKLFlux2" not in record.getMessage()


def _inside(kind: Kind, tensor: Tensor) -> Tensor:
    """Turn tensors of pictures into those of videos, for a class that reads them."""
    return tensor[:, :, None] if kind.frames else tensor


def _outside(kind: Kind, tensor: Tensor) -> Tensor:
    return tensor[:, :, 0] if kind.frames else tensor


def _of_diffusers(config: ModelConfig) -> ModelConfig:
    return {key: value for key, value in config.items() if key != PADDING}


def _ready(vae: nn.Module, tile: int | None, config: ModelConfig) -> nn.Module:
    if tile is not None:
        _kind_of(vae).use_tiles(vae, tile)
    if config.get(PADDING, PADDINGS[0]) != PADDINGS[0]:
        from torch import nn

        # as forks of sd-scripts do (bluvoll/sd-scripts, ``use_reflection_padding``): what a convolution pads itself
        for module in vae.modules():
            if isinstance(module, nn.Conv2d) and any(module.padding):
                module.padding_mode = config[PADDING]
    return vae.eval().requires_grad_(False)


def autoencoder_config(part: Part, latents: Latents, channels: int | None) -> ModelConfig:
    """Read an autoencoder's configuration. Raises UserError if it is of another class, or its latents have other
    statistics, another size or other ``channels`` (None: unknown) than the denoiser reads."""
    config = part.config()
    name = config.get("_class_name")
    if name not in latents.kinds:
        needed = " or ".join(latents.kinds)
        raise UserError(f"model.vae: {part.place} is a {name}; the model needs an {needed}")
    if part.changes and name != "AutoencoderKL":
        changed = ", ".join(f"{key} {value}" for key, value in part.changes.items())
        raise UserError(
            f"model.vae: {part.place} is an {name}, whose latents {changed} would not fit. Remove model.vae_scale, "
            "vae_shift and vae_padding, or name an AutoencoderKL"
        )
    kind = KINDS[name]
    try:
        problem, (made, downsampling) = kind.problem(config), kind.made(config)
    except (LookupError, TypeError) as error:
        raise UserError(f"model.vae: {part.place} has a damaged configuration ({error}). Download it again") from error
    if problem is not None:
        raise UserError(f"model.vae: {part.place} {problem}")
    if (padding := config.get(PADDING, PADDINGS[0])) not in PADDINGS:
        raise UserError(
            f"model.vae: {part.place} has the {PADDING} {padding!r} in its config.json. Use {' or '.join(PADDINGS)}"
        )
    for what, found, wanted in (
        ("channels", made, channels),
        ("pixels a side for each place", downsampling, latents.downsampling),
    ):
        if wanted is not None and found != wanted:
            raise UserError(
                f"model.vae: {part.place} makes latents of {found} {what}, and the model reads {wanted}. Use the "
                "autoencoder of the model's own version"
            )
    return config


def load_autoencoder(part: Part, dtype: torch.dtype, latents: Latents, channels: int | None = None) -> nn.Module:
    """Load an autoencoder on the CPU. Raises UserError if it does not fit (``autoencoder_config``), or its weights do
    not match its configuration."""
    from accelerate import init_empty_weights

    config = autoencoder_config(part, latents, channels)
    name, kind = config["_class_name"], _class_of(config)
    if part.file is None:
        with explain_load_errors(part):
            with init_empty_weights():
                expected = tensor_shapes(kind.from_config(_of_diffusers(config)).state_dict())
            require_weights(part, expected)
            changes = _of_diffusers(part.changes or {})
            return kind.from_pretrained(part.folder, dtype=dtype, **changes, **only_local(part))
    if name != "AutoencoderKL":
        raise UserError(f"model.vae: {part.place} is an {name}, which is read from folders only. Set model.vae to one")
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    original = {LDM_VAE + key: tensor for key, tensor in part.single_file().read("vae").items()}
    with init_empty_weights():
        vae = kind.from_config(_of_diffusers(config))
    tensors = {key: tensor.to(dtype, copy=True) for key, tensor in convert_ldm_vae_checkpoint(original, config).items()}
    require_tensor_shapes(part, tensor_shapes(vae.state_dict()), tensor_shapes(tensors))
    vae.load_state_dict(tensors, assign=True)
    return vae
