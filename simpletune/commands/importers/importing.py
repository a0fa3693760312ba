"""``simpletune import``: recognise a configuration's format, translate it, check it, and report what became of each
key."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from simpletune.commands.importers import (
    ai_toolkit,
    diffusers_scripts,
    kohya,
    kohya_ss,
    lora_easy_scripts,
    musubi_tuner,
    onetrainer,
    simpletuner,
)
from simpletune.commands.importers.command_lines import TOOK, listed
from simpletune.commands.importers.config_files import read_any
from simpletune.commands.importers.translation import (
    KeyOutcome,
    Listed,
    Translation,
    Unsupported,
    format_value,
    refuse,
    refuse_by_table,
    trainer_tables,
)
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig, run_name
from simpletune.runs.outputs import require_new
from simpletune.system.atomic import write_json
from simpletune.system.options import ConfigError, Json, Problem, UserError, plural
from simpletune.system.printable import describe_exception, printable
from simpletune.system.redact import redact

FOLDER = "data/my_pictures"
TOOLS = {
    tool.TITLE: tool
    for tool in (simpletuner, kohya_ss, kohya, lora_easy_scripts, onetrainer, ai_toolkit, diffusers_scripts)
}
READERS = TOOLS | {musubi_tuner.TITLE: musubi_tuner}  # which reads one of its trainer's models
KNOWN = ", ".join([*TOOLS][:-1]) + " or " + [*TOOLS][-1]
LISTS: dict[Listed, str] = {
    "left out": ", which the result lacks",
    "unknown": ", which simpletune import does not know",
    "changed": "",
    "taken": "",
    "not needed": ", without an effect on the result",
    "off": "",
}
"""The printed lists, and what follows the number of their keys."""
UNEXPECTED = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError, OSError)
"""What a translation raises for a value that its trainer would not take either."""
ABSENT = ("does not exist", "is not a folder", "was not found", "cannot be read", "neither a folder nor a Hub name")


OF_WINDOWS = "is a path of Windows"


@dataclass(frozen=True)
class ImportResult:
    """Another trainer's configuration, translated."""

    tool: str
    config: Json
    lines: list[KeyOutcome]  # what became of each key
    problems: list[Problem] = field(default_factory=list)  # problems that ``check`` finds in it
    missing: list[Problem] = field(default_factory=list)  # files and models that it names but this machine lacks

    def lists(self) -> dict[Listed, list[KeyOutcome]]:
        """Return lines by the list that they are printed in. A key stands in one: its lines that differ are changes."""
        of_keys: dict[str, list[KeyOutcome]] = {}
        for line in self.lines:
            of_keys.setdefault(line.key, []).append(line)
        found: dict[Listed, list[KeyOutcome]] = {}
        for lines in of_keys.values():
            kinds = {line.listed for line in lines}
            mixed: Listed = "changed" if kinds & {"taken", "changed"} else "left out"
            mixed = "not needed" if kinds == {"not needed", "off"} else mixed
            found.setdefault(kinds.pop() if len(kinds) == 1 else mixed, []).extend(lines)
        return found


def import_command(file: Path, data: Path | None, out: Path | None, overwrite: bool) -> None:
    """Translate a configuration; without a file to write, print it, and the report to standard error."""
    if out is not None:
        require_new(out, overwrite)
    found = import_file(file, data)
    if out is None:
        print(json.dumps(found.config, indent=2, ensure_ascii=False))
    else:
        try:
            write_json(out, found.config)
        except OSError as error:
            raise UserError(f"--out: {out} cannot be written ({error.strerror or error}). Name another file") from None
    said = sys.stderr if out is None else sys.stdout
    for line in _report(found):
        print(printable(redact(line)), file=said)
    if out is not None:
        print(f"written    {out}", file=said)
    if found.problems:
        raise ConfigError(found.problems, str(out or "the result"))


def _report(found: ImportResult) -> Iterator[str]:
    """Yield what was left out and changes the result, and why; what is unknown, was changed or taken; what was left out
    without an effect; options that were off; what is missing here."""
    yield f"{'from':<10} {found.tool}"
    lists = found.lists()
    for head, said in LISTS.items():
        lines = lists.get(head, [])
        count = len({line.key for line in lines})
        if head == "off":
            yield f"{'off':<10} {plural(count, 'option')} that were off"
            if lines:
                yield f"  {', '.join(dict.fromkeys(line.key for line in lines))}"
            continue
        yield f"{head:<10} {plural(count, 'value')}{said}"
        yield from _joined(lines)
    for problem in found.missing:
        yield f"{'not here':<10} {problem}"


def _joined(lines: list[KeyOutcome]) -> Iterator[str]:
    """Format lines; keys of one section that are left out for the same reason share one."""
    groups: dict[object, list[KeyOutcome]] = {}
    for line in lines:
        section = line.key.rpartition(".")[0]
        alone = line.became not in ("left out", "unknown") or not section
        groups.setdefault(str(line) if alone else (section, line.why), []).append(line)
    for group in groups.values():
        if len(group) == 1:
            yield f"  {group[0]}"
        else:
            named = ", ".join(f"{line.key} {format_value(line.key, line.value)}" for line in group)
            yield f"  {named}" + (f": {group[0].why}" if group[0].why else "")


def import_file(file: Path, data: Path | None = None) -> ImportResult:
    """Translate a configuration of one of the trainers in ``TOOLS``."""
    settings = read_any(file)
    if isinstance(settings, list):
        raise UserError(f"{file} is a list of data sets. Give it with --data, after the configuration")
    if not isinstance(settings, dict):
        raise UserError(f"{file} is no configuration of {KNOWN}: no object {{...}}")
    said = settings.pop(TOOK, [])
    try:
        tool = form_of(settings)
        if tool is None:
            raise UserError(f"{file} is no configuration of {KNOWN}. simpletune's own configurations need no import")
        refuse_by_table(READERS[tool].flatten(settings), trainer_tables(READERS[tool].NAME))
        general, sources = READERS[tool].translate(settings, file.parent, data)
        _take_tokenizers(general, file.parent)
        config = _assemble(general, sources, file)
    except Unsupported as error:
        raise Unsupported(f"{file}: {error}") from None
    except UNEXPECTED as error:
        raise UserError(
            f"{file}: a configuration of another trainer, but a value has an unexpected type or size "
            f"({describe_exception(error)}). Correct or remove it"
        ) from None
    lines = [*general.lines, *(line for source in sources for line in source.lines)]
    lines += [KeyOutcome("left out", key, value, why=why) for key, value, why in said]
    lines = list({(line.became, str(line)): line for line in lines}.values())
    return ImportResult(tool, config, lines, *_problems(config, file))


def form_of(settings: Json) -> str | None:
    """Recognise the trainer by the keys of its configuration; None for an unknown format."""
    if musubi_tuner.is_supported(settings):
        return musubi_tuner.TITLE
    _refuse_musubi_tuner(settings)
    if lora_easy_scripts.is_preset(settings):
        return lora_easy_scripts.TITLE
    if "datasets" in settings:
        return kohya.TITLE
    if "script" in settings:  # a command line
        of_each = (title for title, tool in TOOLS.items() if settings["script"] in trainer_tables(tool.NAME)["scripts"])
        return next(of_each, None) or refuse("script", settings["script"])
    scores = {
        title: len(tool.flatten(settings).keys() & set(trainer_tables(tool.NAME)["recognised_by"]))
        for title, tool in TOOLS.items()
    }
    best = max(scores, key=lambda tool: scores[tool])
    return best if scores[best] >= 2 else None


def _refuse_musubi_tuner(settings: Json) -> None:
    """Refuse a configuration, a data set or a command of musubi-tuner by the model that it trains."""
    tables, flat = trainer_tables("musubi_tuner"), kohya.flatten(settings)
    script, network = str(flat.get("script", "")), str(flat.get("network_module", ""))
    sets = [each for each in listed(settings.get("datasets") or []) if isinstance(each, dict)]
    of_data = [key for each in sets for key in each if key in tables["data"]]
    if model := next((model for start, model in tables["scripts"].items() if script.startswith(start)), ""):
        refuse("script", script, f"{model}, by musubi-tuner")
    elif network in tables["networks"]:
        refuse("network_module", network, f"{tables['networks'][network]}, by musubi-tuner")
    elif "dit" in flat:
        named = (
            model
            for key, patterns in tables["named"].items()
            for pattern, model in patterns.items()
            if re.search(pattern, str(flat.get(key, "")))
        )
        model = next(named, "") or tables["with_dit"].get(network, "a model that is not named")
        refuse("dit", flat["dit"], f"{model}, by musubi-tuner")
    elif of_data:
        model = next(filter(None, (tables["data"][key] for key in of_data)), "models other than Stable Diffusion")
        refuse(f"datasets.{of_data[0]}", next(each[of_data[0]] for each in sets if of_data[0] in each),
               f"a data set of musubi-tuner, for {model}")  # fmt: skip


def _take_tokenizers(general: Translation, folder: Path) -> None:
    """Name a source of tokenizers for a single file, which contains none; other trainers bring them."""
    base = general.get("model.pretrained")
    if not isinstance(base, str) or not general.family.files.lacks_tokenizers:
        return
    local = folder / base
    family = general.family.model_copy(update={"pretrained": str(local)}) if os.path.isfile(local) else general.family
    try:
        example = family.files.text_example
    except UserError:  # the file is of another family, or damaged: ``check`` says so
        return
    why = "a single file has no tokenizers; only what it lacks is downloaded"
    general.lines.append(
        KeyOutcome("changed", "the tokenizers", "not in the file", "model.text_encoders", example, why)
    )
    general.set("model.text_encoders", example)


def _assemble(general: Translation, sources: list[Translation], file: Path) -> Json:
    """Build our configuration, with sections in the order of the schema."""
    config = dict(general.config)
    for source in sources:
        if not source.config["path"]:
            why = "name the data sets with --data, or set data.path"
            source.lines.append(KeyOutcome("changed", "the data", "not found", f"{source.place}path", FOLDER, why))
            source.config["path"] = FOLDER
    if "concept" in config:
        assert not sources
    elif len(sources) == 1:
        config["data"] = sources[0].config
        sources[0].lines = [
            replace(line, path=line.path.replace("data.sources.0.", "data.")) for line in sources[0].lines
        ]
    else:
        config["data"] = {"sources": [source.config for source in sources]}
    named_by_folder = file.stem in ("config", "settings")
    config.setdefault("name", run_name(file.resolve().parent.name if named_by_folder else file.stem))
    order = ["about", *TrainConfig.model_fields]
    return {key: config[key] for key in order if key in config}


def _problems(config: Json, file: Path) -> tuple[list[Problem], list[Problem]]:
    """Run ``check``: return the problems of the configuration, and what is missing on this machine."""
    try:
        validate(config, str(file))
    except ConfigError as error:
        absent = [
            problem
            for problem in error.problems
            if OF_WINDOWS in problem.message
            or (problem.path.rpartition(".")[2] in ("path", "mask_path") or problem.path.startswith("model."))
            and any(words in problem.message for words in ABSENT)
        ]
        return [problem for problem in error.problems if problem not in absent], absent
    return [], []
