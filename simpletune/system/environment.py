"""Describe the machine and library versions, to accompany measurements."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from simpletune.system.options import plural

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes", "optimum-quanto")


def describe_machine() -> dict[str, str]:
    import torch

    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"
    else:
        threads = torch.get_num_threads()
        device = f"{plural(threads, 'CPU thread')} ({cpu_name()})"
    return {
        "device": device,
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {version_or_none(name)}" for name in LIBRARIES),
    }


def version_or_none(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:  # only int8-quanto needs optimum-quanto
        return None


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
