"""Resolve names in a configuration to folders, and check what needs no torch."""

from __future__ import annotations

from pathlib import Path

from simpletune.config.schema import DEMO, TrainConfig
from simpletune.data.demo import resolve, transformer_config
from simpletune.data.sources.multi_source import field_of, source_problems, with_paths
from simpletune.system.options import ConfigError, Problem, UserError

MODEL_DEMOS = ["demo:tiny-sd3"]
DATA_DEMOS = ["demo:pictures", "demo:subject"]


def file_problems(config: TrainConfig) -> list[Problem]:
    """List missing folders and conflicts with the model's shapes; build and download nothing."""
    found: list[Problem] = []
    paths: list[Path | None] = []
    for index, source in enumerate(config.data.members):
        if source.path.startswith(DEMO):
            found += _demo_problems(field_of(config.data, index, "path"), source.path, DATA_DEMOS)
        paths.append(None if source.path.startswith(DEMO) else Path(source.path))
    found += source_problems(config.data, paths)
    unknown = [p for part in _demo_parts(config) for p in _demo_problems(f"model.{part[0]}", part[1], MODEL_DEMOS)]
    if unknown:
        return found + unknown
    if config.is_demo:
        return found + list(config.shape_rules(config.model.shapes_of(transformer_config())))
    config = resolve_model_folder(config)
    model = list(config.model.problems())
    if model:
        return found + model
    try:
        shapes = config.model.shapes(fetch=False)
    except UserError as error:
        return [*found, Problem("model.pretrained", str(error))]
    except (KeyError, TypeError) as error:
        return [
            *found,
            Problem(
                "model.pretrained",
                f"the {config.model.denoiser}'s config.json lacks {error}. Name an {config.model.title} model",
            ),
        ]
    return found + (list(config.shape_rules(dict(shapes))) if shapes else []) + _schedule_problems(config)


def _schedule_problems(config: TrainConfig) -> list[Problem]:
    """List conflicts of the objective with the model's noise schedule, if that is known without a download."""
    try:
        known = config.model.is_schedule_known()
        return list(config.objective.problems(config.model.scheduler_config)) if known else []
    except UserError as error:
        return [Problem("model.pretrained", str(error))]


def require_model_rules(config: TrainConfig) -> None:
    """Check rules that need the model's shapes and schedule, which ``check`` may not know before the download.

    Args:
        config: configuration with folders resolved.

    Raises:
        ConfigError: with every problem found.
    """
    problems = list(config.shape_rules(config.model.known_shapes()))
    problems += config.objective.problems(config.model.scheduler_config)
    if problems:
        raise ConfigError(problems)


def _demo_problems(path: str, name: str, known: list[str]) -> list[Problem]:
    if name in known:
        return []
    return [Problem(path, f"unknown demo {name}. Use {' or '.join(known)}")]


def resolve_folders(config: TrainConfig) -> TrainConfig:
    """Replace ``demo:`` names by folders, which are created on first use, and download the model from the hub.

    Everything is downloaded here, before any other work.

    Raises:
        UserError: the download fails or does not fit on the disk.
    """
    config = resolve_data_folder(resolve_model_folder(config))
    config.model.fetch()
    return config


def checked_folders(config: TrainConfig) -> TrainConfig:
    """Resolve folders, and check the rules that need the model.

    Raises:
        UserError: a download failed, or a rule is broken.
    """
    resolved = resolve_folders(config)
    require_model_rules(resolved)
    return resolved


def resolve_data_folder(config: TrainConfig) -> TrainConfig:
    """Replace the data's ``demo:`` names by their folders."""

    def resolved(path: str) -> str:
        return str(resolve(path, config.output.cache_folder)) if path.startswith(DEMO) else path

    return config.model_copy(update={"data": with_paths(config.data, resolved)})


def resolve_model_folder(config: TrainConfig) -> TrainConfig:
    """Replace the model's ``demo:`` names by folders; download nothing."""
    folders = {part: str(resolve(name, config.output.cache_folder)) for part, name in _demo_parts(config)}
    return config.model_copy(update={"model": config.model.model_copy(update=folders)}) if folders else config


def _demo_parts(config: TrainConfig) -> list[tuple[str, str]]:
    """List the fields of ``model`` that contain a ``demo:`` name."""
    model = config.model
    found = {"pretrained": model.pretrained, model.denoiser: getattr(model, model.denoiser), "vae": model.vae}
    found["text_encoders"] = model.text_encoders
    return [(part, name) for part, name in found.items() if name is not None and name.startswith(DEMO)]
