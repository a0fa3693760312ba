"""simpletune doctor: every check meets a machine that is right and one that is not; nothing ends the examination."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_hub
import pytest
from fake_hub import Failure
from inbox import Inbox

from simpletune.apps.cli.main import main
from simpletune.commands.doctor import checks, doctor_command, hub_checks, probe
from simpletune.commands.doctor.doctor_command import CHECKS, private, report, run_checks
from simpletune.commands.doctor.machine import OK, PROBLEM, WARNING, Finding, Machine
from simpletune.commands.doctor.probe import ProbeProcess
from simpletune.system import hub_account
from simpletune.system.options import UserError

GIB = 2**30
L4 = {"name": "NVIDIA L4", "capability": [8, 9], "free": 22 * GIB, "total": 22.5 * GIB}
T4 = {"name": "Tesla T4", "capability": [7, 5], "free": 14 * GIB, "total": 14.6 * GIB}
V100 = {"name": "Tesla V100", "capability": [7, 0], "free": 15 * GIB, "total": 16 * GIB}
TORCH = {
    "version": "2.13.0+cu130", "cuda": "13.0", "architectures": ["sm_75", "sm_89"], "devices": [L4], "refused": "",
}  # fmt: skip
WITHOUT = {**TORCH, "devices": [], "refused": "device: no NVIDIA GPU was found"}
ANSWERS = {
    "torch": TORCH,
    "bitsandbytes": {"version": "0.50.2", "cuda": True},
    "optimum-quanto": {"version": "0.2.7"},
    "pinned memory": {"pinned": 2**28},
    "product": {"dtype": "bf16", "tflops": 51.0, "expected": 56.6},
    "host": {"processor": "AMD EPYC", "core": 1.4e-4, "launch": 3e-6, "to_device": 24.5, "to_host": 23.0},
    "int8 products": {"why_not": None, "triton": "3.7.1"},
}
STEPS = {
    "losses": [2.0, 1.5], "seconds_per_step": 0.01, "compute": "bf16", "predicted_mib": 50.0, "measured_mib": 51.0,
    "reserved_mib": 60.0,
}  # fmt: skip
MEMINFO = "MemTotal: {} kB\nMemAvailable: {} kB\n"


class FakeProbe(ProbeProcess):
    def __init__(self, answers: Mapping[str, dict[str, Any]]):
        super().__init__()
        self.given = answers

    def ask(self, question: str) -> dict[str, Any]:
        return STEPS if question.startswith("steps") and question not in self.given else self.given[question]


@dataclass
class Fake(Machine):
    """A machine of which everything is made up; a right one unless a test says otherwise."""

    files: dict[str, str] = field(default_factory=dict)
    commands: dict[str, tuple[int, str] | None] = field(default_factory=dict)
    programs: tuple[str, ...] = ("gcc",)
    python: tuple[int, int, int] = (3, 12, 4)
    system: tuple[str, str] = ("Linux", "6.8.0-generic")
    header: bool = True
    locked: int | None = 2**23
    room: dict[str, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    taken: bool = False

    def command(self, *words: str) -> tuple[int, str] | None:
        return self.commands[words[1].split("=")[0]]

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def has_python_header(self) -> bool:
        return self.header

    def which(self, name: str) -> str | None:
        return f"/usr/bin/{name}" if name in self.programs else None

    def locked_limit(self) -> int | None:
        return self.locked

    def free(self, folder: Path) -> tuple[int, int]:
        return (hash(folder) if folder.name in self.room else 0), self.room.get(folder.name, 100 * GIB)

    def require_writable(self, folder: Path) -> None:
        if folder.name in self.refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def require_port(self, port: int) -> None:
        if self.taken:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def machine(answers: Mapping[str, dict[str, Any]] | None = None, **more: Any) -> Fake:
    folders = {"runs": Path("runs"), "cache": Path(".cache"), "hub cache": Path("hub")}
    given: dict[str, Any] = {
        "files": {"/proc/meminfo": MEMINFO.format(32 * 2**20, 20 * 2**20)},
        "commands": {"--query-gpu": (0, "580.65.06, NVIDIA L4"), "--query-compute-apps": (0, "")},
        "environment": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    }
    return Fake(FakeProbe({**ANSWERS, **(answers or {})}), folders=folders, **{**given, **more})


def levels(check: Any, on: Machine) -> dict[str, str]:
    return {finding.level: f"{finding.value} {finding.why} {finding.remedy}" for finding in check(on)}


RIGHT = [check for check in CHECKS if check.__module__ != hub_checks.__name__]


def test_a_machine_that_is_right_gets_no_remedy() -> None:
    assert {check.__name__: set(levels(check, machine())) - {OK} for check in RIGHT} == {
        check.__name__: set() for check, *_ in WRONG.values()
    }, "each check is seen to fail below"


def answer(question: str, **answer: Any) -> dict[str, Any]:
    return {"answers": {question: answer}}


def torch_is(**changes: Any) -> dict[str, Any]:
    return answer("torch", **{**TORCH, **changes})


def smi(code: int, text: str) -> dict[str, Any]:
    apps = (0, "77, /home/ann/bin/python, 9000 MiB")
    return {"commands": {"--query-gpu": (code, text), "--query-compute-apps": apps}}


def variable(**environment: str) -> dict[str, Any]:
    return {"environment": environment}


def meminfo(total: int, free: int, **more: str) -> dict[str, Any]:
    return {"files": {"/proc/meminfo": MEMINFO.format(total * 2**20, free * 2**20), **more}}


WSL = ("Linux", "5.15-microsoft-standard-WSL2")
WSL_1 = ("Linux", "4.4.0-19041-Microsoft")
WRONG = {
    "old Python": (checks.python, {"python": (3, 10, 1)}, PROBLEM, "3.11 or newer"),
    "Windows": (checks.system, {"system": ("Windows", "11")}, WARNING, "WSL 2"),
    "neither Linux nor Windows": (checks.system, {"system": ("Darwin", "25")}, PROBLEM, "Rent a machine"),
    "memory without /proc": (checks.memory, {"files": {}}, WARNING, "unknown"),
    "WSL": (checks.system, {"system": WSL}, WARNING, "pinned memory"),
    "WSL 1": (checks.system, {"system": WSL_1}, PROBLEM, "cannot use the graphics card Convert it to WSL 2"),
    "little memory": (checks.memory, meminfo(8, 1), WARNING, "8.0 GiB"),
    "little memory in WSL": (checks.memory, meminfo(8, 1) | {"system": WSL}, WARNING, "memory=24GB under .wsl2."),
    "a disk of Windows": (
        checks.windows_files,
        meminfo(32, 20, **{"/proc/mounts": f"/dev/sdc / ext4 rw 0 0\nC: {Path.cwd()} 9p rw,aname=drvfs 0 0\n"})
        | {"system": WSL},
        WARNING, ", for runs, cache, hub cache",
    ),
    "a small container": (
        checks.memory, meminfo(32, 1, **{checks.LIMITS[0]: f"{2 * GIB}\n"}), PROBLEM, "may use 2.0 GiB",
    ),
    "memory that cannot be pinned": (
        checks.pinned_memory, answer("pinned memory", error="RuntimeError: CUDA error"), WARNING,
        "CUDA error; ulimit -l 8.0 MiB",
    ),
    "a full disk": (checks.disks, {"room": {"runs": GIB // 2}}, PROBLEM, "512 MiB free for runs"),
    "a small disk": (checks.disks, {"room": {".cache": 2 * GIB}}, WARNING, "2.0 GiB free for cache"),
    "no room for the model": (checks.disks, {"room": {"hub": 10 * GIB}}, WARNING, "HF_HOME"),
    "a folder of another user": (checks.folders, {"refused": ("runs",)}, PROBLEM, "runs: Permission denied"),
    "fixed segments": (
        checks.environment, variable(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128"), WARNING,
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128",
    ),
    "segments off": (
        checks.environment, variable(PYTORCH_ALLOC_CONF="expandable_segments:False"), WARNING,
        "expandable_segments:True",
    ),
    "segments that fail": (
        checks.environment, torch_is(allocator="expandable_segments:False"), WARNING, "driver in Windows",
    ),
    "hidden cards": (checks.environment, variable(CUDA_VISIBLE_DEVICES=""), PROBLEM, "hides"),
    "waiting launches": (checks.environment, variable(CUDA_LAUNCH_BLOCKING="1"), WARNING, "waits"),
    "an address that is none": (
        checks.notification, variable(SIMPLETUNE_NOTIFY_URL="ntfy.sh/topic"), WARNING, "no http or https URL",
    ),
    "nobody to try to notify": (checks.notification, {"notify": True}, WARNING, "SIMPLETUNE_NOTIFY_URL is not set"),
    "a webhook that is gone": (
        checks.notification, {"notify": True} | variable(SIMPLETUNE_NOTIFY_URL="http://127.0.0.1:9/secret"), WARNING,
        r"JSON \(127.0.0.1\) did not take a message \(Connection refused\) (?!.*secret)",
    ),
    "a taken port": (checks.port, {"taken": True}, WARNING, "8000: Address already in use"),
    "no port": (checks.port, variable(AIP_HTTP_PORT="http"), WARNING, "AIP_HTTP_PORT=http"),
    "no driver": (
        checks.driver, {"commands": {"--query-gpu": None}} | answer("torch", **WITHOUT), WARNING, "not found",
    ),
    "a failing driver": (
        checks.driver, smi(9, "Failed to initialize NVML: Driver/library version mismatch\nx"), PROBLEM,
        "version mismatch",
    ),
    "an old driver": (checks.driver, smi(0, "550.54.14, NVIDIA L4"), PROBLEM, "580 or newer"),
    "an old driver for CUDA 12": (
        checks.driver, smi(0, "470.1, Tesla V100") | torch_is(cuda="12.6"), PROBLEM, "525 or newer",
    ),
    "no torch": (checks.torch, answer("torch", error="ImportError: libcudart.so.13"), PROBLEM, "libcudart"),
    "a CPU build beside a card": (
        checks.torch, torch_is(cuda=None, devices=[], version="2.13.0+cpu"), PROBLEM,
        "cannot use the NVIDIA L4 .*SIMPLETUNE_TORCH_INDEX",
    ),
    "a card that torch does not know": (
        checks.torch, torch_is(devices=[V100], refused="it is sm_70, Install a CUDA 12.6 build"), PROBLEM,
        "sm_70, Install a CUDA 12.6 build",
    ),
    "a card that CUDA does not reach": (checks.torch, answer("torch", **WITHOUT), PROBLEM, "refuses"),
    "no card": (checks.card, answer("torch", **WITHOUT), WARNING, "finds none"),
    "a card in use": (
        checks.card, torch_is(devices=[{**L4, "free": 10 * GIB}]) | smi(0, "580.1, NVIDIA L4"), WARNING,
        r"10.0 GiB of 22.5 GiB free .* python \(process 77, 9000 MiB\)",
    ),
    "a slow card": (
        checks.product, answer("product", dtype="bf16", tflops=20.0, expected=56.6), WARNING,
        "20 TFLOP/s in bf16, 56.6 expected of such a card .* power limit",
    ),
    "a card that cannot multiply": (checks.product, answer("product", error="RuntimeError: cuBLAS"), PROBLEM, "cuBLAS"),
    "a virtual machine": (
        checks.host, answer("host", **{**ANSWERS["host"], "launch": 29e-6}), WARNING,
        r"AMD EPYC, 140 us a loop; 29.0 us a launch; 24.5 GB/s to the card, 23.0 back .* launches thousands",
    ),
    "a slow link": (
        checks.host, answer("host", **{**ANSWERS["host"], "to_host": 3.0}), WARNING, "3.0 back .* with the most lanes",
    ),
    "a card that cannot be timed": (checks.host, answer("host", error="RuntimeError: CUDA"), WARNING, "is unknown"),
    "a card without bf16": (checks.bf16, torch_is(devices=[T4]), WARNING, r"no \(sm_75\)"),
    "a V100": (checks.bf16, torch_is(devices=[V100]), WARNING, r"sm_70.*CUDA 12\.6"),
    "no bitsandbytes": (
        checks.bitsandbytes, answer("bitsandbytes", error="the process ended (killed by SIGSEGV)"), PROBLEM, "SIGSEGV",
    ),
    "bitsandbytes for the CPU beside a card": (
        checks.bitsandbytes, answer("bitsandbytes", version="0.50", cuda=False), PROBLEM, "loads no CUDA library",
    ),
    "no quanto": (checks.quanto, answer("optimum-quanto", error="ImportError: x"), PROBLEM, "ImportError: x"),
    "no compiler": (checks.compiler, {"programs": ()}, WARNING, "C compiler not .*apt install gcc python3.12-dev"),
    "no header": (checks.compiler, {"header": False}, WARNING, "Python.h not found"),
    "a CC that is not there": (checks.compiler, variable(CC="icc"), WARNING, r"icc \(CC\) not found"),
    "no int8 products": (checks.int8_products, answer("int8 products", why_not="no compiler"), WARNING, "no compiler"),
    "int8 products that crash": (
        checks.int8_products, answer("int8 products", error="RuntimeError: PTX"), WARNING, "PTX",
    ),
}  # fmt: skip


def test_doctor_can_try_the_notification() -> None:
    with Inbox() as inbox:
        asked = variable(SIMPLETUNE_NOTIFY_URL=f"{inbox.url}/secret")
        assert "JSON (127.0.0.1), not tried" in levels(checks.notification, machine(**asked))[OK]
        assert inbox.posted == []
        assert "JSON (127.0.0.1) took a message" in levels(checks.notification, machine(**asked, notify=True))[OK]
    assert [each.path for each in inbox.posted] == ["/secret"]


def test_linux_own_disk_in_wsl_is_right() -> None:
    files = {"/proc/mounts": "/dev/sdc / ext4 rw 0 0\nC: /mnt/c 9p rw,aname=drvfs 0 0\n"}
    assert levels(checks.windows_files, machine(files=files, system=WSL)) == {}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_its_remedy(name: str) -> None:
    check, changes, level, text = WRONG[name]
    here = machine(**changes)
    findings = [finding for finding in check(here) if finding.level != OK]
    assert [finding.level for finding in findings] == [level], findings
    assert re.search(text, f"{findings[0].value} {findings[0].why} {findings[0].remedy}"), findings[0]
    assert findings[0].why and findings[0].remedy
    assert "/home/ann" not in findings[0].why


def test_what_is_not_needed_is_no_warning() -> None:
    assert "torch reaches the card" in levels(checks.driver, machine(commands={"--query-gpu": None}))[OK]
    bare = machine({"torch": WITHOUT}, programs=(), header=False)  # what only a card needs
    assert levels(checks.compiler, bare).keys() == {OK}
    assert list(checks.int8_products(bare)) == list(checks.bf16(bare)) == list(checks.product(bare)) == []
    unknown = machine({"product": {**ANSWERS["product"], "expected": None}})
    assert "no figure is known for this card" in levels(checks.product, unknown)[OK]
    alone = machine({"host": {"processor": "AMD EPYC", "core": 1.4e-4, "launch": None}})
    assert levels(checks.host, alone) == {OK: "AMD EPYC, 140 us a loop  "}
    assert "not tried" in levels(checks.pinned_memory, bare)[OK]


# Steps


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({}, OK, "peak 50.0 MiB predicted, 51.0 measured"),
        ({"measured_mib": 113.0}, OK, ""),
        ({"measured_mib": 115.0}, WARNING, "More memory was used"),
        ({"predicted_mib": 5000.0, "measured_mib": 5240.0}, OK, ""),
        ({"predicted_mib": 5000.0, "measured_mib": 5260.0}, WARNING, "predictions for this card are too low"),
        ({"losses": [2.0, float("nan")]}, PROBLEM, "not finite"),
        ({"losses": [0.0, 0.0]}, PROBLEM, "zeros"),
        ({"measured_mib": None, "predicted_mib": None}, OK, "memory is measured on a card only"),
    ],
)
def test_steps_are_judged_by_losses_and_memory(changes: dict[str, Any], level: str, text: str) -> None:
    here = machine({"steps bf16 20": {**STEPS, **changes}})
    (finding,) = checks.steps(here, "bf16", 20)
    assert finding.level == level and text in f"{finding.value} {finding.why}"


def test_steps_that_fail_are_a_problem() -> None:
    here = machine(
        {"steps nf4 20": {"error": "the process ended (killed by SIGABRT)"}, **torch_is(devices=[T4])["answers"]}
    )
    assert "SIGABRT" in levels(lambda on: checks.steps(on, "nf4", 20), here)[PROBLEM]
    assert levels(lambda on: checks.steps(on, "int8", 20), here).keys() == {OK}


def test_bf16_is_computed_where_it_exists() -> None:
    from simpletune.commands.doctor.probe_steps import probe_config

    assert probe_config("int8", (8, 9)).precision.compute == probe_config("bf16", None).precision.compute == "bf16"
    assert probe_config("int8", (7, 5)).precision.compute == probe_config("bf16", (7, 5)).precision.compute == "fp16"
    assert probe_config("fp32", (8, 9)).precision.compute == probe_config("fp32", (7, 5)).precision.compute == "fp32"


# Nothing ends the examination


def test_an_exception_of_a_check_is_its_result_after_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(on: Machine) -> Any:
        yield Finding("first", OK, "")
        raise ZeroDivisionError("in a check")

    monkeypatch.setattr(doctor_command, "CHECKS", (checks.python, broken, checks.port))
    findings = list(run_checks(machine(), 0))
    assert [finding.level for finding in findings] == [OK, OK, PROBLEM, OK]
    assert [finding.name for finding in findings[1:3]] == ["first", "broken"]
    assert re.search(r"ZeroDivisionError: in a check \(test_doctor.py:\d+\)", findings[2].value)
    assert "ZeroDivisionError" in report(findings)


CHILD = """
import os, sys, time
for line in sys.stdin:
    question = line.strip()
    print("chatter", flush=True)
    if question == "crash":
        print("Fatal: no such symbol", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 11)
    if question == "exit":
        sys.exit(3)
    if question == "hang":
        time.sleep(600)
    print('@doctor {"pid": %d}' % os.getpid(), flush=True)
"""


def test_a_library_that_crashes_or_hangs_does_not_end_the_doctor() -> None:
    asked = ProbeProcess((sys.executable, "-c", textwrap.dedent(CHILD)), seconds=120.0)
    try:
        first = asked.ask("one")
        assert asked.ask("two")["pid"] == first["pid"]
        crashed = asked.ask("crash")["error"]
        assert signal.SIGSEGV.name in crashed and "Fatal: no such symbol" in crashed
        assert asked.ask("three")["pid"] != first["pid"]
        asked.seconds, began = 1.0, time.monotonic()
        assert "no answer within 1 s" in asked.ask("hang")["error"] and time.monotonic() - began < 120
        asked.seconds = 120.0
        assert "exit code 3" in asked.ask("exit")["error"]
        assert asked.ask("one") == first  # an answer is kept
    finally:
        asked.close()


def test_an_exception_in_the_child_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, Any]:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setitem(probe.QUESTIONS, "torch", broken)
    assert probe.answer("torch") == {"error": "OSError: libcuda.so.1: cannot open shared object file"}
    assert "error" in probe.answer("steps int9 2")


# The real machine


def test_the_surroundings_are_really_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine(ProbeProcess(), folders={"runs": tmp_path / "new" / "runs"})
    disk, free = here.free(tmp_path / "new" / "runs")
    assert disk == tmp_path.stat().st_dev and free > 0
    here.require_writable(tmp_path / "new")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        here.require_writable(tmp_path / "file" / "runs")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert here.command("/no/such/program") is None
    assert here.command("sh", "-c", "echo out; echo err >&2; exit 3") == (3, "out\nerr")
    assert {finding.level for check in (checks.python, checks.memory) for finding in check(here)} <= {OK, WARNING}
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(OSError):
            here.require_port(listener.getsockname()[1])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from huggingface_hub import constants

    from simpletune.models.sd3.sd3_files import SD3_MEDIUM

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(hub_account, "SECONDS", 2.0)
    monkeypatch.setattr(hub_account, "KEPT", 0.0)  # ask each time
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "pipeline").mkdir()
    with fake_hub.serve(tmp_path / "pipeline", **{hub_account.FILE: b"{}"}) as hub:
        hub.name = SD3_MEDIUM
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/" + fake_hub.COMMIT + "/{filename}"
        )
        yield hub


def test_login_and_licence(
    hub: fake_hub.FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_pipeline: Path
) -> None:
    assert "no token" in levels(hub_checks.login, machine())[WARNING]
    assert "may download" in levels(hub_checks.licence, machine())[OK]
    hub.failure = Failure(401, "GatedRepo", on="resolve")
    assert "does not give it" in levels(hub_checks.licence, machine())[WARNING]
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    assert "HF_TOKEN is set" in levels(hub_checks.login, machine(environment={"HF_TOKEN": fake_hub.TOKEN}))[OK]
    hub.failure = Failure(403, "GatedRepo", on="resolve")
    refused = levels(hub_checks.licence, machine())[WARNING]
    assert "has not accepted its licence" in refused and fake_hub.TOKEN not in refused
    hub.failure = Failure("close", on="resolve")
    assert "unknown" in levels(hub_checks.licence, machine())[WARNING]
    kept = tmp_path / "hf" / f"models--{hub.name.replace('/', '--')}" / "snapshots" / "main"
    shutil.copytree(tiny_pipeline, kept)
    (weights,) = (kept / "vae").glob("*.safetensors")
    weights.rename(tmp_path / "vae")
    assert "unknown" in levels(hub_checks.licence, machine())[WARNING], "it is not whole"
    (tmp_path / "vae").rename(weights)
    assert "hub cache" in levels(hub_checks.licence, machine())[OK]


def test_the_file_holds_neither_secrets_nor_home_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    monkeypatch.setattr(Path, "home", lambda: Path("/data/people/ann"))
    text = private(f"/data/people/ann/runs {fake_hub.TOKEN} /home/bob/x:/Users/eve/y /homely")
    assert text == "~/runs *** ~/x:~/y /homely"


# The command


def test_the_parent_imports_no_torch() -> None:
    code = (
        "import sys, simpletune.commands.doctor.doctor_command, simpletune.models.sd3; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_doctor_writes_the_file_that_is_asked_for_and_ends_with_0_on_a_right_machine(
    offline: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(doctor_command, "Machine", lambda probe, notify: machine())
    assert main(["doctor"]) == 0 and list(offline.iterdir()) == []  # nothing is written unasked
    assert "For a bug report, add --out FILE" in capsys.readouterr().out
    assert main(["doctor", "--out", "doctor.txt"]) == 0
    shown = capsys.readouterr().out
    assert "no problem" in shown and "20 steps, nf4 weights: loss 2.0000 to 1.5000" in shown
    written = (offline / "doctor.txt").read_text()
    assert "ok       card: NVIDIA L4, sm_89" in written and re.search(r"^torch 2\.", written, re.M)
    assert main(["doctor", "--no-train", "--json", "--out", "other.txt"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"name": "driver", "level": "ok", "value": "580.65.06", "why": "", "remedy": ""} in found
    assert not any("weights" in each["name"] for each in found) and (offline / "other.txt").exists()


def test_problems_end_it_with_1_and_the_file_is_private(offline: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    wrong = {"bitsandbytes": {"error": f"OSError: /home/ann/lib.so of {fake_hub.TOKEN}"}}
    monkeypatch.setattr(doctor_command, "Machine", lambda probe, notify: machine(wrong))
    assert main(["doctor", "--no-train", "--out", "doctor.txt"]) == 1
    assert "1 problem," in capsys.readouterr().err
    assert "OSError: ~/lib.so of ***" in (offline / "doctor.txt").read_text()
    monkeypatch.setattr(doctor_command, "Machine", lambda probe, notify: machine(python=(3, 9, 0)))
    assert main(["doctor", "--no-train", "--out", "other.txt"]) == 1
    assert "problem  Python: 3.9.0" in capsys.readouterr().out
    assert "problem  Python: 3.9.0" in (offline / "other.txt").read_text()
    assert main(["doctor", "--no-train", "--out", "no/such/folder.txt"]) == 1
    assert "no/such/folder.txt cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_doctor_on_this_machine(offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of it, with fewer steps; this machine may lack anything, but every question has an answer."""
    main(["doctor", "--steps", "2"])
    shown = capsys.readouterr().out
    assert "the check failed" not in shown and "the process ended" not in shown
    for weights in checks.PRECISIONS:
        losses = re.search(rf"2 steps, {weights} weights: loss (\S+) to (\S+),", shown)
        assert losses is not None and 1 < float(losses[2]) < float(losses[1]) < 10, weights


def test_torch_is_asked_for_every_card(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        mem_get_info=lambda number: (10 + number, 20 + number),
        get_device_capability=lambda number: (8, number),
        get_device_name=lambda number: f"Card {number}",
        get_arch_list=lambda: ["sm_80"],
    )

    def refuse(*_: object, **__: object) -> None:
        raise UserError("device: the driver is too old")

    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr("simpletune.system.devices.choose_device", refuse)
    found = probe.answer("torch")
    assert found["devices"] == [
        {"name": "Card 0", "capability": (8, 0), "free": 10, "total": 20},
        {"name": "Card 1", "capability": (8, 1), "free": 11, "total": 21},
    ]
    assert found["refused"] == "device: the driver is too old" and found["architectures"] == ["sm_80"]
    assert (found["version"], found["cuda"]) == (torch.__version__, torch.version.cuda)
    cuda.is_available = lambda: False
    monkeypatch.setattr("simpletune.system.devices.choose_device", lambda *_, **__: ("cpu", ""))
    assert (probe.answer("torch")["devices"], probe.answer("torch")["refused"]) == ([], "")


def test_bitsandbytes_says_what_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "version", lambda name: f"1.0 of {name}")
    setup = "CUDA SETUP: no libcudart"
    for library, expected in (
        (SimpleNamespace(compiled_with_cuda=True), {"cuda": True}),
        (SimpleNamespace(), {"cuda": False}),
        (SimpleNamespace(formatted_error=f"\n  \n  {setup} \nmore"), {"cuda": False, "error": setup}),
    ):
        monkeypatch.setattr("bitsandbytes.cextension.lib", library)
        assert probe.answer("bitsandbytes") == {"version": "1.0 of bitsandbytes", **expected}


@pytest.mark.parametrize("reason", [None, "it is sm_70"])
def test_triton_is_named_where_int8_products_work(reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr(probe, "version", lambda name: f"1.0 of {name}")
    monkeypatch.setattr(
        "simpletune.engine.quant.int8_products.int8_problem", lambda device: devices.append(str(device)) or reason
    )
    assert probe.answer("int8 products") == {"why_not": reason, "triton": None if reason else "1.0 of triton"}
    assert devices == ["cuda:3"]


def test_the_trial_steps_draw_new_values_and_the_same_in_every_trial() -> None:
    import torch

    from simpletune.commands.doctor import probe_steps
    from simpletune.models.shared.conditioning import Conditioning
    from simpletune.stages.step.batch_loader import Batch

    class Core:
        def step(self, batches: list[Batch]) -> tuple[torch.Tensor, None]:
            tensors = [
                tensor
                for batch in batches
                for tensor in (batch.z_0, batch.noise, *batch.conditioning.tensors().values())
            ]
            assert len(tensors) == 8 and all(tensor.std() > 0.5 for tensor in tensors)
            assert all(batch.level.eq(7).all() for batch in batches), "the level is not drawn"
            return sum(tensor.sum() for tensor in tensors), None  # type: ignore[return-value]

    class Synthetic:
        def step(self, step: int) -> list[Batch]:
            def batch() -> Batch:
                z_0, noise, embeds, pooled = (torch.zeros(4, 64) for _ in range(4))
                return Batch(z_0, noise, torch.full((4,), 7.0), Conditioning(embeds, pooled=pooled), names=())

            return [batch(), batch()]

    losses, seconds = probe_steps._losses(Core(), Synthetic(), 3)  # type: ignore[arg-type]
    assert len(set(losses)) == 3 and len(seconds) == 3 and min(seconds) >= 0
    assert probe_steps._losses(Core(), Synthetic(), 3)[0] == losses  # type: ignore[arg-type]
