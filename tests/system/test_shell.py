"""Printed commands can be pasted, wherever the program is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from simpletune.apps.cli.main import parse, read_paths
from simpletune.system import extras, shell
from simpletune.system.extras import install_extra
from simpletune.system.options import UserError
from simpletune.system.package import PACKAGE
from simpletune.system.shell import install_command, login_command, quote_command, typed_path


def program(folder: Path) -> Path:
    folder.mkdir(parents=True)
    file = folder / "simpletune"
    file.touch(0o755)
    return file


def test_a_program_that_is_not_on_path_is_named_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = program(tmp_path / ".venv" / "bin"), program(tmp_path / "bin")
    monkeypatch.setattr(sys, "executable", str(ours.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert quote_command("simpletune", "check", Path("my dog.json")) == ".venv/bin/simpletune check 'my dog.json'"
    assert quote_command("tensorboard", "--logdir", "profiles") == "tensorboard --logdir profiles"  # is not there
    monkeypatch.setenv("PATH", str(other.parent))  # another installation's
    assert quote_command("simpletune", "doctor") == ".venv/bin/simpletune doctor"
    monkeypatch.chdir(other.parent)
    assert quote_command("simpletune", "doctor") == f"{ours} doctor"
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "simpletune").symlink_to(ours)
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert quote_command("simpletune", "doctor") == "simpletune doctor"


HOME = Path.home()


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("~/my dog", f"{HOME}/my dog"), ("'~/my dog'", f"{HOME}/my dog"), ('"/x/my dog"', "/x/my dog"),
        ("it's", "it's"),
        ("stabilityai/sdxl", "stabilityai/sdxl"), ("s3://b/runs", "s3://b/runs"), ("demo:style", "demo:style"),
        ("runs/demo@100:0.8", "runs/demo@100:0.8"), (" a", " a"), ("", ""), ("a~b", "a~b"), ("x:0.8", "x:0.8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wsl", [False, True])
def test_a_path_is_read_as_it_is_typed_or_pasted(
    typed: str, read: str, wsl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "is_under_wsl", lambda: wsl)
    assert typed_path(typed) == read


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (r"C:\Users\me\Pictures", "/mnt/c/Users/me/Pictures"),
        (r'"D:\my dog"', "/mnt/d/my dog"), ("c:/a/b", "/mnt/c/a/b"),
        ("E:\\", "/mnt/e/"), (r"\\wsl$\Ubuntu\home\me", "/home/me"), (r"\\wsl.localhost\Ubuntu-24.04\srv\x", "/srv/x"),
        (r"C:\loras\x.safetensors:0.8", "/mnt/c/loras/x.safetensors:0.8"),
    ],
)  # fmt: skip
def test_a_path_of_windows_is_translated_under_wsl_and_refused_elsewhere(
    typed: str, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "is_under_wsl", lambda: True)
    assert typed_path(typed) == read
    monkeypatch.setattr(shell, "is_under_wsl", lambda: False)
    with pytest.raises(UserError, match="is a path of Windows, which this machine cannot open. Copy what it names"):
        typed_path(typed)


def test_a_path_of_windows_without_its_backslashes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "is_under_wsl", lambda: True)
    with pytest.raises(UserError, match="C:UsersmePictures is .* whose backslashes the shell removed"):
        typed_path("C:UsersmePictures")
    with pytest.raises(UserError, match="a path of Windows, which this machine cannot open"):
        typed_path(r"\\server\share\pictures")


def test_paths_among_a_verb_s_arguments_are_read_and_prompts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "is_under_wsl", lambda: True)
    args = parse(
        ["generate", "--run", "~/runs/demo", "--lora", "~/a.safetensors:0.5", "--output", r"C:\out", "--prompt", "~/x"]
    )
    read_paths(args)
    assert (args.run, args.lora, args.output) == (HOME / "runs/demo", [f"{HOME}/a.safetensors:0.5"], Path("/mnt/c/out"))
    assert args.prompt == ["~/x"]
    args = parse(["report", "~/runs/a", '"/x/my run"'])
    read_paths(args)
    assert args.runs == [HOME / "runs/a", Path("/x/my run")]
    args = parse(["train", "'~/my dog'", "train.steps=3", "--resume", "latest"])
    read_paths(args)
    assert (args.config, args.overrides, args.resume) == (HOME / "my dog", ["train.steps=3"], "latest")


def test_printed_installs_and_logins_name_the_programs_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/srv/env/bin/python")
    monkeypatch.setattr(shell.shutil, "which", lambda name, path=None: f"{path}/{name}" if path else None)
    assert login_command() == "/srv/env/bin/hf auth login"
    assert install_command("triton") == "/srv/env/bin/python -m pip install triton"
    monkeypatch.chdir(PACKAGE.parent)
    assert install_extra("heic") == "/srv/env/bin/python -m pip install -e '.[heic]'"
    monkeypatch.chdir("/usr")
    assert install_extra("heic") == f"/srv/env/bin/python -m pip install -e '{PACKAGE.parent}[heic]'"
    monkeypatch.setattr(extras, "PACKAGE", Path("/usr/lib/python3/site-packages/simpletune"))
    assert install_extra("heic") == "/srv/env/bin/python -m pip install 'simpletune[heic]'"
    monkeypatch.setenv("SIMPLETUNE_CALLED_FROM", "/home/me")  # by train.sh: what is printed is typed elsewhere
    assert login_command() == "cd /usr && /srv/env/bin/hf auth login"
    bare = [
        f"{file}: {line.strip()}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"pip3? install|hf auth|huggingface-cli", line)
    ]
    assert bare == []
