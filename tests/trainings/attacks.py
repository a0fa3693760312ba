"""Attacks on a run's files and hostile input: the second part of ``make torture``.

Each attack is tried the given number of times. Findings are listed, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from damage import CODES, DAMAGES, OF_FOLDERS, Place, answer, changed_state, damage, is_alike, make_origin, targets
from safetensors.numpy import load_file, save_file

from simpletune.runs import checkpoint
from simpletune.system.devices import prepare_environment
from simpletune.system.options import UserError

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 16 * 2**30  # bytes of address space that a hostile input may make a command take


@dataclass
class Attack:
    """The tries of one attack, and its findings."""

    name: str
    tries: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> None:
        """Add one try."""
        self.tries += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def lines(self) -> list[str]:
        """In words."""
        outcomes = ", ".join(f"{outcome} {count}" for outcome, count in sorted(self.outcomes.items()))
        head = f"{self.name:<34} {self.tries:>6} tries, {len(self.found)} found: {outcomes}"
        return [head, *(f"    {each}" for each in self.found)]


# --- a run's own files ----------------------------------------------------------------------------------------------


def attack_state(place: Place, tries: int, draw: random.Random, kind: str) -> Attack:
    """Single changed bits or digits of a state.json: the checkpoint must not be accepted."""
    attack, folder = Attack(f"state.json, one {kind} changed"), place.checkpoint(4)
    file = folder / checkpoint.STATE
    text = file.read_bytes()
    for _ in range(tries):
        changed = changed_state(text, draw, kind)
        file.write_bytes(changed)
        try:
            checkpoint.read_checkpoint(folder)
        except UserError:
            attack.count("refused")
        except Exception as error:
            attack.count("traceback")
            attack.found.append(repr(error)[:160])
        else:
            attack.count("accepted")
            at = next(n for n, (old, new) in enumerate(zip(text, changed, strict=True)) if old != new)
            attack.found.append(f"byte {at} changed from {text[at]} to {changed[at]}")
    file.write_bytes(text)
    return attack


def attack_run(origin: Place, folder: Path, tries: int, draw: random.Random) -> Attack:
    """One to three damaged files of a killed run, then ``train --resume auto``: the same weights, or a refusal."""
    attack = Attack("a run's files, then --resume auto")
    for number in range(tries):
        place, done = origin.copied(folder / str(number)).stopped(), []
        for _ in range(draw.choice([1, 1, 2, 3])):
            target = draw.choice(targets(place))
            entry = place.run.parent / target
            if os.path.lexists(entry) and (entry.is_dir() or entry.is_file()):
                kind = draw.choice([*(OF_FOLDERS if entry.is_dir() else DAMAGES)])
                damage(place, target, kind, seed=draw.random())
                done.append(f"{target} {kind}")
        code, fault = answer(place, "train")
        if fault:
            attack.found.append(f"{'; '.join(done)}: {fault}")
        elif code == 0 and not is_alike(place, origin):
            fault = "other weights"
            attack.found.append(f"{'; '.join(done)}: {fault}")
        attack.count("wrong" if fault else "the same weights" if code == 0 else "refused")
        shutil.rmtree(place.folder)
    return attack


# --- hostile input --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hostile:
    """A command on hostile input.

    Args:
        name: of the attack.
        seconds: it may take.
        command: makes the input in a folder, and gives the arguments of ``simpletune``.
        refused: whether it must end with another code than 0.
    """

    name: str
    seconds: float
    command: Callable[[Path, Place], list[str]]
    refused: bool = True


def _config(folder: Path, place: Place, text: str | None = None, **changes: Any) -> str:
    file = folder / "hostile.json"
    output = {**place.data["output"], "runs": str(folder / "runs"), "profiles": str(folder / "profiles")}
    file.write_text(json.dumps({**place.data, "output": output, **changes}) if text is None else text)
    return str(file)


def _with(place: Place, section: str, value: str) -> str:
    """The configuration's text with something that no JSON writer produces."""
    return json.dumps({**place.data, section: "HERE"}).replace('"HERE"', value)


def _model(folder: Path, place: Place, file: str, change: Callable[[str], str]) -> list[str]:
    """``check`` of a configuration whose model folder has one changed file."""
    shutil.copytree(place.data["model"]["pretrained"], folder / "model")
    changed = folder / "model" / file
    changed.write_text(change(changed.read_text()))
    model = {**place.data["model"], "pretrained": str(folder / "model")}
    return ["check", _config(folder, place, model=model)]


def _setting(name: str, value: object) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), name: value})


def _lora(folder: Path, place: Place, metadata: dict[str, str] | None = None, **more: np.ndarray) -> str:
    tensors = load_file(place.run / "pytorch_lora_weights.safetensors")
    file = folder / "hostile.safetensors"
    save_file({**tensors, **more}, file, metadata)
    return str(file)


def _alpha(folder: Path, place: Place, value: float) -> list[str]:
    tensors = load_file(place.run / "pytorch_lora_weights.safetensors")
    layer = next(name for name in sorted(tensors) if "lora_A" in name).split(".lora_A")[0]
    file = _lora(folder, place, **{f"{layer}.alpha": np.array(value, np.float32)})
    draw = ["--steps", "1", "--prompt", "a disc", "--device", "cpu", "--output", str(folder / "p.png")]
    return ["generate", "--run", str(place.run), "--lora", file, *draw]


def _without_axes(folder: Path, place: Place) -> list[str]:
    tensors = load_file(place.run / "pytorch_lora_weights.safetensors")
    return ["inspect", _lora(folder, place, **{sorted(tensors)[0]: np.array(1.0, np.float32)})]


def _parquet(folder: Path, place: Place) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    image = next(Path(place.data["data"]["path"]).glob("*.png")).read_bytes()
    rows = {"image": [{"bytes": image, "path": "a.png"}], "text": ["a" * 200_000_000]}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "bomb.parquet", compression="zstd")
    return ["data", _config(folder, place, data={"path": str(folder / "bomb.parquet"), "resolution": 32})]


def _same_images(folder: Path, place: Place) -> list[str]:
    image = next(Path(place.data["data"]["path"]).glob("*.png")).read_bytes()
    (folder / "same").mkdir()
    for number in range(20_000):
        (folder / "same" / f"{number}.png").write_bytes(image + number.to_bytes(4, "little"))
    return ["data", _config(folder, place, data={"path": str(folder / "same"), "resolution": 32, "prompt": "a"})]


TRANSFORMER, SCHEDULER = "transformer/config.json", "scheduler/scheduler_config.json"
HOSTILE = (
    Hostile("config: 900 brackets", 10, lambda f, p: ["check", _config(f, p, _with(p, "name", "[" * 900 + "]" * 900))]),
    Hostile("override: 5,000 brackets", 10, lambda f, p: ["check", str(p.file), "name=" + "[" * 5000]),
    Hostile("config: lr 1e400", 10, lambda f, p: ["check", _config(f, p, _with(p, "optimizer", '{"lr": 1e400}'))]),
    Hostile(
        "config: steps of 4,000 digits",
        10,
        lambda f, p: ["check", _config(f, p, _with(p, "train", '{"steps": ' + "9" * 4000 + "}"))],
    ),
    Hostile(
        "config: 20,000 unknown keys",
        10,
        lambda f, p: ["check", _config(f, p, **{f"unknown{n}": n for n in range(20_000)})],
    ),
    Hostile(
        "config: 200,000 unknown keys",
        30,
        lambda f, p: ["check", _config(f, p, **{f"k{n}": n for n in range(200_000)})],
    ),
    Hostile(
        "config: 8,000,000 prompts",
        60,
        lambda f, p: ["check", _config(f, p, _with(p, "validation", '{"prompts": [' + '"a",' * 7_999_999 + '"a"]}'))],
    ),
    Hostile("config: escapes in data.path", 10, lambda f, p: ["check", _config(f, p, data={"path": "\x1b[2J\x07/no"})]),
    Hostile("model: 5,000 brackets", 10, lambda f, p: _model(f, p, TRANSFORMER, lambda _: "[" * 5000)),
    Hostile("model: 10^9 layers", 20, lambda f, p: _model(f, p, TRANSFORMER, _setting("num_layers", 10**9))),
    Hostile("model: patch_size 0", 10, lambda f, p: _model(f, p, TRANSFORMER, _setting("patch_size", 0))),
    Hostile(
        "model: vae of 10^10 channels",
        30,
        lambda f, p: ["train", *_model(f, p, "vae/config.json", _setting("block_out_channels", [10**10]))[1:]],
    ),
    Hostile(
        "model: 10^12 timesteps",
        60,
        lambda f, p: ["train", *_model(f, p, SCHEDULER, _setting("num_train_timesteps", 10**12))[1:]],
    ),
    Hostile(
        "model: a damaged tokenizer",
        60,
        lambda f, p: ["train", *_model(f, p, "tokenizer/vocab.json", lambda text: text[:-9])[1:], "output.cache=c"],
    ),
    Hostile("LoRA: alpha NaN", 60, lambda f, p: _alpha(f, p, float("nan"))),
    Hostile("LoRA: alpha 1e38", 60, lambda f, p: _alpha(f, p, 1e38)),
    Hostile("LoRA: escapes in a name", 10, lambda f, p: ["inspect", _lora(f, p, **{"\x1b[2J": np.ones(1)})], False),
    Hostile(
        "LoRA: escapes in metadata", 10, lambda f, p: ["inspect", _lora(f, p, {"a\x1b]0;x\x07": "\x1b[2J"})], False
    ),
    Hostile("LoRA: a factor without axes", 10, _without_axes, False),  # inspect describes it
    Hostile("data: a parquet cell of 200 MB", 40, _parquet),
    Hostile("data: 20,000 like pictures", 120, _same_images, False),
)


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def fault_of(case: Hostile, folder: Path, place: Place) -> str:
    """What is wrong with a command's reaction to hostile input; empty: nothing."""
    folder.mkdir()
    command = [sys.executable, "-m", "simpletune", *case.command(folder, place)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=case.seconds, preexec_fn=_bounded
        )
    except subprocess.TimeoutExpired:
        return f"not done in {case.seconds:g} s"
    said = done.stdout + done.stderr
    if b"Traceback" in said:
        return f"a traceback: {said.decode(errors='replace').strip().splitlines()[-1][:120]}"
    if b"\x1b" in said or b"\x07" in said:
        return "raw control characters"
    if done.returncode not in CODES or (case.refused and done.returncode == 0):
        return f"exit code {done.returncode}"
    if done.returncode and b"error: " not in done.stderr:
        return f"no message: {said.decode(errors='replace')[-120:]}"
    return ""


def attack_from_outside(place: Place, folder: Path, only: str = "") -> Attack:
    """Try hostile configurations, models, LoRA files and data: each must end with a message, in time."""
    attack = Attack("hostile input")
    for number, case in enumerate(case for case in HOSTILE if only in case.name):
        began = time.perf_counter()
        fault = fault_of(case, folder / f"hostile-{number}", place)
        attack.count("wrong" if fault else "answered in words")
        if fault:
            attack.found.append(f"{case.name}: {fault}")
        print(f"{time.perf_counter() - began:7.1f} s  {case.name}: {fault or 'as it should be'}", flush=True)
        shutil.rmtree(folder / f"hostile-{number}")
    return attack


def main() -> None:
    """Run the attacks of ``make torture``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=2000, help="changes of a state.json, of bits and of digits each")
    parser.add_argument("--runs", type=int, default=100, help="damaged runs")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the hostile inputs those with this in the name")
    parser.add_argument("--no-hostile", action="store_true", help="leave hostile input out")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    prepare_environment()
    draw, began = random.Random(seed), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="attacks-") as name:
        folder = Path(name)
        with contextlib.redirect_stdout(io.StringIO()):
            origin = make_origin(folder)
        attacks = [attack_state(origin, args.states, draw, kind) for kind in ("bit", "digit")]
        (folder / "damaged").mkdir()
        attacks.append(attack_run(origin, folder / "damaged", args.runs, draw))
        if not args.no_hostile:
            attacks.append(attack_from_outside(origin, folder, args.only))
    print("\n".join(line for attack in attacks for line in attack.lines()))
    print(f"{time.perf_counter() - began:.0f} s, seed {seed}")
    sys.exit(any(attack.found for attack in attacks))


if __name__ == "__main__":
    main()
