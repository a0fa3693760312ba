"""Checks of the Hugging Face hub: whether there is a login, and whether it gives access to SD3 Medium."""

from __future__ import annotations

from collections.abc import Iterator

from simpletune.commands.doctor.machine import OK, WARNING, Finding, Machine
from simpletune.system.shell import login_command


def login_words() -> str:
    return f"Run `{login_command()}`, or set HF_TOKEN"


def login(machine: Machine) -> Iterator[Finding]:
    """Check whether a token is stored, without showing or sending it."""
    from huggingface_hub import get_token

    if get_token() is None:
        yield Finding(
            "hub login",
            WARNING,
            "no token",
            "The hub only lets accounts that accepted its licence download SD3 Medium",
            f"{login_words()}. Local folders and files, FLUX.2 klein, Z-Image, Qwen-Image, SDXL, SD 1.5 and 2 need "
            "none",
        )
    else:
        yield Finding(
            "hub login", OK, "HF_TOKEN is set" if machine.environment.get("HF_TOKEN") else "a token is stored"
        )


def licence(machine: Machine) -> Iterator[Finding]:
    """Check whether this account may download SD3 Medium."""
    from simpletune.models.sd3.sd3_files import SD3_MEDIUM

    yield from access(SD3_MEDIUM, "SD3 Medium")


def access(name: str, title: str = "") -> Iterator[Finding]:
    """Check whether this account may download a model."""
    from simpletune.models.families import base_access

    found, title = base_access(name), title or name
    if found.state == "here":
        yield Finding(title, OK, "it is in the hub cache")
    elif found.state == "ready":
        yield Finding(title, OK, "this account may download it")
    else:
        value = "the hub does not give it to this account" if found.may_fail else "unknown: the hub gave no answer"
        yield Finding(title, WARNING, value, found.why, "The demo and local models work without the hub")
