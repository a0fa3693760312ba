"""kohya's sample_prompts: one prompt per line, with ``--w``, ``--h``, ``--d``, ``--l``, ``--s`` and ``--n``."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from simpletune.commands.importers.translation import Translation, number, whole_number
from simpletune.system.options import Json

FLAGS = {"w": "width", "h": "height", "d": "seed", "l": "scale", "s": "sample_steps", "n": "negative_prompt"}
FIELDS = {
    "width": "width",
    "height": "height",
    "seed": "seed",
    "scale": "guidance",
    "sample_steps": "steps",
    "negative_prompt": "negative_prompt",
}
KINDS = {"guidance": number, "negative_prompt": str}
STEP = 16  # px


def take_prompts(found: Translation, key: str, file: Path) -> None:
    """Take a file's prompts, and size, seed, steps and guidance of the first."""
    rows = [row for row in _rows(file) if row.get("prompt")]
    if not rows:
        return found.leave(key, "the file has no prompts")
    found.take(key, "validation.prompts", [row["prompt"] for row in rows])
    for name, field in FIELDS.items():
        values = [row[name] for row in rows if row.get(name) is not None]
        if not values:
            continue
        value = KINDS.get(field, whole_number)(values[0])  # type: ignore[operator]
        if field in ("width", "height"):
            value = max(STEP, int(value) // STEP * STEP)
        if any(other != values[0] for other in values) and field != "seed":
            found.change(key, f"validation.{field}", value, "that of the first prompt, for all")
        else:
            found.take(key, f"validation.{field}", value)


def _rows(file: Path) -> list[Json]:
    content = file.read_text(encoding="utf-8-sig")
    if file.suffix == ".json":
        rows = json.loads(content)
    elif file.suffix == ".toml":
        own = tomllib.loads(content).get("prompt", {})
        general = {key: value for key, value in own.items() if key != "subset"}
        rows = [{**general, **each} for each in own.get("subset", [])]
    else:
        rows = [line.strip() for line in content.splitlines() if line.strip() and not line.startswith("#")]
    if not isinstance(rows, list):
        raise ValueError("no list of prompts")
    return [_row(row) if isinstance(row, str) else dict(row) for row in rows]


def _row(line: str) -> Json:
    """Split a line such as ``a dog --w 1024 --n blurred`` into its parts."""
    first, *flags = re.split(r"\s--(?=[a-z]+\s)", f" {line}")
    row: Json = {"prompt": first.strip()}
    for flag in flags:
        letter, _, value = flag.partition(" ")
        if letter in FLAGS:
            row[FLAGS[letter]] = value.strip()
    return row
