"""Write a hypernetwork in the form of AUTOMATIC1111's web UI."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.adapters.files.attach import holds_hypernetwork
from simpletune.adapters.methods.hypernetworks.files import read_hypernetwork, write_a1111
from simpletune.commands.lora_tools.metadata import SAID
from simpletune.commands.lora_tools.named_lora import NamedLora
from simpletune.runs.model_card import public_name
from simpletune.runs.outputs import require_new
from simpletune.system.console import say
from simpletune.system.options import UserError, plural


def export_hypernetwork(source: NamedLora, args: argparse.Namespace) -> Path:
    """Write a hypernetwork in the form of AUTOMATIC1111's web UI."""
    if not holds_hypernetwork(source.file):
        raise UserError(
            f"--format {args.format} writes hypernetworks, and {source.file} is not one. The web UI reads LoRA in "
            "kohya's layout: use --format kohya"
        )
    unfit = [name for name in ("rank", "energy", "dtype", *SAID[1:]) if getattr(args, name, None) is not None]
    if unfit:
        raise UserError(f"--{unfit[0]}: the web UI's form of a hypernetwork has no place for it. Leave it out")
    out = args.out or (source.run or source.file.parent) / f"{source.title}_{args.format}.pt"
    if out.suffix != ".pt":
        raise UserError(f"--out: {out} does not end in .pt, the only files that the web UI looks for. Use a .pt name")
    require_new(out, args.overwrite)
    found = read_hypernetwork(source.file)
    config = source.config(found.metadata)
    base = None if config is None else public_name(config.model.weights_from)
    written = write_a1111(found, out, getattr(args, "title", None) or out.stem, source.steps, base)
    say(f"{written}: {args.format}, {plural(len(found.tensors), 'tensor')}, {written.stat().st_size / 2**20:.1f} MiB. "
        "It is a pickle file of plain tensors, which simpletune itself does not read")  # fmt: skip
    return written
