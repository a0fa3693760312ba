"""``make compare``: what it notices in the files of two runs, which rows it demands, and names of an older tree."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.compare_rows import (
    EXCUSED,
    Row,
    older_path,
    rows,
    translate,
    translate_words,
    unknown_members,
    without_row,
)
from benchmarks.compare_trees import Comparison, compare_runs, main, run, table

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "configs" / "schema.json").read_text())
WEIGHTS, STATE = "result.safetensors", "checkpoints/step-000002/optimizer.safetensors"


def write_run(folder: Path) -> Path:
    """What a run leaves: metrics, a result, a checkpoint's state, a picture."""
    (folder / STATE).parent.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1.9250144958496094, "seconds": 0.5, "grad_norm": 0.15}\n'
        '{"step": 2, "loss": NaN, "seconds": 0.25, "grad_norm": 0.17}\n'
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(3, 4, generator=generator) for name in ("up", "down")}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    save_file({"state.up": tensors["up"].bfloat16()}, folder / STATE)
    Image.new("RGB", (4, 4), (1, 2, 3)).save(folder / "drawn.png")
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal runs, which took other times and name other authors."""
    base, new = write_run(tmp_path / "base"), write_run(tmp_path / "new")
    (new / "metrics.jsonl").write_text((new / "metrics.jsonl").read_text().replace('"seconds": 0.5', '"seconds": 9'))
    save_file(load_file(new / WEIGHTS), new / WEIGHTS, {"author": "another"})
    return base, new


def change_bit(file: Path, name: str) -> None:
    """Change the last bit of a tensor's last element."""
    tensors = load_file(file)
    tensors[name].view(torch.uint8).flatten()[-4 if tensors[name].dtype == torch.float32 else -2] ^= 1
    save_file(tensors, file)


def replace(run: Path, old: str, new: str) -> None:
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace(old, new))


def resave(run: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(run / WEIGHTS), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, run / WEIGHTS)


CHANGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "loss": (lambda run: replace(run, "1.9250144958496094", "1.9250144958496096"), "losses",
             "step 1: loss 1.9250144958496094, now 1.9250144958496096"),
    "lost column": (lambda run: replace(run, ', "grad_norm": 0.17', ""), "losses",
                    "step 2: grad_norm 0.17, now missing"),
    "column": (lambda run: replace(run, '"grad_norm"', '"norm"'), "losses", "step 1: norm missing, now 0.15"),
    "step": (lambda run: (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines()[0]),
             "losses", "metrics.jsonl: 2 rows, now 1"),
    "evaluation": (lambda run: (run / "evaluations.jsonl").write_text('{"step": 2, "eval_loss": 1.0}\n'),
                   "losses", "evaluations.jsonl: 0 rows, now 1"),
    "weight": (lambda run: change_bit(run / WEIGHTS, "up"), "weights",
               f"{WEIGHTS}: up F32 [3, 4] differs from byte 44 on"),
    "state": (lambda run: change_bit(run / STATE, "state.up"), "weights",
              f"{STATE}: state.up BF16 [3, 4] differs from byte 22 on"),
    "missing tensor": (lambda run: resave(run, down=None), "weights", f"{WEIGHTS}: down is missing"),
    "new tensor": (lambda run: resave(run, more=torch.ones(1)), "weights", f"{WEIGHTS}: more is new"),
    "shape": (lambda run: resave(run, up=torch.ones(4, 3)), "weights", f"{WEIGHTS}: up F32 [3, 4], now F32 [4, 3]"),
    "missing file": (lambda run: (run / STATE).unlink(), "weights", f"{STATE}: only in the base"),
    "pixel": (lambda run: Image.new("RGB", (4, 4), (1, 2, 4)).save(run / "drawn.png"), "weights",
              "drawn.png: pixels differ"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_named(change: str, pair: tuple[Path, Path]) -> None:
    one = compare_runs(*pair)
    assert one.equal and (one.steps, one.tensors, one.files) == (2, 3, 3)
    assert (one.first, one.last) == ("1.9250144958496094", "NaN")
    apply, part, words = CHANGES[change]
    apply(pair[1])
    one = compare_runs(*pair)
    assert not one.equal
    assert (one.losses, one.weights) == ((words, "") if part == "losses" else ("", words))
    assert words in table({"it": Row("all", {})}, {"it": one})


def test_runs_that_left_nothing_are_not_equal(tmp_path: Path) -> None:
    one = compare_runs(tmp_path, tmp_path)
    assert not one.equal and one.failure == "nothing to compare: 0 steps, 0 tensors"
    assert not Comparison().equal


def test_every_choice_has_a_row_and_every_excuse_is_in_use() -> None:
    assert without_row(SCHEMA, rows().values()) == []
    needed = without_row(SCHEMA, rows().values(), excused=())
    assert {one for one in EXCUSED if not any(choice.startswith(one) for choice in needed)} == set()


def test_a_choice_without_a_row_is_named() -> None:
    for without, named in {
        "prodigy": ["optimizer.name=prodigy", "optimizer.use_bias_correction=true", "optimizer.safeguard_warmup=true"],
        "stream": ["data.source=stream"],
        '"ema"': ["ema"],
        '"input_gradient"': ["precision.input_gradient=int8"],
    }.items():
        fewer = [row for row in rows().values() if without not in json.dumps(row.config)]
        assert without_row(SCHEMA, fewer) == named
    schema = json.loads(json.dumps(SCHEMA))
    properties = {"name": {"const": "muon", "type": "string"}, "nesterov": {"type": "boolean"}}
    schema["$defs"]["Muon"] = {"type": "object", "properties": properties}
    schema["properties"]["optimizer"]["discriminator"]["mapping"]["muon"] = "#/$defs/Muon"
    schema["properties"]["optimizer"]["oneOf"].append({"$ref": "#/$defs/Muon"})
    assert without_row(schema, rows().values()) == [
        "optimizer.name=muon", "optimizer.nesterov=true", "optimizer.nesterov=false"
    ]  # fmt: skip


RENAMED = {
    "train.max_steps": "train.steps",
    "levers.in_backward": "memory.optimizer_in_backward",
    "optimizer.name=adamw_8bit": "optimizer.name=adamw8bit",
    "model.t5=off": "model.t5=false",
}


def test_a_family_that_an_older_tree_lacks_is_named() -> None:
    older = copy.deepcopy(SCHEMA)
    union = older["properties"]["model"]["discriminator"]["mapping"]
    chosen = rows()
    assert not any(unknown_members(row.config, older) for row in chosen.values())
    del union["sdxl"]
    new = {name: unknown for name, row in chosen.items() if (unknown := unknown_members(row.config, older))}
    assert new and all(name.startswith("sdxl") and unknown == ["model.family=sdxl"] for name, unknown in new.items())


def test_an_older_tree_gets_its_own_names() -> None:
    new = {"train": {"max_steps": 4, "seed": 1}, "levers": {"in_backward": True}, "optimizer": {"name": "adamw_8bit"},
           "model": {"t5": "off"}}  # fmt: skip
    older = translate(new, SCHEMA, RENAMED)
    assert older == {"train": {"seed": 1, "steps": 4}, "levers": {}, "optimizer": {"name": "adamw8bit"},
                     "memory": {"optimizer_in_backward": True}, "model": {"t5": False}}  # fmt: skip
    assert new["train"] == {"max_steps": 4, "seed": 1}  # a copy was changed
    assert translate({"train": {"seed": 1}}, SCHEMA, RENAMED) == {"train": {"seed": 1}}  # what is not set stays so
    known = {"train": {"steps": 4}, "optimizer": {"name": "adamw8bit"}}
    renamed = {"train.steps": "train.old_steps", "optimizer.name=adamw8bit": "optimizer.name=eight"}
    assert translate(known, SCHEMA, renamed) == known
    words = {"draw": "generate", "--of": "--run", "train": "fit"}
    takes = {("generate", ""), ("train", ""), ("train", "--of"), ("generate", "--run")}
    for given, older in {
        "draw --of x": "generate --run x", "train c.json --resume latest": "train c.json --resume latest",
        "train --of x": "train --of x",
    }.items():  # fmt: skip
        assert translate_words(given.split(), lambda *asked: asked in takes, words) == older.split()
    assert older_path(Path("a/weights.st"), {"weights.st": "w.st"}) == Path("a/w.st")


def test_an_unknown_row_or_commit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--base", "HEAD", "--rows", "nonsense"])
    assert "--rows 'nonsense' names no row. Known: lora; " in capsys.readouterr().err
    if (ROOT / ".git").exists():
        with pytest.raises(SystemExit, match="git knows no commit nonsense"):
            main(["--base", "nonsense", "--rows", "dora"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_changed_line_is_seen(tmp_path: Path) -> None:
    """One row of a commit against itself, and against the same with another learning rate."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    # the commit may lack files that the working tree has
    shutil.copytree(ROOT / "benchmarks", clone / "benchmarks", dirs_exist_ok=True)
    shutil.copy2(ROOT / "tests" / "support" / "compare_inputs.py", clone / "tests" / "support")
    chosen = {"lora": rows()["lora"]}
    place = tmp_path / "equal"
    place.mkdir()
    report, equal = run(place, "HEAD", chosen, clone)
    assert equal, report
    assert "1 of 1 rows are equal to the bit" in report and not (place / "base" / "runs" / "lora").exists()
    main_file = clone / "simpletune" / "__main__.py"
    line = 'if "train" in sys.argv:\n    sys.argv.append("optimizer.lr=0.01001")\n'
    main_file.write_text(main_file.read_text().replace("import sys\n", f"import sys\n\n{line}"))
    place = tmp_path / "changed"
    place.mkdir()
    report, equal = run(place, "HEAD", chosen, clone)
    assert not equal and "0 of 1 rows are equal" in report and "with changes" in report
    assert "- lora: DIFFERENT: step 1: lr 0.01, now 0.01001" in report
    assert (place / "new" / "runs" / "lora").exists()
