"""Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL: answer a question about a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from PIL import Image
from torch import Tensor

from simpletune.commands.caption.captioner import Captioner, CaptionerSizes
from simpletune.models.shared.transformers_folder import ModelFolder
from simpletune.system import strict_json
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.image_processing_backends import PilBackend

MAX_PIXELS = 1024 * 1024
"""Scale larger pictures down to this area: memory and time grow with it, and 1024 px suffice for a caption."""
PROMPT_TOKENS = 64


class Qwen(Captioner):
    """Qwen-VL, such as Qwen/Qwen3-VL-4B-Instruct."""

    names: ClassVar[Mapping[str, str]] = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    processor_name = "Qwen2VL"
    answers = True
    own_prompt = (
        "Write a caption for this picture in one or two plain sentences: the subject first, then what it does, its "
        "surroundings, the light and the style. Answer with the caption only."
    )

    def __init__(self, place: ModelFolder, model: PreTrainedModel, prompt: str | None):
        super().__init__(place, model, prompt)
        if self.tokenizer.chat_template is None:  # older folders keep it with the processor
            try:
                found = strict_json.read(place.folder / "chat_template.json")
            except (OSError, strict_json.JsonError):
                found = None
            template = found.get("chat_template") if isinstance(found, dict) else None
            if not isinstance(template, str):
                raise place.damaged("has no chat template, so it takes no questions")
            self.tokenizer.chat_template = template

    @classmethod
    def processor_of(cls, place: ModelFolder) -> PilBackend:
        """Load the processor, as ``Captioner`` does: it keeps a picture's aspect ratio, rounded to whole patches,
        within ``MAX_PIXELS``."""
        processor = super().processor_of(place)
        size = processor.size
        processor.size = {"shortest_edge": size["shortest_edge"], "longest_edge": min(size["longest_edge"], MAX_PIXELS)}
        return processor

    @staticmethod
    def shape(model: PreTrainedModel) -> CaptionerSizes:
        """Return the sizes for a picture of ``MAX_PIXELS``."""
        vision, text = model.config.vision_config, model.config.text_config
        patches = MAX_PIXELS // vision.patch_size**2
        hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
        inner = getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio)
        tokens = patches // vision.spatial_merge_size**2 + PROMPT_TOKENS
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        cached = 2 * text.num_hidden_layers * text.num_key_value_heads * head
        return CaptionerSizes(
            patches,
            4 * inner + 5 * hidden,
            tokens,
            3 * text.intermediate_size + 4 * text.hidden_size,
            cached,
            text.vocab_size,
        )

    def inputs(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Build a conversation turn for each picture, padded on the left; the image placeholder expands to the
        picture's tokens."""
        prepared = self.processor(list(images), return_tensors="pt")
        grids = prepared["image_grid_thw"]  # [n, 3]: frames, rows, columns of patches
        merged = self.processor.merge_size**2
        image = self.model.config.image_token_id
        content = [{"type": "image"}, {"type": "text", "text": self.prompt}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        turn = self.tokenizer(text, add_special_tokens=False).input_ids
        if turn.count(image) != 1:
            raise UserError("--model: its chat template has no place for a picture. Download it again")
        place = turn.index(image)
        rows = [[*turn[:place], *[image] * (int(grid.prod()) // merged), *turn[place + 1 :]] for grid in grids]
        width = max(map(len, rows))
        padding = self.tokenizer.pad_token_id
        ids = torch.tensor([[padding] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return {
            "pixel_values": prepared["pixel_values"],
            "image_grid_thw": grids,
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": (ids == image).int(),
        }
