"""``simpletune import``: print or write the configuration, and report what became of each key."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from simpletune.commands.importers.importing import ImportResult, import_file
from simpletune.runs.outputs import require_new
from simpletune.system.atomic import write_json
from simpletune.system.options import ConfigError, UserError, plural
from simpletune.system.printable import printable
from simpletune.system.redact import redact


def import_command(file: Path, data: Path | None, out: Path | None, overwrite: bool) -> None:
    """Translate a configuration."""
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
    for line in report(found):
        print(printable(redact(line)), file=said)
    if out is not None:
        print(f"written    {out}", file=said)
    if found.problems:
        raise ConfigError(found.problems, str(out or "the result"))


def report(found: ImportResult) -> Iterator[str]:
    """Yield lines of text: what was taken; what was changed, and why; what was left out, and what it did; what is
    missing here."""
    yield f"{'from':<10} {found.tool}"
    for became in ("taken", "changed", "left out"):
        lines = [line for line in found.lines if line.became == became]
        yield f"{became:<10} {plural(len(lines), 'value')}"
        yield from (f"  {line}" for line in lines)
    for problem in found.missing:
        yield f"{'not here':<10} {problem}"
