"""Stable Diffusion 3: where its parts are, loading them, and what one prediction is.

Shapes: b samples, c = 16 latent channels, h and w an eighth of the picture's, t text tokens (77 + T5's), e = 4096 text
width, p = 2048 pooled width (for SD3 Medium; other sizes follow from the configs).
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
    """Stable Diffusion 3 and 3.5 Medium, as a folder in diffusers' layout, a single file, or from the hub."""

    family: Literal["sd3"] = "sd3"
    """Stable Diffusion 3 (MMDiT)."""
    pretrained: Annotated[str, Field(min_length=1)] = SD3_MEDIUM
    """A hub name (owner/name), a folder in diffusers' layout, a single .safetensors file, or demo:tiny-sd3."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Start the transformer from its weights, or from random ones (training from scratch; only its config is read)."""
    transformer: str | None = None
    """Another transformer: its folder or single file, or a pipeline's folder or hub name that holds one."""
    vae: str | None = None
    """Another autoencoder: its folder, or a pipeline's folder or hub name that holds one."""
    text_encoders: str | None = None
    """A pipeline's folder or hub name for tokenizers and text encoders; with a single file, for what it lacks."""
    t5: bool = True
    """Use the T5 text encoder; without it its part of the prompt is zeros (saves 9.5 GB of download)."""
    t5_length: Annotated[int, Field(ge=1, le=512)] = 256
    """Tokens of the T5 prompt; 77 to 256 are in use."""

    def problems(self) -> Iterator[Problem]:
        """Parts that are nowhere, and files that cannot be read; nothing is built or fetched."""
        yield from sd3_sources.problems(self)

    def part(self, name: str) -> Part:
        """Where a part is (``transformer``, ``vae``, ``scheduler``, ``tokenizer_2``), fetched if need be.

        Raises:
            UserError: it is not there, or cannot be fetched.
        """
        return sd3_sources.locate(self, name)

    def fetch(self) -> None:
        """Fetch every part that comes from the hub, after a look at the disk.

        Raises:
            UserError: they do not fit, or cannot be fetched.
        """
        fetch(sd3_sources.hub_parts(self))

    def transformer_config(self, fetch: bool = True) -> ModelConfig | None:
        """The transformer's ``config.json``.

        Args:
            fetch: whether a hub repository may be asked; if not, SD3 Medium's is known, another's is None.
        """
        name = self.transformer or self.pretrained
        if not fetch and is_hub_name(name):
            return sd3_medium_config() if name == SD3_MEDIUM else None
        part = self.part("transformer")
        return part.config() if part.file is None else open_file(part.file).transformer_config

    def known_config(self) -> ModelConfig:
        """The transformer's ``config.json``, fetched only where it is not known without."""
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
        """Tokens of a prompt that the transformer sees: CLIP's, then T5's."""
        return CLIP_TOKENS + self.t5_length

    def blocks(self) -> int:
        """How many blocks the transformer has."""
        return int(self.known_config()["num_layers"])

    def shapes(self, fetch: bool = True) -> Mapping[str, Shape] | None:
        """Parameters of the transformer and their shapes, without torch; None if they are not known without a fetch."""
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
        """The transformer, frozen, quantised while loading: host memory holds one layer at a time.

        Args:
            precision: how weights are held.
            device: where to.
            seed: for random weights (``init: random``).
            on_host: whether the module of that name stays in host memory.
            sizes: (width, height) in pixels of all pictures it will see: positions are cut to them; None: kept whole.
            cache: the cache's root, where a quantised base is kept for the next start; None: it is not kept.

        Raises:
            UserError: weights are missing or do not fit the config.
        """
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
            kept = QuantisedBase(cache, config, part, precision, device)
            model = kept.load(on_host) or kept.make(on_host, fresh)
        if sizes is not None:
            crop_to(model, sizes, tensors, precision.base_dtype())
        return model

    def parameter_count(self) -> int:
        """Parameters of the transformer: quantised layers count as what they stand for."""
        return sum(math.prod(shape) for shape in parameter_shapes(self.known_config()).values())

    def empty_transformer(
        self,
        precision: WeightPrecision,
        device: torch.device,
        on_host: Callable[[str], bool] = lambda name: False,
        sizes: Collection[Size] | None = None,
    ) -> Transformer:
        """The transformer as ``load_transformer`` makes it, without values; only its config is needed.

        Under fake tensors it takes no memory; otherwise as much as the real one.

        Args:
            precision: how weights are held.
            device: where to.
            on_host: as for ``load_transformer``.
            sizes: as for ``load_transformer``.
        """
        from simpletune.models.sd3_transformer import EmptyTensors, crop_to, load

        config = self.known_config()
        model = load(config, EmptyTensors(config), precision, device, on_host)
        if sizes is not None:
            crop_to(model, sizes, lambda: EmptyTensors(config), precision.base_dtype())
        return model

    def load_vae(self, device: torch.device, dtype: torch.dtype, tile: int | None = None) -> nn.Module:
        """The autoencoder (AutoencoderKL, or AutoencoderTiny), frozen.

        Args:
            device: where to.
            dtype: of its weights.
            tile: pixels of the tiles in which larger pictures go through an AutoencoderKL; None: whole.
        """
        vae = load_autoencoder(self.part("vae"), dtype).to(device).eval().requires_grad_(False)
        if tile is not None:
            use_tiles(vae, tile)
        return vae

    def vae_fingerprint(self) -> str:
        """A short name for the autoencoder's content."""
        return self.part("vae").fingerprint()

    def encode_pictures(self, vae: Any, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Pictures [b, 3, 8h, 8w] in -1..1 to latents [b, c, h, w], fp32: the posterior's mode, shifted, scaled.

        Args:
            noise: normal noise [b, c, h, w]; with it, a draw from the posterior instead of its mode.
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
        """Latents [b, c, h, w] to pictures [b, 3, 8h, 8w] in 0..1, fp32."""
        raw = z.float() / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        pixels = vae.decode(raw.to(vae.dtype), return_dict=False)[0]
        return (pixels.float() / 2 + 0.5).clamp(0, 1)

    def prompts(self, dtype: torch.dtype) -> Prompts:
        """The text encoders, each loaded when it is needed."""
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
        """(c, h, w) of the latents of a picture in pixels."""
        config = self.transformer_config()
        assert config is not None
        return config["in_channels"], height // 8, width // 8


def predict_velocity(
    model: nn.Module,
    z_t: Tensor,  # [b, c, h, w]
    sigma: Tensor,  # [b], fp32
    prompt_embeds: Tensor,  # [b, t, e]
    pooled: Tensor,  # [b, p]; with a modulation plan its rows, [b, m]
    dtype: torch.dtype,
) -> Tensor:  # [b, c, h, w]
    """The velocity that the transformer sees at z_t; its timestep is 1000 sigma.

    Args:
        dtype: the type of activations.
    """
    return model(
        hidden_states=z_t.to(dtype),
        timestep=timestep_of(sigma),
        encoder_hidden_states=prompt_embeds.to(dtype),
        pooled_projections=pooled.to(dtype),
        return_dict=False,
    )[0]
