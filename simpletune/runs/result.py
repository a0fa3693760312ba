"""Write a run's result: what the denoiser's method exports, and what trained on the text side."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from simpletune.config.schema import TrainConfig
from simpletune.text.export import export_embeddings, export_lora
from simpletune.text.option import result_names
from simpletune.text.update import text_of, without_text


def export_result(config: TrainConfig, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
    """Write the files of a result in formats that other tools read.

    Args:
        config: the run's configuration.
        model: trained denoiser, with the text side if that trains.
        folder: folder for the result.
        metadata: strings for the safetensors headers.

    Returns:
        The file or folder that ``result_files`` lists first.
    """
    with without_text(model):
        output = config.adapter.export(model, folder, metadata)
    text = text_of(model)
    if text is not None:
        export_lora(text, output, metadata)
        export_embeddings(text, folder, config.name, metadata)
    return result_files(config, folder)[0]


def result_files(config: TrainConfig, folder: Path) -> list[Path]:
    """List the files or folders of a run's result: the LoRA or denoiser first, then the embeddings."""
    return [folder / name for name in result_names(config.name, config.adapter, config.text, config.model.denoiser)]
