"""Checksums of the files that a run's figures and pages are made from, which checkpoints and the summary keep.

The rows of metrics.jsonl and evaluations.jsonl are appended, so their checksum is of the bytes there were.
"""

from __future__ import annotations

from pathlib import Path

from simpletune.runs.folder import EVALUATION, EVALUATIONS, METRICS, SAMPLES
from simpletune.runs.repair import CHANGED, set_aside
from simpletune.system.checksums import sha256_of
from simpletune.system.console import say
from simpletune.system.options import Json
from simpletune.system.processes import is_first_process

FIGURES = "figures_sha256"  # in summary.json: those of a finished run


def figure_sums(folder: Path) -> Json:
    """Return the number of bytes and the SHA-256 of each of these files, by its path in the run's folder."""
    files = [folder / name for name in (METRICS, EVALUATIONS, EVALUATION)]
    files += sorted((folder / SAMPLES / "base").glob("*.png"))
    sizes = {file: file.stat().st_size for file in files if file.is_file()}
    return {file.relative_to(folder).as_posix(): [size, sha256_of(file, size)] for file, size in sizes.items()}


def require_figures(folder: Path, sums: Json) -> None:
    """Compare the files with the checksums of a checkpoint or summary. Warns of rows that have changed, since nothing
    can tell what they were; sets other damaged files aside, so that they are made again or missed instead of shown."""
    for key, (size, sha256) in sums.items():
        file = folder / key
        if not file.is_file():
            continue
        if (sha256_of(file, size) if key.endswith("l") else sha256_of(file)) == sha256:
            continue
        if not key.endswith("l"):
            set_aside(file, CHANGED)
        elif is_first_process():
            say(
                f"warning {file} has changed since it was written: a number in it is not what was measured. "
                "Curves and figures made from it may be wrong; the weights are not affected"
            )
