"""``memory --measure-only``: measure the memory grid for comparison with stored predictions, all rows in one process.

A row takes seconds, without a prediction and imports. If the process dies, the row at which it died is reported and a
new process measures the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.first_hour import fate
from benchmarks.table import Results, describe_machine, selected
from simpletune.runs.folder import read_json_or_none
from simpletune.system.console import say
from simpletune.system.devices import prepare_environment
from simpletune.system.options import ConfigError, UserError

CHILD = (sys.executable, "-m", "benchmarks.measured_memory")
STORED = Path(__file__).resolve().parent / "results" / "cpu" / "memory.json"
ABOUT = (
    f"{memory.ABOUT} Here the predictions are those stored in `benchmarks/results/cpu/memory.json`, with the workspace "
    "of this card's libraries, and all rows were measured in one process."
)


def run(folder: Path, minutes: float, only: str = "") -> Path:
    """Measure the rows that are missing, until the time is up.

    Raises:
        UserError: the process died at a row; the other rows are stored.
    """
    results = Results(folder / "memory", memory.COLUMNS, "memory --measure-only")
    stored = stored_predictions()
    names = [name for name in selected(memory.ROWS, only) if not memory.ROWS[name].whole and results.lacks(name)]
    deadline, died = time.monotonic() + 60 * minutes, []
    while names and time.monotonic() < deadline:
        for name, found in measured(names, deadline):
            names.remove(name)
            if isinstance(found, str):
                died.append(f"{name}: {found}")
                break
            row = beside(stored.get(name), found)
            results.add(name, {**row, "target_mib": memory.ROWS[name].target_mib})
            say(f"bench   {name}: measured {row.get('measured_mib', 'nothing')}, predicted {row.get('predicted_mib')}")
    if names:
        say("bench   time is up; run the same command again to continue")
    table = results.write_table("Memory of SD3 Medium's training step", ABOUT, describe_machine())
    if died:
        raise UserError(f"the process died at {'; '.join(died)}. The other rows are in {table}", 1)
    return table


def measured(names: Sequence[str], deadline: float) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yield each row's figures as its process prints them; for the row at which the process died, how it ended."""
    left = list(names)
    work = json.dumps([[name, memory.ROWS[name].overrides] for name in names])
    with subprocess.Popen([*CHILD, work], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("["):  # libraries print too
                    name, found = json.loads(line)
                    left.remove(name)
                    yield name, found
                if time.monotonic() > deadline:
                    return
        finally:
            process.kill()  # does nothing to one that has ended
    if left:
        yield left[0], fate(process.returncode)


def stored_predictions() -> Mapping[str, dict[str, Any]]:
    """The committed predictions by row, for the workspaces of sm_89."""
    return (read_json_or_none(STORED) or {}).get("rows", {})


def predicted_for(stored: Mapping[str, Any], capability: tuple[int, int]) -> dict[str, Any]:
    """A stored prediction with another card's cuBLAS workspace, in MiB."""
    from simpletune.engine.memory.cuda_libraries import cublas_workspace

    more = (cublas_workspace(capability) - cublas_workspace(memory.SM_89)) / 2**20
    kept = {key: stored[key] for key in ("host_mib", "at") if key in stored}
    return {**kept, "predicted_mib": round(stored["predicted_mib"] + more)}


def beside(stored: Mapping[str, Any] | None, found: dict[str, Any]) -> dict[str, Any]:
    """Join a row's prediction, if there is one, and its measurement."""
    capability = found.pop("capability", memory.SM_89)
    row = {**(predicted_for(stored, tuple(capability)) if stored else {}), **found}
    if "predicted_mib" in row and row.get("measured_mib"):
        row["error"] = round(row["predicted_mib"] / row["measured_mib"] - 1, 4)
    return row


def child(work: Sequence[Sequence[Any]]) -> None:
    """Measure rows in this process; print a JSON line for each: name, figures."""
    import torch

    from benchmarks import memory_row
    from simpletune.stages.latent_cache import free_memory

    for name, overrides in work:
        free_memory(torch.device("cuda"))
        before = torch.cuda.memory_allocated() / 2**20  # cuBLAS's workspace stays
        try:
            found = memory_row.measure(tuple(overrides))
        except torch.OutOfMemoryError:
            found = {"at": "out of memory"}
        except ConfigError:
            found = {"at": "not supported on this card"}
        found |= {"allocated_before_mib": round(before, 1), "capability": torch.cuda.get_device_capability()}
        print(json.dumps([name, found]), flush=True)


if __name__ == "__main__":
    prepare_environment()
    child(json.loads(sys.argv[1]))
