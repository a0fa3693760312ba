"""Checks of this machine: Python, system, memory, disk, folders, environment and port; then driver, torch, card, the
libraries that compute on it, and what they make of a few training steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from simpletune.commands.doctor.machine import OK, PROBLEM, WARNING, Finding, Level, Machine
from simpletune.system.devices import ALLOCATOR, BF16_FROM, CUDA_13_FROM, EXPANDABLE, FIXED, is_under_wsl, sm
from simpletune.system.disk import format_bytes
from simpletune.system.host_memory import LIMITS
from simpletune.system.notify import VARIABLE, Message, find_receiver
from simpletune.system.options import UserError, plural
from simpletune.system.shell import install_command

GIB = 2**30
OLDEST_PYTHON = (3, 11)
LITTLE_MEMORY, LEAST_MEMORY = 12 * GIB, 4 * GIB
LITTLE_DISK, LEAST_DISK, MODEL = 5 * GIB, GIB, 16 * 10**9  # MODEL: download of SD3 Medium with T5
DRIVERS = {13: 580, 12: 525}  # oldest driver of each CUDA version that torch is built for
LITTLE_FREE = 0.9  # share of the device memory; less free memory means others use a lot
PRECISIONS = ("bf16", "int8", "nf4", "fp32")  # of the training steps
DEAR_LAUNCH, SLOW_LINK = 10e-6, 5.0  # seconds; GB/s
SLOW_PRODUCT = 0.5  # times the expected rate; a laptop's card may have less power than expected
ALLOWED, ALLOWED_MIB = 0.05, 64.0  # a measured peak may exceed the prediction by the larger of both
OF_WINDOWS = (
    "WSL takes half of the computer's memory unless .wslconfig in your Windows user folder says more, such as "
    "memory=24GB under [wsl2]; `wsl --shutdown` applies it"
)
WINDOWS_FILES = ("9p", "drvfs", "virtiofs")  # file systems by which WSL shows the disks of Windows
COMPILERS = ("gcc", "clang", "cc")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
PROCESSES = ("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")
OTHER_BUILD = (
    'Install a build of torch that fits: its index URL is on PyTorch\'s "Get Started" page; then '
    "SIMPLETUNE_TORCH_INDEX=URL ./train.sh (docs/how-to/install.md)"
)


def python(machine: Machine) -> Iterator[Finding]:
    version = machine.python
    value, oldest = ".".join(map(str, version)), ".".join(map(str, OLDEST_PYTHON))
    if version[:2] < OLDEST_PYTHON:
        remedy = f"Install Python {oldest} or newer, then: PYTHON=/path/to/python{oldest} ./train.sh"
        yield Finding("Python", PROBLEM, value, f"simpletune needs Python {oldest} or newer", remedy)
    else:
        yield Finding("Python", OK, value)


def in_wsl(machine: Machine) -> bool:
    """Return whether this is Linux inside Windows."""
    name, release = machine.system
    return name == "Linux" and is_under_wsl(release)


def system(machine: Machine) -> Iterator[Finding]:
    """Check whether this is Linux, and not inside Windows."""
    name, release = machine.system
    lines = (machine.read("/etc/os-release") or "").splitlines()
    title = next((line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME=")), name)
    if name == "Windows":
        yield Finding(
            "system",
            WARNING,
            f"{name} {release}",
            "Natively, nobody has tried simpletune on Windows yet",
            "Use WSL 2 (docs/how-to/install.md), or report what fails",
        )
    elif name != "Linux":
        yield Finding(
            "system",
            PROBLEM,
            f"{name} {release}",
            "simpletune runs on Linux only",
            "Rent a machine (docs/tutorials/rented-l4.md)",
        )
    elif in_wsl(machine) and "-Microsoft" in release:  # WSL 2 writes it small
        yield Finding(
            "system",
            PROBLEM,
            f"{title} in WSL 1, kernel {release}",
            "Programs in WSL 1 cannot use the graphics card",
            "Convert it to WSL 2, in PowerShell: wsl --set-version NAME 2 (wsl -l -v lists the names)",
        )
    elif in_wsl(machine):
        yield Finding(
            "system",
            WARNING,
            f"{title} in WSL, kernel {release}",
            "WSL limits pinned memory, with which offloading hides its copies, and the Windows driver may "
            "move device memory to the host instead of reporting that it is full",
            "Install the NVIDIA driver in Windows, not in WSL. In its Control Panel, set CUDA - Sysmem "
            "Fallback Policy to Prefer No Sysmem Fallback",
        )
    else:
        yield Finding("system", OK, f"{title}, kernel {release}")


def memory(machine: Machine) -> Iterator[Finding]:
    """Check how much host memory there is, within a container's limit."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", machine.read("/proc/meminfo") or "", re.M)
    amounts = {name: int(number) * 1024 for name, number in lines}
    if "MemTotal" not in amounts:
        yield Finding(
            "host memory",
            WARNING,
            "unknown",
            "It is read from /proc/meminfo, which this system lacks",
            f"Look it up elsewhere: {format_bytes(LEAST_MEMORY)} are the least",
        )
        return
    total, free = amounts["MemTotal"], amounts.get("MemAvailable", amounts["MemTotal"])
    limits = [text.strip() for text in map(machine.read, LIMITS) if text]
    limit = min((int(text) for text in limits if text.isdecimal()), default=total)
    value = f"{format_bytes(total)}, {format_bytes(free)} of it free"
    if limit < total:
        value += f"; this container may use {format_bytes(limit)}"
    usable = min(total, limit)
    why = "Levers that save device memory move weights to host memory (docs/reference/memory-levers.md)"
    remedy = "Prefer settings that keep weights on the card; `simpletune estimate CONFIG` shows the host memory of each"
    of_windows = f"{OF_WINDOWS}. " if in_wsl(machine) else ""
    if usable < LEAST_MEMORY:
        remedy = f"Use a machine or container with at least {format_bytes(LEAST_MEMORY)}"
        why = "Importing torch and loading a model take gigabytes"
        yield Finding("host memory", PROBLEM, value, why, of_windows + remedy)
    else:
        yield Finding("host memory", WARNING if usable < LITTLE_MEMORY else OK, value, why, of_windows + remedy)


def pinned_memory(machine: Machine) -> Iterator[Finding]:
    """Check whether host memory can be pinned, if there is a card."""
    limit = machine.locked_limit()
    shown = "ulimit -l unlimited" if limit is None else f"ulimit -l {format_bytes(limit)}"
    if not machine.ask("torch").get("devices"):
        yield Finding("pinned memory", OK, f"not tried without a card; {shown}")
        return
    answer = machine.ask("pinned memory")
    if "error" in answer:
        yield Finding(
            "pinned memory",
            WARNING,
            f"{answer['error']}; {shown}",
            "Only from pinned memory are blocks in host memory copied while the card computes",
            "Raise the limit (`ulimit -l unlimited`, in a container --ulimit memlock=-1) or free host memory",
        )
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
            yield Finding(
                "disk",
                PROBLEM,
                value,
                "A run could not write its checkpoints and its result",
                "Free some space, or set output.runs and output.cache to another disk",
            )
        elif "hub cache" in on_it and room < MODEL:
            yield Finding(
                "disk",
                WARNING,
                value,
                f"SD3 Medium's download takes {format_bytes(MODEL)}",
                "Set HF_HOME to a larger disk, or leave T5 out: model.t5=false (saves 8.9 GiB)",
            )
        else:
            yield Finding(
                "disk",
                WARNING if room < LITTLE_DISK else OK,
                value,
                "A full run's checkpoints take GiB",
                "Free some space; `simpletune estimate CONFIG` shows what a run writes",
            )


def windows_files(machine: Machine) -> Iterator[Finding]:
    """Check that under WSL nothing is written to a disk of Windows."""
    if not in_wsl(machine):
        return
    mounts = [line.split() for line in (machine.read("/proc/mounts") or "").splitlines()]
    kinds = {Path(mount[1]): mount[2] for mount in mounts if len(mount) > 2}
    found: dict[Path, list[str]] = {}
    for name, folder in machine.folders.items():
        path = folder.resolve()
        mount = next((parent for parent in (path, *path.parents) if parent in kinds), Path("/"))
        if kinds.get(mount) in WINDOWS_FILES:
            found.setdefault(mount, []).append(name)
    for mount, names in found.items():
        yield Finding(
            "Windows disk",
            WARNING,
            f"{mount}, for {', '.join(names)}",
            "WSL reaches it through a file server, which is much slower than its own disk",
            "Work in a folder of Linux, such as ~/simpletune, and keep pictures there, too",
        )


def folders(machine: Machine) -> Iterator[Finding]:
    refused = {}
    for name, folder in machine.folders.items():
        try:
            machine.require_writable(folder)
        except OSError as error:
            refused[name] = f"{folder}: {error.strerror or type(error).__name__}"
    for name, reason in refused.items():
        yield Finding(
            f"folder for {name}",
            PROBLEM,
            reason,
            "simpletune writes to it",
            "Give this user write permission, or choose another folder: output.runs, output.profiles, "
            "output.cache, or HF_HOME for the hub cache",
        )
    if not refused:
        yield Finding("folders", OK, f"{', '.join(machine.folders)} can be written to")


def environment(machine: Machine) -> Iterator[Finding]:
    """Check for environment variables that change what torch does."""
    given = machine.environment
    for name in (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"):
        if name in given and "expandable_segments:true" not in given[name].lower().replace(" ", ""):
            yield Finding(
                "allocator",
                WARNING,
                f"{name}={given[name]}",
                "Without expandable segments, memory fragments when picture shapes alternate",
                f"Unset {name}, or add {EXPANDABLE} to it",
            )
    if EXPANDABLE in given.get(ALLOCATOR, "") and FIXED in machine.ask("torch").get("allocator", ""):
        yield Finding(
            "allocator",
            WARNING,
            "expandable segments fail, so runs allocate fixed ones",
            "Without expandable segments, memory fragments when picture shapes alternate",
            "Update the NVIDIA driver in Windows",
        )
    visible = given.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip() == "-1"):
        yield Finding(
            "visible cards",
            PROBLEM,
            f"CUDA_VISIBLE_DEVICES={visible}",
            "It hides every card from torch",
            "Unset it, or set it to a number from `nvidia-smi -L`",
        )
    elif visible is not None:
        yield Finding("visible cards", OK, f"CUDA_VISIBLE_DEVICES={visible}")
    if given.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        yield Finding(
            "launches",
            WARNING,
            "CUDA_LAUNCH_BLOCKING is set",
            "The host waits for every kernel",
            "Unset CUDA_LAUNCH_BLOCKING",
        )


def notification(machine: Machine) -> Iterator[Finding]:
    """Check where the ends of runs are posted; ``doctor --notify`` posts a message."""
    why, remedy = "The ends of runs are posted nowhere", f"Set {VARIABLE} to your webhook's or topic's URL"
    try:
        receiver = find_receiver(machine.environment)
    except UserError as error:
        yield Finding("notification", WARNING, str(error), why, remedy)
        return
    if receiver is None:
        if machine.notify:
            yield Finding("notification", WARNING, f"{VARIABLE} is not set", why, remedy)
    elif not machine.notify:
        yield Finding("notification", OK, f"to {receiver}, not tried; --notify posts a message")
    elif failed := receiver.post(Message("simpletune doctor", "test", "messages about your runs arrive here")):
        yield Finding("notification", WARNING, failed, why, remedy)
    else:
        yield Finding("notification", OK, f"{receiver} took a message")


def port(machine: Machine) -> Iterator[Finding]:
    """Check whether the default port of ``simpletune serve`` is free."""
    text = machine.environment.get("AIP_HTTP_PORT") or "8000"
    if not text.isdecimal() or int(text) > 65535:
        yield Finding(
            "port of serve", WARNING, f"AIP_HTTP_PORT={text}", "It is not a port from 0 to 65535", "Unset AIP_HTTP_PORT"
        )
        return
    try:
        machine.require_port(int(text))
    except OSError as error:
        yield Finding(
            "port of serve",
            WARNING,
            f"{text}: {error.strerror}",
            "`simpletune serve` listens on it",
            "Stop what uses it, or choose another one: simpletune serve --port 0",
        )
    else:
        yield Finding("port of serve", OK, f"{text} is free")


def driver(machine: Machine) -> Iterator[Finding]:
    """Check whether there is a driver that torch's CUDA can use."""
    answer = machine.command(*DRIVER)
    if answer is None and machine.ask("torch").get("devices"):
        yield Finding("driver", OK, "its version is unknown without nvidia-smi; torch reaches the card")
        return
    if answer is None:
        yield Finding(
            "driver",
            WARNING,
            "nvidia-smi was not found",
            "Without NVIDIA's driver, only the CPU trains",
            "If this machine has an NVIDIA card, install its driver (Ubuntu: sudo apt install "
            "nvidia-driver-580, then reboot)",
        )
        return
    code, text = answer
    version = text.split(",")[0].strip()
    if code or not version[:1].isdigit():
        reason = (text.splitlines() or ["no output"])[0]
        yield Finding(
            "driver",
            PROBLEM,
            f"nvidia-smi fails: {reason}",
            "Torch cannot use the card either",
            "Install the driver again, and reboot: its kernel module may be of another version",
        )
        return
    cuda = str(machine.ask("torch").get("cuda") or "")
    needed = DRIVERS.get(int(cuda.partition(".")[0] or 0))
    if needed and int(version.partition(".")[0]) < needed:
        yield Finding(
            "driver",
            PROBLEM,
            f"{version}, for CUDA {cuda} of torch",
            f"Torch builds for CUDA {cuda.partition('.')[0]} need driver {needed} or newer",
            f"Update the driver. Or: {OTHER_BUILD}",
        )
    else:
        yield Finding("driver", OK, version)


def torch(machine: Machine) -> Iterator[Finding]:
    """Check whether torch imports and can use the card that the driver shows."""
    found, answer = machine.ask("torch"), machine.command(*DRIVER)
    if "error" in found:
        yield Finding(
            "torch",
            PROBLEM,
            found["error"],
            "Nothing runs without torch",
            "Install it again: rm -r .venv, then ./train.sh",
        )
        return
    value = f"{found['version']}, built for " + (f"CUDA {found['cuda']}" if found["cuda"] else "the CPU")
    has_card = answer is not None and answer[0] == 0
    if has_card and not found["cuda"]:
        card = answer[1].splitlines()[0].partition(",")[2].strip() if answer else ""
        yield Finding("torch", PROBLEM, value, f"This build cannot use the {card}", OTHER_BUILD)
    elif found["refused"] and (has_card or found["devices"]):
        yield Finding(
            "torch",
            PROBLEM,
            f"{value}, for {', '.join(found['architectures']) or 'no card'}",
            f"simpletune train refuses this card: {found['refused']}",
            OTHER_BUILD,
        )
    else:
        built = f", for {', '.join(found['architectures'])}" if found["architectures"] else ""
        yield Finding("torch", OK, value + built)


def card(machine: Machine) -> Iterator[Finding]:
    """Check which card there is, how much of its memory is free, and which programs use it."""
    devices = machine.ask("torch").get("devices") or []
    if not devices:
        yield Finding(
            "card",
            WARNING,
            "torch finds none",
            "Training SD3 on the CPU takes seconds to minutes per step",
            "The demo and all predictions work without one; see driver and torch above if there is a card",
        )
        return
    first = devices[0]
    free, total = first["free"], first["total"]
    value = f"{first['name']}, {sm(first['capability'])}, {format_bytes(free)} of {format_bytes(total)} free"
    if len(devices) > 1:
        value += f"; {len(devices)} cards, of which simpletune uses this one (choose with CUDA_VISIBLE_DEVICES)"
    if free >= LITTLE_FREE * total:
        yield Finding("card", OK, value)
        return
    answer = machine.command(*PROCESSES)
    rows = [line.split(", ") for line in answer[1].splitlines()] if answer and answer[0] == 0 else []
    # programs without their paths
    users = "; ".join(f"{row[1].rpartition('/')[2]} (process {row[0]}, {row[2]})" for row in rows if len(row) == 3)
    yield Finding(
        "card",
        WARNING,
        value,
        f"Other programs use it: {users or 'nvidia-smi names none'}",
        "End them, or leave room for them: simpletune estimate CONFIG --reserve GIB",
    )


def product(machine: Machine) -> Iterator[Finding]:
    """Check whether a large product runs at the rate of such a card."""
    if not machine.ask("torch").get("devices"):
        return
    found = machine.ask("product")
    if "error" in found:
        why = "Its other computations will fail, too"
        yield Finding("product", PROBLEM, found["error"], why, "See driver and torch above, or report it")
        return
    value = f"{found['tflops']:.3g} TFLOP/s in {found['dtype']}"
    if found["expected"] is None:
        yield Finding("product", OK, f"{value}; no figure is known for this card")
        return
    value += f", {found['expected']:.3g} expected of such a card"
    why = remedy = ""
    if found["tflops"] < SLOW_PRODUCT * found["expected"]:
        why = "The card computes much slower than others of its kind"
        remedy = "End other programs on it (nvidia-smi), and look at its power limit and temperature (nvidia-smi -q -d "
        remedy += "POWER,TEMPERATURE,PERFORMANCE). " + OTHER_BUILD
    yield Finding("product", WARNING if why else OK, value, why, remedy)


def host(machine: Machine) -> Iterator[Finding]:
    """Check what the processor, the driver and the link add to a step; a card that computes faster waits for them."""
    found = machine.ask("host")
    if "error" in found:
        yield Finding("host", WARNING, found["error"], "Its speed is unknown", "Report it with this file attached")
        return
    value = f"{found['processor']}, {found['core'] * 1e6:.0f} us a loop"
    if found["launch"] is None:
        yield Finding("host", OK, value)
        return
    link = found["to_device"], found["to_host"]
    value += f"; {found['launch'] * 1e6:.1f} us a launch; {link[0]:.1f} GB/s to the card, {link[1]:.1f} back"
    why = remedy = ""
    if found["launch"] > DEAR_LAUNCH:
        why = "A launch takes 2 to 5 us on most machines, more in some virtual ones: a step launches thousands"
        remedy = "Larger batches launch no more; speed.compile launches less. Predictions count with it"
    elif min(link) < SLOW_LINK:
        why = "16 lanes of PCI Express 3 copy 12 GB/s: streamed weights and offloaded inputs wait for the link"
        remedy = "Put the card into the slot with the most lanes. Predictions count with it"
    yield Finding("host", WARNING if why else OK, value, why, remedy)


def bf16(machine: Machine) -> Iterator[Finding]:
    """Check whether the card multiplies in bf16."""
    for device in (machine.ask("torch").get("devices") or [])[:1]:
        if tuple(device["capability"]) >= BF16_FROM:
            yield Finding("bf16", OK, f"yes ({sm(device['capability'])})")
            continue
        why = (
            "Cards before sm_80 have no bf16, in which SD3's weights are published; "
            "docs/reference/models.md says what they do"
        )
        remedy = "Leave precision.compute at auto, which is fp16 on this card"
        if tuple(device["capability"]) < CUDA_13_FROM:
            remedy += ", and a torch built for CUDA 12.6: newer ones do not know this card. " + OTHER_BUILD
        yield Finding("bf16", WARNING, f"no ({sm(device['capability'])})", why, remedy)


def bitsandbytes(machine: Machine) -> Iterator[Finding]:
    """Check whether bitsandbytes loads its library for the device."""
    answer, has_card = machine.ask("bitsandbytes"), bool(machine.ask("torch").get("devices"))
    why = "nf4 weights and 8-bit optimizers need it"
    remedy = f"Install it again: {install_command('--force-reinstall', '--no-deps', 'bitsandbytes')}"
    if "error" in answer:
        yield Finding("bitsandbytes", PROBLEM, answer["error"], why, remedy)
    elif has_card and not answer["cuda"]:
        value = f"{answer['version']} loads no CUDA library"
        yield Finding(
            "bitsandbytes", PROBLEM, value, why, f"{remedy}. `python -m bitsandbytes` shows what it looks for"
        )
    else:
        yield Finding("bitsandbytes", OK, f"{answer['version']}, {'CUDA' if answer['cuda'] else 'CPU'} library")


def quanto(machine: Machine) -> Iterator[Finding]:
    answer = machine.ask("optimum-quanto")
    if "error" in answer:
        yield Finding(
            "optimum-quanto",
            PROBLEM,
            answer["error"],
            "precision.weights=int8-quanto needs it",
            "Install it again, or use precision.weights=int8, which needs nothing",
        )
    else:
        yield Finding("optimum-quanto", OK, answer["version"])


def compiler(machine: Machine) -> Iterator[Finding]:
    """Check whether Triton has what it needs to compile: a C compiler and Python.h."""
    version = ".".join(map(str, machine.python[:2]))
    asked = machine.environment.get("CC")
    found = [path for path in map(machine.which, [asked] if asked else COMPILERS) if path]
    lacks = [] if found else [f"{asked} (CC)" if asked else "a C compiler"]
    lacks += [] if machine.has_python_header() else ["Python.h"]
    has_card = bool(machine.ask("torch").get("devices"))
    if lacks:
        level = WARNING if has_card else OK
        value = f"{' and '.join(lacks)} not found" + ("" if has_card else "; a card needs it")
        yield Finding(
            "compiler",
            level,
            value,
            "Triton compiles with it: without, precision.products=int8 multiplies with dequantised weights "
            "instead, and speed.compile does not work",
            f"sudo apt install gcc python{version}-dev",
        )
    else:
        name = re.sub(r".*/", "", found[0])
        yield Finding("compiler", OK, f"{name} and Python.h found")


def int8_products(machine: Machine) -> Iterator[Finding]:
    """Check whether the card multiplies in int8: compile the kernel and compare its sums."""
    if not machine.ask("torch").get("devices"):
        return
    answer = machine.ask("int8 products")
    reason = answer.get("error") or answer["why_not"]
    if reason:
        yield Finding(
            "int8 products",
            WARNING,
            reason,
            "precision.products=int8 multiplies with dequantised weights",
            "Leave precision.products at dequantised, or fix the compiler (above)",
        )
    else:
        yield Finding("int8 products", OK, f"they work; Triton {answer['triton']}")


def steps(machine: Machine, weights: str, count: int) -> Iterator[Finding]:
    """Train the demo model in one precision, and judge the steps by their losses and memory."""
    name = f"{plural(count, 'step')}, {weights} weights"
    answer = machine.ask(f"steps {weights} {count}")
    if "error" in answer:
        yield Finding(
            name,
            PROBLEM,
            answer["error"],
            f"Training with precision.weights={weights} fails here",
            "See the checks above; report it with this file attached",
        )
        return
    losses = answer["losses"]
    value = (
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}, {answer['seconds_per_step']:.4f} s a step in {answer['compute']}"
    )
    excess = 0.0
    if answer.get("measured_mib") is None:
        value += ", memory is measured on a card only"
    else:
        predicted, measured, reserved = (answer[f"{which}_mib"] for which in ("predicted", "measured", "reserved"))
        value += f", peak {predicted:.1f} MiB predicted, {measured:.1f} measured ({reserved:.0f} reserved)"
        excess = measured - predicted - max(ALLOWED * predicted, ALLOWED_MIB)
    level: Level = OK
    why = remedy = ""
    if not all(map(math.isfinite, losses)):
        level, why = PROBLEM, "A loss is not finite: this precision does not train here"
        remedy = "Try another precision, and report it with this file attached"
    elif not any(losses):
        level, why = PROBLEM, "Every loss is 0: the device returns zeros instead of results"
        remedy = "Check the driver, then report it with this file attached"
    elif excess > 0:
        level, why = WARNING, "More memory was used than predicted, so predictions for this card are too low"
        remedy = "Leave room with --reserve, and report it with this file attached"
    yield Finding(name, level, value, why, remedy)
