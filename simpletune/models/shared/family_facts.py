"""What a model family must state: data and pure functions, on which everything else builds.

Shapes: b samples, c latent channels, h and w the latents' sides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypedDict

from pydantic import Field

from simpletune.models.objectives.conventions import USUAL, FlowConventions
from simpletune.models.shared.autoencoder import Latents
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.shared.model_config import ModelConfig, Shape
from simpletune.models.shared.modulation import Modulation
from simpletune.models.shared.parameter_shapes import shapes_of_class
from simpletune.models.shared.single_file import FileLayout
from simpletune.models.text.family_text import FamilyText
from simpletune.system.options import Option

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.shared.conditioning import Conditioning
    from simpletune.models.shared.weights import TensorSource


class AttentionShape(NamedTuple):
    """One shape of attention in the trained model, which has no dropout, and a mask only for text (``text.masked``)."""

    heads: int
    queries: int  # tokens that attend
    keys: int  # tokens that are attended to
    width: int  # of a head


class Licence(TypedDict, total=False):
    """Licence fields of a model card's front matter, with the Hub's names."""

    license: str
    license_name: str
    license_link: str


class DiffusersNames(NamedTuple):
    """What diffusers calls a family's classes."""

    model: str  # class of the trained model
    pipeline: str  # class
    tag: str  # on the Hub
    inpainting: str | None = None  # class of the pipeline of models that inpaint; None: the family has none
    negative_prompt: bool = True  # whether the pipeline takes one; if not, guidance leads away from the empty text


LoraNames = list[Annotated[str, Field(min_length=1)]]
"""The type of ``model.loras``."""


class FamilyFacts(Option):
    """What every model family states. Members declare the fields below and override what raises NotImplementedError."""

    if TYPE_CHECKING:  # every member declares them, so that its tag comes first in JSON
        family: str
        pretrained: str
        revision: str | None
        init: str
        loras: LoraNames
        vae: str | None
        text_encoders: str | None

    title: ClassVar[str]
    """The family's name for messages."""
    denoiser: ClassVar[str]
    """The part that is trained, and the option that replaces it: ``transformer`` or ``unet``."""
    layout: ClassVar[FileLayout]
    """The layout of the family's single files."""
    lora: ClassVar[Sequence[Layout]]
    """The layouts of the family's LoRA files. A run's result has the first; the last has bare names."""
    text_side: ClassVar[type[FamilyText[Any]]]
    """The class of its text side (``text``)."""
    hub_names: ClassVar[Mapping[str, str]]
    """The version of each Hub name whose configurations ship, a key of ``bundled_configs``."""
    after_units: ClassVar[str]
    """The name of the module that takes the last unit's output: a norm."""
    latents: ClassVar[Latents]
    """The latents that the trained model reads, and what makes them."""
    starts_small: ClassVar[str]
    """A pattern of the weights that end a residual branch or the model, or gate one, which the original training
    initialises to zero. Random ones get a hundredth of the others' deviation, so that gradients flow from the first
    step."""
    multiple: ClassVar[int]
    """Sides of training pictures are multiples of this, in pixels, and it is one of ``latents.downsampling``."""
    generated_multiple: ClassVar[int | None] = None
    """The same of generated pictures, where the model takes others than it trains on; None: ``multiple``."""
    resolution: ClassVar[int]
    """The default of ``data.resolution``, in pixels."""
    guidance: ClassVar[float]
    """The default of ``validation.guidance``."""
    negative_prompt: ClassVar[str | None] = ""
    """The default of ``validation.negative_prompt``."""
    objectives: ClassVar[tuple[str, ...]]
    """The ``name`` of each objective that its models can be trained with; the first is that of the pretrained ones."""
    flow: ClassVar[FlowConventions] = USUAL
    """Its conventions under the objective ``flow``."""
    published_as: ClassVar[str] = "(?!)"
    """A pattern of the last part of names under which its models are published, where nothing else tells the family."""
    diffusers: ClassVar[DiffusersNames]
    """The names of diffusers' classes."""
    templates: ClassVar[Mapping[str, str]] = {}
    """The shipped configuration that ``init`` starts from, by what the pictures teach (subject, style, general);
    ``{card}`` stands for the size of a card, such as 8gb. Empty: none ships."""
    hub_bytes: ClassVar[int] = 2
    """Bytes per parameter of the weights that are fetched for ``hub_names``: full precision, if a repository has it."""
    scheduler_tells: ClassVar[bool] = False
    """Whether a single file may not say what it predicts, so that its scheduler has to come from the Hub too."""
    modulation: ClassVar[Modulation | None] = None
    """How the trained model makes its modulations; None: ``memory.modulation`` plan does not apply."""
    pipeline_reads_embeddings: ClassVar[bool] = False
    """Whether diffusers' pipeline loads embeddings of new tokens (textual inversion)."""
    no_hypernetwork: ClassVar[str | None] = None
    """Why no hypernetwork is trained on it, and what to use instead; None: one can be."""
    ends_with_feed_forward: ClassVar[bool] = False
    """Whether a unit uses its feed-forward networks' outputs only in sums and in products with modulations. Its
    recomputation may then omit the networks where modulations carry no gradient."""
    supports_fsdp: ClassVar[bool] = False
    """Whether processes may divide the weights of its models among them."""

    # What a family must state

    def bundled_configs(self) -> Mapping[str, Mapping[str, ModelConfig]]:
        """The configurations that ship, by version and part."""
        raise NotImplementedError

    def file_version(self) -> str:
        """The version, a key of ``bundled_configs``, of the single file ``pretrained``."""
        raise NotImplementedError

    def shapes_of(self, config: ModelConfig) -> dict[str, Shape]:
        """The shapes of the trained model's parameters, without torch for every configuration that ships."""
        return shapes_of_class(self.diffusers.model, config)

    def units_among(self, names: Collection[str]) -> tuple[str, ...]:
        """The modules that levers treat one by one (checkpoint, stream, quantise), in the order of the forward pass,
        from the names of the parameters."""
        raise NotImplementedError

    @property
    def largest_side(self) -> int:
        """The longest side that the model can process, in pixels."""
        raise NotImplementedError

    def image_tokens(self, size: Size) -> int:
        """The number of picture tokens; asked only where the shift of a flow's solver depends on it."""
        raise NotImplementedError

    def layer_rows(self, size: Size) -> Callable[[str], int]:
        """How many rows (image or text tokens) a linear layer of a given name within the units multiplies for one
        picture."""
        raise NotImplementedError

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        """The distinct shapes of attention for a picture, largest first."""
        raise NotImplementedError

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

    def skipped_steps(self, steps: int, strength: float) -> int:
        """How many of the first, noisiest of ``steps`` sampling steps a starting picture skips at a strength, with or
        without a mask; rounded as diffusers' pipelines of the family do."""
        raise NotImplementedError

    def licence_of(self, hub_name: str) -> Licence | None:
        """The licence of a known Hub name, as fields of a model card; None for another."""
        raise NotImplementedError

    @property
    def new_weights(self) -> str | None:
        """The parameter that is larger than the stored one and begins with zeros, so that it has to train
        (``model.inpainting``); None: there is none."""
        return None

    def widened(self, tensors: TensorSource) -> TensorSource:
        """The trained model's tensors from those that are stored (``new_weights``)."""
        return tensors

    def part_names(self) -> list[str]:
        """The names of all parts that the model needs."""
        return ["scheduler", self.denoiser, "vae", *self.text.part_names()]

    @property
    def text(self) -> FamilyText[Any]:
        """Its text encoders, and what the denoiser reads of their outputs."""
        return self.text_side(self)

    # What a family may override

    def require_supported(self, config: ModelConfig, place: str) -> None:
        """UserError: the trained model's configuration from ``place``, whose sizes are within the limits, is of another
        family, or of a variant that cannot be trained. Needed where several families share a class."""

    def tensor_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """The shapes of all tensors of the trained model: its parameters, and its stored constants."""
        return self.shapes_of(config)

    def whole_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The whole tensors behind those that ``fit_to`` has reduced, by name, for an export."""
        return {}

    def pipeline_arguments(self) -> dict[str, str]:
        """Arguments of diffusers' ``from_pretrained`` that this model needs, as Python."""
        return {}

    def call_arguments(self) -> dict[str, object]:
        """Arguments for diffusers' pipeline, besides every family's, that make it draw as this model does."""
        return {}

    @property
    def text_example(self) -> str:
        """A Hub name with tokenizers and text encoders for this model, for messages."""
        return str(type(self).model_fields["pretrained"].default)

    def per_sample(self, layer: str) -> bool:
        """Whether a layer within the units sees one row for each sample, so that all of a sample's tokens or pixels
        would share its errors."""
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
