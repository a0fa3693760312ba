"""Remove the calls that order the device's work, one at a time, and count the software GPU's seeds that notice.

    PYTHONPATH=. tests/gpu/softgpu/run python tests/gpu/softgpu/waits.py [--seeds 20] [--out waits.json]

Prints the table of tests/gpu/softgpu/README.md. Each call is tried in the runs with all levers that reach it; a
seed notices if losses, weights or optimizer states differ in any bit, or the run fails. Results are written to the file
one by one, and calls that it already has are not tried again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from softgpu.take_out import ORDERING, Call, calls_of, without

if TYPE_CHECKING:
    from softgpu.levers import Result

ROOT = Path(__file__).resolve().parents[3]
WRAPPERS = {"mark", "wait", "join", "finish", "_let_go"}
EVENTS = {"_written"}
FILES = ("simpletune.engine.memory.", "simpletune.training.pending_steps")
"""Where the wrappers are called; elsewhere these names mean something else."""
ONLY_IN = {
    "BlockOffload.updating": "full",
    "BlockOffload._fetch_state": "full",
    "BlockOffload._finish": "full",
    "BlockOffload._give_up": "full poisoned",
    "state_to_tensors": "paged",
}
"""The run that reaches a function's calls. Others are tried in LoRA's, and in the full one if no seed notices there."""
ELSEWHERE = {
    "simpletune.engine.graphs": "these runs replay nothing",
    "simpletune.engine.quant.int8_kernel": "times tiles; Triton's interpreter runs none of them twice",
}
"""Modules whose calls these runs do not reach, and why."""
TIMING = ("simpletune.estimate.timing", "simpletune.estimate.int8_choice")


def ordering_calls() -> list[Call]:
    """Every call of the package that records, marks, waits or synchronises, with the events that are handed on; apart
    from timing, which measures rates on tensors of its own and hands nothing on."""
    found = calls_of(ROOT / "simpletune", ORDERING | WRAPPERS, EVENTS)
    found = [call for call in found if not call.module.startswith(TIMING)]
    ours = {call for call in found if call.module.startswith(FILES) and call.text.startswith("self.")}
    return [call for call in found if call in ours or call.name in ORDERING]


def why_not(call: Call) -> str | None:
    """Why a call cannot be tried here; None if it can."""
    return ELSEWHERE.get(call.module)


def noticed(call: Call, seeds: range) -> dict[str, int]:
    """How many of the seeds notice that a call is missing, by run."""
    only = ONLY_IN.get(call.function)
    counts: dict[str, int] = {}
    for name in (only,) if only else ("full",) if call.name in EVENTS else ("LoRA", "full"):
        if not any(counts.values()):
            counts[name] = sum(_differs(call, name, seed) for seed in seeds)
    return counts


@cache
def _expected(name: str) -> Result:
    """What a run gives without an adversary."""
    from softgpu import levers as softgpu_levers
    from softgpu import queues

    queues.seed(queues.AT_ONCE)
    return softgpu_levers.RUNS[name]()


def _differs(call: Call, name: str, seed: int) -> bool:
    from softgpu import levers as softgpu_levers
    from softgpu import queues

    expected = _expected(name)
    queues.seed(seed)
    try:
        with without(call):
            return not softgpu_levers.RUNS[name]().equals(expected)
    except (RuntimeError, TypeError, AttributeError, ValueError):
        return True  # the missing call's result was needed
    finally:
        queues.seed(queues.AT_ONCE)


def key_of(call: Call) -> str:
    """A call's name in the file of results."""
    return f"{call.module}:{call.line}:{call.column} {call.text}"


def table(calls: list[Call], results: dict[str, dict[str, int]], seeds: int) -> Iterator[str]:
    """The table in Markdown."""
    yield f"| call | where | seeds of {seeds} that notice |"
    yield "|---|---|---|"
    for call in calls:
        place = f"`{call.module.removeprefix('simpletune.')}`, `{call.function}`"
        found = results.get(key_of(call), {})
        counts = ", ".join(f"{name} {count}" for name, count in found.items())
        yield f"| `{call.text}` | {place} | {counts or why_not(call) or 'not tried'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default="", help="only calls whose name contains this text")
    parser.add_argument("--out", type=Path, default=ROOT / "waits.json")
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    calls = ordering_calls()
    for call in calls:
        if key_of(call) not in results and why_not(call) is None and args.only in key_of(call):
            results[key_of(call)] = noticed(call, range(args.seeds))
            args.out.write_text(json.dumps(results, indent=1))
    print("\n".join(table(calls, results, args.seeds)))


if __name__ == "__main__":
    main()
