"""The base class of model families: where a model's parts come from, how they load, how pictures become latents.

A family is an option (a member of the union ``model``) that answers questions with data and pure functions. Levers ask
it for units, shapes and capabilities, never for its name.

Shapes: b samples, c latent channels, h and w the latents' height and width.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from simpletune.models.shared import sources
from simpletune.models.shared.autoencoder import Autoencoder
from simpletune.models.shared.buckets import Framing, Size
from simpletune.models.shared.family_facts import FamilyFacts
from simpletune.models.shared.model_config import ModelConfig, Shape, Shapes
from simpletune.models.shared.parameter_shapes import empty_model
from simpletune.models.shared.parts import Part, explain_load_errors
from simpletune.system.hub import fetch, is_hub_name
from simpletune.system.options import Problem, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from simpletune.engine.denoiser import Denoiser
    from simpletune.engine.quant.precision import WeightPrecision
    from simpletune.models.objectives.objective import Solver, TrainingObjective
    from simpletune.models.shared.flops import Flops, TrainedParameters
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
        found = list(sources.problems(self, self._channels_on_disk))
        yield from found or self._other_encoders()

    def _other_encoders(self) -> Iterator[Problem]:
        """Report text encoders of another model than the denoiser's, as far as both are known without a download."""
        text = self.text
        try:
            known = self.denoiser_config(fetch=False) is not None
            given = [sources.provider(self, encoder.model)[1] or "" for encoder in text.encoders] if known else []
            if not given or any(is_hub_name(each) and self.bundled_config(each) is None for each in given):
                return
            configs = [(encoder, self.known_part(encoder.model).config()) for encoder in text.encoders]
            widths = [encoder.width(config) for encoder, config in configs]
            pooled = sum(encoder.pooled_width(config) for encoder, config in configs)
            reads, reads_pooled, fits = text.width, text.pooled_width, text.fits(widths)
        except (UserError, KeyError, TypeError, ValueError):
            return  # reported where the shapes are read, or the encoder is
        named = "a text encoder of width" if len(widths) == 1 else "text encoders of widths"
        field, source = ("text_encoders", self.text_encoders) if self.text_encoders else ("pretrained", self.pretrained)
        title = {"unet": "UNet"}.get(self.denoiser, self.denoiser)
        for has, fitting, read in (
            (f"{named} {' + '.join(map(str, widths))}", fits, reads),
            (f"a pooled prompt of width {pooled}", pooled == reads_pooled, reads_pooled),
        ):
            if not fitting:
                remedy = f"Use the pipeline of the {title}'s own version"
                yield Problem(f"model.{field}", f"{source} has {has}, and the {title} reads {read}. {remedy}")
                return

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
        fetch(sources.hub_parts(self), self.text.optional)

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

    def solver(self, objective: TrainingObjective, size: Size, steps: int, skipped: int) -> Solver:
        """See ``TrainingObjective.solver``, of the objective that the weights were trained with, for pictures of a size
        in pixels. UserError: the scheduler's configuration is damaged, or does not fit it."""
        part = self.part("scheduler")
        with explain_load_errors(part):
            return objective.solver(part.config(), steps, skipped, self.flow, partial(self.image_tokens, size))

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

    def flops(self, trained: TrainedParameters, size: Size, batch: int, checkpointed: int = 0) -> Flops:
        """Count the operations of one micro-batch, by a step on the meta device: 1 s for SD3 Medium, 3 s for SDXL.

        Args:
            trained: the trained parameters.
            size: (width, height) of the pictures in pixels.
            batch: b.
            checkpointed: how many units, from the first, are recomputed in the backward pass.
        """
        import torch

        from simpletune.models.shared.flops import count_flops

        config = self.known_config()
        model, (_, h, w) = empty_model(self.diffusers.model, config).eval(), self.autoencoder.shape(*size)
        units = self.units_among([name for name, _ in model.named_parameters()])
        with torch.device("meta"):
            z_t, time = torch.zeros(batch, int(self.complete(config)["in_channels"]), h, w), torch.zeros(batch)
            text = self.text.framed(self.text.blank(torch.float32, batch), [Framing.whole(size)] * batch)

            def predict() -> Tensor:
                return self.predict(model, z_t, time, text, torch.float32)

            return count_flops(model, predict, trained, units[:checkpointed])

    @staticmethod
    def complete(config: ModelConfig) -> ModelConfig:
        """A configuration with the defaults that it leaves out, of those that channels depend on."""
        return config

    @property
    def autoencoder(self) -> Autoencoder:
        """Between pictures and the latents that the trained model reads."""
        usual = next(iter(self.bundled_configs().values()), {}).get("vae", {})
        part, known_part = partial(self.part, "vae"), partial(self.known_part, "vae")
        return Autoencoder(self.latents, part, known_part, self._latent_channels, usual)

    def _latent_channels(self) -> int:
        """c, the channels of a latent, by the trained model's configuration."""
        config = self.complete(self.known_config())
        return int(config.get("out_channels") or config["in_channels"])

    def _channels_on_disk(self) -> int | None:
        """The same; None if the configuration has to be downloaded, or is damaged, which is reported elsewhere."""
        try:
            return None if self.denoiser_config(fetch=False) is None else self._latent_channels()
        except (UserError, OSError, KeyError, TypeError, ValueError):
            return None

    @property
    def inpaints(self) -> bool:
        """Whether the model reads a mask and the latents of the masked picture, 1 + c channels, after z_t."""
        return int(self.complete(self.known_config())["in_channels"]) == 2 * self.autoencoder.channels + 1

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

    def empty_model(self, config: ModelConfig) -> Denoiser:
        """Build the trained model with all tensors on the meta device, its units set."""
        model: Denoiser = empty_model(self.diffusers.model, config)  # type: ignore[assignment]
        names = [name for name, _ in model.named_parameters()]
        model.units, model.after_units = self.units_among(names), self.after_units
        model.per_sample = frozenset(filter(self.per_sample, {name.rpartition(".")[0] for name in names}))
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
        from simpletune.engine.fp16_blocks import watch_fp16
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
        from simpletune.engine.fp16_blocks import watch_fp16
        from simpletune.models.shared.weights import fill_model

        config = self.known_config()
        model = fill_model(self.empty_model(config), self.empty_tensors(config), precision, device, on_host)
        if sizes is not None:
            self.fit_to(model, sizes, partial(self.empty_tensors, config), precision.compute_dtype())
        return watch_fp16(model, precision.product_dtype())
