"""Stable Diffusion 3: locate its parts, load them, and predict the velocity.

Shapes: b samples, c = 16 latent channels, h and w an eighth of the picture's, t text tokens (77 + T5's), e = 4096 text
width, p = 2048 pooled width (for SD3 Medium; the configs give other sizes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from simpletune.hub.fetch import fetch, is_hub_name
from simpletune.models import sd3_sources
from simpletune.models.buckets import Size
from simpletune.models.parts import Part, load_autoencoder, loading, use_tiles
from simpletune.models.sd3_shapes import ModelConfig, Shape, parameter_shapes, sd3_medium_config, timestep_of
from simpletune.models.single_file import open_file
from simpletune.options import Option, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.sd3_text import Prompts
    from simpletune.models.sd3_transformer import TensorSource
    from simpletune.models.transformer import Transformer
    from simpletune.quant.precision import WeightPrecision

SD3_MEDIUM = "stabilityai/stable-diffusion-3-medium-diffusers"
CLIP_TOKENS = 77


class SD3(Option):
    """Stable Diffusion 3 and 3.5 Medium, from a folder in diffusers' layout, a single file or the Hub."""

    family: Literal["sd3"] = "sd3"
    """Stable Diffusion 3 (MMDiT)."""
    pretrained: Annotated[str, Field(min_length=1)] = SD3_MEDIUM
    """A Hub name (owner/name), a folder in diffusers' layout, a single .safetensors file, or demo:tiny-sd3."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Start from the pretrained transformer, or from random weights (training from scratch; reads only its config)."""
    transformer: str | None = None
    """Replaces the transformer: its folder or single file, or the folder or Hub name of a pipeline."""
    vae: str | None = None
    """Replaces the autoencoder: its folder, or the folder or Hub name of a pipeline."""
    text_encoders: str | None = None
    """Folder or Hub name of a pipeline with tokenizers and text encoders; a single file's own encoders take
    precedence."""
    t5: bool = True
    """Use the T5 text encoder. Without it, zeros replace its embeddings, which saves a download of 9.5 GB."""
    t5_length: Annotated[int, Field(ge=1, le=512)] = 256
    """Length of the T5 prompt in tokens; 77 to 256 are common."""

    def problems(self) -> Iterator[Problem]:
        """Find missing parts and unreadable files without building or downloading anything."""
        yield from sd3_sources.problems(self)

    def part(self, name: str) -> Part:
        """Locate a part (``transformer``, ``vae``, ``scheduler``, ``tokenizer_2``), downloading it if necessary.

        Raises:
            UserError: it is missing, or cannot be downloaded.
        """
        return sd3_sources.locate(self, name)

    def fetch(self) -> None:
        """Download every part that comes from the Hub, after checking the free disk space.

        Raises:
            UserError: the parts do not fit on the disk, or cannot be downloaded.
        """
        fetch(sd3_sources.hub_parts(self))

    def transformer_config(self, fetch: bool = True) -> ModelConfig | None:
        """The transformer's ``config.json``.

        Args:
            fetch: whether to query the Hub. If not, returns SD3 Medium's bundled config, or None for another Hub name.
        """
        name = self.transformer or self.pretrained
        if not fetch and is_hub_name(name):
            return sd3_medium_config() if name == SD3_MEDIUM else None
        part = self.part("transformer")
        return part.config() if part.file is None else open_file(part.file).transformer_config

    def known_config(self) -> ModelConfig:
        """The transformer's ``config.json``, downloaded only if it is not available locally."""
        config = self.transformer_config(fetch=False) or self.transformer_config()
        assert config is not None
        return config

    @property
    def largest_side(self) -> int:
        """Pixels of the longest side that the transformer has positions for."""
        config = self.known_config()
        return int(config["pos_embed_max_size"]) * int(config["patch_size"]) * 8

    @property
    def text_tokens(self) -> int:
        """The number of text tokens that the transformer sees: CLIP's, then T5's."""
        return CLIP_TOKENS + self.t5_length

    def image_tokens(self, size: Size) -> int:
        """The number of image tokens of a picture.

        Args:
            size: (width, height) in pixels.
        """
        pixels = 8 * int(self.known_config()["patch_size"])
        return math.prod(side // pixels for side in size)

    def blocks(self) -> int:
        """The number of transformer blocks."""
        return int(self.known_config()["num_layers"])

    def shapes(self, fetch: bool = True) -> Mapping[str, Shape] | None:
        """The shapes of the transformer's parameters, without torch; None if that needs a download."""
        config = self.transformer_config(fetch)
        return None if config is None else parameter_shapes(config)

    def load_transformer(
        self,
        precision: WeightPrecision,
        device: torch.device,
        seed: int = 0,
        on_host: Callable[[str], bool] = lambda name: False,
        sizes: Collection[Size] | None = None,
        cache: Path | None = None,
    ) -> Transformer:
        """Load the frozen transformer, quantising as it loads, with one layer at a time in host memory.

        Args:
            precision: the weight precision.
            device: the target device.
            seed: seeds random weights (``init: random``).
            on_host: whether the module of a given name stays in host memory.
            sizes: (width, height) in pixels of all pictures it will see; crops the position table to them unless None.
            cache: the root folder of the cache for the quantised base; None disables caching.

        Raises:
            UserError: weights are missing or do not match the config.
        """
        from simpletune.models.fp16_blocks import watch_fp16
        from simpletune.models.quantised_cache import QuantisedBase
        from simpletune.models.sd3_transformer import RandomTensors, crop_to, load, open_tensors

        config, part = self.transformer_config(), self.part("transformer")
        assert config is not None

        def tensors() -> TensorSource:
            if self.init == "random":
                return RandomTensors(config, seed, part.folder)
            source = part.file or part.folder
            assert source is not None
            return open_tensors(source)

        def fresh() -> Transformer:
            return load(config, tensors(), precision, device, on_host, part.place)

        if cache is None or self.init == "random" or not precision.cacheable:
            model = fresh()
        else:
            cached = QuantisedBase(cache, config, part, precision, device)
            model = cached.load(on_host) or cached.make(on_host, fresh)
        if sizes is not None:
            crop_to(model, sizes, tensors, precision.base_dtype())
        return watch_fp16(model, precision.product_dtype())

    def parameter_count(self) -> int:
        """The number of the transformer's parameters before quantisation."""
        return sum(math.prod(shape) for shape in parameter_shapes(self.known_config()).values())

    def empty_transformer(
        self,
        precision: WeightPrecision,
        device: torch.device,
        on_host: Callable[[str], bool] = lambda name: False,
        sizes: Collection[Size] | None = None,
    ) -> Transformer:
        """Build the transformer as ``load_transformer`` does, with uninitialised weights; needs only the config.

        Takes no memory under fake tensors, and otherwise as much as the real one.

        Args:
            precision: the weight precision.
            device: the target device.
            on_host: as for ``load_transformer``.
            sizes: as for ``load_transformer``.
        """
        from simpletune.models.fp16_blocks import watch_fp16
        from simpletune.models.sd3_transformer import EmptyTensors, crop_to, load

        config = self.known_config()
        model = load(config, EmptyTensors(config), precision, device, on_host)
        if sizes is not None:
            crop_to(model, sizes, lambda: EmptyTensors(config), precision.base_dtype())
        return watch_fp16(model, precision.product_dtype())

    def load_vae(self, device: torch.device, dtype: torch.dtype, tile: int | None = None) -> nn.Module:
        """Load the frozen autoencoder (AutoencoderKL or AutoencoderTiny).

        Args:
            device: the target device.
            dtype: the type of its weights.
            tile: side in pixels of the tiles for larger pictures (AutoencoderKL only); None disables tiling.
        """
        vae = load_autoencoder(self.part("vae"), dtype).to(device).eval().requires_grad_(False)
        if tile is not None:
            use_tiles(vae, tile)
        return vae

    def vae_fingerprint(self) -> str:
        """A short hash of the autoencoder's content."""
        return self.part("vae").fingerprint()

    def encode_pictures(self, vae: Any, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Encode pictures [b, 3, 8h, 8w] in -1..1 to fp32 latents [b, c, h, w]: the posterior's mode, shifted, scaled.

        Args:
            noise: normal noise [b, c, h, w]; if given, samples the posterior instead of taking its mode.
        """
        output = vae.encode(pixels.to(vae.dtype))
        if not hasattr(output, "latent_dist"):
            raw = output.latents
        elif noise is None:
            raw = output.latent_dist.mode()
        else:
            raw = output.latent_dist.mean + output.latent_dist.std * noise.to(vae.dtype)
        return (raw.float() - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor

    def decode_latents(self, vae: Any, z: Tensor) -> Tensor:
        """Decode latents [b, c, h, w] to fp32 pictures [b, 3, 8h, 8w] in 0..1."""
        raw = z.float() / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        pixels = vae.decode(raw.to(vae.dtype), return_dict=False)[0]
        return (pixels.float() / 2 + 0.5).clamp(0, 1)

    def prompts(self, dtype: torch.dtype) -> Prompts:
        """The text encoders; each is loaded on demand."""
        from simpletune.models.sd3_text import Prompts

        config = self.transformer_config()
        assert config is not None
        return Prompts(self.part, self.t5_length, self.t5, config["joint_attention_dim"], dtype)

    def scheduler(self) -> Any:
        """The sampler's schedule of noise levels (diffusers' FlowMatchEulerDiscreteScheduler)."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        part = self.part("scheduler")
        with loading(part):
            return FlowMatchEulerDiscreteScheduler.from_config(part.config())

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """(c, h, w) of the latents of a picture whose size is given in pixels."""
        config = self.transformer_config()
        assert config is not None
        return config["in_channels"], height // 8, width // 8


def predict_velocity(
    model: nn.Module,
    z_t: Tensor,  # [b, c, h, w]
    sigma: Tensor,  # [b], fp32
    prompt_embeds: Tensor,  # [b, t, e]
    pooled: Tensor,  # [b, p]; with a modulation plan, its rows [b, m]
    dtype: torch.dtype,
) -> Tensor:  # [b, c, h, w]
    """Predict the velocity at z_t; the transformer's timestep is 1000 sigma.

    Args:
        dtype: the type of the activations.
    """
    return model(
        hidden_states=z_t.to(dtype),
        timestep=timestep_of(sigma),
        encoder_hidden_states=prompt_embeds.to(dtype),
        pooled_projections=pooled.to(dtype),
        return_dict=False,
    )[0]
