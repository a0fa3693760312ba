"""Checks of the machine apart from the card: Python, system, memory, disk, folders, environment, port."""

from __future__ import annotations

import re
from collections.abc import Iterator

from simpletune.commands.doctor.machine import OK, PROBLEM, WARNING, Finding, Machine
from simpletune.system.devices import ALLOCATOR
from simpletune.system.disk import format_bytes

GIB = 2**30
OLDEST_PYTHON = (3, 11)
LITTLE_MEMORY, LEAST_MEMORY = 12 * GIB, 4 * GIB
LITTLE_DISK, LEAST_DISK, MODEL = 5 * GIB, GIB, 16 * 10**9  # MODEL: download of SD3 Medium with T5
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroup 2 and 1


def python(machine: Machine) -> Iterator[Finding]:
    version = machine.python
    value, oldest = ".".join(map(str, version)), ".".join(map(str, OLDEST_PYTHON))
    if version[:2] < OLDEST_PYTHON:
        remedy = f"Install Python {oldest} or newer, then: PYTHON=/path/to/python{oldest} ./train.sh"
        yield Finding("Python", PROBLEM, value, f"simpletune needs Python {oldest} or newer", remedy)
    else:
        yield Finding("Python", OK, value)


def system(machine: Machine) -> Iterator[Finding]:
    """Check whether this is Linux, and not inside Windows."""
    name, release = machine.system
    lines = (machine.read("/etc/os-release") or "").splitlines()
    title = next((line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME=")), name)
    if name != "Linux":
        yield Finding("system", PROBLEM, f"{name} {release}", "simpletune runs on Linux only",
                      "On Windows, use WSL 2; otherwise, use a rented machine (docs/cloud_l4.md)")  # fmt: skip
    elif "microsoft" in release.lower():
        yield Finding("system", WARNING, f"{title} in WSL, kernel {release}",
                      "WSL limits pinned memory, with which offloading hides its copies, and the Windows driver may "
                      "move device memory to the host instead of reporting that it is full",
                      "Install the NVIDIA driver in Windows, not in WSL. In its Control Panel, set CUDA - Sysmem "
                      "Fallback Policy to Prefer No Sysmem Fallback")  # fmt: skip
    else:
        yield Finding("system", OK, f"{title}, kernel {release}")


def memory(machine: Machine) -> Iterator[Finding]:
    """Check how much host memory there is, within a container's limit."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", machine.read("/proc/meminfo") or "", re.M)
    amounts = {name: int(number) * 1024 for name, number in lines}
    total, free = amounts["MemTotal"], amounts.get("MemAvailable", amounts["MemTotal"])
    limits = [text.strip() for text in map(machine.read, LIMITS) if text]
    limit = min((int(text) for text in limits if text.isdecimal()), default=total)
    value = f"{format_bytes(total)}, {format_bytes(free)} of it free"
    if limit < total:
        value += f"; this container may use {format_bytes(limit)}"
    usable = min(total, limit)
    why = "Levers that save device memory move weights to host memory (docs/memory.md)"
    remedy = "Prefer settings that keep weights on the card; `simpletune estimate CONFIG` shows the host memory of each"
    if usable < LEAST_MEMORY:
        remedy = f"Use a machine or container with at least {format_bytes(LEAST_MEMORY)}"
        yield Finding("host memory", PROBLEM, value, "Importing torch and loading a model take gigabytes", remedy)
    else:
        yield Finding("host memory", WARNING if usable < LITTLE_MEMORY else OK, value, why, remedy)


def pinned_memory(machine: Machine) -> Iterator[Finding]:
    """Check whether host memory can be pinned, if there is a card."""
    limit = machine.locked_limit()
    shown = "ulimit -l unlimited" if limit is None else f"ulimit -l {format_bytes(limit)}"
    if not machine.ask("torch").get("devices"):
        yield Finding("pinned memory", OK, f"not tried without a card; {shown}")
        return
    answer = machine.ask("pinned memory")
    if "error" in answer:
        yield Finding("pinned memory", PROBLEM, f"{answer['error']}; {shown}",
                      "Blocks in host memory are copied from pinned memory while the card computes",
                      "Raise the limit (`ulimit -l unlimited`, in a container --ulimit memlock=-1) or free host memory",
                      )  # fmt: skip
    else:
        yield Finding("pinned memory", OK, f"{format_bytes(answer['pinned'])} pinned; {shown}")


def disks(machine: Machine) -> Iterator[Finding]:
    """Check the free space on the disks that simpletune writes to."""
    names: dict[int, list[str]] = {}
    free: dict[int, int] = {}
    for name, folder in machine.folders.items():
        disk, free[disk] = machine.free(folder)
        names.setdefault(disk, []).append(name)
    for disk, on_it in names.items():
        room, value = free[disk], f"{format_bytes(free[disk])} free for {', '.join(on_it)}"
        if room < LEAST_DISK:
            yield Finding("disk", PROBLEM, value, "A run could not write its checkpoints and its result",
                          "Free some space, or set output.runs and output.cache to another disk")  # fmt: skip
        elif "hub cache" in on_it and room < MODEL:
            yield Finding("disk", WARNING, value, f"SD3 Medium's download takes {format_bytes(MODEL)}",
                          "Set HF_HOME to a larger disk, or leave T5 out: model.t5=false (saves 9.5 GB)")  # fmt: skip
        else:
            yield Finding("disk", WARNING if room < LITTLE_DISK else OK, value, "A full run's checkpoints take GiB",
                          "Free some space; `simpletune estimate CONFIG` shows what a run writes")  # fmt: skip


def folders(machine: Machine) -> Iterator[Finding]:
    refused = {}
    for name, folder in machine.folders.items():
        try:
            machine.require_writable(folder)
        except OSError as error:
            refused[name] = f"{folder}: {error.strerror or type(error).__name__}"
    for name, reason in refused.items():
        yield Finding(f"folder for {name}", PROBLEM, reason, "simpletune writes to it",
                      "Give this user write permission, or choose another folder: output.runs, output.profiles, "
                      "output.cache, or HF_HOME for the hub cache")  # fmt: skip
    if not refused:
        yield Finding("folders", OK, f"{', '.join(machine.folders)} can be written to")


def environment(machine: Machine) -> Iterator[Finding]:
    """Check for environment variables that change what torch does."""
    given = machine.environment
    for name in (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"):
        if name in given and "expandable_segments:true" not in given[name].lower().replace(" ", ""):
            yield Finding("allocator", WARNING, f"{name}={given[name]}",
                          "Without expandable segments, memory fragments when picture shapes alternate",
                          f"Unset {name}, or add expandable_segments:True to it")  # fmt: skip
    visible = given.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip() == "-1"):
        yield Finding("visible cards", PROBLEM, f"CUDA_VISIBLE_DEVICES={visible}", "It hides every card from torch",
                      "Unset it, or set it to a number from `nvidia-smi -L`")  # fmt: skip
    elif visible is not None:
        yield Finding("visible cards", OK, f"CUDA_VISIBLE_DEVICES={visible}")
    if given.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        yield Finding("launches", WARNING, "CUDA_LAUNCH_BLOCKING is set", "The host waits for every kernel",
                      "Unset CUDA_LAUNCH_BLOCKING")  # fmt: skip


def port(machine: Machine) -> Iterator[Finding]:
    """Check whether the default port of ``simpletune serve`` is free."""
    text = machine.environment.get("AIP_HTTP_PORT") or "8000"
    if not text.isdecimal() or int(text) > 65535:
        yield Finding("port of serve", WARNING, f"AIP_HTTP_PORT={text}", "It is not a port from 0 to 65535",
                      "Unset AIP_HTTP_PORT")  # fmt: skip
        return
    try:
        machine.require_port(int(text))
    except OSError as error:
        yield Finding("port of serve", WARNING, f"{text}: {error.strerror}", "`simpletune serve` listens on it",
                      "Stop what uses it, or choose another one: simpletune serve --port 0")  # fmt: skip
    else:
        yield Finding("port of serve", OK, f"{text} is free")
