"""Print for ``make coverage`` how much of the package and the benchmarks the tests run, and why the rest is not run.

Reads two JSON reports of coverage: of the fast suite, and of this with the benchmarks' slow tests. Fails if lines that
neither runs have no reason in REASONS, or if too few are run.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

Report = dict[str, Any]
BENCHMARKS = "benchmarks/"
LEAST = 0.97
ALLOWED = 3  # lines of a function that need no reason: a rare error's message

GPU = "needs an NVIDIA GPU: tests marked gpu (make gpu)"
DRY = "needs torch's CUDA build: make dry"
SLOW = "takes minutes: its result is committed (benchmarks/results, simpletune/assets)"
REASONS: dict[str, str] = {
    r"run_estimate\.py::card_at_hand": GPU,
    r"memory/copy_stream\.py::": GPU,
    r"optim/options\.py::PagedAdamW8bit": GPU,
    r"int8_kernel\.py::_seconds": GPU,
    r"int8_products\.py::(_product_on_cuda|_product_by_kernel)": GPU,
    r"profiling/traces\.py::Window\._dump": GPU,
    r"stage_timer\.py::StageTimer\.": GPU,
    r"memory_row\.py::measure": GPU,
    r"int8_products\.py::_try_products|int8_gelu\.py::_tried": GPU,
    r"training/drawn\.py::draw|pipeline/load\.py::load_base_together|probe_steps\.py::take_steps": GPU,
    r"benchmarks/dry_(row|operations)\.py::": DRY,
    r"benchmarks/elementwise\.py::measure": SLOW,
    r"benchmarks/(choice|hours|measured_scaling|scaling|student_study|vertex)\.py::": SLOW,
    r"benchmarks/first_hour\.py::(card_name|main)": GPU,
    r"benchmarks/kernels\.py::": SLOW,
    r"models/compile\.py::_forward": "tests marked slow (make slow)",
    r"tiny_models/train_tiny_encoders\.py::$": SLOW,
    r"tiny_models/(make_tiny_sd3|train_autoencoder|train_text_encoders)\.py::$": SLOW,
}


def reason_of(place: str) -> str | None:
    """Why a function, ``path::name``, is not covered."""
    return next((reason for pattern, reason in REASONS.items() if re.search(pattern, place)), None)


def module_of(path: str) -> str:
    """The package or module of the top level that a file belongs to."""
    parts = Path(path).parts
    if parts[0] != "simpletune":
        return parts[0] + "/"
    return parts[1] + "/" if len(parts) > 2 else parts[1]


def main(fast: Report, report: Report) -> int:
    """Print the tables; returns the exit status."""
    wanted, missed, reasons = Counter[str](), Counter[str](), Counter[str]()
    missed_by_fast: Counter[str] = Counter()
    without = []
    for path, file in sorted(report["files"].items()):
        wanted[module_of(path)] += file["summary"]["num_statements"]
        missed[module_of(path)] += file["summary"]["missing_lines"]
        missed_by_fast[module_of(path)] += fast["files"][path]["summary"]["missing_lines"]
        for name, function in file["functions"].items():
            lines = function["missing_lines"]
            place = f"{path}::{name}"
            if not lines:
                continue
            reason = reason_of(place) or ("a rare case's one to three lines" if len(lines) <= ALLOWED else None)
            reasons[reason or "no reason"] += len(lines)
            if reason is None:
                without.append(f"{place}: {len(lines)} lines, from {lines[0]}")
    print("| part | statements | fast tests | and the benchmarks' slow ones |\n|---|---|---|---|")
    package = [part for part in wanted if part != BENCHMARKS]
    rows = {part: [part] for part in sorted(wanted) if wanted[part]}
    for name, parts in {**rows, "the package": package, "all": list(wanted)}.items():
        total = sum(wanted[part] for part in parts)
        shares = [1 - sum(each[part] for part in parts) / total for each in (missed_by_fast, missed)]
        print(f"| {name} | {total:,} | {shares[0]:.1%} | {shares[1]:.1%} |")
    low = shares[1] < LEAST
    print("\n| not covered because | lines |\n|---|---|")
    for reason, count in reasons.most_common():
        print(f"| {reason} | {count} |")
    print("".join(f"\nwithout a reason: {line}" for line in without))
    if low:
        print(f"less than {LEAST:.0%} is covered")
    return 1 if without or low else 0


if __name__ == "__main__":
    sys.exit(main(*(json.loads(Path(name).read_text()) for name in sys.argv[1:3])))
