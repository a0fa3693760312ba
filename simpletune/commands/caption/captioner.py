"""Interface of image-to-text models: build inputs without torchvision, and write captions.

Legend: n pictures in a batch, t tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from PIL import Image
from torch import Tensor

from simpletune.models.shared.transformers_folder import ModelFolder, quiet
from simpletune.system.options import Json, UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.image_processing_backends import PilBackend


@dataclass(frozen=True)
class CaptionerSizes:
    """Sizes that decide how much memory a model takes besides its weights."""

    patches: int  # number of patches of a picture in the vision tower's first layers
    vision: int  # largest width of a patch's activations
    tokens: int  # tokens of a picture and its prompt in the language model
    text: int  # largest width of a token's activations
    cached: int  # numbers that the language model keeps for each token
    vocabulary: int  # number of tokens in the vocabulary


class Captioner(ABC):
    """A model and its preprocessing.

    Args:
        place: the model's folder.
        model: the loaded model.
        prompt: the question, task or beginning; None: the kind's default.

    Raises:
        UserError: the folder lacks a tokenizer or a preprocessor_config.json, or the kind does not accept the prompt.
    """

    names: ClassVar[Mapping[str, str]]
    """How transformers' classes begin, by the ``model_type`` of a config.json."""
    processor_name: ClassVar[str]
    """How the class of its image processor begins."""
    own_prompt: ClassVar[str]
    continues: ClassVar[bool] = True
    """Whether the caption continues the prompt's tokens rather than being decoded separately."""
    answers: ClassVar[bool] = False
    """Whether the prompt is a question, which the caption leaves out, rather than its beginning."""
    silent: ClassVar[str] = "the model wrote nothing about it"
    """Reason why a picture has no caption if the caption is empty."""

    def __init__(self, place: ModelFolder, model: PreTrainedModel, prompt: str | None):
        self.model = model
        self.prompt = self.own_prompt if prompt is None else prompt
        self.tokenizer = place.tokenizer(padding_side="left")
        self.processor = self.processor_of(place)

    @classmethod
    def classes(cls, config: Json) -> tuple[type[PreTrainedModel], type[PretrainedConfig]]:
        """Return the classes of model and configuration for the content of a config.json."""
        import transformers

        name = cls.names[config["model_type"]]
        return getattr(transformers, f"{name}ForConditionalGeneration"), getattr(transformers, f"{name}Config")

    @classmethod
    def processor_of(cls, place: ModelFolder) -> PilBackend:
        """Load the folder's image processor in the form that needs no torchvision. Raises UserError if the folder has
        no preprocessor_config.json, or it is damaged."""
        import transformers

        kind: type[PilBackend] = getattr(transformers, f"{cls.processor_name}ImageProcessorPil")
        with quiet():
            try:
                return kind.from_pretrained(place.folder, local_files_only=True)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                reason = str(error).splitlines()[0]
                raise place.damaged(f"has no usable preprocessor_config.json ({reason})") from None

    @staticmethod
    @abstractmethod
    def shape(model: PreTrainedModel) -> CaptionerSizes:
        """Return the sizes for the largest picture that the model is given."""

    @abstractmethod
    def inputs(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Prepare a batch: pixels and token ids, on the CPU. Raises ValueError if the model rejects a picture's
        shape."""

    @torch.no_grad()
    def caption(self, images: Sequence[Image.Image], length: int) -> tuple[list[str], list[bool]]:
        """Write the most likely caption of each RGB picture, of at most ``length`` tokens, and whether it was cut off.
        Raises ValueError if the model rejects a picture's shape, and UserError if prompt and caption together exceed
        its context."""
        device = self.model.device
        dtype = next(each.dtype for each in self.model.parameters() if each.is_floating_point())
        inputs = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in self.inputs(images).items()
        }
        given = inputs["input_ids"]
        room = self.model.config.text_config.max_position_embeddings - given.shape[1] * self.continues
        if length > room:
            raise UserError(f"--max-new-tokens {length}: this model has room for {max(0, room):,} beside its prompt")
        # whatever sampling the folder's settings ask for
        unsampled = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        with quiet():
            ids = self.model.generate(**inputs, max_new_tokens=length, **unsampled)
        new, end_tokens = self.new_ids(ids, given), self.end_tokens()
        cut = [not any(int(each) in end_tokens for each in row) and len(row) >= length for row in new]
        return self.tokenizer.batch_decode(new if self.answers else ids, skip_special_tokens=True), cut

    def new_ids(self, ids: Tensor, given: Tensor) -> Tensor:  # [n, t], [n, t] -> [n, t]
        """Return the generated tokens without the prompt."""
        return ids[:, given.shape[1] :]

    def end_tokens(self) -> set[int]:
        """Return the tokens that end a caption."""
        end = self.model.generation_config.eos_token_id
        return set(end) if isinstance(end, list) else {end}
