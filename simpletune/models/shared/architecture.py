"""The network of a model family: facts about its layers and shapes, and functions that build it.

Shapes: b samples, c latent channels, h and w the latents' height and width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from simpletune.models.shared import parameter_shapes
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.family_files import ModelOption
from simpletune.models.shared.model_config import ModelConfig, Shape, Shapes
from simpletune.models.shared.modulation import Modulation

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.engine.denoiser import Denoiser
    from simpletune.models.shared.weights import TensorSource


class AttentionShape(NamedTuple):
    """One shape of attention in the trained model, which has no dropout, and a mask only for text (``text.masked``)."""

    heads: int
    queries: int  # tokens that attend
    keys: int  # tokens that are attended to
    width: int  # of a head


class Architecture:
    """The network that a family trains. Members state the fields below and override what raises NotImplementedError.

    Args:
        family: the model's option.
    """

    diffusers_class: ClassVar[str]
    """The name of diffusers' class."""
    defaults: ClassVar[ModelConfig] = {}
    """The defaults of that class for settings that a ``config.json`` leaves out and channels depend on."""
    multiple: ClassVar[int]
    """Sides of training pictures are multiples of this, in pixels, and it is one of ``latents.downsampling``."""
    after_units: ClassVar[str]
    """The name of the module that takes the last unit's output: a norm."""
    starts_small: ClassVar[str]
    """A pattern of the weights that end a residual branch or the model, or gate one, which the original training
    initialises to zero. Random ones get a hundredth of the others' deviation, so that gradients flow from the first
    step."""
    modulation: ClassVar[Modulation | None] = None
    """How the trained model makes its modulations; None: ``memory.modulation`` plan does not apply."""
    ends_with_feed_forward: ClassVar[bool] = False
    """Whether a unit uses its feed-forward networks' outputs only in sums and in products with modulations. Its
    recomputation may then omit the networks where modulations carry no gradient."""
    quantises_modulation: ClassVar[bool] = True
    """Whether a quantised precision includes the layers within the units that see one row for each sample
    (``per_sample``)."""
    fp16_overflows: ClassVar[str | None] = None
    """Why nothing is computed in fp16, as a clause; None: blocks that overflow there compute in fp32."""
    supports_fsdp: ClassVar[bool] = False
    """Whether processes may divide the weights of its models among them."""

    def __init__(self, family: ModelOption):
        self.family = family

    # What a family must state

    def units_among(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the modules that levers treat one by one (checkpoint, stream, quantise), in the order of the forward
        pass, from the names of the parameters."""
        raise NotImplementedError

    @property
    def largest_side(self) -> int:
        """The longest side that the model can process, in pixels."""
        raise NotImplementedError

    def image_tokens(self, size: Size) -> int:
        """Return the number of picture tokens; asked only where the shift of a flow's solver depends on it."""
        raise NotImplementedError

    def layer_rows(self, size: Size) -> Callable[[str], int]:
        """Return how many rows (image or text tokens) a given linear layer within the units multiplies for one
        picture."""
        raise NotImplementedError

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        """Return the distinct shapes of attention for a picture, largest first."""
        raise NotImplementedError

    # What a family may override

    @property
    def generated_multiple(self) -> int:
        """``multiple`` for generated pictures, of which a model may take others than it trains on."""
        return self.multiple

    def shapes_of(self, config: ModelConfig) -> dict[str, Shape]:
        """Return the shapes of the trained model's parameters, without torch for every configuration that ships."""
        return parameter_shapes.shapes_of_class(self.diffusers_class, config)

    def tensor_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """Return the shapes of all tensors of the trained model: its parameters, and its stored constants."""
        return self.shapes_of(config)

    def whole_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole tensors behind those that ``fit_to`` has reduced, by name, for an export."""
        return {}

    def per_sample(self, layer: str) -> bool:
        """Return whether a layer within the units sees one row for each sample, so that all of a sample's tokens or
        pixels would share its errors."""
        return self.modulation is not None and self.modulation.has(layer)

    def fit_to(
        self, model: nn.Module, sizes: Collection[Size], whole: Callable[[], TensorSource], dtype: torch.dtype
    ) -> None:
        """Reduce a loaded model in place to what pictures of these sizes need (``memory.crop_positions``).

        Args:
            sizes: (width, height) of the pictures in pixels.
            whole: opens the tensors again, for an export.
            dtype: the type of unquantised weights.
        """

    @property
    def new_weights(self) -> str | None:
        """The parameter that is larger than the stored one and begins with zeros, so that it has to train
        (``model.inpainting``); None: there is none."""
        return None

    def widened(self, tensors: TensorSource) -> TensorSource:
        """Return the trained model's tensors from those that are stored (``new_weights``)."""
        return tensors

    def stored_shapes(self) -> dict[str, Shape]:
        """Return the shapes of the model's parameters before ``widened``."""
        return self.known_shapes()

    def empty_model(self, config: ModelConfig) -> Denoiser:
        """Build the trained model with all tensors on the meta device, its units set."""
        model: Denoiser = parameter_shapes.empty_model(self.diffusers_class, config)  # type: ignore[assignment]
        names = [name for name, _ in model.named_parameters()]
        model.units, model.after_units = self.units_among(names), self.after_units
        model.per_sample = frozenset(filter(self.per_sample, {name.rpartition(".")[0] for name in names}))
        model.unquantised = frozenset() if self.quantises_modulation else model.per_sample
        return model

    def random_tensors(self, config: ModelConfig, seed: int, folder: Path | None = None) -> TensorSource:
        """Make random weights, a function of the seed and each tensor's name (see ``random_weight``, ``starts_small``).

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
        """Make uninitialised weights, for simulation with fake tensors."""
        import torch

        from simpletune.models.shared.weights import MadeTensors

        return MadeTensors(self.tensor_shapes(config), lambda _, shape: torch.empty(shape))

    # What follows

    @property
    def in_channels(self) -> int:
        """How many channels it reads: c, or 2c + 1 if the model ``inpaints``."""
        return int({**self.defaults, **self.family.files.known_config()}["in_channels"])

    @property
    def out_channels(self) -> int:
        """c, the channels of a latent."""
        config = {**self.defaults, **self.family.files.known_config()}
        return int(config.get("out_channels") or config["in_channels"])

    def shapes(self, fetch: bool = True) -> Shapes | None:
        """Return the shapes of the trained model's parameters, without torch; None if that needs a download."""
        config = self.family.files.denoiser_config(fetch)
        return None if config is None else self.shapes_of(config)

    def known_shapes(self) -> dict[str, Shape]:
        """Return the shapes of the trained model's parameters, with a download if necessary."""
        return self.shapes_of(self.family.files.known_config())

    def units(self) -> tuple[str, ...]:
        """See ``units_among``."""
        return self.units_among(self.known_shapes())

    def blocks(self) -> int:
        return len(self.units())

    def parameter_count(self) -> int:
        """Return the number of the trained model's parameters before quantisation."""
        return sum(math.prod(shape) for shape in self.known_shapes().values())
