"""train.sh, test.sh and setup.sh on machines of every kind, with a fake Python, pip and nvidia-smi: no network, no GPU.

The scripts are copied to a folder whose path has a space, and see a PATH of fakes and the few tools named here.
tests/gpu/dry_gpu/setup.sh, which makes another environment by the same rules, is tested here, too.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = "awk bash cat chmod cp cut df dirname du env find flock grep mkdir mv pwd rm sed sha256sum sleep tail timeout"
DRY = "tests/gpu/dry_gpu/setup.sh"

# What a Python answers to the questions of setup.sh; as .venv/bin/python it is also pip and the project.
FAKE_PYTHON = """#!/bin/bash
version={version}
case "$*" in
    *ensurepip*) echo "$version {venv}" ;;
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
        sleep "${{FAKE_PIP_SECONDS:-0}}"
        if [[ -n ${{FAKE_PIP_ERROR:-}} ]]; then echo "ERROR: $FAKE_PIP_ERROR"; exit 1; fi ;;
    *)
        echo "run $PWD: $*" >>"$FAKE_LOG"
        [[ "$*" != *"${{FAKE_RUN_FAILS:-nothing}}"* ]] ;;
esac
"""


class Machine:
    """A project folder and a PATH, both made up."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "the project"
        self.bin = folder / "bin"
        self.log = folder / "calls.log"
        self.bin.mkdir(parents=True)
        for name in ("train.sh", "test.sh", "pyproject.toml", "simpletune/setup.sh", DRY):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, self.root / name)
        (self.root / "configs").mkdir()
        (self.root / "configs" / "demo.json").write_text("{}")
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

    def run(self, script: str, *arguments: str, cwd: Path | None = None, **environment: str) -> tuple[int, str]:
        """Exit status, and what was printed on both streams."""
        process = self.start(script, *arguments, cwd=cwd, **environment)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def calls(self, kind: str) -> list[str]:
        """The calls of one kind (venv, pip, run) that the fakes have seen, without the kind."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix(f"{kind} ") for line in lines if line.startswith(f"{kind} ")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def ready(machine: Machine) -> Machine:
    """A machine on which train.sh has run once."""
    machine.python()
    assert machine.run("train.sh")[0] == 0
    machine.log.unlink()
    return machine


# Compiler


@pytest.mark.parametrize(("compiler", "header"), [(True, True), (False, True), (True, False), (False, False)])
def test_a_card_without_what_triton_compiles_with_is_said_once(
    machine: Machine, tmp_path: Path, compiler: bool, header: bool
) -> None:
    machine.python()
    machine.driver("580.65.06")
    if compiler:
        machine.command("gcc", "#!/bin/bash\n")
    include = tmp_path / "include"
    include.mkdir()
    if header:
        (include / "Python.h").touch()
    status, output = machine.run("train.sh", FAKE_INCLUDE=str(include))
    assert status == 0, output
    said = re.findall(r"setup: (.*) not found", output)
    assert said == (
        [] if compiler and header else [" and ".join(["a C compiler"] * (not compiler) + ["Python.h"] * (not header))]
    )
    assert ("sudo apt install gcc python3.11-dev" in output) == bool(said)
    assert "not found" not in machine.run("train.sh", FAKE_INCLUDE=str(include))[1]


def test_without_a_card_no_compiler_is_asked_for(machine: Machine) -> None:
    machine.python()
    assert "C compiler" not in machine.run("train.sh")[1]


# Python


def test_fresh_machine_installs_and_trains(machine: Machine) -> None:
    machine.python()
    status, output = machine.run("train.sh")
    assert status == 0, output
    assert re.search(r"making \.venv with Python 3\.11\.7, installing simpletune and the packages for training", output)
    assert re.search(r"done in \d+ s; \.venv takes \d+ MB", output)
    assert machine.calls("pip") == [f"{machine.root}: -m pip --disable-pip-version-check --no-input install -e ."]
    assert machine.calls("run") == [f"{machine.root}: -m simpletune train configs/demo.json"]


def test_no_python_names_what_was_looked_for_and_how_to_get_one(machine: Machine) -> None:
    status, output = machine.run("train.sh")
    assert status == 3
    assert "needs Python 3.11 or newer; none of python3.13 python3.12 python3.11 python3 python was found" in output
    assert "sudo apt install python3.11 python3.11-venv" in output
    assert not (machine.root / ".venv").exists()


def test_old_python_names_found_and_needed_version(machine: Machine) -> None:
    machine.python("python", "2.7.18")
    machine.python("python3", "3.9.18")
    status, output = machine.run("train.sh")
    assert status == 3
    assert "needs Python 3.11 or newer; python3 is 3.9.18." in output
    assert "pyenv install 3.11" in output and "uv python install 3.11" in output
    assert not (machine.root / ".venv").exists()


def test_newer_python_beside_an_old_one_is_found(machine: Machine) -> None:
    machine.python("python3", "3.9.18")
    machine.python("python3.12", "3.12.1")
    machine.command("python3.13", "#!/bin/bash\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    status, output = machine.run("train.sh")
    assert status == 0, output
    assert "making .venv with Python 3.12.1" in output


def test_python_without_venv_gets_the_package_to_install(machine: Machine) -> None:
    machine.python("python3", "3.11.2", venv=False)
    status, output = machine.run("train.sh")
    assert status == 3
    assert "Python 3.11 (python3) cannot make a virtual environment" in output
    assert "sudo apt install python3.11-venv" in output
    assert not (machine.root / ".venv").exists()


def test_python_without_venv_is_passed_over_for_one_with(machine: Machine) -> None:
    machine.python("python3.12", "3.12.1", venv=False)
    machine.python("python3", "3.11.7")
    status, output = machine.run("train.sh")
    assert status == 0, output
    assert "with Python 3.11.7" in output


def test_chosen_python_is_used_or_refused_but_never_replaced(machine: Machine) -> None:
    machine.python("python3", "3.11.7")
    machine.python("mine", "3.13.0")
    machine.python("old", "3.10.13")
    status, output = machine.run("train.sh", PYTHON="old")
    assert status == 3
    assert "old is 3.10.13" in output
    status, output = machine.run("train.sh", PYTHON="absent")
    assert status == 3
    assert "none of absent was found" in output
    status, output = machine.run("train.sh", PYTHON=str(machine.bin / "mine"))
    assert status == 0, output
    assert machine.calls("venv") == ["3.13.0"]


# NVIDIA driver


def test_old_driver_stops_before_the_install(machine: Machine) -> None:
    machine.python()
    machine.driver("550.54.15\n550.54.15")  # one line a GPU
    status, output = machine.run("train.sh")
    assert status == 3
    assert "NVIDIA driver 550.54.15 is too old" in output
    assert "needs driver 580 or newer" in output
    assert "nvidia-driver-580" in output and "SIMPLETUNE_TORCH_INDEX=URL" in output
    assert machine.calls("pip") == [] and not (machine.root / ".venv").exists()


def test_old_driver_with_a_torch_index_takes_torch_from_there(machine: Machine) -> None:
    machine.python()
    machine.driver("550.54.15")
    status, output = machine.run("train.sh", SIMPLETUNE_TORCH_INDEX="https://wheels.invalid/cu126")
    assert status == 0, output
    assert "torch from SIMPLETUNE_TORCH_INDEX" in output
    *_, torch, project = machine.calls("pip")
    assert torch.endswith("install --index-url https://wheels.invalid/cu126 torch>=2.11,<2.14")
    assert project.endswith("install -e .")


def test_torch_index_is_remembered_and_a_new_one_replaces_torch(machine: Machine) -> None:
    machine.python()
    machine.driver("550.54.15")
    assert machine.run("train.sh", SIMPLETUNE_TORCH_INDEX="https://wheels.invalid/cu126")[0] == 0
    machine.log.unlink()
    status, output = machine.run("test.sh")  # needs an install (dev), and the variable is not set this time
    assert status == 0, output
    assert [call.split("install ")[1] for call in machine.calls("pip")] == [
        "--index-url https://wheels.invalid/cu126 torch>=2.11,<2.14",
        "-e .[dev]",
    ]
    machine.log.unlink()
    status, output = machine.run("train.sh", SIMPLETUNE_TORCH_INDEX="https://wheels.invalid/cpu")
    assert status == 0, output
    assert [call.split("install ")[1] for call in machine.calls("pip")] == [
        "-y torch",  # uninstall
        "--index-url https://wheels.invalid/cpu torch>=2.11,<2.14",
        "-e .",
    ]


@pytest.mark.parametrize("driver", ["580.65.06", "610.10"])
def test_new_driver_installs(machine: Machine, driver: str) -> None:
    machine.python()
    machine.driver(driver)
    status, output = machine.run("train.sh")
    assert status == 0, output
    assert "NVIDIA" not in output and "nvidia" not in output


def test_broken_nvidia_smi_is_named_and_the_install_goes_on(machine: Machine) -> None:
    machine.python()
    machine.driver("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", status=9)
    status, output = machine.run("train.sh")
    assert status == 0, output
    assert "nvidia-smi is installed but fails (NVIDIA-SMI has failed" in output
    assert "only the CPU" in output


def test_nvidia_smi_without_devices_is_named_and_the_install_goes_on(machine: Machine) -> None:
    machine.python()
    machine.driver("No devices were found")
    status, output = machine.run("train.sh")
    assert status == 0, output
    assert "reports no driver version (No devices were found)" in output


# Once, and again


def test_second_call_starts_at_once(ready: Machine) -> None:
    status, output = ready.run("train.sh")
    assert (status, output) == (0, "")
    assert ready.calls("pip") == []
    assert ready.calls("run") == [f"{ready.root}: -m simpletune train configs/demo.json"]


def test_changed_pyproject_reinstalls_into_the_same_venv(ready: Machine) -> None:
    with (ready.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    status, output = ready.run("train.sh")
    assert status == 0
    assert "setup: installing simpletune" in output
    assert len(ready.calls("pip")) == 1 and ready.calls("venv") == []
    assert ready.run("train.sh") == (0, "")


def test_dev_install_serves_training_but_not_the_reverse(ready: Machine) -> None:
    status, output = ready.run("test.sh")
    assert status == 0
    assert "the packages for training and the tests" in output
    assert [call.split("install ")[1] for call in ready.calls("pip")] == ["-e .[dev]"]
    assert ready.run("train.sh") == (0, "")
    assert len(ready.calls("pip")) == 1


def test_killed_set_up_is_made_anew(machine: Machine) -> None:
    machine.python()
    process = machine.start("train.sh", FAKE_PIP_SECONDS="30")
    deadline = time.monotonic() + 20
    while not machine.calls("pip") and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (machine.root / ".venv" / "half").touch()
    status, output = machine.run("train.sh")
    assert status == 0, output
    assert "remaking .venv (an earlier set-up stopped halfway)" in output
    assert not (machine.root / ".venv" / "half").exists()
    assert machine.run("train.sh") == (0, "")


def test_venv_whose_python_is_gone_is_made_anew(ready: Machine) -> None:
    python = ready.root / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nonexistent/python3")
    status, output = ready.run("train.sh")
    assert status == 0, output
    assert "remaking .venv (its Python is gone)" in output


def test_moved_project_is_made_anew(ready: Machine) -> None:
    moved = ready.root.rename(ready.root.with_name("moved"))
    ready.root = moved
    status, output = ready.run("train.sh")
    assert status == 0, output
    assert "remaking .venv (it was moved, copied or linked here)" in output
    assert ready.run("train.sh") == (0, "")


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock there is no lock")
def test_two_calls_at_once_install_once(machine: Machine) -> None:
    machine.python()
    both = [machine.start("train.sh", FAKE_PIP_SECONDS="1") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("waiting for another set-up" in output for output in outputs) == 1
    assert len(machine.calls("pip")) == 1 and len(machine.calls("run")) == 2


@pytest.mark.parametrize(
    "error, remedy",
    [
        ("Failed to establish a new connection: ConnectionError", "index could not be reached. Check the network"),
        ("[Errno 28] No space left on device", "The disk is full"),
        (
            "No matching version (from versions: none)",
            "reached, or has nothing for Python 3.11.7. Check the network",
        ),
        ("No matching distribution found for torch", "no fitting version for Python 3.11.7"),
        ("something else", "then run the same command again"),
    ],
)
def test_failed_install_shows_the_log_and_the_remedy(machine: Machine, error: str, remedy: str) -> None:
    machine.python()
    status, output = machine.run("train.sh", FAKE_PIP_ERROR=error)
    assert status == 4
    assert f"| ERROR: {error}" in output
    assert "Installing simpletune failed (exit status 1)." in output and "the project/.venv/install.log" in output
    assert remedy in output
    assert machine.calls("run") == []
    status, output = machine.run("train.sh")  # the failure leaves nothing behind that needs cleaning
    assert status == 0, output
    assert "remaking" not in output


# What .venv holds is deleted only if it can be made again


def contents(folder: Path) -> dict[str, str | None]:
    """Every path below a folder, except the lock: a file's text, a link's target, None for a folder."""
    paths = [path for path in folder.rglob("*") if path.name != ".venv.lock"]
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_text()
        if path.is_file()
        else None
        for path in paths
    }


@pytest.fixture(params=["train.sh", DRY])
def setting(request: pytest.FixtureRequest, machine: Machine, tmp_path: Path) -> tuple[Machine, str, Path]:
    """A machine, one of the scripts that set up, and where its environment lies."""
    machine.python()
    machine.command("df", "#!/bin/bash\necho header\necho /dev/x 9 9 99999999 9% /\n")
    machine.environment["DRY_VENV"] = str(tmp_path / "an environment")
    return machine, request.param, tmp_path / "an environment" if request.param == DRY else machine.root / ".venv"


def precious(folder: Path, *names: str) -> Path:
    """A folder of somebody's files, of which set-up has seen none."""
    for name in ("thesis.txt", "bin/script", ".hidden", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("years of work")
    return folder


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("folder", r"\(it has no Python.*\) and is not emptied: set-up did not make it, and without pyvenv\.cfg"),
        ("file", r"is not emptied: it is not a folder\.\n +Move it away: mv -i \S+"),
        (
            "link to a folder",
            r"\(it has no Python.*: it is a link, .* through a link\.\n +Remove the link.* rm \S+",
        ),
        ("link to an empty folder", r"it is a link"),
        ("link to a file", r"it is a link"),
        ("link to a broken environment", r"it is a link"),
        ("link to an unfinished environment", r"\(an earlier set-up stopped halfway\).* it is a link"),
        ("link to nothing", r"\(its target is gone\) .* it is a link"),
    ],
)
def test_somebody_s_files_are_not_deleted(
    setting: tuple[Machine, str, Path], tmp_path: Path, kind: str, reason: str
) -> None:
    machine, script, venv = setting
    target = tmp_path / "elsewhere"
    place = target if kind.startswith("link") else venv
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
    if kind.startswith("link"):
        venv.symlink_to(target)
    before = contents(tmp_path)
    for _ in range(2):  # the first call must not leave what the second takes for leave to delete
        status, output = machine.run(script)
        assert status == 3, output
        assert re.search(reason, output, re.DOTALL), output
        assert str(venv) in output and "run the same command again" in output
        assert "keep it" not in output  # no Python in it, nothing to keep
        assert contents(tmp_path) == before


@pytest.mark.parametrize("ending", ["", "/", "//", "/."])
def test_a_link_is_seen_behind_a_slash(machine: Machine, tmp_path: Path, ending: str) -> None:
    machine.python()
    precious(tmp_path / "elsewhere", "pyvenv.cfg")
    (tmp_path / "link").symlink_to("elsewhere")
    before = contents(tmp_path)
    status, output = machine.run(DRY, cwd=tmp_path, DRY_VENV=f"link{ending}")
    assert status == 3 and "it is a link" in output
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "trace", ["", "pyvenv.cfg", ".simpletune-installing", ".simpletune-installed-run", ".simpletune-installed-dev"]
)
def test_an_empty_folder_and_a_broken_environment_are_used(setting: tuple[Machine, str, Path], trace: str) -> None:
    machine, script, venv = setting
    venv.mkdir()
    if trace:
        precious(venv, trace)
    status, output = machine.run(script)
    assert status == 0, output
    assert "making" in output and not (venv / "thesis.txt").exists()
    assert machine.run(script) == (0, "")


def test_a_set_up_killed_while_it_empties_is_made_anew(setting: tuple[Machine, str, Path]) -> None:
    machine, script, venv = setting
    precious(venv, "pyvenv.cfg")
    killed = """rm "$2/pyvenv.cfg" "$2/.hidden"; kill -9 $PPID; exit 1"""
    machine.command("find", f"""#!/bin/bash\n[[ "$*" != *-delete* ]] || {{ {killed}; }}\n""")
    assert machine.run(script)[0] == -signal.SIGKILL
    assert (venv / "thesis.txt").exists() and not (venv / ".hidden").exists()
    machine.command("find", f"""#!/bin/bash\nexec {shutil.which("find")} "$@"\n""")
    status, output = machine.run(script)
    assert status == 0, output
    assert not (venv / "thesis.txt").exists()


def test_a_venv_that_could_not_be_made_is_made_by_the_next_call(setting: tuple[Machine, str, Path]) -> None:
    machine, script, venv = setting
    status, output = machine.run(script, FAKE_VENV_ERROR="no room")
    assert status == 4 and (venv / "install.log").read_text() == "Error: no room\n", output
    status, output = machine.run(script)
    assert status == 0, output


def hand_made(machine: Machine, folder: Path, *, cfg: bool) -> Path:
    """An environment that somebody made: a Python, and with `cfg` the file that `python -m venv` writes."""
    precious(folder, "lib/python3.11/site-packages/theirs.py", *["pyvenv.cfg"] * cfg)
    shutil.copy(machine.bin / "python3", folder / "bin" / "python")
    return folder


@pytest.mark.parametrize("cfg", [True, False])
@pytest.mark.parametrize("linked", [True, False])
def test_a_hand_made_environment_that_works_is_used(
    setting: tuple[Machine, str, Path], tmp_path: Path, linked: bool, cfg: bool
) -> None:
    machine, script, venv = setting
    place = hand_made(machine, tmp_path / "elsewhere" if linked else venv, cfg=cfg)
    if linked:
        venv.symlink_to(place)
    before = contents(place)
    status, output = machine.run(script, FAKE_RUN_FAILS="lacking.py" if script == DRY else "nothing")
    assert ("is not complete" in output) if script == DRY else status == 0, output  # the fake lacks the same ever after
    assert machine.calls("pip") and not machine.calls("venv")
    assert machine.run(script) == (0, "")
    assert before.items() <= contents(place).items() and venv.is_symlink() == linked


@pytest.mark.parametrize("linked", [True, False])
def test_a_hand_made_environment_is_kept_when_it_breaks_later(
    setting: tuple[Machine, str, Path], tmp_path: Path, linked: bool
) -> None:
    machine, script, venv = setting
    place = hand_made(machine, tmp_path / "elsewhere" if linked else venv, cfg=linked)
    if linked:
        venv.symlink_to(place)
    lacks = "lacking.py" if script == DRY else "nothing"
    assert machine.run(script, FAKE_PIP_ERROR="no network", FAKE_RUN_FAILS=lacks)[0] == 4
    assert not (place / ".simpletune-installing").exists()  # a refused package does not make it half-made
    process = machine.start(script, FAKE_PIP_SECONDS="30", FAKE_RUN_FAILS=lacks)
    begun = time.monotonic()
    while len(machine.calls("pip")) < 2 and time.monotonic() < begun + 20:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = contents(place)
    status, output = machine.run(script)
    assert status == 3 and "(an earlier set-up stopped halfway)" in output
    assert contents(place) == before and before["thesis.txt"] == "years of work"
    assert re.search(r"keep it: rm .*/\.simpletune-installing\n", output)
    (place / ".simpletune-installing").unlink()
    status, output = machine.run(script)
    assert status == 0, output
    (place / "bin" / "python").unlink()
    before = contents(place)
    status, output = machine.run(script)
    assert status == 3 and "keep it" not in output
    assert contents(place) == before


def test_the_venv_of_another_checkout_is_not_emptied(ready: Machine, tmp_path: Path) -> None:
    other = Machine(tmp_path / "other")
    other.python()
    (other.root / ".venv").symlink_to(ready.root / ".venv")
    before = contents(tmp_path)
    status, output = other.run("train.sh")
    assert status == 3 and "(it was moved, copied or linked here)" in output and "it is a link" in output
    assert contents(tmp_path) == before


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock there is no lock")
def test_the_lock_harms_nothing(machine: Machine, tmp_path: Path) -> None:
    machine.python()
    lock = machine.root / ".venv.lock"
    for make in (os.mkfifo, os.mkdir):
        make(lock)
        status, output = machine.run("train.sh")
        assert status == 3 and f"{lock} is not a file; set-up locks it." in output
        lock.unlink() if lock.is_fifo() else lock.rmdir()
    (tmp_path / "thesis.txt").write_text("years of work")
    lock.symlink_to(tmp_path / "thesis.txt")
    status, output = machine.run("train.sh")
    assert status == 0, output
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock there is no lock")
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is a folder in which even root makes no file")
def test_a_checkout_that_cannot_be_written_is_named(machine: Machine) -> None:
    machine.command(
        "set up", f"""#!/bin/bash\nsource "{machine.root}/simpletune/setup.sh"\nsimpletune_setup /proc run\n"""
    )
    status, output = machine.run("../bin/set up")
    assert status == 3
    assert output.splitlines()[-2:] == [
        "setup: /proc/.venv.lock cannot be written; set-up locks it and makes .venv beside it.",
        "       Make /proc writable, or copy it to a folder that is.",
    ]


# train.sh


@pytest.mark.parametrize(
    "arguments, passed_on",
    [
        ([], "configs/demo.json"),
        (["train.steps=3"], "configs/demo.json train.steps=3"),
        (["--resume", "latest"], "configs/demo.json --resume latest"),
        (["configs/other.json", "name=a b", "--fast"], "configs/other.json name=a b --fast"),
        (["/tmp/mine.json"], "/tmp/mine.json"),
        (["demo", "train.steps=3"], "demo train.steps=3"),
    ],
)
def test_config_defaults_to_the_demo(ready: Machine, arguments: list[str], passed_on: str) -> None:
    assert ready.run("train.sh", *arguments) == (0, "")
    assert ready.calls("run") == [f"{ready.root}: -m simpletune train {passed_on}"]


def test_from_elsewhere_config_is_the_callers_and_paths_are_the_projects(ready: Machine, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    (elsewhere / "mine.json").write_text("{}")
    (elsewhere / "a=b.json").write_text("{}")
    (elsewhere / "my pictures").mkdir()
    (elsewhere / "a=b").mkdir()
    (ready.root / "theirs").mkdir()
    for given, passed_on in [
        ("mine.json", f"{elsewhere}/mine.json"),
        ("a=b.json", f"{elsewhere}/a=b.json"),  # a file, in spite of its "="
        ("my pictures/", f"{elsewhere}/my pictures/"),  # a folder of pictures
        ("a=b", f"{elsewhere}/a=b"),
        ("theirs", "theirs"),  # not there, but in the project
        ("configs/demo.json", "configs/demo.json"),  # not there, but in the project
        ("demo", "demo"),  # the name of a shipped configuration
        ("absent.json", f"{elsewhere}/absent.json"),  # so that the error names where it was looked for
    ]:
        status, output = ready.run("train.sh", given, "train.steps=3", cwd=elsewhere)
        assert status == 0
        assert output == f"train.sh: relative paths in the config and in overrides are taken from {ready.root}\n"
        assert ready.calls("run")[-1] == f"{ready.root}: -m simpletune train {passed_on} train.steps=3"


def test_help_never_installs(machine: Machine) -> None:
    machine.python()
    status, output = machine.run("train.sh", "--help")
    assert status == 0
    assert output.startswith("usage: ./train.sh [CONFIG | FOLDER] [key.path=value ...] [--flags]")
    assert machine.calls("pip") == [] and not (machine.root / ".venv").exists()


def test_help_goes_on_to_the_trainer_once_installed(ready: Machine) -> None:
    status, output = ready.run("train.sh", "configs/demo.json", "--help")
    assert status == 0
    assert output.startswith("usage: ./train.sh")
    assert ready.calls("run") == [f"{ready.root}: -m simpletune train --help"]


def test_exit_status_is_the_trainers(ready: Machine) -> None:
    assert ready.run("train.sh", FAKE_RUN_FAILS="simpletune train") == (1, "")


# test.sh


def test_tests_check_style_and_types_first(machine: Machine) -> None:
    machine.python()
    status, output = machine.run("test.sh")
    assert status == 0, output
    tests = "-m pytest -n auto --maxprocesses 4 --dist loadfile"
    commands = ["-m ruff check .", "-m ruff format --check .", "-m mypy", tests]
    assert machine.calls("run") == [f"{machine.root}: {command}" for command in commands]
    assert re.search(r"== mypy: ok in \d+ s\n", output) and re.search(r"test\.sh: all passed in \d+ s\n", output)


def test_tests_with_arguments_run_only_pytest(machine: Machine) -> None:
    machine.python()
    status, output = machine.run("test.sh", "tests/test_x.py", "-k", "a or b")
    assert status == 0, output
    assert machine.calls("run") == [f"{machine.root}: -m pytest tests/test_x.py -k a or b"]


def test_a_failed_check_fails_but_does_not_hide_the_rest(machine: Machine) -> None:
    machine.python()
    status, output = machine.run("test.sh", FAKE_RUN_FAILS="ruff")
    assert status == 1
    assert "test.sh: failed: ruff check; ruff format --check\n" in output
    assert machine.calls("run")[-1].endswith("-m pytest -n auto --maxprocesses 4 --dist loadfile")
