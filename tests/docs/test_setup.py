"""train.sh, test.sh and setup.sh on machines of every kind, with a fake Python, pip and nvidia-smi: no network, no GPU.

The scripts are copied to a folder whose path has a space, and see a PATH of fakes and the few tools named here.
tests/gpu/dry_gpu/setup.sh, which makes another environment by the same rules, is tested here, too, and .ci/run, which
calls it after test.sh. Of rows that take the same path through a script, all but one are slow.
"""

import ensurepip
import hashlib
import http.server
import os
import pty
import re
import shutil
import signal
import subprocess
import threading
import time
import venv
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import pytest
from slow_cases import slow_but

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = (
    "awk bash cat chmod cp cut df dirname du env find flock grep mkdir mv pwd readlink rm sed sha256sum sleep tail "
    "timeout"
)
DRY = "tests/gpu/dry_gpu/setup.sh"

# What a Python answers to the questions of setup.sh; as .venv/bin/python it is also pip and the project.
FAKE_PYTHON = """#!/bin/bash
version={version}
case "$*" in
    *ensurepip*) echo "$version {venv}" ;;
    *requires_dist*) echo "${{FAKE_TORCH:-}}" ;;
    *--dry-run*|*"pip>="*) ;;
    *sysconfig*) echo "${{FAKE_INCLUDE:-/no/such/folder}}" ;;
    "-c "*) echo "${{version%.*}}" ;;
    "-m venv "*)
        echo "venv $version" >>"$FAKE_LOG"
        if [[ -n ${{FAKE_VENV_ERROR:-}} ]]; then echo "Error: $FAKE_VENV_ERROR"; exit 1; fi
        mkdir -p "$3/bin" "$3/lib/python${{version%.*}}"
        : >"$3/pyvenv.cfg"
        cp "$0" "$3/bin/python" ;;
    "-m pip --version") ;;
    "-m pip "*)
        echo "pip $PWD: $*" >>"$FAKE_LOG"
        printf '%s' "${{FAKE_PIP_OUTPUT:-}}"
        sleep "${{FAKE_PIP_SECONDS:-0}}"
        until [[ -z ${{FAKE_PIP_GATE:-}} || -e $FAKE_PIP_GATE ]]; do sleep 0.05; done
        if [[ -n ${{FAKE_PIP_ERROR:-}} ]]; then echo "ERROR: $FAKE_PIP_ERROR"; exit 1; fi ;;
    *)
        echo "run $PWD: $*" >>"$FAKE_LOG"
        echo "from ${{SIMPLETUNE_CALLED_FROM:-}}" >>"$FAKE_LOG"
        [[ "$*" != *"${{FAKE_RUN_FAILS:-nothing}}"* ]] || {{ printf "%s" "${{FAKE_RUN_ERROR:-}}"; exit 1; }} ;;
esac
"""


class Machine:
    """A project folder and a PATH, both made up."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "the project"
        self.bin = folder / "bin"
        self.log = folder / "calls.log"
        self.bin.mkdir(parents=True)
        for name in ("train.sh", "test.sh", "pyproject.toml", "simpletune/setup.sh", DRY, ".ci/run", ".ci/dry"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, self.root / name)
        (self.root / "configs" / "more").mkdir(parents=True)
        for name in ("demo", "more/rarer"):
            (self.root / "configs" / f"{name}.json").write_text("{}")
        for tool in TOOLS.split():
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        self.environment = {"PATH": str(self.bin), "HOME": str(folder), "FAKE_LOG": str(self.log), "LC_ALL": "C"}

    def command(self, name: str, text: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)  # it may be a link to the machine's own tool
        path.write_text(text)
        path.chmod(0o755)

    def python(self, name: str = "python3", version: str = "3.11.7", venv: bool = True) -> None:
        self.command(name, FAKE_PYTHON.format(version=version, venv="venv" if venv else "no-venv"))

    def driver(self, answer: str, status: int = 0) -> None:
        self.command("nvidia-smi", f"#!/bin/bash\necho '{answer}'\nexit {status}\n")

    def start(self, script: str, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / script), *arguments],
            cwd=cwd or self.root,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *arguments: str, status: int = 0, cwd: Path | None = None, **environment: str) -> str:
        """What was printed on both streams by a script that ends with this status."""
        process = self.start(script, *arguments, cwd=cwd, **environment)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == status, output
        return output

    def kill_during_pip(self, script: str, calls: int, **environment: str) -> None:
        """Start a script, and kill it once pip was called so often."""
        process = self.start(script, FAKE_PIP_SECONDS="300", **environment)
        deadline = time.monotonic() + 120
        while len(self.calls("pip")) < calls and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def calls(self, kind: str) -> list[str]:
        """The calls of one kind (venv, pip, run) that the fakes have seen, without the kind."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix(f"{kind} ") for line in lines if line.startswith(f"{kind} ")]

    def installs(self) -> list[str]:
        """What pip was asked for since the last call."""
        found = [call.split("install ")[1] for call in self.calls("pip")]
        self.log.unlink(missing_ok=True)
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def ready(machine: Machine) -> Machine:
    """A machine on which train.sh has run once."""
    machine.python()
    machine.run("train.sh")
    machine.log.unlink()
    return machine


# Compiler, Python, NVIDIA driver


NEITHER = (False, False, ["a C compiler and Python.h"])
ROWS = [(True, True, []), (False, True, ["a C compiler"]), (True, False, ["Python.h"]), NEITHER]


@pytest.mark.parametrize("compiler, header, lacks", slow_but(ROWS[:3], ROWS))
def test_a_card_without_what_triton_compiles_with_is_said_once(
    machine: Machine, tmp_path: Path, compiler: bool, header: bool, lacks: list[str]
) -> None:
    machine.python()
    machine.driver("580.65.06")
    if compiler:
        machine.command("gcc", "#!/bin/bash\n")
    if header:
        (tmp_path / "Python.h").touch()
    output = machine.run("train.sh", FAKE_INCLUDE=str(tmp_path))
    assert re.findall(r"setup: (.*) not found", output) == lacks
    assert ("sudo apt install gcc python3.11-dev" in output) == bool(lacks)
    assert "not found" not in machine.run("train.sh", FAKE_INCLUDE=str(tmp_path))


def test_a_fresh_machine_installs_and_trains_and_the_next_call_starts_at_once(machine: Machine) -> None:
    machine.python()
    output = machine.run("train.sh")
    assert "making .venv with Python 3.11.7, installing simpletune and the packages for training" in output
    assert re.search(r"done in \d+ s; \.venv takes \d+ MB", output)
    assert "C compiler" not in output, "there is no card"
    assert machine.run("train.sh") == ""
    assert machine.calls("pip") == [f"{machine.root}: -m pip --disable-pip-version-check --no-input install -e ."]
    assert machine.calls("run") == [f"{machine.root}: -m simpletune train configs/demo.json"] * 2


FETCHING = """Collecting torch<2.14,>=2.13
  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl.metadata (29 kB)
Processing /opt/files/numpy-2.4.6-cp311-cp311-linux_x86_64.whl (from x)
  Using cached rich-15.0.0-py3-none-any.whl (310 kB)
  Downloading wandb-0.31.0-py3-none-any.whl (20.5 MB)
Progress 0 of 20500000
Progress 20500000 of 20500000
Collecting torch<2.14,>=2.13
  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (192.0 MB)
"""
HALF = FETCHING + "Progress 96000000 of 192000000\n"
UNPACKING = HALF + "Installing collected packages: numpy, rich, wandb, torch\n"


@pytest.mark.parametrize(
    ("log", "expected", "line"),
    [
        (HALF, "85 450", "[##------] 116 of about 450 MB, 4 of 85 packages, 2 min 51 s left: torch"),
        (HALF, "", "[--------] 116 MB, 4 packages, 1 min 0 s: torch"),
        # an older pip does not say what has arrived
        (FETCHING, "85 450", "[--------] 20 of about 450 MB, 4 of 85 packages, 1 min 0 s: torch"),
        (UNPACKING, "85 450", "[###-----] unpacking 2 of 4 packages, 1 min 0 s so far"),
        (UNPACKING + "Successfully installed torch-2.13.0\n", "85 450", "[########] finishing, 1 min 0 s so far"),
        (
            UNPACKING + "Successfully installed torch-2.13.0\nCollecting a\n",
            "",
            "[--------] 212 MB, 4 packages, 1 min 0 s",
        ),
        ("a pip of another form\n", "85 450", "[--------] 0 of about 450 MB, 0 of 85 packages, 1 min 0 s"),
        ("", "", "[--------] 0 MB, 0 packages, 1 min 0 s"),
    ],
)
def test_how_far_an_install_is_by_pips_log(tmp_path: Path, log: str, expected: str, line: str) -> None:
    (tmp_path / "log").write_text(log)
    for name in ("pip-26.3", "numpy-2.4.6"):
        (tmp_path / "lib/python3.11/site-packages" / f"{name}.dist-info").mkdir(parents=True)
    script = f"source simpletune/setup.sh; venv={tmp_path} log={tmp_path}/log; _setup_progress 60 {expected}"
    done = subprocess.run(["bash", "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(line) and len(done.stdout.splitlines()) == 1


def test_an_install_shows_how_far_it_is_and_keeps_pips_exit_status(machine: Machine) -> None:
    """Without a terminal a line now and then, in one a bar that is removed."""
    machine.python()
    script = machine.root / "simpletune" / "setup.sh"
    script.write_text(script.read_text().replace("_SETUP_LINE_SECONDS=20", "_SETUP_LINE_SECONDS=1"))
    given = {"FAKE_PIP_OUTPUT": HALF, "FAKE_PIP_SECONDS": "1.3"}
    output = machine.run("train.sh", status=4, FAKE_PIP_ERROR="disk quota", **given)
    assert re.search(r"^setup: 116 of about 450 MB, 4 of 85 packages, \d+ s left: torch$", output, re.MULTILINE)
    assert "| ERROR: disk quota" in output and "(exit status 1)" in output
    assert "Progress" not in output and "Terminated" not in output
    handle, end = pty.openpty()
    process = subprocess.Popen(
        [str(machine.root / "train.sh")], cwd=machine.root, env=machine.environment | given, stderr=end, stdout=end
    )
    os.close(end)
    shown = b""
    with suppress(OSError):  # the terminal's other end was closed
        while more := os.read(handle, 4096):
            shown += more
    os.close(handle)
    assert process.wait(60) == 0
    bar, rest = re.findall(rb"\r\x1b\[K([^\r]*)", shown)[-2:]
    assert re.fullmatch(rb"setup: \[-+\] 116 MB, 4 packages, \d s: torch", bar) and rest.startswith(b"setup: done")


def test_a_pip_that_can_counts_the_bytes(machine: Machine) -> None:
    machine.python()
    for version, found in (("24.0", False), ("24.1", True), ("26.3", True)):
        machine.run("train.sh")
        site = machine.root / ".venv" / "lib" / "python3.11" / "site-packages"
        shutil.rmtree(site, ignore_errors=True)
        (site / f"pip-{version}.dist-info").mkdir(parents=True)
        (machine.root / "pyproject.toml").write_text(f"# {version}")  # something new to install
        machine.log.unlink(missing_ok=True)
        machine.run("train.sh")
        assert ("--progress-bar raw" in machine.calls("pip")[-1]) == found


PYTHONS = [
    (
        "",
        "",
        r"3\.11 or newer; none of python3\.13 .*python was found.*sudo apt install python3\.11 python3\.11-venv",
    ),
    ("python=2.7.18 python3=3.9.18", "", r"; python3 is 3\.9\.18\..*pyenv install 3\.11.*uv python install 3\.11"),
    ("python3=3.11.2-no-venv", "", r"3\.11 \(python3\) cannot make a virtual .*sudo apt install python3\.11-venv"),
    ("python3=3.11.7 old=3.10.13", "old", r"old is 3\.10\.13"),
    ("python3=3.11.7", "absent", r"none of absent was found"),
    ("python3=3.9.18 python3.12=3.12.1", "", "Python 3.12.1"),
    ("python3.12=3.12.1-no-venv python3=3.11.7", "", "Python 3.11.7"),
    ("python3=3.11.7 mine=3.13.0", "mine", "Python 3.13.0"),
]


@pytest.mark.parametrize("pythons, chosen, words", slow_but([PYTHONS[0], PYTHONS[2], PYTHONS[3], PYTHONS[6]], PYTHONS))
def test_the_newest_usable_python_is_taken_or_the_chosen_one(
    machine: Machine, pythons: str, chosen: str, words: str
) -> None:
    machine.command("python3.13", "#!/bin/bash\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    for name, version in (each.split("=") for each in pythons.split()):
        machine.python(name, version.partition("-")[0], venv="-" not in version)
    found = words.startswith("Python ")
    output = machine.run("train.sh", status=0 if found else 3, PYTHON=chosen)
    assert re.search(words, output, re.S), output
    assert (machine.root / ".venv").exists() == found
    assert machine.calls("venv") == [words.removeprefix("Python ")] * found


def test_an_old_driver_stops_before_the_install_unless_torch_comes_from_another_index(machine: Machine) -> None:
    machine.python()
    machine.driver("550.54.15\n550.54.15")  # one line a GPU
    output = machine.run("train.sh", status=3)
    assert "NVIDIA driver 550.54.15 is too old" in output and "needs driver 580 or newer" in output
    assert "nvidia-driver-580" in output and "SIMPLETUNE_TORCH_INDEX=URL" in output
    assert machine.installs() == [] and not (machine.root / ".venv").exists()
    output = machine.run("train.sh", SIMPLETUNE_TORCH_INDEX="https://wheels.invalid/cu126")
    assert "torch from SIMPLETUNE_TORCH_INDEX" in output
    torch = "torch>=2.13,<2.16"
    assert machine.installs()[-2:] == [f"--index-url https://wheels.invalid/cu126 {torch}", "-e ."]
    machine.run("test.sh")  # needs an install (dev), and the variable is not set this time
    assert machine.installs() == [f"--index-url https://wheels.invalid/cu126 {torch}", "-e .[dev]"]
    machine.run("train.sh", SIMPLETUNE_TORCH_INDEX="https://wheels.invalid/cpu")
    uninstalled = "-y torch"
    assert machine.installs() == [uninstalled, f"--index-url https://wheels.invalid/cpu {torch}", "-e ."]


def test_without_a_card_torch_is_one_without_cuda_until_a_card_comes(machine: Machine) -> None:
    machine.python()
    machine.run("train.sh", FAKE_TORCH="2.13.0+cpu")
    assert machine.installs() == ["-e . torch==2.13.0+cpu"]
    assert machine.run("train.sh") == ""
    machine.driver("580.65.06")
    machine.run("train.sh")
    assert machine.installs() == ["-y torch", "-e ."]
    assert machine.run("train.sh") == ""


class PackageIndex(http.server.SimpleHTTPRequestHandler):
    """A folder of an index, each package's list with the hashes of the metadata that lie beside its wheels."""

    folder: ClassVar[Path]
    asked: ClassVar[list[str]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, directory=str(self.folder))

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def publish(folder: Path, version: str, needs: str = "", metadata: bool = True, mib: int = 0) -> None:
    """Put a made-up torch into an index: one that needs something, of some size, with or without metadata apart."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"torch-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n" + (f"Requires-Dist: {needs}\n" if needs else "")
    wheel = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch_filling", b"0" * (mib << 20))
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    shown = ""
    if metadata:
        wheel.with_name(f"{wheel.name}.metadata").write_text(about)
        shown = f' data-core-metadata="sha256={hashlib.sha256(about.encode()).hexdigest()}"'
    with (folder / "index.html").open("a") as page:
        page.write(f'<a href="{quote(wheel.name)}"{shown}>{wheel.name}</a>\n')


@pytest.fixture(scope="module")
def own_pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pip that this Python brings, unpacked."""
    wheel = next(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"), None)
    if wheel is None:
        pytest.skip("this Python comes without pip's wheel")
    folder = tmp_path_factory.mktemp("pip") / wheel.stem
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


CUDA = 'nvidia-cublas==13.1; platform_system == "Linux"'
ELSEWHERE = 'nvidia-cublas==13.1; platform_system == "Windows"'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wheels", "cpu", "chosen", "installed"),
    [
        pytest.param([("2.13.0+cpu", ""), ("2.13.0", CUDA), ("2.15.0", "")], "", "torch==2.13.0+cpu", "",
                     id="cpu build"),
        pytest.param([("2.13.0", CUDA), ("2.12.0", ELSEWHERE), ("2.11.0", "")], "", "torch==2.12.0", "", id="older"),
        pytest.param([("2.13.0", CUDA), ("2.10.0", "")], "", "", "", id="only cuda"),
        # what it needs stands in its wheel alone, of which pip would download the whole
        pytest.param([("2.13.0", "", False, 20)], "2.12.0+cpu", "", "2.12.0+cpu", id="no metadata"),
    ],
)  # fmt: skip
def test_torch_without_cuda_is_found_by_its_metadata(
    tmp_path: Path, own_pip: Path, wheels: list[tuple], cpu: str, chosen: str, installed: str
) -> None:
    """By the Python's own pip from an index of made-up packages."""
    for wheel in wheels:
        publish(tmp_path / "index" / "torch", *wheel)
    (tmp_path / "cpu" / "torch").mkdir(parents=True)
    if cpu:
        publish(tmp_path / "cpu" / "torch", cpu)
    venv.create(tmp_path / "venv", symlinks=True)
    Index = type("Index", (PackageIndex,), {"folder": tmp_path, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        script = f"""source simpletune/setup.sh
            _SIMPLETUNE_CPU_INDEX={url}/cpu venv={tmp_path}/venv log=$venv/log torch="torch>=2.11,<2.14" chosen=
            _setup_torch_without_cuda
            echo "$chosen" """
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(own_pip),
                       "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{url}/index"}  # fmt: skip
        done = subprocess.run(["bash", "-c", script], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        server.shutdown()
    log = (tmp_path / "venv" / "log").read_text()
    assert (done.returncode, done.stdout.strip()) == (0, chosen), done.stderr + log
    assert ("about 6 GB" in done.stderr) == (not chosen and not installed)
    found = [path.name for path in (tmp_path / "venv").glob("lib/*/site-packages/torch-*.dist-info")]
    assert found == ([f"torch-{installed}.dist-info"] if installed else [])
    assert (tmp_path / "venv" / ".simpletune-torch-cpu").exists() == bool(chosen or installed)
    if wheels[0][2:] == () and tuple(map(int, own_pip.name.split("-")[1].split(".")[:2])) >= (23, 3):
        assert [path for path in Index.asked if path.startswith("/index/") and path.endswith(".whl")] == []


def test_a_new_or_unknown_driver_does_not_stop_the_install(machine: Machine) -> None:
    machine.python()
    for answer, status, said in (
        ("580.65.06", 0, None),
        ("610.10", 0, None),
        ("NVIDIA-SMI has failed because it", 9, "nvidia-smi is installed but fails (NVIDIA-SMI has failed"),
        ("No devices were found", 0, "reports no driver version (No devices were found)"),
    ):
        shutil.rmtree(machine.root / ".venv", ignore_errors=True)
        machine.driver(answer, status)
        output = machine.run("train.sh")
        assert ("nvidia" not in output.lower()) if said is None else (said in output and "only the CPU" in output)


# Once, and again


def test_what_has_changed_is_installed_into_the_same_venv(ready: Machine) -> None:
    with (ready.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert "setup: installing simpletune" in ready.run("train.sh")
    assert ready.run("train.sh") == ""
    assert ready.calls("venv") == [] and ready.installs() == ["-e ."]
    assert "the packages for training and the tests" in ready.run("test.sh")
    assert ready.run("train.sh") == "", "what tests need is enough to train"
    assert ready.installs() == ["-e .[dev]"]


def test_without_a_card_the_tests_get_a_triton_that_lists_no_leaks(machine: Machine) -> None:
    machine.python()
    machine.run("test.sh", FAKE_TORCH="2.13.0+cpu")
    assert machine.installs() == ["-e .[dev] torch==2.13.0+cpu triton<3.9; platform_system == 'Linux'"]
    shutil.rmtree(machine.root / ".venv")
    machine.run("train.sh", FAKE_TORCH="2.13.0+cpu")
    assert machine.installs() == ["-e . torch==2.13.0+cpu"]


def test_killed_set_up_is_made_anew(machine: Machine) -> None:
    machine.python()
    machine.kill_during_pip("train.sh", 1)
    (machine.root / ".venv" / "half").touch()
    assert "remaking .venv (an earlier set-up stopped halfway)" in machine.run("train.sh")
    assert not (machine.root / ".venv" / "half").exists()
    assert machine.run("train.sh") == ""


KILLED = """step=0
_at_step() {
    case ${1:-} in _setup_install | _setup_empty | _setup_torch_without_cuda) ;; *) return 0 ;; esac
    ((BASH_SUBSHELL > 0 || ++step <= DIES_AT)) || { echo "$step $BASH_COMMAND" >>"$DIED"; kill -9 0; }
}
[[ -z ${DIES_AT:-} || $0 != *train.sh ]] || { set -T; trap '_at_step "${FUNCNAME[0]:-}"' DEBUG; }
"""


@pytest.mark.slow
def test_a_set_up_killed_after_any_of_its_steps_is_finished_by_the_next_call(machine: Machine, tmp_path: Path) -> None:
    machine.python()
    (tmp_path / "killed.sh").write_text(KILLED)
    machine.environment |= {"BASH_ENV": str(tmp_path / "killed.sh"), "DIED": str(tmp_path / "died")}
    machine.environment["FAKE_TORCH"] = "2.13.0+cpu"
    venv = machine.root / ".venv"
    for steps in range(100):
        shutil.rmtree(venv, ignore_errors=True)
        machine.log.unlink(missing_ok=True)
        process = machine.start("train.sh", DIES_AT=str(steps))
        output, _ = process.communicate(timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, output
        whole = (venv / ".simpletune-installed-run").exists() and not (venv / ".simpletune-installing").exists()
        if half := (venv / "bin" / "python").exists() and not whole:
            (venv / "half").touch()
        machine.run("train.sh")
        done = (tmp_path / "died").read_text().splitlines()[-1]
        assert (venv / ".simpletune-installed-run").exists() and (venv / ".simpletune-torch-cpu").exists(), done
        assert not (venv / ".simpletune-installing").exists() and not (half and (venv / "half").exists()), done
        kinds = [line.split()[0] for line in machine.log.read_text().splitlines() if not line.startswith("from ")]
        assert kinds[-1] == "run" and "pip" in kinds[len(kinds) - kinds[::-1].index("venv") :], done
    assert 20 < steps < 99


def test_a_venv_whose_python_is_gone_or_that_was_moved_is_made_anew(ready: Machine) -> None:
    python = ready.root / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nonexistent/python3")
    assert "remaking .venv (its Python is gone)" in ready.run("train.sh")
    ready.root = ready.root.rename(ready.root.with_name("moved"))
    assert "remaking .venv (it was moved, copied or linked here)" in ready.run("train.sh")
    assert ready.run("train.sh") == ""


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock there is no lock")
def test_two_calls_at_once_install_once(machine: Machine, tmp_path: Path) -> None:
    machine.python()
    gate, late = tmp_path / "gate", time.monotonic() + 120
    first = machine.start("train.sh", FAKE_PIP_GATE=str(gate))
    while not machine.calls("pip"):
        assert time.monotonic() < late
        time.sleep(0.02)
    second = machine.start("train.sh", FAKE_PIP_GATE=str(gate))
    assert second.stdout is not None
    said = second.stdout.readline()  # comes while the first one holds the lock
    gate.touch()
    outputs = [first.communicate(timeout=120)[0], said + second.communicate(timeout=120)[0]]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert sum("waiting for another set-up" in output for output in outputs) == 1
    assert len(machine.calls("pip")) == 1 and len(machine.calls("run")) == 2


ERRORS = [
    ("Failed to establish a new connection: ConnectionError", "index could not be reached. Check the network"),
    ("[Errno 28] No space left on device", "The disk is full"),
    ("No matching version (from versions: none)", "has nothing for Python 3.11.7. Check the network"),
    ("No matching distribution found for torch", "no fitting version for Python 3.11.7"),
    ("something else", "then run the same command again"),
]


@pytest.mark.parametrize("error, remedy", ERRORS)
def test_failed_install_shows_the_log_and_the_remedy(machine: Machine, error: str, remedy: str) -> None:
    machine.python()
    output = machine.run("train.sh", status=4, FAKE_PIP_ERROR=error)
    assert f"| ERROR: {error}" in output and remedy in output
    assert "Installing simpletune failed (exit status 1)." in output and "the project/.venv/install.log" in output
    assert machine.calls("run") == []
    assert "remaking" not in machine.run("train.sh"), "the failure leaves nothing behind that needs cleaning"


# What .venv holds is deleted only if it can be made again


def contents(folder: Path) -> dict[str, str | None]:
    """Every path below a folder, except the lock: a file's text, a link's target, None for a folder."""
    found: dict[str, str | None] = {}
    for path in folder.rglob("*"):
        if path.name != ".venv.lock":
            text = os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else None
            found[str(path.relative_to(folder))] = text
    return found


@pytest.fixture(params=["train.sh", pytest.param(DRY, marks=pytest.mark.slow)])
def setting(request: pytest.FixtureRequest, machine: Machine, tmp_path: Path) -> tuple[Machine, str, Path]:
    """A machine, one of the scripts that set up, and where its environment lies."""
    machine.python()
    machine.command("df", "#!/bin/bash\necho header\necho /dev/x 9 9 99999999 9% /\n")
    machine.environment["DRY_VENV"] = str(tmp_path / "an environment")
    return machine, request.param, tmp_path / "an environment" if request.param == DRY else machine.root / ".venv"


def precious(folder: Path, *names: str) -> None:
    """Somebody's files, of which set-up has seen none."""
    for name in ("thesis.txt", "bin/script", ".hidden", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("years of work")


KINDS = [
    ("folder", r"\(it has no Python.*\) and is not emptied: set-up did not make it, and without pyvenv\.cfg"),
    ("file", r"is not emptied: it is not a folder\.\n +Move it away: mv -i \S+"),
    ("link to a folder", r"\(it has no Python.*: it is a link, .* through a link\.\n +Remove the link.* rm \S+"),
    ("link to an empty folder", r"it is a link"),
    ("link to a file", r"it is a link"),
    ("link to a broken environment", r"it is a link"),
    ("link to an unfinished environment", r"\(an earlier set-up stopped halfway\).* it is a link"),
    ("link to nothing", r"\(its target is gone\) .* it is a link"),
]


@pytest.mark.parametrize("kind, reason", slow_but([KINDS[0], KINDS[1], KINDS[6], KINDS[7]], KINDS))
def test_somebody_s_files_are_not_deleted(
    setting: tuple[Machine, str, Path], tmp_path: Path, kind: str, reason: str
) -> None:
    machine, script, venv = setting
    place = tmp_path / "elsewhere" if kind.startswith("link") else venv
    if kind.endswith("file"):
        place.write_text("years of work")
    elif kind.endswith("broken environment"):
        precious(place, "pyvenv.cfg", ".simpletune-installed-run")
    elif kind.endswith("unfinished environment"):
        precious(place, "pyvenv.cfg", ".simpletune-installing")
    elif kind.endswith("empty folder"):
        place.mkdir()
    elif not kind.endswith("nothing"):
        precious(place)
    if place != venv:
        venv.symlink_to(place)
    before = contents(tmp_path)
    for _ in range(2):  # the first call must not leave what the second takes for leave to delete
        output = machine.run(script, status=3)
        assert re.search(reason, output, re.DOTALL), output
        assert str(venv) in output and "run the same command again" in output
        assert "keep it" not in output  # no Python in it, nothing to keep
        assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_link_is_seen_behind_a_slash(machine: Machine, tmp_path: Path) -> None:
    machine.python()
    precious(tmp_path / "elsewhere", "pyvenv.cfg")
    (tmp_path / "link").symlink_to("elsewhere")
    before = contents(tmp_path)
    for ending in ("", "/", "//", "/."):
        assert "it is a link" in machine.run(DRY, status=3, cwd=tmp_path, DRY_VENV=f"link{ending}")
        assert contents(tmp_path) == before


TRACES = [None, "pyvenv.cfg", ".simpletune-installing", ".simpletune-installed-run", ".simpletune-installed-dev"]


@pytest.mark.parametrize("trace", slow_but([*TRACES[:2], TRACES[4]], TRACES))
def test_an_empty_folder_and_a_broken_environment_are_used(
    setting: tuple[Machine, str, Path], trace: str | None
) -> None:
    machine, script, venv = setting
    venv.mkdir()
    if trace is not None:
        precious(venv, trace)
    assert "making" in machine.run(script) and not (venv / "thesis.txt").exists()
    assert machine.run(script) == ""


def test_a_set_up_killed_while_it_empties_is_made_anew(setting: tuple[Machine, str, Path]) -> None:
    machine, script, venv = setting
    precious(venv, "pyvenv.cfg")
    killed = """rm "$2/pyvenv.cfg" "$2/.hidden"; kill -9 $PPID; exit 1"""
    machine.command("find", f"""#!/bin/bash\n[[ "$*" != *-delete* ]] || {{ {killed}; }}\n""")
    machine.run(script, status=-signal.SIGKILL)
    assert (venv / "thesis.txt").exists() and not (venv / ".hidden").exists()
    machine.command("find", f"""#!/bin/bash\nexec {shutil.which("find")} "$@"\n""")
    machine.run(script)
    assert not (venv / "thesis.txt").exists()


def test_a_venv_that_could_not_be_made_is_made_by_the_next_call(setting: tuple[Machine, str, Path]) -> None:
    machine, script, venv = setting
    machine.run(script, status=4, FAKE_VENV_ERROR="no room")
    assert (venv / "install.log").read_text() == "Error: no room\n"
    machine.run(script)


@pytest.fixture(params=["linked", "a folder"])
def hand_made(request: pytest.FixtureRequest, setting: tuple[Machine, str, Path], tmp_path: Path) -> Path:
    """A place with a Python that somebody made, in which set-up finds its environment."""
    machine, _, venv = setting
    place = tmp_path / "elsewhere" if request.param == "linked" else venv
    precious(place, "lib/python3.11/site-packages/theirs.py")
    shutil.copy(machine.bin / "python3", place / "bin" / "python")
    if place != venv:
        venv.symlink_to(place)
    return place


def test_a_hand_made_environment_that_works_is_used(setting: tuple[Machine, str, Path], hand_made: Path) -> None:
    machine, script, venv = setting
    if hand_made == venv:  # as `python -m venv` does; below it is the link's target that has one
        (hand_made / "pyvenv.cfg").touch()
    before, linked = contents(hand_made), venv.is_symlink()
    if script == DRY:
        assert "is not complete" in machine.run(script, status=4, FAKE_RUN_FAILS="lacking.py")
    else:
        machine.run(script)
    assert machine.calls("pip") and not machine.calls("venv")
    assert machine.run(script) == ""
    assert before.items() <= contents(hand_made).items() and venv.is_symlink() == linked


@pytest.mark.parametrize("hand_made", slow_but(["a folder"], ["linked", "a folder"]), indirect=True)
def test_a_hand_made_environment_is_kept_when_it_breaks_later(
    setting: tuple[Machine, str, Path], hand_made: Path
) -> None:
    machine, script, venv = setting
    if hand_made != venv:
        (hand_made / "pyvenv.cfg").touch()
    lacks = "lacking.py" if script == DRY else "nothing"
    machine.run(script, status=4, FAKE_PIP_ERROR="no network", FAKE_RUN_FAILS=lacks)
    assert not (hand_made / ".simpletune-installing").exists()  # a refused package does not make it half-made
    machine.kill_during_pip(script, 2, FAKE_RUN_FAILS=lacks)
    before = contents(hand_made)
    output = machine.run(script, status=3)
    assert "(an earlier set-up stopped halfway)" in output
    assert re.search(r"keep it: rm .*/\.simpletune-installing\n", output)
    assert contents(hand_made) == before and before["thesis.txt"] == "years of work"
    (hand_made / ".simpletune-installing").unlink()
    machine.run(script)
    (hand_made / "bin" / "python").unlink()
    before = contents(hand_made)
    assert "keep it" not in machine.run(script, status=3)
    assert contents(hand_made) == before


def test_the_venv_of_another_checkout_is_not_emptied(ready: Machine, tmp_path: Path) -> None:
    other = Machine(tmp_path / "other")
    other.python()
    (other.root / ".venv").symlink_to(ready.root / ".venv")
    before = contents(tmp_path)
    output = other.run("train.sh", status=3)
    assert "(it was moved, copied or linked here)" in output and "it is a link" in output
    assert contents(tmp_path) == before


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock there is no lock")
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is a folder in which even root makes no file")
def test_the_lock_harms_nothing_and_is_named_where_it_cannot_be(machine: Machine, tmp_path: Path) -> None:
    machine.python()
    lock = machine.root / ".venv.lock"
    for make, remove in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
        make(lock)
        assert f"{lock} is not a file; set-up locks it." in machine.run("train.sh", status=3)
        remove(lock)
    (tmp_path / "thesis.txt").write_text("years of work")
    lock.symlink_to(tmp_path / "thesis.txt")
    machine.run("train.sh")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    code = f"""#!/bin/bash\nsource "{machine.root}/simpletune/setup.sh"\nsimpletune_setup /proc run\n"""
    machine.command("set up", code)
    assert machine.run("../bin/set up", status=3).splitlines()[-2:] == [
        "setup: /proc/.venv.lock cannot be written; set-up locks it and makes .venv beside it.",
        "       Make /proc writable, or copy it to a folder that is.",
    ]
    (machine.bin / "flock").unlink()  # as on macOS
    assert machine.run("../bin/set up", status=3).splitlines()[-2:] == [
        "setup: /proc/.venv cannot be written.",
        "       Make it writable, or copy the project to a folder that is.",
    ]


# train.sh


def test_the_config_defaults_to_the_demo_and_the_exit_status_is_the_trainers(ready: Machine) -> None:
    for arguments, passed_on in (
        ([], "configs/demo.json"),
        (["train.steps=3"], "configs/demo.json train.steps=3"),
        (["--resume", "latest"], "configs/demo.json --resume latest"),
        (["configs/other.json", "name=a b", "--fast"], "configs/other.json name=a b --fast"),
        (["/tmp/mine.json"], "/tmp/mine.json"),
        (["demo", "train.steps=3"], "demo train.steps=3"),
    ):
        assert ready.run("train.sh", *arguments) == ""
        assert ready.calls("run")[-1] == f"{ready.root}: -m simpletune train {passed_on}"
    assert ready.run("train.sh", status=1, FAKE_RUN_FAILS="simpletune train") == ""


def test_from_elsewhere_config_is_the_callers_and_paths_are_the_projects(ready: Machine, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    for folder in (elsewhere / "my pictures", elsewhere / "a=b", ready.root / "theirs"):
        folder.mkdir(parents=True)
    for name in ("mine.json", "a=b.json"):
        (elsewhere / name).write_text("{}")
    for given, passed_on in [
        ("mine.json", f"{elsewhere}/mine.json"),
        ("a=b.json", f"{elsewhere}/a=b.json"),  # a file, in spite of its "="
        ("my pictures/", f"{elsewhere}/my pictures/"),  # a folder of pictures
        ("a=b", f"{elsewhere}/a=b"),
        ("theirs", "theirs"),  # not there, but in the project
        ("configs/demo.json", "configs/demo.json"),  # not there, but in the project
        ("demo", "demo"),  # the name of a shipped configuration
        ("rarer", "rarer"),  # one that lists leave out
        ("absent.json", f"{elsewhere}/absent.json"),  # so that the error names where it was looked for
    ]:
        output = ready.run("train.sh", given, "train.steps=3", cwd=elsewhere)
        assert output == f"train.sh: relative paths in the config and in overrides are taken from {ready.root}\n"
        assert ready.calls("run")[-1] == f"{ready.root}: -m simpletune train {passed_on} train.steps=3"
        assert ready.calls("from")[-1] == str(elsewhere)


def test_help_never_installs_and_goes_on_to_the_trainer_once_installed(machine: Machine) -> None:
    machine.python()
    output = machine.run("train.sh", "--help")
    assert output.startswith("usage: ./train.sh [CONFIG | FOLDER] [key.path=value ...] [--flags]")
    assert machine.calls("pip") == [] and not (machine.root / ".venv").exists()
    machine.run("train.sh")
    assert machine.run("train.sh", "configs/demo.json", "--help").startswith("usage: ./train.sh")
    assert machine.calls("run")[1:] == [f"{machine.root}: -m simpletune train --help"]


# test.sh


def test_tests_check_style_and_types_first_and_a_failure_does_not_hide_the_rest(machine: Machine) -> None:
    machine.python()
    output = machine.run("test.sh")
    tests = "-m pytest -n auto --maxprocesses 4 --dist loadfile"
    commands = ["-m ruff check .", "-m ruff format --check .", "-m mypy", tests]
    assert machine.calls("run") == [f"{machine.root}: {command}" for command in commands]
    assert re.search(r"== mypy: ok in \d+ s \(\d+ processor seconds\)\n", output)
    assert re.search(r"test\.sh: all passed in \d+ s \(\d+ processor seconds\)\n", output)
    output = machine.run("test.sh", status=1, FAKE_RUN_FAILS="ruff")
    assert "test.sh: failed: ruff check; ruff format --check\n" in output
    assert machine.calls("run")[-1] == f"{machine.root}: {tests}"
    machine.run("test.sh", "tests/test_x.py", "-k", "a or b")
    assert machine.calls("run")[8:] == [f"{machine.root}: -m pytest tests/test_x.py -k a or b"]
    machine.run("test.sh", "--changed", "main")
    since = tests.replace("-n auto", "-p changed --changed-since main -n auto")
    assert machine.calls("run")[9:] == [f"{machine.root}: {command}" for command in [*commands[:3], since]]
    assert "takes one commit" in machine.run("test.sh", "--changed", "a", "b", status=2)


def test_a_link_to_a_script_finds_the_project(ready: Machine, tmp_path: Path) -> None:
    link = tmp_path / "train"
    link.symlink_to(ready.root / "train.sh")
    done = subprocess.run([link, "demo"], env=ready.environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ready.calls("run")[-1].startswith(f"{ready.root}: -m simpletune train")


# .ci/run


@pytest.fixture
def server(machine: Machine) -> Machine:
    """A machine that can do all of .ci/run: 20 GiB are free; FAKE_SLOW is a command that exceeds its limit."""
    machine.python()
    (machine.root / "tmp").mkdir()
    machine.environment["TMPDIR"] = str(machine.root / "tmp")
    machine.command("gcc", "#!/bin/bash\n")
    machine.command("make", '#!/bin/bash\necho "make $*" >>"$FAKE_LOG"\nexit ${FAKE_MAKE_STATUS:-0}\n')
    free = "free=${FAKE_FREE_GIB:-20}; [[ $2 != */tmp ]] || free=${FAKE_TMP_GIB:-20}"
    machine.command("df", f"#!/bin/bash\n{free}\necho header\necho /dev/x 9 9 $((free << 20)) 9% /\n")
    run = f'"{shutil.which("env")}" "${{@:2}}"'
    limit = f'echo "timeout $*" >>"$FAKE_LOG"\n[[ $2 != "${{FAKE_SLOW:-}}" ]] || exit 124\n{run}\n'
    machine.command("timeout", f"#!/bin/bash\n{limit}")
    machine.run("test.sh")
    machine.log.unlink()
    return machine


def test_the_server_runs_make_dry_after_the_tests(server: Machine) -> None:
    output = server.run(".ci/run", SECONDS="480")
    assert re.search(r"test\.sh: all passed.*\.ci/dry: making \.venv-cuda within \d+ s", output, re.S)
    assert [call.split()[1:] for call in server.calls("timeout")] == [["./test.sh"], [DRY], ["make", "dry"]]
    assert server.calls("make") == ["dry"]
    assert "SKIPPED" not in output
    server.log.unlink()
    assert "test.sh: failed: mypy" in server.run(".ci/run", status=1, FAKE_RUN_FAILS="mypy")
    assert server.calls("make") == [], "the server has failed by then"


NO_NETWORK = "HTTPSConnectionPool(host='index.invalid'): Max retries exceeded"


SKIPS: list[tuple[dict[str, str], str]] = [
    ({"FAKE_FREE_GIB": "9"}, r"the disk is too small: .*/\.venv-cuda needs 10 GiB .*; 9 GiB are free"),
    ({"FAKE_TMP_GIB": "2"}, r"the disk is too small: .*/tmp needs 3 GiB .*; 2 GiB are free"),
    ({"FAKE_PIP_ERROR": "[Errno 28] No space left on device"}, "the disk is too small: Installing torch"),
    ({"FAKE_PIP_ERROR": NO_NETWORK}, r"the wheels cannot be had: Installing torch 2\.13\.0"),
    ({"FAKE_PIP_ERROR": "No matching distribution found for torch"}, "the wheels cannot be had: Installing torch"),
    ({"FAKE_RUN_FAILS": "lacking.py", "FAKE_RUN_ERROR": "torch 2.13.0 is not a CUDA build"},
     r"the wheels cannot be had: .* torch 2\.13\.0 is not a CUDA build"),
    ({"FAKE_SLOW": DRY}, r"the wheels cannot be had: \.venv-cuda was not made within 3[56]\d\d s"),
]  # fmt: skip


@pytest.mark.parametrize("environment, words", slow_but([SKIPS[0], SKIPS[3], SKIPS[6]], SKIPS))
def test_a_server_that_cannot_run_make_dry_says_why_and_passes(
    server: Machine, environment: dict[str, str], words: str
) -> None:
    output = server.run(".ci/run", **{"SECONDS": "0", **environment})
    assert re.search(rf"^\.ci/dry: MAKE DRY IS SKIPPED: {words}", output, re.M), output
    assert server.calls("make") == []


@pytest.mark.parametrize("tool", ["gcc", "make"])
def test_without_a_compiler_make_dry_is_skipped(server: Machine, tool: str) -> None:
    (server.bin / tool).unlink()
    output = server.run(".ci/run")
    assert re.search(rf"MAKE DRY IS SKIPPED: there is no .*{tool}", output), output
    assert server.calls("make") == []
    server.command("gcc", "#!/bin/bash\necho 'Python.h: No such file'\nexit 1\n")
    server.command("make", "#!/bin/bash\n")
    assert "SKIPPED: there is no C compiler with Python.h: Python.h: No such file\n" in server.run(".ci/run")


FAILURES: list[tuple[dict[str, str], int]] = [
    ({"FAKE_PIP_ERROR": "ResolutionImpossible"}, 4),
    ({"FAKE_VENV_ERROR": NO_NETWORK}, 4),
    ({"FAKE_RUN_FAILS": "lacking.py", "FAKE_RUN_ERROR": "pytest>=9.2 is not installed"}, 4),
    ({"FAKE_RUN_FAILS": "lacking.py", "FAKE_RUN_ERROR": "torch 2.13.0 is not a CUDA build\npytest is not"}, 4),
    ({"DRY_VENV": "pyproject.toml"}, 3),
    ({"FAKE_MAKE_STATUS": "2"}, 2),
    ({"FAKE_SLOW": "make"}, 124),
    ({"FAKE_SLOW": "./test.sh"}, 124),
]


@pytest.mark.parametrize("environment, status", slow_but([FAILURES[0], FAILURES[6], FAILURES[7]], FAILURES))
def test_other_failures_fail_the_server(server: Machine, environment: dict[str, str], status: int) -> None:
    output = server.run(".ci/run", status=status, **environment)
    assert "SKIPPED" not in output
    slow = re.search(r"(make|\./test\.sh)( dry)? did not end within .* s", output)
    assert (slow[1] if slow else None) == environment.get("FAKE_SLOW")


@pytest.mark.parametrize("before", slow_but([2400], [480, 2400, 4500]))
def test_the_server_takes_90_minutes_at_most(server: Machine, before: int) -> None:
    """A slow machine waits for make dry: it has what the tests and the set-up leave."""
    server.run(".ci/dry", str(before))
    made, ran = (int(call.split()[0]) for call in server.calls("timeout"))
    assert made == max(5100 - 1500 - before, 300) and 5100 - before - 60 < ran <= 5100 - before
    assert before + made + 300 <= 90 * 60, "what make dry has after a set-up that takes all of its time"
