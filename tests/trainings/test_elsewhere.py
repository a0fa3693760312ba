"""Without a network, and in locales with a decimal comma and a dotless i: the same words, numbers and files."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "simpletune").rglob("*.py"))
DOUBTFUL = re.compile(r"\blocale\b|n\}|(read|write)_text")
STRANGE = """\
import locale, socket
locale.setlocale(locale.LC_ALL, "")  # as a library may that formats for people
assert locale.localeconv()["decimal_point"] == ",", locale.setlocale(locale.LC_ALL)

def refused(*args, **options):
    raise RuntimeError(f"the network was asked for {args[:2]}")

class Alone(socket.socket):
    def connect(self, address):
        return super().connect(address) if self.family == socket.AF_UNIX else refused(address)
    connect_ex = connect

socket.getaddrinfo = socket.create_connection = refused
socket.socket = Alone
"""


@pytest.fixture(scope="module")
def locales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both locales, compiled where only these tests look, and a sitecustomize that sets one and cuts the network."""
    folder = tmp_path_factory.mktemp("locales")
    if (localedef := shutil.which("localedef")) is None:
        pytest.skip("localedef is not installed, which compiles the locales")
    for name in ("de_DE", "tr_TR"):
        command = [localedef, "--no-archive", "-i", name, "-f", "UTF-8", str(folder / f"{name}.UTF-8")]
        if subprocess.run(command, capture_output=True).returncode > 1:
            pytest.skip(f"the sources of the locale {name} are not installed")
    (folder / "sitecustomize.py").write_text(STRANGE, encoding="utf-8")
    return folder


def simpletune(*words: str, folder: Path | None = None, language: str = "") -> str:
    """What a command prints; in a locale and without a network if there is one."""
    strange = {"LOCPATH": str(folder), "LC_ALL": f"{language}.UTF-8", "LANGUAGE": language} if folder else {}
    paths = [str(ROOT), *([str(folder)] if folder else [])]
    done = subprocess.run(
        [sys.executable, "-m", "simpletune", *words], capture_output=True, encoding="utf-8", timeout=300,
        env=os.environ | strange | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("language", ["de_DE", "tr_TR"])
def test_checks_and_imports_say_the_same_everywhere(language: str, locales: Path, tmp_path: Path) -> None:
    options = {
        "LoRA_type": "Standard", "learning_rate": "1e-4", "network_dim": 8, "epoch": 2, "optimizer": "AdamW8bit",
        "max_resolution": "512,512", "pretrained_model_name_or_path": "runwayml/stable-diffusion-v1-5",
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(options), encoding="utf-8")
    for words in (("check", "demo", "optimizer.lr=1.5e-4"), ("import", str(tmp_path / "a.json")), ("schema",)):
        assert simpletune(*words, folder=locales, language=language) == simpletune(*words), words


@pytest.mark.slow
@pytest.mark.parametrize("language", ["de_DE", "tr_TR"])
def test_a_run_is_the_same_everywhere(language: str, locales: Path, tmp_path: Path) -> None:
    """Training with its pictures, its report, and the reading of its files."""
    found = []
    for name, folder in (("here", None), ("there", locales)):
        runs = tmp_path / name
        overrides = [
            f"output.runs={runs}", f"output.cache={runs / 'cache'}", f"output.profiles={runs}", "device=cpu",
            "train.steps=2", "schedule.warmup_steps=1", "validation.steps=1", "tracking.tensorboard=false",
        ]  # fmt: skip
        simpletune("train", "demo", *overrides, folder=folder, language=language)
        run = next(runs.glob("*/summary.json")).parent
        simpletune("report", str(run), "--out", str(runs / "report.html"), folder=folder, language=language)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        weights = simpletune("inspect", str(run), "--json", folder=folder, language=language)
        found.append(([row["loss"] for row in rows], json.loads(weights)["ranks"]))
        assert re.search(r"\d\.\d{3}", (runs / "report.html").read_text(encoding="utf-8"))
    assert found[0] == found[1]


def test_nothing_is_formatted_or_read_by_the_locale() -> None:
    """No format of type n, which has the locale's point; no text file in the locale's encoding; no locale module."""
    found = []
    for path in PACKAGE:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if DOUBTFUL.search(text) else ():
            said = None
            if isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr):
                spec = "".join(each.value for each in node.format_spec.values if isinstance(each, ast.Constant))
                said = "a format of type n" if spec.endswith("n") else None
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else [node.module]
                said = "the locale" if "locale" in names else None
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                given = {each.arg for each in node.keywords}
                short = len(node.args) < (1 if node.func.attr == "read_text" else 2)
                if node.func.attr in ("read_text", "write_text") and "encoding" not in given and short:
                    said = "a text file without an encoding"
            if said is not None:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} has {said}")
    assert not found
