"""A model family: an option (a member of the union ``model``) that is composed of files, architecture, text,
autoencoder and words, and what takes several of them.

Levers ask it for units, shapes and capabilities, never for its name.

Shapes: b samples, c latent channels, h and w the latents' height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from simpletune.models.objectives.conventions import USUAL, FlowConventions
from simpletune.models.shared.architecture import Architecture
from simpletune.models.shared.autoencoder import Autoencoder
from simpletune.models.shared.buckets import Framing, Size
from simpletune.models.shared.family_files import FamilyFiles, ModelOption
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.shared.parts import Part, explain_load_errors
from simpletune.system.options import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.engine.denoiser import Denoiser
    from simpletune.engine.quant.precision import WeightPrecision
    from simpletune.models.objectives.objective import Solver, TrainingObjective
    from simpletune.models.shared.conditioning import Conditioning
    from simpletune.models.shared.flops import Flops, TrainedParameters
    from simpletune.models.shared.weights import TensorSource

OnHost = Callable[[str], bool]


class Overlay(Protocol):
    """What changes a model's weights before anything else does: ``model.loras``."""

    @property
    def key(self) -> object:
        """JSON that differs where the weights do."""

    def over(self, family: Family, part: Part) -> TensorSource:
        """Return the changed tensors of a part."""


class Family(ModelOption):
    """A model family. Members declare the options of ``ModelOption`` and the fields below and there."""

    files_class: ClassVar[type[FamilyFiles]] = FamilyFiles
    architecture_class: ClassVar[type[Architecture]]
    """The class of ``architecture``."""
    lora: ClassVar[Sequence[Layout]]
    """The layouts of the family's LoRA files. A run's result has the first; the last has bare names."""
    objectives: ClassVar[tuple[str, ...]]
    """The ``name`` of each objective that its models can be trained with; the first is that of the pretrained ones."""
    flow: ClassVar[FlowConventions] = USUAL
    """Its conventions under the objective ``flow``."""

    def conventions(self, objective: TrainingObjective, side: float) -> FlowConventions:
        """Return ``flow``, where the family has a shift with the objective's, for squares of a side in pixels."""
        return self.flow if self.flow.shift is None else self.flow._replace(shift=objective.shift_at(side))

    @property
    def architecture(self) -> Architecture:
        """The network that is trained."""
        return self.architecture_class(self)

    @property
    def autoencoder(self) -> Autoencoder:
        files = self.files
        usual = next(iter(files.bundled_configs().values()), {}).get("vae", {})
        part, known_part = partial(files.part, "vae"), partial(files.known_part, "vae")
        return Autoencoder(self.latents, part, known_part, lambda: self.architecture.out_channels, usual)

    def predict(
        self, model: nn.Module, z_t: Tensor, time: Tensor, conditioning: Conditioning, dtype: torch.dtype
    ) -> Tensor:
        """Predict the objective's target [b, c, h, w] at z_t.

        Args:
            model: the trained model.
            z_t: [b, c, h, w]; for a model that ``inpaints`` [b, 2c + 1, h, w], with the mask (1 in the hole) and the
                latents of the masked picture.
            time: the timestep that the model receives [b], fp32, by the objective.
            conditioning: of b samples, ``framed``; with a modulation plan, with its rows.
            dtype: the type of the activations.
        """
        raise NotImplementedError

    def rescale(self, guided: Tensor, positive: Tensor) -> Tensor:
        """Correct a prediction with guidance [b, c, h, w] by that for the prompt alone, as the family does."""
        return guided

    def skipped_steps(self, steps: int, strength: float) -> int:
        """Return how many of the first, noisiest of ``steps`` sampling steps a starting picture skips at a strength,
        with or without a mask; rounded as diffusers' pipelines of flow models do."""
        return int(max(steps - steps * strength, 0))

    def solver(self, objective: TrainingObjective, size: Size, steps: int, skipped: int) -> Solver:
        """Build the solver of the objective that the weights were trained with, for pictures of a size in pixels (see
        ``TrainingObjective.solver``). Raises UserError if the scheduler's configuration is damaged or does not fit."""
        part, image_tokens = self.files.part("scheduler"), partial(self.architecture.image_tokens, size)
        conventions = self.conventions(objective, math.sqrt(math.prod(size)))
        with explain_load_errors(part):
            return objective.solver(part.config(), steps, skipped, conventions, image_tokens)

    @property
    def inpaints(self) -> bool:
        """Whether the model reads a mask and the latents of the masked picture, 1 + c channels, after z_t."""
        return self.architecture.in_channels == 2 * self.architecture.out_channels + 1

    @property
    def pipeline(self) -> str:
        """diffusers' class of the pipeline that generates with the model; without its files, the plain one's."""
        usual, other = self.words.pipeline.name, self.words.pipeline.inpainting
        if other is None:
            return usual
        try:
            return other if self.inpaints else usual
        except UserError:  # a model card is written without its base, too
            return usual

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

        network, (_, h, w) = self.architecture, self.autoencoder.shape(*size)
        model = network.empty_model(self.files.known_config()).eval()
        units = network.units_among([name for name, _ in model.named_parameters()])
        with torch.device("meta"):
            z_t, time = torch.zeros(batch, network.in_channels, h, w), torch.zeros(batch)
            text = self.text.framed(self.text.blank(torch.float32, batch), [Framing.whole(size)] * batch)

            def predict() -> Tensor:
                return self.predict(model, z_t, time, text, torch.float32)

            return count_flops(model, predict, trained, units[:checkpointed])

    def base_tensors(self, overlay: Overlay | None = None) -> TensorSource:
        """Open the trained model's tensors, with what ``loras`` names in them."""
        from simpletune.models.shared.weights import open_tensors

        part = self.files.part(self.denoiser)
        return self.architecture.widened(open_tensors(part) if overlay is None else overlay.over(self, part))

    def load_denoiser(
        self,
        precision: WeightPrecision,
        device: torch.device,
        seed: int = 0,
        on_host: OnHost = lambda name: False,
        sizes: Collection[Size] | None = None,
        cache: Path | None = None,
        overlay: Overlay | None = None,
        mapped: OnHost | None = None,
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
            mapped: whether the module of a given name, if it stays in host memory, does so in the pages of the cache's
                files; None: none does.

        Raises:
            UserError: weights are missing or do not match the config.
        """
        from simpletune.engine.fp16_blocks import watch_fp16
        from simpletune.models.shared.quantised_cache import QuantisedBase
        from simpletune.models.shared.weights import fill_model, open_tensors

        network, config, part = self.architecture, self.files.known_config(), self.files.part(self.denoiser)
        random = self.init == "random"
        assert bool(self.loras) == (overlay is not None), "whoever loads a base reads its LoRAs"

        def tensors() -> TensorSource:
            return network.random_tensors(config, seed, part.folder) if random else open_tensors(part)

        def changed() -> TensorSource:
            return tensors() if random else self.base_tensors(overlay)

        def fresh() -> Denoiser:
            return fill_model(network.empty_model(config), changed(), precision, device, on_host, part.place)

        if cache is None or random or not precision.cacheable:
            model = fresh()
        else:
            key = None if overlay is None else overlay.key
            cached = QuantisedBase(cache, config, partial(network.empty_model, config), part, precision, device, key)
            model = cached.load(on_host, mapped) or cached.make(on_host, changed, fresh, mapped)
        if sizes is not None:
            # The model keeps this source to read constants again, so it must not hold an overlay's tensors.
            network.fit_to(model, sizes, tensors, precision.compute_dtype())
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

        network, config = self.architecture, self.files.known_config()
        model = fill_model(network.empty_model(config), network.empty_tensors(config), precision, device, on_host)
        if sizes is not None:
            network.fit_to(model, sizes, partial(network.empty_tensors, config), precision.compute_dtype())
        return watch_fp16(model, precision.product_dtype())
