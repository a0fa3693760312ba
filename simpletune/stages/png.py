"""PNGs with generation parameters that other tools can read. Does not import torch.

The chunk ``parameters`` is the text of AUTOMATIC1111's web UI, which Forge, ComfyUI and civitai also read: the prompt
with ``<lora:NAME:STRENGTH>``, the negative prompt, and one line of settings. The chunk ``simpletune`` contains every
value as JSON.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import IO, TYPE_CHECKING

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from simpletune import __version__
from simpletune.system.options import Json

if TYPE_CHECKING:
    from simpletune.stages.sample import ImageRequest

CHUNK = "simpletune"
ASKED = (
    "prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance", "strength", "paste", "inputs",
)  # fmt: skip
_SEPARATORS = re.compile(r'[,:<>"\n]')


def save_png(image: Image.Image, file: Path | IO[bytes], request: ImageRequest, **more: object) -> None:
    """Write a PNG with its generation parameters in text chunks.

    Args:
        image: the picture.
        file: the target.
        request: the request that was generated.
        more: further values, such as ``weights`` (a description), ``model``, ``sampler`` and ``loras`` (pairs of name
            and strength).
    """
    how = request_values(request)
    chunks = {"parameters": web_ui_text(request, **more), CHUNK: json.dumps({**how, **more}, ensure_ascii=False)}
    chunks |= {"seed": str(request.seed)} | {key: value for key, value in more.items() if isinstance(value, str)}
    info = PngInfo()
    for key, value in chunks.items():
        # tEXt only for ASCII, because some readers decode its Latin-1 as UTF-8
        (info.add_text if value.isascii() else info.add_itxt)(key, value)
    if isinstance(file, Path):
        file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file, format="PNG", pnginfo=info)


def request_values(request: ImageRequest) -> Json:
    """Return a request as JSON: files by their paths, without pictures in memory, and without what needs a picture or a
    mask that is not there."""
    how = {key: str(value) if isinstance(value, Path) else value for key, value in vars(request).items()}
    less = {"strength", "image"} if request.image is None else set()
    less |= {"mask", "paste"} if request.mask is None else set()
    return {key: value for key, value in how.items() if key not in less and not isinstance(value, Image.Image)}


def comparison_key(how: Json) -> str:
    """Return what was asked for, as text that is equal for pictures that differ only in the weights."""
    return json.dumps({name: how[name] for name in ASKED if name in how}, sort_keys=True)


def web_ui_text(
    request: ImageRequest, model: object = "", loras: object = (), sampler: object = "", **more: object
) -> str:
    """Format the text of the chunk ``parameters``.

    Puts each prompt on one line and removes field separators from names, because some readers split at every comma.
    """
    pairs = loras if isinstance(loras, list | tuple) else ()
    tags = [f"<lora:{_name(name)}:{strength:g}>" for name, strength in pairs]
    settings = {
        "Steps": request.steps,
        **({"Sampler": sampler} if sampler else {}),
        "CFG scale": f"{request.guidance:g}",
        "Seed": request.seed,
        "Size": f"{request.width}x{request.height}",
    }
    if request.image is not None:
        settings["Denoising strength"] = f"{request.strength:g}"
    if model:
        settings["Model"] = _name(str(model))
    settings["Version"] = f"simpletune {__version__}"
    return "\n".join(
        [
            " ".join([*request.prompt.split(), *tags]),
            f"Negative prompt: {' '.join((request.negative_prompt or '').split())}",
            ", ".join(f"{key}: {value}" for key, value in settings.items()),
        ]
    )


def _name(text: str) -> str:
    """Strip folders and field separators from a model's name."""
    return _SEPARATORS.sub("_", Path(text).name)


def generation_parameters(file: Path) -> Json:
    """Read a picture's generation parameters, by the names of ``RunRequest`` and ``more``; empty if it has none.

    Raises:
        OSError, SyntaxError, ValueError: the file is damaged.
    """
    with Image.open(file) as image:
        text: dict[str, str] = dict(getattr(image, "text", {}))
    if CHUNK not in text:  # version 0.1 used a chunk for each value
        prompt = {"prompt": text["prompt"]} if "prompt" in text else {}
        return prompt | ({"seed": int(text["seed"])} if text.get("seed", "").isdecimal() else {})
    how = json.loads(text[CHUNK])
    if not isinstance(how, dict):
        raise ValueError(f"{file}: the chunk {CHUNK} is not a JSON object")
    return how
