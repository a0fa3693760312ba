"""``simpletune data``: print the dataset report and write its files."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

from simpletune.commands.inspect_data.page import page, sheet
from simpletune.commands.inspect_data.scan import DatasetReport, scan_dataset
from simpletune.commands.inspect_data.text import as_json, format_report
from simpletune.config.resolve import resolve_data_folder
from simpletune.config.schema import TrainConfig
from simpletune.system.console import say, silent
from simpletune.system.options import UserError

PAGE, SHEET, FIGURES = "data.html", "sheet.png", "data.json"


def report(config: TrainConfig, out: Path | None, as_figures: bool = False, shown: int = 96) -> DatasetReport:
    """Scan a configuration's data, print the report, and write the page, the contact sheet and the JSON file.

    Without a folder nothing is written; ``as_figures`` prints only JSON; the sheet and the page show so many pictures.
    """
    with silent() if as_figures else nullcontext():
        found = scan_dataset(resolve_data_folder(config), shown, tuple(source.path for source in config.data.members))
    if as_figures:
        print(json.dumps(as_json(found)))
    else:
        say(format_report(found))
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / PAGE).write_text(page(found, config.name), encoding="utf-8")
            (out / FIGURES).write_text(json.dumps(as_json(found), indent=1), encoding="utf-8")
            written = [out / PAGE, out / FIGURES]
            if any(seen.tile for seen in found.usable):
                sheet(found).save(out / SHEET, optimize=True)
                written.insert(1, out / SHEET)
        except OSError as error:
            raise UserError(f"--out: {out} cannot be written ({error}). Name another folder") from None
        if not as_figures:
            say(f"{'written':<10} {', '.join(str(file) for file in written)}")
    if not found.usable:
        raise UserError(f"data.path: {config.data.place} contains no usable pictures. Fix the problems listed above")
    return found
