"""Replayed steps with many seeds of the adversary: of each setting alone and of all together, beside the CPU's bits.

PYTHONPATH=.:tests/support tests/gpu/softgpu/run python tests/gpu/softgpu/graph_seeds.py [--alone 25] [--together 200]
    [--minutes 60] [--out FILE]

Takes a seed of every setting in turn, so that a short run tries all of them. With --out it goes on where it stopped.
Exits with 1 if a seed's bits differ.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import cache
from pathlib import Path

from softgpu import levers, queues

SETTINGS = levers.GRAPHS | {"all": levers.ALL_GRAPHS}
expected = cache(lambda name: levers.run(SETTINGS[name], "cpu"))


def main() -> int:
    """Run the seeds that are missing, until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", type=int, default=25, help="seeds of each setting")
    parser.add_argument("--together", type=int, default=200, help="seeds of all settings together")
    parser.add_argument("--minutes", type=float, default=60.0, help="no seed begins after as many")
    parser.add_argument("--out", type=Path, help="JSON: the seeds that are done, by setting; true: equal bits")
    given = parser.parse_args()
    wanted = dict.fromkeys(SETTINGS, given.alone) | {"all": given.together}
    done: dict[str, dict[str, bool]] = {name: {} for name in SETTINGS}
    if given.out is not None and given.out.exists():
        done |= json.loads(given.out.read_text())
    began, used = time.monotonic(), time.process_time()
    for seed in range(max(wanted.values())):
        for name in (name for name, seeds in wanted.items() if seed < seeds and str(seed) not in done[name]):
            if time.monotonic() - began > 60 * given.minutes:
                break
            queues.seed(seed)
            found = levers.run(SETTINGS[name])
            queues.seed(queues.AT_ONCE)
            done[name][str(seed)] = found.equals(expected(name))
            if given.out is not None:
                given.out.write_text(json.dumps(done, indent=1))
    wrong = {name: [seed for seed, equal in seeds.items() if not equal] for name, seeds in done.items()}
    for name, seeds in done.items():
        print(f"{name}: {len(seeds)} of {wanted[name]} seeds, wrong: {wrong[name] or 'none'}")
    print(f"{time.process_time() - used:.0f} s of processor time")
    return int(any(wrong.values()))


if __name__ == "__main__":
    raise SystemExit(main())
