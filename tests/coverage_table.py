"""Print for ``make coverage`` how much of the package and the benchmarks the tests run, and why the rest is not run.

Reads coverage's JSON report. Fails if uncovered lines have no reason in REASONS.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ALLOWED = 2  # lines of a function that need no reason: a rare error's message

GPU = "needs an NVIDIA GPU: tests marked gpu (make gpu)"
SLOW = "takes minutes: its result is committed (benchmarks/results, simpletune/assets)"
REASONS: dict[str, str] = {
    r"forecast\.py::(card_at_hand|_own_context)": GPU,
    r"memory/copy_stream\.py::": GPU,
    r"eight_bit\.py::PagedAdamW8bit": GPU,
    r"int8_kernel\.py::_seconds": GPU,
    r"int8_products\.py::(_rows_on_cuda|_product_on_cuda|_plain_product)": GPU,
    r"profiling/window\.py::Window\._(dump|begin)": GPU,
    r"stage_timer\.py::StageTimer\.": GPU,
    r"memory_row\.py::measure": GPU,
    r"benchmarks/dreambooth\.py::": SLOW,
    r"benchmarks/pair\.py::(Job\.prepare|one_round|ours|theirs|timed)": SLOW,
    r"models/compile\.py::_forward": "tests marked slow (make slow)",
    r"demo/(make_tiny_sd3|train_autoencoder|train_text_encoders)\.py::$": SLOW,
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


def main(report: dict[str, Any]) -> int:
    """Print the tables; returns the exit status."""
    wanted, missed, reasons = Counter[str](), Counter[str](), Counter[str]()
    without = []
    for path, file in sorted(report["files"].items()):
        wanted[module_of(path)] += file["summary"]["num_statements"]
        missed[module_of(path)] += file["summary"]["missing_lines"]
        for name, function in file["functions"].items():
            lines = function["missing_lines"]
            place = f"{path}::{name}"
            if not lines:
                continue
            reason = reason_of(place) or ("a rare error's one or two lines" if len(lines) <= ALLOWED else None)
            reasons[reason or "no reason"] += len(lines)
            if reason is None:
                without.append(f"{place}: {len(lines)} lines, from {lines[0]}")
    print("| part | statements | covered |\n|---|---|---|")
    for part in sorted(wanted):
        if wanted[part]:
            print(f"| {part} | {wanted[part]:,} | {1 - missed[part] / wanted[part]:.1%} |")
    total, gone = wanted.total(), missed.total()
    print(f"| all | {total:,} | {1 - gone / total:.1%} |\n\n| not covered because | lines |\n|---|---|")
    for reason, count in reasons.most_common():
        print(f"| {reason} | {count} |")
    print("".join(f"\nwithout a reason: {line}" for line in without))
    return 1 if without else 0


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text())))
