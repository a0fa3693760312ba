"""Florence-2 (arXiv:2311.06242): takes a task's sentence, writes a caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from PIL import Image
from torch import Tensor

from simpletune.commands.caption.captioner import Captioner, CaptionerSizes
from simpletune.models.shared.transformers_folder import ModelFolder
from simpletune.system.options import Json, UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TASKS = {  # by task, the sentence that the model was trained on (arXiv:2311.06242, appendix)
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
}
PROMPT_TOKENS = 16


class Florence(Captioner):
    """Florence-2 in transformers' own classes, such as florence-community/Florence-2-base."""

    names: ClassVar[Mapping[str, str]] = {"florence2": "Florence2"}
    processor_name = "CLIP"  # squashes pictures to a square
    own_prompt = "<DETAILED_CAPTION>"
    continues = False

    def __init__(self, place: ModelFolder, model: PreTrainedModel, prompt: str | None):
        super().__init__(place, model, prompt)
        if self.prompt not in TASKS:
            raise UserError(
                f"--prompt {self.prompt!r}: Florence-2 knows tasks, not questions. Use one of {', '.join(TASKS)}"
            )

    @classmethod
    def classes(cls, config: Json) -> tuple[type[PreTrainedModel], type[PretrainedConfig]]:
        if "auto_map" in config or "dim_embed" in (config.get("vision_config") or {}):
            raise UserError(
                "--model: this Florence-2 is of the first release, which runs code from its folder. Use one in "
                "transformers' own form, such as florence-community/Florence-2-base"
            )
        return super().classes(config)

    @staticmethod
    def shape(model: PreTrainedModel) -> CaptionerSizes:
        """Return the sizes at 768 px, the size of all Florence-2 models."""
        vision, text = model.config.vision_config, model.config.text_config
        side, stride = 768, vision.patch_stride[0]
        tokens = image_tokens(model.config, side) + PROMPT_TOKENS
        cached = 2 * text.decoder_layers * text.d_model * 2  # keys and values of its own tokens and of the picture's
        widest = int(vision.embed_dim[0] * (2 * vision.mlp_ratio + 14))  # attention copies its windows
        return CaptionerSizes((side // stride) ** 2, widest, tokens, 6 * text.encoder_ffn_dim, cached, text.vocab_size)

    def inputs(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Return the picture's tokens, then the task's sentence between the begin and end tokens."""
        pixels = self.processor(list(images), return_tensors="pt")["pixel_values"]  # [n, 3, s, s]
        text = self.tokenizer.bos_token + TASKS[self.prompt] + self.tokenizer.eos_token
        words = self.tokenizer(text, add_special_tokens=False).input_ids
        ids = [self.model.config.image_token_id] * image_tokens(self.model.config, pixels.shape[-1]) + words
        rows = torch.tensor([ids] * len(images))
        return {"pixel_values": pixels, "input_ids": rows, "attention_mask": torch.ones_like(rows)}

    def new_ids(self, ids: Tensor, given: Tensor) -> Tensor:  # [n, t], [n, t] -> [n, t]
        """Return all tokens but the one that starts the decoder."""
        return ids[:, 1:]

    def end_tokens(self) -> set[int]:
        """Return the padding token: the end token is also forced at the last position of a caption that is cut off."""
        return {self.tokenizer.pad_token_id}


def image_tokens(config: PretrainedConfig, side: int) -> int:
    """Count the tokens of a picture: one for each position of the last stage's grid, and one for their mean."""
    for stride in config.vision_config.patch_stride:
        side = -(-side // stride)
    return side**2 + 1
