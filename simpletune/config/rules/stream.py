"""Check what a run cannot do when its data is streamed row by row instead of listed beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simpletune.config.prior import ClassPictures
from simpletune.system.options import Problem

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig


def stream_rules(config: TrainConfig) -> Iterator[Problem]:
    """Report options that need all pictures or captions before the first step."""
    if not config.data.streamed:
        return
    if config.train.batch_size == "auto":
        yield Problem(
            "train.batch_size",
            "auto may change after pictures were encoded, which would change the rows of a stream that the run uses. "
            "Use a number; simpletune estimate says what fits",
        )
    split = config.validation.split
    if split is not None and split < 1:
        yield Problem(
            "validation.split",
            f"{split:g} would hold out a share of a stream by the bytes of all its pictures, which are not read. Use a "
            "whole number of pictures, such as 64",
        )
    if config.text.trains:
        yield Problem(
            "text",
            "training the text side reads every caption before the first step, but a stream's are only read when "
            "they are needed. Use data.source table or folder, or text without embeddings and lora",
        )
    if isinstance(config.prior, ClassPictures):
        yield Problem(
            "prior.method",
            f"{config.prior.method} adds a source of class pictures, and a stream does not mix with other sources. Use "
            "another prior.method, or data.source table",
        )
