"""Train every row of ``field_values.py`` for a few steps with and without its field, and write what differs as a page.

python -m benchmarks.field_effects [--rows TEXT] [--out FILE]
"""

from __future__ import annotations

import argparse
import copy
import gc
import gzip
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.compare_rows import INPUTS, Json
from benchmarks.compare_trees import ROOT, read_pixels, read_tensors
from benchmarks.field_values import GROUPS, OWN, START, Group, Row

PAGE = Path("benchmarks/results/cpu/field-effects.md")
TIMED = re.compile(r"s/step|done in|first step after| in \d|moved the older run|GiB|MiB|\bOWN/")
"""Lines of the console with times, memory or paths, which differ between any two runs."""
NOT_COMPARED = {"config.json", "summary.json", "environment.json", "attempts.json", "README.md", "predicted.json",
                "report.html", "report.md", "state.json", "summary.md", "metrics.jsonl", "evaluations.jsonl",
                "data.json", "eval_before.json", "chosen.json"}  # fmt: skip
"""Files that repeat the configuration or hold times, or that plan and loss compare."""
Seen = dict[str, dict[str, object]]
"""What a run showed: by plan, loss, file and said, each part by a name."""


def differing(one: Seen, two: Seen) -> dict[str, list[str]]:
    """The parts that differ, of those of plan, loss, file and said that do."""
    found = {
        kind: sorted(name for name in one[kind] | two[kind] if one[kind].get(name) != two[kind].get(name))
        for kind in one
    }
    return {kind: names for kind, names in found.items() if names}


def placed(data: Json, path: str, value: object) -> None:
    """Set a value by its dotted path; a number chooses an entry of a list."""
    *above, last = path.split(".")
    here: object = data
    for name in above:
        here = here[int(name)] if isinstance(here, list) else _section(here, name)
    assert isinstance(here, dict)
    here[last] = value


def _section(here: object, name: str) -> object:
    assert isinstance(here, dict)
    return here.setdefault(name, {})


def configuration(group: Group, row: Row) -> Json:
    """The configuration without the field."""
    data: Json = copy.deepcopy(group.base)
    for path, value in {**group.beside, **row.beside}.items():
        placed(data, path, copy.deepcopy(value))
    return data | {"name": "run"}


def changed(data: Json, group: Group, name: str, value: object) -> Json:
    """The configuration with it. A union's tag brings its member's section."""
    data = copy.deepcopy(data)
    whole = isinstance(value, dict) and name in ("source", "family", "method", "name", "weights")
    path = group.path if whole else f"{group.path}.{name}".strip(".")
    placed(data, path, value)
    return data


@dataclass
class Effects:
    """Runs rows in a folder, each baseline once.

    Args:
        folder: a folder to work in.
        inputs: what ``tests/support/field_inputs.py`` wrote.
    """

    folder: Path
    inputs: Path
    known: dict[str, tuple[Seen, Path]] = field(default_factory=dict)
    count: int = 0

    def of(self, group: Group, name: str) -> dict[str, list[str]]:
        """What differs with a row's field."""
        row = group.rows[name]
        data = configuration(group, row)
        if row.differs == "estimate":
            return differing(*(self._estimated(each) for each in (data, changed(data, group, name, row.value))))
        key = json.dumps(data, sort_keys=True)
        if key not in self.known:
            self.known[key] = self._run(data)
        before, start = self.known[key]
        after, _ = self._run(changed(data, group, name, row.value), start)
        return differing(before, after)

    def _estimated(self, data: Json) -> Seen:
        """What is predicted of a configuration's memory on a card."""
        from simpletune.config.load import validate
        from simpletune.estimate.simulate.simulate import simulate

        text = json.dumps(data | {"device": "cuda"}).replace(INPUTS, str(self.inputs))
        report = simulate(validate(json.loads(text), "row"), capability=(8, 9))
        return {"estimate": {"peak": report.peak, **report.phases}}

    def _run(self, data: Json, start: Path | None = None) -> tuple[Seen, Path]:
        """Train a configuration; what it showed, and its result."""
        from simpletune.config.load import validate
        from simpletune.system.console import verbose
        from simpletune.training.train import train

        own = self.folder / str(self.count)
        self.count += 1
        places = {"runs": str(own / "runs"), "profiles": str(own / "profiles"), "cache": str(self.folder / "cache")}
        stated = data.get("output")
        assert isinstance(stated, dict)
        text = json.dumps(data | {"output": places | stated}).replace(INPUTS, str(self.inputs))
        text = text.replace(f'"{OWN}', f'"{own}/own').replace(f'"{START}"', json.dumps(str(start)))
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said), verbose():
            run = train(validate(json.loads(text), "row"))
        lines = said.getvalue().replace(str(own), OWN).splitlines()
        told: dict[str, object] = {re.sub(r"\s+", " ", line): True for line in lines if not TIMED.search(line)}
        seen = _rows(run) | {"file": dict(_files(own)), "said": told}
        return seen, next(iter(sorted(run.glob("pytorch_lora_weights.safetensors"))), run)


def _rows(run: Path) -> Seen:
    """Plan and losses of a run."""
    data = json.loads((run / "data.json").read_text())
    plan: dict[str, object] = {name: data[name] for name in data.keys() - {"sources"}}  # which repeat the configuration
    loss: dict[str, object] = {}
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        lines = (run / name).read_text().splitlines() if (run / name).exists() else []
        rows = [json.loads(line) for line in lines]
        plan[f"rows of {name}"] = [(row.get("step"), row.get("epoch")) for row in rows]
        for row in rows:
            for key in row.keys() - {"seconds", "step", "epoch"}:
                loss.setdefault(key, [])
                loss[key].append(row[key])  # type: ignore[attr-defined]
    return {"plan": plan, "loss": loss}


def _files(own: Path) -> Iterator[tuple[str, object]]:
    """Every file that a run left, by its name without times, and what is in it."""
    for file in sorted(own.rglob("*")):
        name = re.sub(r"\.\d{10,}\.[\w.]*", ".N", file.relative_to(own).as_posix())
        if file.is_dir() or file.suffix == ".lock":
            continue
        if name.startswith("profiles/") and file.name == "summary.json":
            yield name, [note for note in json.loads(file.read_text())["notes"] if note.startswith("recorded")]
        elif file.name in NOT_COMPARED or "tfevents" in name:
            yield name, True
        elif file.suffix == ".safetensors":
            yield name, read_tensors(file)
        elif file.suffix == ".png":
            yield name, read_pixels(file)
        elif file.name.endswith(".trace.json.gz"):
            yield name, _trace(file)
        else:
            yield name, re.sub(rb'"(seconds|at|time|sum)[^,}]*|' + re.escape(str(own).encode()), b"", file.read_bytes())


def _trace(file: Path) -> object:
    """The kinds of events of a trace, their arguments' names, and the ranges that the run itself named."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    named = {event.get("name") for event in events if event.get("cat") == "user_annotation"}
    return {event.get("cat") for event in events}, {key for event in events for key in event.get("args", ())}, named


def write_inputs(folder: Path) -> None:
    """Write the rows' inputs by a process of its own."""
    program = ROOT / "tests" / "support" / "field_inputs.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(program), str(folder)], check=True, env=environment, capture_output=True)


def page(found: Mapping[tuple[int, str], dict[str, list[str]]], seconds: float) -> str:
    """The table of all rows, with what differed."""
    lines = [
        "# What each field changes",
        "",
        "Does every field change something? Every field of the "
        "[configuration](../../../docs/reference/configuration.md) at a value that is not its default, and what "
        "differs from the same run without it. Tiny models, 2 steps for most rows, on the CPU. Made on "
        f"{today()} with Python {platform.python_version()}, torch {version('torch')} and diffusers "
        f"{version('diffusers')} in {seconds / 60:.0f} min on a busy machine by",
        "",
        "    python -m benchmarks.field_effects",
        "",
        "*Plan*: pictures, prompts, steps. *Loss*: losses, norms, learning rates. *File*: names, tensors, pixels and "
        "the kinds of events in traces, not copies of the configuration. *Said*: the console, without times. "
        "*Estimate*: the memory predicted for a card, for levers that are exact. A dash: nothing can differ here, and "
        "why. `tests/benchmarks/test_field_effects.py` fails if a field has no row, and `make slow` if one loses its "
        "effect.",
        "",
        "| field | of | value | beside | differs |",
        "|---|---|---|---|---|",
    ]
    for number, group in enumerate(GROUPS):
        for name, row in group.rows.items():
            effect = found.get((number, name))
            told = f"- {row.differs}" if effect is None else ", ".join(effect)
            field_path = f"{group.path}.{name}".strip(".").replace("schema_", "$schema")
            cells = (
                f"`{field_path}`",
                group.owner,
                shown(row.value),
                shown({**group.beside, **row.beside} or ""),
                told,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    """A value in a cell."""
    if value == "":
        return ""
    text = json.dumps(value).replace(f"{INPUTS}/", "").replace(f'"{START}"', "the result of the run without it")
    return f"`{text}`".replace("|", "\\|")


def today() -> str:
    now = date.today()
    return f"{now.day} {now:%B %Y}"


def main(argv: list[str] | None = None) -> int:
    from simpletune.system.devices import prepare_environment

    parser = argparse.ArgumentParser(prog="python -m benchmarks.field_effects", description=__doc__)
    parser.add_argument("--rows", default="", help="only rows whose Class.field contains this; writes no page")
    parser.add_argument("--out", type=Path, default=PAGE, help=f"the page (default: {PAGE})")
    args = parser.parse_args(argv)
    prepare_environment()
    import simpletune.training.train  # noqa: F401

    os.fsync = os.fstat  # type: ignore[assignment]  # what a machine that loses power keeps is not compared
    gc.collect()
    gc.freeze()  # each run collects several times
    found, failed, began = {}, [], time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        inputs = Path(place) / "inputs"
        write_inputs(inputs)
        effects = Effects(Path(place), inputs)
        for number, name in numbered():
            group = GROUPS[number]
            if args.rows not in (title := f"{group.owner}.{name}"):
                continue
            found[number, name] = effects.of(group, name)
            wanted = group.rows[name].differs
            if wanted not in found[number, name]:
                failed.append(title)
            print(f"{title}: {', '.join(found[number, name]) or 'nothing'} (expected {wanted})", flush=True)
    if not args.rows and not failed:
        args.out.write_text(page(found, time.monotonic() - began))
    print(f"without their effect: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def numbered() -> list[tuple[int, str]]:
    """Every row that is compared: its group's number and its field."""
    return [(number, name) for number, group in enumerate(GROUPS) for name, row in group.rows.items() if row.compared]


if __name__ == "__main__":
    sys.exit(main())
