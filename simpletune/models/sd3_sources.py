"""Which option of the model provides which of its parts, where that part is, and what is missing: no torch, no network.

A single file comes before ``model.text_encoders`` for what it holds; what it lacks (always the tokenizers) comes from
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.hub.download import Repository
from simpletune.hub.fetch import HubPart, is_hub_name, part_folder
from simpletune.models.parts import Part, bundled_configs
from simpletune.models.single_file import open_file
from simpletune.options import Problem, UserError

if TYPE_CHECKING:
    from simpletune.models.sd3 import SD3

WITHOUT_WEIGHTS = ("tokenizer", "scheduler")
NAMES_OF = {"text_encoder": "CLIP-L", "text_encoder_2": "CLIP-G", "text_encoder_3": "T5", "vae": "autoencoder (VAE)"}
PIPELINE = "a folder in diffusers' layout, or a hub name (owner/name)"
REMEDY = (
    "Set model.text_encoders to a folder in diffusers' layout or to a hub name "
    "(stabilityai/stable-diffusion-3-medium-diffusers, say: only what is lacking is fetched)"
)


def is_single_file(name: str) -> bool:
    """Whether a name is that of a single weight file."""
    return name.endswith((".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")) and not Path(name).is_dir()


def part_names(model: SD3) -> list[str]:
    """Every part that the model needs."""
    suffixes = ("", "_2", "_3") if model.t5 else ("", "_2")
    text = [f"{kind}{suffix}" for suffix in suffixes for kind in ("tokenizer", "text_encoder")]
    return ["scheduler", "transformer", "vae", *text]


def provider(model: SD3, part: str) -> tuple[str, str | None]:
    """The option that provides a part, and its value; None where only the bundled configuration is left.

    Raises:
        UserError: a single file cannot be read.
    """
    single = is_single_file(model.pretrained)
    if part in ("transformer", "vae") and getattr(model, part) is not None:
        return part, getattr(model, part)
    if part.startswith(("tokenizer", "text_encoder")) and model.text_encoders is not None:
        if not (single and open_file(Path(model.pretrained)).has(part)):
            return "text_encoders", model.text_encoders
    if single and part.startswith(WITHOUT_WEIGHTS):
        return "text_encoders", None
    return "pretrained", model.pretrained


def locate(model: SD3, part: str) -> Part:
    """Where a part is, fetched from the hub if need be.

    Raises:
        UserError: it is not there, or cannot be fetched.
    """
    field, value = provider(model, part)
    if value is None:
        return _without_file(model, part)
    if is_single_file(value):
        if not open_file(Path(value)).has(part):
            raise UserError(f"model.{field}: {value} holds no {NAMES_OF.get(part, part)}. {_remedy(part)}")
        return Part(part, _config_folder(model, part), Path(value))
    if is_hub_name(value):
        return Part(part, part_folder(_hub_part(model, part, field, value)))
    if field == part and (Path(value) / "config.json").exists():
        return Part(part, Path(value))
    folder = Path(value) / part
    if not folder.is_dir():
        raise UserError(f"model.{field}: {value} has no {part}/ folder. Give {PIPELINE}")
    return Part(part, folder)


def _without_file(model: SD3, part: str) -> Part:
    """The scheduler of a single file; its tokenizers are nowhere."""
    if part != "scheduler":
        raise UserError(f"model.pretrained: {model.pretrained} holds no {part}. {REMEDY}")
    return Part(part, _config_folder(model, part))


def _config_folder(model: SD3, part: str) -> Path | None:
    """The folder of a part's configuration beside ``model.text_encoders``; None: the bundled one serves."""
    folder = Path(model.text_encoders or "/nowhere") / part
    known = part in bundled_configs() and any(folder.glob("*config.json"))
    return folder if known else None


def _remedy(part: str) -> str:
    return "Set model.vae to a folder or hub name that has one" if part == "vae" else REMEDY


def _hub_part(model: SD3, part: str, field: str, value: str) -> HubPart:
    weights = not part.startswith(WITHOUT_WEIGHTS) and not (part == "transformer" and model.init == "random")
    return HubPart(Repository(value, model.revision if field == "pretrained" else None), part, weights)


def hub_parts(model: SD3) -> list[HubPart]:
    """All that has to come from the hub, so that it can be measured and fetched at once."""
    provided = [(part, *provider(model, part)) for part in part_names(model)]
    return [_hub_part(model, part, f, value) for part, f, value in provided if value is not None and is_hub_name(value)]


def problems(model: SD3) -> Iterator[Problem]:
    """Names that lead nowhere, files that hold no SD3, and parts that nothing provides."""
    unusable = list(_unusable_names(model))
    yield from unusable
    if any(problem.path == "model.pretrained" for problem in unusable):
        return
    named = {problem.path for problem in unusable}
    provided = [(part, *provider(model, part)) for part in part_names(model)]
    for field, value in dict.fromkeys((field, value) for _, field, value in provided):
        if value is not None and f"model.{field}" not in named and _is_bare(value, model):
            yield Problem(f"model.{field}", f"{value} holds no part of a model. Give {PIPELINE}")
            named.add(f"model.{field}")
    for part, field, value in provided:
        if value is not None and not is_hub_name(value) and f"model.{field}" not in named:
            yield from _problems_of_part(field, value, part)
    if lacking := list(_lacking_text_parts(provided)):
        yield Problem("model.pretrained", f"{model.pretrained} holds no {', '.join(lacking)}. {REMEDY}")


def _is_bare(folder: str, model: SD3) -> bool:
    """Whether a folder that is there holds nothing of a model: pictures, say."""
    if not Path(folder).is_dir():
        return False
    parts = any((Path(folder) / part).is_dir() for part in part_names(model))
    return not parts and not (Path(folder) / "config.json").exists()


def _lacking_text_parts(provided: list[tuple[str, str, str | None]]) -> Iterator[str]:
    """Text encoders and tokenizers that the single file would have to hold and does not."""
    for part, _, value in provided:
        if part.startswith("text_encoder") and value is not None and is_single_file(value):
            if not open_file(Path(value)).has(part):
                yield NAMES_OF[part]
    if any(part.startswith("tokenizer") and value is None for part, _, value in provided):
        yield "tokenizers"


def _problems_of_part(field: str, value: str, part: str) -> Iterator[Problem]:
    """A part that a local folder or file has to hold, in a form that can be read."""
    if not is_single_file(value):
        yield from _problems_of_folder(field, Path(value), part)
        return
    file = open_file(Path(value))
    try:
        if file.has(part):
            file.check(part)
        elif not part.startswith("text_encoder"):
            yield Problem(f"model.{field}", f"{value} holds no {NAMES_OF.get(part, part)}. {_remedy(part)}")
    except UserError as error:
        yield Problem(f"model.{field}", str(error))


def _problems_of_folder(field: str, folder: Path, part: str) -> Iterator[Problem]:
    """A part that a local folder has to hold; the transformer's configuration is read for its shapes anyway."""
    own = field == part and (folder / "config.json").exists()
    if not own and not (folder / part).is_dir():
        yield Problem(f"model.{field}", f"{folder} has no {part}/ folder (diffusers' layout)")
    elif part != "transformer" and not part.startswith("tokenizer"):
        try:
            Part(part, folder if own else folder / part).config()
        except UserError as error:
            yield Problem(f"model.{field}", str(error))


def _unusable_names(model: SD3) -> Iterator[Problem]:
    """Options that name neither a folder nor a usable file nor a hub repository."""
    for field in ("pretrained", "transformer", "vae", "text_encoders"):
        value = getattr(model, field)
        if value is None or is_hub_name(value) or Path(value).is_dir():
            continue
        if is_single_file(value) and field in ("pretrained", "transformer"):
            try:
                open_file(Path(value))
            except FileNotFoundError:
                yield Problem(f"model.{field}", f"{value} does not exist. Check the path")
            except (UserError, OSError) as error:
                yield Problem(f"model.{field}", str(error))
        else:
            yield Problem(f"model.{field}", f"{value} is not a folder, nor a hub name (owner/name). Check the path")
