"""Shapes as diffusers' classes make them: what ships, what a process of its own finds, and what neither can make."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from blocks import CONFIG, UNETS

from benchmarks.stored_shapes import stored
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_shapes import parameter_shapes
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.shared import parameter_shapes as shapes
from simpletune.system.options import UserError

CLASS = "SD3Transformer2DModel"
SETTINGS = shapes.settings_of(CONFIG, None)


def test_what_ships_is_what_diffusers_makes_and_small() -> None:
    assert shapes.STORED.read_text() == stored()
    assert shapes.STORED.stat().st_size < 32_000


def test_a_shipped_size_is_known_by_what_differs_from_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else its files state: their version, diffusers' own defaults, what the class ignores."""
    monkeypatch.setattr(shapes, "_made", lambda *_: pytest.fail("it ships"))
    for family in (SD3(), SDXL()):
        config = family.files.known_config()
        stated = {"_diffusers_version": "9", "_name_or_path": "x", "foreign": 1, "out_channels": config["out_channels"]}
        assert family.architecture.shapes_of({**config, **stated}) == family.architecture.known_shapes()
    with pytest.raises(pytest.fail.Exception):
        SD3().architecture.shapes_of({**SD3().files.known_config(), "num_layers": 23})


def test_a_process_computes_an_unknown_size_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise SystemError('a module of the current folder')")
    found = shapes._kept(CLASS, SETTINGS)
    assert found == parameter_shapes(CONFIG) and list(found) == list(parameter_shapes(CONFIG))
    (file,) = (tmp_path / ".cache" / "shapes").iterdir()
    said = "shapes  none that ships is of this SD3Transformer2DModel: diffusers computes them once, in seconds, for "
    assert capsys.readouterr() == ("", f"{said}{file.relative_to(tmp_path)}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **more: pytest.fail("it is known"))
    assert shapes._kept(CLASS, SETTINGS) == found and capsys.readouterr() == ("", "")
    file.write_text('{"damaged": 1}')
    with pytest.raises(pytest.fail.Exception):
        shapes._kept(CLASS, SETTINGS)


def test_a_size_is_kept_for_one_version_of_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shapes, "_found", lambda model, settings, file: {"weight": (1,)})
    for version in ("0.42.0", "0.42.1", "0.42.1"):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        assert shapes._kept(CLASS, SETTINGS) == {"weight": (1,)}
    assert len(list((tmp_path / ".cache" / "shapes").iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cache").write_text("a file")
    monkeypatch.setattr(shapes, "_found", lambda model, settings, file: {"weight": (1,)})
    assert shapes._kept(CLASS, SETTINGS) == {"weight": (1,)}
    assert "cannot be written (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "config", "said"),
    [
        (CLASS, {**CONFIG, "qk_norm": "odd"}, "unknown qk_norm: odd. .*'l2'. Download the model again, or use another"),
        ("UNet2DConditionModel", {**UNETS["sd2"], "attention_head_dim": [1]}, "Must provide the same number"),
    ],
)
def test_what_diffusers_refuses_is_a_sentence_here_and_from_a_process(
    model: str, config: dict, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=f"^diffusers makes no {model} of this config.json: .*{said}") as error:
        shapes.shapes_of_class(model, config)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([model, shapes.settings_of(config, None)])))
    shapes.print_shapes()
    answer = capsys.readouterr().out
    monkeypatch.setattr(subprocess, "run", lambda *_, **more: SimpleNamespace(returncode=0, stdout=answer, stderr=""))
    with pytest.raises(UserError) as again:
        shapes._found(model, "", Path("x"))
    assert str(again.value) == str(error.value)


def test_a_process_that_ends_or_takes_too_long_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: Any, timeout: float, **more: Any) -> NoReturn:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(UserError, match="did not make a SD3Transformer2DModel of this config.json in 600 s. Download"):
        shapes._found(CLASS, SETTINGS, Path("x"))
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **more: SimpleNamespace(returncode=1, stdout="", stderr="a\nKilled")
    )
    with pytest.raises(UserError, match="could not be computed: Killed. Try again, or see simpletune doctor"):
        shapes._found(CLASS, SETTINGS, Path("x"))
