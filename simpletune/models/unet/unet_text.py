"""What the text sides of families with a UNet share: 77 tokens, which one or several CLIP encoders read."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from simpletune.models.text.family_text import FamilyText, HasFiles
from simpletune.models.unet.unet_config import levels_of


class UNetText(FamilyText[HasFiles]):
    """The text side of a family with a UNet."""

    tokens: ClassVar[int] = 77

    @cached_property
    def width(self) -> int:
        return levels_of(self.family.files.known_config())[0].text
