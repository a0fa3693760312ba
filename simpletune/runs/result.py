"""Write and verify a run's result: what the denoiser's method exports, and what trained on the text side."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from simpletune.adapters.text.text_option import result_names
from simpletune.adapters.text.update import trained_text, without_text
from simpletune.config.schema import TrainConfig
from simpletune.system.checksums import sha256_of
from simpletune.system.options import Json

CHECKSUMS = "result_sha256"  # in summary.json: the SHA-256 of the result's files, by path in the run's folder


def export_result(config: TrainConfig, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
    """Write the files of a result in formats that other tools read; returns the one that ``result_files`` lists first.

    ``model`` is the trained denoiser, with the text side if that trains; ``metadata`` goes into safetensors' headers.
    """
    with without_text(model):
        output = config.adapter.export(model, folder, metadata)
    text = trained_text(model)
    if text is not None:
        text.export_lora(output, metadata)
        text.export_embeddings(folder, config.name, metadata)
    return result_files(config, folder)[0]


def result_files(config: TrainConfig, folder: Path) -> list[Path]:
    """List the files or folders of a run's result: the LoRA or denoiser first, then the embeddings."""
    return [folder / name for name in result_names(config.name, config.adapter, config.text, config.model.denoiser)]


def result_checksums(config: TrainConfig, folder: Path) -> dict[str, str]:
    """Compute the SHA-256 of every file of a run's result, by its path in the run's folder."""
    places = result_files(config, folder)
    files = [file for place in places for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    return {file.relative_to(folder).as_posix(): sha256_of(file) for file in files if file.is_file()}


def damaged_results(config: TrainConfig, folder: Path, summary: Json) -> list[Path]:
    """List the files or folders of a run's result that are missing or do not match the checksums in its summary."""
    known = summary.get(CHECKSUMS)
    recorded = known if isinstance(known, dict) else {}
    damaged = []
    for place in result_files(config, folder):
        files = {folder / name: value for name, value in recorded.items() if Path(name).parts[:1] == (place.name,)}
        if not files or not all(file.is_file() and sha256_of(file) == value for file, value in files.items()):
            damaged.append(place)
    return damaged
