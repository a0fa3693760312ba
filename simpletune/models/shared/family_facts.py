"""What a model family must state: data and pure functions, on which everything else builds.

Shapes: b samples, c latent channels, h and w an eighth of the picture's, t text tokens, e text width, p pooled width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple, TypedDict

from pydantic import Field

from simpletune.models.shared.buckets import Framing, Size
from simpletune.models.shared.flops import Flops, TrainedParameters
from simpletune.models.shared.lora_names import Layout
from simpletune.models.shared.model_config import ModelConfig, Shape
from simpletune.models.shared.parts import TextEncoder
from simpletune.models.shared.single_file import FileLayout
from simpletune.system.options import Option

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.shared.prompts import Prompts
    from simpletune.models.shared.weights import TensorSource


class AttentionShape(NamedTuple):
    """One shape of attention in the trained model, which has no mask and no dropout."""

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


class TextRegion(NamedTuple):
    """Where one text encoder's output is in a prompt's embeddings."""

    part: str  # the part with its weights
    width: int  # the width of its output
    column: int = 0  # its first column
    pooled: tuple[int, int] | None = None
    """Its first column and its width in the pooled embedding; None: it has no pooled output."""
    last: bool = False  # its tokens are the last ones, after those of the CLIP encoders, which share the first


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
    clip: ClassVar[Sequence[TextEncoder]]
    """Its CLIP text encoders."""
    hub_names: ClassVar[Mapping[str, str]]
    """The version of each Hub name whose configurations ship, a key of ``bundled_configs``."""
    after_units: ClassVar[str]
    """The name of the module that takes the last unit's output: a norm."""
    starts_small: ClassVar[str]
    """A pattern of the weights that end a residual branch or the model, or gate one, which the original training
    initialises to zero. Random ones get a hundredth of the others' deviation, so that gradients flow from the first
    step."""
    multiple: ClassVar[int]
    """Sides of pictures are multiples of this, in pixels."""
    resolution: ClassVar[int]
    """The default of ``data.resolution``, in pixels."""
    guidance: ClassVar[float]
    """The default of ``validation.guidance``."""
    negative_prompt: ClassVar[str | None] = ""
    """The default of ``validation.negative_prompt``."""
    objective: ClassVar[str]
    """The ``name`` of the objective that the pretrained models were trained with."""
    published_as: ClassVar[str] = "(?!)"
    """A pattern of the last part of names under which its models are published, where nothing else tells the family."""
    diffusers: ClassVar[DiffusersNames]
    """The names of diffusers' classes."""
    hub_bytes: ClassVar[int] = 2
    """Bytes per parameter of the weights that are fetched for ``hub_names``: full precision, if a repository has it."""
    scheduler_tells: ClassVar[bool] = False
    """Whether a single file may not say what it predicts, so that its scheduler has to come from the Hub too."""
    has_modulation: ClassVar[bool] = False
    """Whether ``memory.modulation`` plan applies."""
    pipeline_reads_embeddings: ClassVar[bool] = False
    """Whether diffusers' pipeline loads embeddings of new tokens (textual inversion)."""
    no_hypernetwork: ClassVar[str | None] = None
    """Why no hypernetwork is trained on it, and what to use instead; None: one can be."""
    reads_framing: ClassVar[bool] = False
    """Whether the model is told how a picture was cut (``framed``)."""
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
        """The shapes of the trained model's parameters, in the order of the forward pass, without torch."""
        raise NotImplementedError

    def units_among(self, names: Collection[str]) -> tuple[str, ...]:
        """The modules that levers treat one by one (checkpoint, stream, quantise), in the order of the forward pass,
        from the names of the parameters."""
        raise NotImplementedError

    @property
    def text_tokens(self) -> int:
        """t, the number of text tokens that the trained model sees."""
        raise NotImplementedError

    @property
    def text_width(self) -> int:
        """e, the width of a text token."""
        raise NotImplementedError

    @property
    def pooled_width(self) -> int:
        """p, the width of the pooled prompt; 0 for a family without one."""
        raise NotImplementedError

    @property
    def largest_side(self) -> int:
        """The longest side that the model can process, in pixels."""
        raise NotImplementedError

    def layer_rows(self, size: Size) -> Callable[[str], int]:
        """How many rows (image or text tokens) a linear layer of a given name within the units multiplies for one
        picture."""
        raise NotImplementedError

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        """The distinct shapes of attention for a picture, largest first."""
        raise NotImplementedError

    def flops(self, trained: TrainedParameters, size: Size, batch: int, checkpointed: int = 0) -> Flops:
        """Count the operations of one micro-batch.

        Args:
            trained: the trained parameters.
            size: (width, height) of the pictures in pixels.
            batch: b.
            checkpointed: how many units, from the first, are recomputed in the backward pass.
        """
        raise NotImplementedError

    def describe_text(self) -> str:
        """Say which text encoders are in use, for ``check``."""
        raise NotImplementedError

    def text_regions(self) -> Mapping[str, TextRegion]:
        """Where the output of each text encoder in use lies in a prompt's embeddings."""
        raise NotImplementedError

    def prompts(self, dtype: torch.dtype) -> Prompts:
        """The text side; each encoder is loaded on demand."""
        raise NotImplementedError

    def predict(
        self, model: nn.Module, z_t: Tensor, time: Tensor, prompt_embeds: Tensor, pooled: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Predict the objective's target [b, c, h, w] at z_t.

        Args:
            model: the trained model.
            z_t: [b, c, h, w]; for a model that ``inpaints`` [b, 2c + 1, h, w], with the mask (1 in the hole) and the
                latents of the masked picture.
            time: the timestep that the model receives [b], fp32, by the objective.
            prompt_embeds: [b, t, e].
            pooled: [b, p], ``framed``; with a modulation plan, its rows.
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
        text = [part for encoder in self.encoders() for part in (encoder.tokenizer, encoder.model)]
        return ["scheduler", self.denoiser, "vae", *text]

    @property
    def clip_encoders(self) -> tuple[str, ...]:
        """The names of its CLIP text encoders."""
        return tuple(encoder.name for encoder in self.clip)

    # What a family may override

    def steered_from(self, negative_prompt: str | None) -> str | None:
        """The text that guidance steers away from if ``negative_prompt`` is given, or with None none is; None: zeros
        take the place of its embeddings."""
        return negative_prompt or ""

    def encoders(self) -> Sequence[TextEncoder]:
        """The text encoders in use."""
        return self.clip

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

    def framed(self, pooled: Tensor, framings: Sequence[Framing]) -> Tensor:
        """Pooled prompts [b, p] with what the model is told of how b pictures were cut (``reads_framing``)."""
        return pooled

    def is_conditioning(self, module: str) -> bool:
        """Whether a module serves only to compute modulations, which ``memory.modulation`` plan computes ahead."""
        return False

    def fit_to(
        self, model: nn.Module, sizes: Collection[Size], whole: Callable[[], TensorSource], dtype: torch.dtype
    ) -> None:
        """Reduce a loaded model in place to what pictures of these sizes need (``memory.crop_positions``).

        Args:
            sizes: (width, height) of the pictures in pixels.
            whole: opens the tensors again, for an export.
            dtype: the type of unquantised weights.
        """
