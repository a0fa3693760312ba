"""Stable Diffusion 3: where its parts are, loading them, and what one prediction is.

Shapes: b samples, c = 16 latent channels, h and w an eighth of the picture's, t text tokens (77 + T5's), e = 4096 text
width, p = 2048 pooled width (for SD3 Medium; other sizes follow from the configs).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from simpletune.models.hub import is_hub_name, part_folder
from simpletune.models.sd3_shapes import Shape, parameter_shapes, sd3_medium_config
from simpletune.models.weights import fingerprint
from simpletune.options import Option, Problem, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.sd3_text import Prompts
    from simpletune.quant.precision import WeightPrecision

SD3_MEDIUM = "stabilityai/stable-diffusion-3-medium-diffusers"


class SD3(Option):
    """Stable Diffusion 3 and 3.5 Medium, in diffusers' folder layout."""

    family: Literal["sd3"] = "sd3"
    """Stable Diffusion 3 (MMDiT)."""
    pretrained: Annotated[str, Field(min_length=1)] = SD3_MEDIUM
    """A hub name (owner/name), a local folder in diffusers' layout, or demo:tiny-sd3."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Start the transformer from its weights, or from random ones (training from scratch; only its config is read)."""
    transformer: str | None = None
    """Another transformer: its folder, or a pipeline's folder or hub name that holds one."""
    vae: str | None = None
    """Another autoencoder: its folder, or a pipeline's folder or hub name that holds one."""
    text_encoders: str | None = None
    """A pipeline's folder or hub name to take tokenizers and text encoders from."""
    t5: bool = True
    """Use the T5 text encoder; without it its part of the prompt is zeros (saves 9.5 GB of download)."""
    t5_length: Annotated[int, Field(ge=1, le=512)] = 256
    """Tokens of the T5 prompt; 77 to 256 are in use."""

    def problems(self) -> Iterator[Problem]:
        """Parts that are neither local folders nor hub names, and local folders that lack a part."""
        for field in ("pretrained", "transformer", "vae", "text_encoders"):
            value = getattr(self, field)
            if value is None or is_hub_name(value):
                continue
            if not Path(value).is_dir():
                yield Problem(f"model.{field}", f"{value} is not a folder, nor a hub name (owner/name). Check the path")
        if not is_hub_name(self.pretrained) and Path(self.pretrained).is_dir():
            for part in self._parts_of_pretrained():
                if not (Path(self.pretrained) / part).is_dir():
                    yield Problem("model.pretrained", f"{self.pretrained} has no {part}/ folder (diffusers' layout)")

    def _parts_of_pretrained(self) -> list[str]:
        """The sub-folders that the pretrained pipeline must hold."""
        parts = ["scheduler"]
        parts += ["transformer"] if self.transformer is None else []
        parts += ["vae"] if self.vae is None else []
        if self.text_encoders is None:
            for suffix in ("", "_2", "_3") if self.t5 else ("", "_2"):
                parts += [f"tokenizer{suffix}", f"text_encoder{suffix}"]
        return parts

    def folder(self, part: str) -> Path:
        """The local folder of a part (``transformer``, ``vae``, ``scheduler``, ``tokenizer_2``), fetched if need be.

        Raises:
            UserError: it is not there, or cannot be fetched.
        """
        override = {"transformer": self.transformer, "vae": self.vae}.get(part)
        if override is None and part.startswith(("tokenizer", "text_encoder")):
            override = self.text_encoders
        if override is None:
            return part_folder(self.pretrained, part, self.revision)
        if (Path(override) / "config.json").exists():
            return Path(override)
        return part_folder(override, part)

    def transformer_config(self, fetch: bool = True) -> dict[str, Any] | None:
        """The transformer's ``config.json``.

        Args:
            fetch: whether a hub repository may be asked; if not, SD3 Medium's is known, another's is None.
        """
        name = self.transformer or self.pretrained
        if not fetch and is_hub_name(name):
            return sd3_medium_config() if name == SD3_MEDIUM else None
        file = self.folder("transformer") / "config.json"
        try:
            return json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}). It describes the transformer") from None

    def shapes(self, fetch: bool = True) -> Mapping[str, Shape] | None:
        """Parameters of the transformer and their shapes, without torch; None if they are not known without a fetch."""
        config = self.transformer_config(fetch)
        return None if config is None else parameter_shapes(config)

    def load_transformer(self, precision: WeightPrecision, device: torch.device, seed: int = 0) -> nn.Module:
        """The transformer, frozen, quantised while loading: host memory holds one layer at a time.

        Args:
            precision: how weights are held.
            device: where to.
            seed: for random weights (``init: random``).

        Raises:
            UserError: weights are missing or do not fit the config.
        """
        from simpletune.models.sd3_transformer import load

        config = self.transformer_config()
        assert config is not None
        source = None if self.init == "random" else self.folder("transformer")
        return load(config, source, precision, device, seed)

    def load_vae(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The autoencoder (AutoencoderKL, or AutoencoderTiny), frozen."""
        import diffusers

        folder = self.folder("vae")
        name = json.loads((folder / "config.json").read_text())["_class_name"]
        if name not in ("AutoencoderKL", "AutoencoderTiny"):
            raise UserError(f"model.vae: {folder} holds a {name}; SD3 needs an AutoencoderKL or AutoencoderTiny")
        vae = getattr(diffusers, name).from_pretrained(folder, dtype=dtype, local_files_only=True)
        return vae.to(device).eval().requires_grad_(False)

    def vae_fingerprint(self) -> str:
        """A short name for the autoencoder's content."""
        return fingerprint(self.folder("vae"))

    def encode_pictures(self, vae: Any, pixels: Tensor) -> Tensor:
        """Pictures [b, 3, 8h, 8w] in -1..1 to latents [b, c, h, w], fp32: the posterior's mode, shifted, scaled."""
        output = vae.encode(pixels.to(vae.dtype))
        raw = output.latent_dist.mode() if hasattr(output, "latent_dist") else output.latents
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
        return Prompts(self.folder, self.t5_length, self.t5, config["joint_attention_dim"], dtype)

    def scheduler(self) -> Any:
        """The sampler's schedule of noise levels (diffusers' FlowMatchEulerDiscreteScheduler)."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler.from_pretrained(self.folder("scheduler"), local_files_only=True)

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
    pooled: Tensor,  # [b, p]
    dtype: torch.dtype,
) -> Tensor:  # [b, c, h, w]
    """The velocity that the transformer sees at z_t; its timestep is 1000 sigma.

    Args:
        dtype: the type of activations.
    """
    return model(
        hidden_states=z_t.to(dtype),
        timestep=1000.0 * sigma,
        encoder_hidden_states=prompt_embeds.to(dtype),
        pooled_projections=pooled.to(dtype),
        return_dict=False,
    )[0]
