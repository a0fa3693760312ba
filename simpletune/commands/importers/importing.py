"""Import a configuration: recognise its format, translate options and data, and check the result."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from simpletune.commands.importers import (
    kohya,
    kohya_data,
    onetrainer,
    onetrainer_concepts,
    simpletuner,
    simpletuner_data,
)
from simpletune.commands.importers.files import found_beside, read_any
from simpletune.commands.importers.translation import KeyOutcome, Translation, trainer_tables
from simpletune.config.load import validate
from simpletune.config.run_name import run_name
from simpletune.config.schema import TrainConfig
from simpletune.system.options import ConfigError, Json, Problem, UserError

FOLDER = "data/my_pictures"
ABSENT = ("does not exist", "is not a folder", "was not found", "cannot be read")


@dataclass(frozen=True)
class ImportResult:
    """Another trainer's configuration, translated."""

    tool: str  # the trainer that it was for
    config: Json  # our configuration, as JSON
    lines: list[KeyOutcome]  # what became of each key
    problems: list[Problem] = field(default_factory=list)  # problems that ``check`` finds in it
    missing: list[Problem] = field(default_factory=list)  # files and models that it names but this machine lacks


def import_file(file: Path, data: Path | None = None) -> ImportResult:
    """Translate a configuration of SimpleTuner, kohya's scripts or OneTrainer."""
    settings = read_any(file)
    if isinstance(settings, list):
        raise UserError(f"{file} is a list of data sets. Give it with --data, after the configuration")
    if not isinstance(settings, dict):
        raise UserError(f"{file} is no configuration of SimpleTuner, kohya's scripts or OneTrainer: no object {{...}}")
    tool = form_of(settings)
    if tool is None:
        raise UserError(
            f"{file} is no configuration of SimpleTuner, kohya's scripts or OneTrainer. simpletune's own "
            "configurations need no import"
        )
    try:
        general, sources = _BY_TOOL[tool](settings, file.parent, data)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: a configuration of {tool}, but a value has an unexpected type ({error})") from None
    config = _assembled(general, sources, file)
    lines = [*general.lines, *(line for source in sources for line in source.lines)]
    return ImportResult(tool, config, lines, *_problems(config, file))


def form_of(settings: Json) -> str | None:
    """Recognise the trainer by the keys of its configuration; None for an unknown format."""
    keys = set(simpletuner.strip_dashes(settings))
    if kohya_data.is_dataset(settings):
        return kohya.TITLE
    of_each = (simpletuner, keys), (onetrainer, keys), (kohya, set(kohya.flatten_sections(settings)))
    scores = {tool.TITLE: len(own.intersection(trainer_tables(tool.NAME)["recognised_by"])) for tool, own in of_each}
    best = max(scores, key=lambda tool: scores[tool])
    return best if scores[best] >= 2 else None


def _simpletuner(settings: Json, folder: Path, data: Path | None) -> tuple[Translation, list[Translation]]:
    named = simpletuner.strip_dashes(settings).get("data_backend_config")
    general = simpletuner.translate(settings, folder)
    entries = _data(folder, data, named)
    if entries is None:
        return general, []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError("--data: SimpleTuner's data sets are a list of objects (multidatabackend.json)")
    return general, simpletuner_data.translate(entries, general)


def _kohya(settings: Json, folder: Path, data: Path | None) -> tuple[Translation, list[Translation]]:
    own = settings if kohya_data.is_dataset(settings) else None
    options = kohya.flatten_sections({} if own is not None else settings)
    general = kohya.translate(options, folder)
    content = own if own is not None else _data(folder, data, options.get("dataset_config"))
    general.seen("dataset_config")
    if content is None:
        sources = kohya_data.from_folders(general)
    elif not isinstance(content, dict) or not isinstance(content.get("datasets"), list):
        raise UserError("--data: kohya's data sets are a TOML file with [[datasets]] (dataset_config)")
    else:
        sources = kohya_data.translate(content, general)
    kohya.finish(general)
    return general, sources


def _onetrainer(settings: Json, folder: Path, data: Path | None) -> tuple[Translation, list[Translation]]:
    concepts = settings.get("concepts")
    if concepts is None or data is not None:
        concepts = _data(folder, data, settings.get("concept_file_name"))
    general = onetrainer.translate(settings)
    if concepts is not None and not (isinstance(concepts, list) and all(isinstance(each, dict) for each in concepts)):
        raise UserError("--data: OneTrainer's concepts are a list of objects (concepts.json)")
    sources = onetrainer_concepts.translate(concepts or [], general)
    samples = settings.get("samples")
    if samples is None and isinstance(settings.get("sample_definition_file_name"), str):
        beside = found_beside(folder, settings["sample_definition_file_name"])
        samples = None if beside is None else read_any(beside)
    if isinstance(samples, list):
        onetrainer_concepts.take_samples(samples, general)
    onetrainer.finish(general)
    return general, sources


_BY_TOOL = {simpletuner.TITLE: _simpletuner, kohya.TITLE: _kohya, onetrainer.TITLE: _onetrainer}


def _data(folder: Path, data: Path | None, named: object) -> object:
    """Read the data sets: those of ``--data``, otherwise of the file that the configuration names, if it is here."""
    if data is not None:
        return read_any(data)
    beside = found_beside(folder, named) if isinstance(named, str) else None
    return None if beside is None else read_any(beside)


def _assembled(general: Translation, sources: list[Translation], file: Path) -> Json:
    """Build our configuration, with sections in the order of the schema."""
    config = dict(general.config)
    if not sources:
        general.lines.append(
            KeyOutcome(
                "changed",
                "the data",
                "not found",
                "data.path",
                FOLDER,
                "name the data sets with --data, or set data.path",
            )
        )
        dropout = general.settings.get(
            "caption_dropout_probability", general.defaults.get("caption_dropout_probability")
        )
        config["data"] = {"path": FOLDER} | ({} if dropout is None else {"caption_dropout": float(dropout)})
    elif len(sources) == 1:
        config["data"] = sources[0].config
        sources[0].lines = [_single(line) for line in sources[0].lines]
    else:
        config["data"] = {"sources": [source.config for source in sources]}
    config.setdefault("name", _name(file))
    order = ["about", *TrainConfig.model_fields]
    return {key: config[key] for key in order if key in config}


def _single(line: KeyOutcome) -> KeyOutcome:
    return replace(line, path=line.path.replace("data.sources.0.", "data."))


def _name(file: Path) -> str:
    return run_name(file.resolve().parent.name if file.stem in ("config", "settings") else file.stem)


def _problems(config: Json, file: Path) -> tuple[list[Problem], list[Problem]]:
    """Run ``check``: return the problems of the configuration, and what is missing on this machine."""
    try:
        validate(config, str(file))
    except ConfigError as error:
        absent = [problem for problem in error.problems if _is_absent(problem)]
        return [problem for problem in error.problems if problem not in absent], absent
    return [], []


def _is_absent(problem: Problem) -> bool:
    leaf = problem.path.rpartition(".")[2]
    place = leaf in ("path", "mask_path") or problem.path.startswith("model.")
    return place and any(words in problem.message for words in ABSENT)
