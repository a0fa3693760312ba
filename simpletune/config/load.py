"""Find, read and validate a configuration: a JSON file, a shipped one by name, or one stored with a result."""

from __future__ import annotations

import copy
import difflib
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from simpletune.config.check import config_rules
from simpletune.config.error_text import problems_of
from simpletune.config.family_defaults import forgotten_family, with_family, with_objective
from simpletune.config.overrides import merge
from simpletune.config.resolve import file_problems
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.walk import SUFFIXES
from simpletune.engine.memory.profiles import with_profile
from simpletune.models.families import FAMILIES
from simpletune.system import strict_json
from simpletune.system.options import (
    ConfigError,
    Json,
    Option,
    Problem,
    UserError,
    default_tag,
    item_of,
    member_for,
    union_of,
)
from simpletune.system.package import PACKAGE
from simpletune.system.redact import secret_paths, texts_in
from simpletune.system.safetensors_file import PICKLES, conversion_command, read_header
from simpletune.system.shell import quote_command, typed_path
from simpletune.system.strict_json import JsonError

MODEL_PARTS = ("pretrained", "transformer", "unet", "vae", "text_encoders")
PATHS = {
    "data": ("path", "mask_path"),
    "model": (*MODEL_PARTS, "loras"),
    "adapter": ("start",),
    "output": ("runs", "profiles", "cache", "prices"),
}
"""Fields that name files or folders, by section."""
REPAIRS = 3  # removing one wrong value can make another wrong, such as the fields of an unknown tag
_SECRET = (
    "contains a token or a password, but the configuration is copied into checkpoints, results and reports. Remove it, "
    "and set HF_TOKEN or WANDB_API_KEY in the environment"
)


def shipped_folder(package: Path) -> Path:
    """Return the folder ``configs/``."""
    # a folder of an installed package, a link of a checkout, or, where git writes links as text (Windows), its target
    return folder if (folder := package / "configs").is_dir() else package.parent / "configs"


SHIPPED_FOLDER = shipped_folder(PACKAGE)
# A folder in it, of those that lists leave out: they differ from another in a field or two, or are there for studies,
# benchmarks and tests. Their names are found like the others'.
MORE = "more"


def shipped_files() -> dict[str, Path]:
    """Return all shipped configurations by name: the file's, without ``.json``."""
    files = (*SHIPPED_FOLDER.glob("*.json"), *(SHIPPED_FOLDER / MORE).glob("*.json"))
    return {file.stem: file for file in sorted(files) if file.name != "schema.json"}


def shipped_names() -> list[str]:
    """List the names of the shipped configurations to choose from."""
    return [name for name, file in shipped_files().items() if file.parent.name != MORE]


def find_config(file: Path) -> Path:
    """Return the shipped file if ``file`` is its name and no file of the current folder has it, else ``file``."""
    shipped = shipped_files().get(str(file))
    return shipped if shipped is not None and (file.is_dir() or not file.exists()) else file


def read_config(
    file: Path, overrides: list[str] | None = None, needs_data: bool = True, needs_model: bool = True
) -> tuple[TrainConfig, list[str]]:
    """Read, merge and validate a configuration; also return notices about what overrides dropped.

    Args:
        file: a JSON file, or the name of a shipped configuration.
        overrides: ``key.path=value`` each; values are parsed by the field's type.
        needs_data: require the data to exist.
        needs_model: require the model to exist.

    Raises:
        ConfigError: with every problem found.
        UserError: the file does not exist or is not a JSON object.
    """
    merged, notices, problems = merge(read_json(file), overrides or [])
    return validate(merged, str(file), problems, needs_data, needs_model), notices


def read_json(file: Path) -> Json:
    """Read the JSON object of a file or a shipped configuration. Raises UserError with line and column of a mistake."""
    try:
        data = strict_json.read(find_config(file))
    except FileNotFoundError:
        beside = [each for each in file.parent.glob("[!.]*") if each.suffix == ".json" or each.is_dir()]
        meant = {**{name: name for name in shipped_files()}, **{each.stem: str(each) for each in beside}}
        near = difflib.get_close_matches(file.stem, meant, n=1)
        count = len(shipped_names())
        known = (
            f"Give the path of a JSON file, the name of one of the {count} in {SHIPPED_FOLDER}, such as demo, or, "
            "for train, init and data, a folder of pictures"
        )
        hint = f"Did you mean {meant[near[0]]}?" if near else known
        raise UserError(f"{file} does not exist. {hint}") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder. Name a configuration in it, such as {file}/NAME.json") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error})") from None
    except JsonError as error:
        if (seems := _identify_other(file)) is not None:
            raise UserError(f"{file} is not a configuration, but {seems}") from None
        if not error.line:
            raise UserError(f"{file}: {error}") from None
        raise UserError(
            f"{file}:{error.line}:{error.column}: not valid JSON ({error}). "
            "Check for missing or extra commas, single quotes and comments"
        ) from None
    if not isinstance(data, dict):
        kinds = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
        kind = kinds.get(type(data), "null")
        raise UserError(f"{file}: contains {kind}, but a configuration is a JSON object {{...}}")
    return data


def _identify_other(file: Path) -> str | None:
    """Say what a file is that was given in place of a configuration, and what to do with it; None if it is unknown."""
    from simpletune.adapters.files.detect_model import is_lora
    from simpletune.models.shared.single_file import a_lora

    if file.suffix.lower() in SUFFIXES:
        return f"a picture. Give its folder, as in {quote_command('simpletune', 'train', file.parent)}"
    if file.suffix.lower() in (".toml", ".yaml", ".yml"):
        return (
            f"another format. If it is another trainer's configuration: {quote_command('simpletune', 'import', file)}"
        )
    if file.suffix.lower() in (".zip", ".tar", ".gz", ".7z", ".rar"):
        return "an archive. Unpack it, and give the folder with the pictures"
    if file.suffix.lower() in PICKLES:
        return f"a pickle of weights. Convert it: {conversion_command(file)}"
    if file.suffix.lower() != ".safetensors":
        return None
    if is_lora([name for name in read_header(file) if name != "__metadata__"]):
        return a_lora(file)
    words = quote_command("simpletune", "train", "sd15_lora", f"model.pretrained={file}")
    return f"a file of weights. Train it by a configuration of its family, as in {words}"


def read_saved(text: str | bytes) -> TrainConfig:
    """Read a complete configuration that a run, a checkpoint or a LoRA file stores; a ``ValidationError`` if it is none
    of this version."""
    try:
        data = json.loads(text)
    except ValueError:
        return TrainConfig.model_validate_json(text)  # validation reports what is wrong
    # An objective without a name is from before there were several.
    return TrainConfig.model_validate_json(json.dumps(with_objective(data) if isinstance(data, dict) else data))


def complete(data: Json) -> Json:
    """Fill in what the family, the profile and the unions' tags determine."""
    method = member_for(TrainConfig.model_fields["adapter"], data.get("adapter", {}))
    data = with_profile(with_family(data), bool(getattr(method, "trains_base", False)))
    return with_default_tags(TrainConfig, data)


def with_default_tags(option: type[Option], data: Json) -> Json:
    """Add the default tag to each union that lacks one."""
    result = dict(data)
    for name, field in option.model_fields.items():
        item, value = item_of(field), result.get(name)
        if isinstance(value, dict):
            result[name] = _tag(field, value)
        elif isinstance(value, list) and item is not None:
            result[name] = [_tag(item, each) if isinstance(each, dict) else each for each in value]
    return result


def _tag(field: FieldInfo, value: Json) -> Json:
    """Add the default tags to a field's object."""
    union = union_of(field)
    if union is not None and union.tag not in value:
        value = {union.tag: default_tag(union, value), **value}
    member = member_for(field, value)
    return value if member is None else with_default_tags(member, value)


def validate(
    data: Json,
    source: str,
    problems: list[Problem] | None = None,
    needs_data: bool = True,
    needs_model: bool = True,
) -> TrainConfig:
    """Validate once, strictly, in JSON mode, and then check the rules between fields.

    The rules run without the invalid fields, so that all problems are reported at once in one ``ConfigError``.
    """
    data, unreadable = with_typed_paths(data)
    found = [*(problems or []), *unreadable, *(Problem(path, _SECRET) for path in secret_paths(data))]
    if (suggested := forgotten_family(data)) is not None:
        usual = FAMILIES[0]
        found.append(
            Problem(
                "model.family",
                f"it is not stated, and the name of {data['model']['pretrained']} suggests {suggested.words.title}. "
                f"Set it to {suggested.family}, or to {usual.family} if it is an {usual.words.title} model",
            )
        )
        data = {**data, "model": {**data["model"], "family": suggested.family}}
    data = complete(data)
    config = _attempt(data, found)
    unheard = list(found)
    for _ in range(REPAIRS):
        if config is None:
            config = _attempt(_repaired(data, unheard), unheard)
    if config is not None:
        bad = {problem.path for problem in found}
        known = suggested is not None or not bad & {"model", "model.family"}  # else it is the default one here
        missing = tuple(part for part, needed in (("data.", needs_data), ("model.", needs_model)) if not needed)
        try:
            found += [problem for problem in config_rules(config, known) if problem.path not in bad]
            bad = {problem.path for problem in found}
            skipped = (*missing, *(f"{path}." for path in bad))
            of_files = file_problems(config, known, needs_data)
            found += [each for each in of_files if each.path not in bad and not each.path.startswith(skipped)]
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            found.append(_path_too_long(data, str(error.filename)))
    if found or config is None:
        raise ConfigError(found, source)
    return config


def _path_too_long(data: Json, file: str) -> Problem:
    """Report a path that is longer than any file's: its place is the longest value within it."""
    named = {path: value for path, value in texts_in(data) if value in file}
    path = max(named, key=lambda path: len(named[path]), default="")
    return Problem(path, f"{file[:40]}... has {len(file):,} characters, more than a file's name can. Shorten it")


def path_fields(data: Json) -> Iterator[tuple[Any, Any, str]]:
    """Yield every text that names a file or folder, if it is one: its object or list, its key in it, and its path."""
    section = data.get("data")
    sources = section.get("sources") if isinstance(section, dict) else None
    places: list[tuple[Any, str, tuple[str, ...]]] = [(data.get(name), name, keys) for name, keys in PATHS.items()]
    if isinstance(sources, list):
        places += [(source, f"data.sources.{number}", PATHS["data"]) for number, source in enumerate(sources)]
    for place, name, keys in places:
        for key in keys if isinstance(place, dict) else ():
            if isinstance(place.get(key), str):
                yield place, key, f"{name}.{key}"
            elif isinstance(place.get(key), list):
                texts = enumerate(place[key])
                yield from ((place[key], at, f"{name}.{key}.{at}") for at, text in texts if isinstance(text, str))


def with_typed_paths(data: Json) -> tuple[Json, list[Problem]]:
    """Return the configuration with its paths as ``typed_path`` reads them, and the problems of those it cannot."""
    data, problems = copy.deepcopy(data), []
    for place, key, path in path_fields(data):
        try:
            place[key] = typed_path(place[key])
        except UserError as error:
            problems.append(Problem(path, str(error)))
    return data, problems


def _attempt(data: Json, found: list[Problem]) -> TrainConfig | None:
    try:
        return TrainConfig.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        found += problems_of(error, data, TrainConfig)
        return None


def _repaired(data: Json, found: list[Problem]) -> Json:
    """Remove invalid values and fill in required ones; problems of these placeholders are not reported."""
    result = copy.deepcopy(data)
    prompts_alone = isinstance(result.get("concept"), dict) and result.get("data") is None
    for problem in found:
        section: object = result
        for part in problem.path.split("."):
            if isinstance(section, list) and part.isdecimal():
                item = section[int(part)] if int(part) < len(section) else None  # an item that is lacking
                section = item if isinstance(item, dict) else section
            elif isinstance(section, dict):
                owner, leaf, section = section, part, section.get(part)
        owner.pop(leaf, None)  # for an item of a list of values, remove the list
    if prompts_alone:
        concept = result.setdefault("concept", {})
        directions = concept.get("directions")
        if not isinstance(directions, list) or not directions or not all(isinstance(d, dict) for d in directions):
            directions = [{}]
        concept["directions"] = [{"target": "a", "positive": "b"} | direction for direction in directions]
        result.setdefault("name", "unnamed")
        return with_default_tags(TrainConfig, result)
    if not isinstance(result.setdefault("data", {}), dict):
        result["data"] = {}
    data = result["data"]
    if data.get("source") == "several" and not data.get("sources"):
        data = result["data"] = {}
    for source in data.get("sources") or [data]:
        source.setdefault("path", "demo:pictures")
    result.setdefault("name", "unnamed")
    return with_default_tags(TrainConfig, result)
