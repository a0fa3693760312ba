"""Load an encoder's parts from its folder with transformers, and refuse folders that are not whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from simpletune.commands.evaluate.encoders.encoder import EncoderInfo
from simpletune.models.shared.transformers_folder import ModelFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def complete(kind: type[PreTrainedModel], about: EncoderInfo, **options: object) -> PreTrainedModel:
    """Load a model in fp32, frozen.

    Raises:
        UserError: weights are missing, have other shapes than the configuration, or cannot be read.
    """
    return encoder_folder(about).model(kind, torch.float32, **options)


def empty_model(
    kind: type[PreTrainedModel], config: type[PretrainedConfig], about: EncoderInfo, **options: object
) -> PreTrainedModel:
    """Build a model from its configuration with uninitialised weights, on torch's current device.

    Raises:
        UserError: the configuration does not describe such a model.
    """
    return encoder_folder(about).empty(kind, config, **options)


def tokenizer_of(about: EncoderInfo) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Raises:
        UserError: it cannot be loaded.
    """
    return encoder_folder(about).tokenizer()


def encoder_folder(about: EncoderInfo) -> ModelFolder:
    """Return the folder of an encoder, with the words for its messages."""
    return ModelFolder(about.folder, about.option, "encoder")
