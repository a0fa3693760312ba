"""The base class of model families: where a model's parts come from, how they load, how pictures become latents.

A family is an option (a member of the union ``model``) that answers questions with data and pure functions. Levers ask
it for units, shapes and capabilities, never for its name.

Shapes: b samples, c latent channels, h and w an eighth of the picture's.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from simpletune.models.shared import sources
from simpletune.models.shared.buckets import DOWNSAMPLING, Size
from simpletune.models.shared.family_facts import FamilyFacts
from simpletune.models.shared.model_config import ModelConfig, Shape, Shapes
from simpletune.models.shared.parts import Part, explain_load_errors, load_autoencoder, use_tiles
from simpletune.system.hub import fetch, is_hub_name
from simpletune.system.options import Problem, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.engine.quant.precision import WeightPrecision
    from simpletune.models.objectives.objective import Solver, TrainingObjective
    from simpletune.models.shared.denoiser import Denoiser
    from simpletune.models.shared.weights import TensorSource

OnHost = Callable[[str], bool]


class Overlay(Protocol):
    """What changes a model's weights before anything else does: ``model.loras``."""

    @property
    def key(self) -> object:
        """JSON that differs where the weights do."""

    def over(self, family: Family, part: Part) -> TensorSource:
        """The changed tensors of a part."""


class Family(FamilyFacts):
    """A model family: everything that follows from the facts its members state."""

    def problems(self) -> Iterator[Problem]:
        """Find missing parts and unreadable files without building or downloading anything."""
        yield from sources.problems(self)

    def part(self, name: str) -> Part:
        """Locate a part (``transformer``, ``vae``, ``scheduler``, ``tokenizer_2``), downloading it if necessary.
        UserError: it is missing, or cannot be downloaded."""
        return sources.locate_part(self, name)

    def fingerprints(self, sums: Path | None = None) -> dict[str, str]:
        """The fingerprint of every part that a training reads from files, by its name; ``sums`` as for
        ``Part.fingerprint``. A denoiser with random weights counts by its configuration."""

        def short(config: ModelConfig) -> str:
            return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]

        found: dict[str, str] = {}
        for part in map(self.part, self.part_names()):
            if part.name == self.denoiser and self.init == "random":
                found[part.name] = short(self.known_config())
            elif part.folder is not None or part.file is not None:
                found[part.name] = part.fingerprint(sums)
                if part.name == self.denoiser and part.file is not None:  # its marks say what it predicts
                    found.setdefault("scheduler", short(part.single_file().scheduler_settings))
        return found

    def known_part(self, name: str) -> Part:
        """Locate a part's configuration; downloads nothing for a Hub name whose configuration ships."""
        config = self.bundled_config(sources.provider(self, name)[1], name)
        return self.part(name) if config is None else Part(name, None, bundled=config)

    def bundled_config(self, hub_name: str | None, part: str | None = None) -> ModelConfig | None:
        """A part's (default: the trained model's) ``config.json`` for a Hub name whose configurations ship, or None."""
        version = self.hub_names.get(hub_name or "")
        return None if version is None else self.bundled_configs()[version].get(part or self.denoiser)

    @property
    def lacks_tokenizers(self) -> bool:
        """Whether the base is a single file, which contains no tokenizers, and no option names a source of them."""
        return sources.is_single_file(self.pretrained) and self.text_encoders is None

    def fetch(self) -> None:
        """Download every part that comes from the Hub. UserError: they do not fit on the disk, or it fails."""
        fetch(sources.hub_parts(self))

    @property
    def weights_from(self) -> str:
        """Where the trained model comes from: a folder, a file or a Hub name."""
        return getattr(self, self.denoiser) or self.pretrained

    def denoiser_config(self, fetch: bool = True) -> ModelConfig | None:
        """The trained model's ``config.json``.

        Args:
            fetch: whether to query the Hub. If not, returns a bundled configuration, or None for another Hub name.
        """
        name = self.weights_from
        if not fetch and is_hub_name(name):
            return self.bundled_config(name)
        part = self.part(self.denoiser)
        return part.config() if part.file is None else part.single_file().denoiser_config

    def known_config(self) -> ModelConfig:
        """The trained model's ``config.json``, downloaded only if it is not available locally."""
        config = self.denoiser_config(fetch=False) or self.denoiser_config()
        assert config is not None
        return config

    def scheduler_config(self) -> ModelConfig:
        return self.known_part("scheduler").config()

    def is_schedule_known(self) -> bool:
        """Whether ``scheduler_config`` needs no download."""
        value = sources.provider(self, "scheduler")[1]
        return value is None or not is_hub_name(value) or self.bundled_config(value) is not None

    def schedule_source(self) -> str:
        """What ``scheduler_config`` comes from, for messages, if it needs no download."""
        return sources.schedule_source(self)

    def solver(self, objective: TrainingObjective, steps: int, skipped: int) -> Solver:
        """See ``TrainingObjective.solver``, of the objective that the weights were trained with. UserError: the
        scheduler's configuration is damaged, or does not fit it."""
        part = self.part("scheduler")
        with explain_load_errors(part):
            return objective.solver(part.config(), steps, skipped)

    def shapes(self, fetch: bool = True) -> Shapes | None:
        """The shapes of the trained model's parameters, without torch; None if that needs a download."""
        config = self.denoiser_config(fetch)
        return None if config is None else self.shapes_of(config)

    def known_shapes(self) -> dict[str, Shape]:
        """The shapes of the trained model's parameters, with a download if necessary."""
        return self.shapes_of(self.known_config())

    def stored_shapes(self) -> dict[str, Shape]:
        """The same of the model before ``widened``."""
        return self.known_shapes()

    def units(self) -> tuple[str, ...]:
        """See ``units_among``."""
        return self.units_among(self.known_shapes())

    def blocks(self) -> int:
        return len(self.units())

    def parameter_count(self) -> int:
        """The number of the trained model's parameters before quantisation."""
        return sum(math.prod(shape) for shape in self.known_shapes().values())

    @staticmethod
    def complete(config: ModelConfig) -> ModelConfig:
        """A configuration with the defaults that it leaves out, of those that channels depend on."""
        return config

    @property
    def latent_channels(self) -> int:
        """c, the channels of a latent."""
        config = self.complete(self.known_config())
        return int(config.get("out_channels") or config["in_channels"])

    @property
    def inpaints(self) -> bool:
        """Whether the model reads a mask and the latents of the masked picture, 1 + c channels, after z_t."""
        return int(self.complete(self.known_config())["in_channels"]) == 2 * self.latent_channels + 1

    @property
    def pipeline(self) -> str:
        """diffusers' class of the pipeline that draws with the model; without its files, the plain one's."""
        usual, other = self.diffusers.pipeline, self.diffusers.inpainting
        if other is None:
            return usual
        try:
            return other if self.inpaints else usual
        except UserError:  # a model card is written without its base, too
            return usual

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """(c, h, w) of the latents of a picture whose size is given in pixels."""
        return self.latent_channels, height // DOWNSAMPLING, width // DOWNSAMPLING

    def empty_model(self, config: ModelConfig) -> Denoiser:
        """Build the trained model with all tensors on the meta device, its units set."""
        import diffusers
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=True):
            model: Denoiser = getattr(diffusers, self.diffusers.model).from_config(config)
        model.units, model.after_units = self.units_among(self.shapes_of(config)), self.after_units
        return model

    def random_tensors(self, config: ModelConfig, seed: int, folder: Path | None = None) -> TensorSource:
        """Random weights, a function of the seed and each tensor's name (see ``random_weight``, ``starts_small``).

        Args:
            folder: the folder of the configuration, which may contain constants.
        """
        from simpletune.models.shared.weights import MadeTensors, random_weight

        small = re.compile(self.starts_small)
        return MadeTensors(
            self.tensor_shapes(config),
            lambda name, shape: random_weight(name, shape, seed, 0.01 if small.search(name) else 1.0),
        )

    def empty_tensors(self, config: ModelConfig) -> TensorSource:
        """Uninitialised weights, for simulation with fake tensors."""
        import torch

        from simpletune.models.shared.weights import MadeTensors

        return MadeTensors(self.tensor_shapes(config), lambda _, shape: torch.empty(shape))

    def load_denoiser(
        self,
        precision: WeightPrecision,
        device: torch.device,
        seed: int = 0,
        on_host: OnHost = lambda name: False,
        sizes: Collection[Size] | None = None,
        cache: Path | None = None,
        overlay: Overlay | None = None,
    ) -> Denoiser:
        """Load the frozen model, quantising as it loads, with one layer at a time in host memory.

        Args:
            precision: the weight precision.
            device: the target device.
            seed: seeds random weights (``init: random``).
            on_host: whether the module of a given name stays in host memory.
            sizes: (width, height) in pixels of all pictures it will see, for ``fit_to``; None keeps the whole model.
            cache: the root folder of the cache for the quantised base; None disables caching.
            overlay: what ``loras`` names (``runs.stack``); None without any.

        Raises:
            UserError: weights are missing or do not match the config.
        """
        from simpletune.models.shared.fp16_blocks import watch_fp16
        from simpletune.models.shared.quantised_cache import QuantisedBase
        from simpletune.models.shared.weights import fill_model, open_tensors

        config, part, random = self.known_config(), self.part(self.denoiser), self.init == "random"
        assert bool(self.loras) == (overlay is not None), "whoever loads a base reads its LoRAs"

        def tensors() -> TensorSource:
            return self.random_tensors(config, seed, part.folder) if random else open_tensors(part)

        def fresh() -> Denoiser:
            source = tensors() if overlay is None else overlay.over(self, part)
            source = source if random else self.widened(source)
            return fill_model(self.empty_model(config), source, precision, device, on_host, part.place)

        if cache is None or random or not precision.cacheable:
            model = fresh()
        else:
            key = None if overlay is None else overlay.key
            cached = QuantisedBase(cache, config, partial(self.empty_model, config), part, precision, device, key)
            model = cached.load(on_host) or cached.make(on_host, fresh)
        if sizes is not None:
            # The model keeps this source to read constants again, so it must not hold an overlay's tensors.
            self.fit_to(model, sizes, tensors, precision.compute_dtype())
        return watch_fp16(model, precision.product_dtype())

    def empty_denoiser(
        self,
        precision: WeightPrecision,
        device: torch.device,
        on_host: OnHost = lambda name: False,
        sizes: Collection[Size] | None = None,
    ) -> Denoiser:
        """Build the model as ``load_denoiser`` does, with uninitialised weights; needs only the config.

        Takes no memory under fake tensors, and otherwise as much as the real one.
        """
        from simpletune.models.shared.fp16_blocks import watch_fp16
        from simpletune.models.shared.weights import fill_model

        config = self.known_config()
        model = fill_model(self.empty_model(config), self.empty_tensors(config), precision, device, on_host)
        if sizes is not None:
            self.fit_to(model, sizes, partial(self.empty_tensors, config), precision.compute_dtype())
        return watch_fp16(model, precision.product_dtype())

    def autoencoder_dtype(self, precision: WeightPrecision) -> torch.dtype:
        """The type in which the autoencoder runs: that of the products, but fp32 instead of fp16 unless its own
        configuration says that it needs no upcast."""
        # SD3's and SD 1.5's say so, too, though SD3's overflows in fp16. So this counts only in a family whose own
        # autoencoder says the opposite: one that says no was then made for fp16.
        usual = next(iter(self.bundled_configs().values()))["vae"].get("force_upcast")
        part = self.known_part("vae")  # a single file's weights may have come with another configuration
        made_for_fp16 = usual and part.file is None and part.config().get("force_upcast") is False
        return precision.product_dtype() if made_for_fp16 else precision.encoder_dtype()

    def load_vae(self, device: torch.device, dtype: torch.dtype, tile: int | None = None) -> nn.Module:
        """Load the frozen autoencoder (AutoencoderKL or AutoencoderTiny). ``tile``: side in pixels of the tiles for
        larger pictures (AutoencoderKL only); None disables tiling."""
        vae = load_autoencoder(self.part("vae"), dtype).to(device).eval().requires_grad_(False)
        if tile is not None:
            use_tiles(vae, tile)
        return vae

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
