"""Run the checks in order, print what they find, and write it to a file for a bug report if one is named."""

from __future__ import annotations

import datetime
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from simpletune import __version__
from simpletune.commands.doctor import checks, hub_checks
from simpletune.commands.doctor.machine import PROBLEM, WARNING, Finding, Machine
from simpletune.commands.doctor.probe import ProbeProcess
from simpletune.system.console import say
from simpletune.system.environment import LIBRARIES
from simpletune.system.options import UserError, plural
from simpletune.system.printable import describe_exception
from simpletune.system.redact import redact

FOUND = 1  # exit code if there are problems
CHECKS = (
    checks.python, checks.system, checks.memory, checks.disks, checks.windows_files, checks.folders,
    checks.environment, checks.notification, checks.port, checks.driver, checks.torch, checks.card, checks.product,
    checks.host, checks.bf16, checks.pinned_memory, checks.bitsandbytes, checks.quanto, checks.compiler,
    checks.int8_products, hub_checks.login, hub_checks.licence,
)  # fmt: skip


def doctor(out: Path | None, train: bool, as_json: bool, steps: int, notify: bool = False) -> None:
    probe = ProbeProcess()
    findings = []
    try:
        for finding in run_checks(Machine(probe, notify=notify), steps if train else 0):
            findings.append(finding)
            if not as_json:
                for line in finding.lines():
                    say(private(line))
    finally:
        probe.close()
    if as_json:
        print(private(json.dumps([asdict(finding) for finding in findings], indent=2)))
    problems = [finding for finding in findings if finding.level == PROBLEM]
    attach = "For a bug report, add --out FILE" if out is None else f"Attach {out} to a bug report"
    try:
        if out is not None:
            out.write_text(private(report(findings)), encoding="utf-8")
    except OSError as error:
        reason = f"{out} cannot be written ({error.strerror}). Name another file with --out"
        raise UserError(f"doctor: {plural(len(problems), 'problem')}; {reason}", FOUND) from None
    if problems:
        said = f"doctor: {plural(len(problems), 'problem')}, each with its remedy"
        raise UserError(f"{said}. {attach}", FOUND)
    if not as_json:
        warnings = sum(finding.level == WARNING for finding in findings)
        say(f"no problem, {plural(warnings, 'warning')}. {attach}")


def run_checks(machine: Machine, steps: int) -> Iterator[Finding]:
    """Run every check; an exception becomes a finding, with reason and source line, and does not stop the others."""
    named: dict[str, Callable[[], Iterable[Finding]]] = {check.__name__: partial(check, machine) for check in CHECKS}
    for weights in checks.PRECISIONS if steps else ():
        named[f"steps {weights}"] = partial(checks.steps, machine, weights, steps)
    for name, check in named.items():
        try:
            yield from check()
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            said = f"the check failed: {describe_exception(error)} ({where})"
            yield Finding(name, PROBLEM, said, "Its answer is unknown", "Report it with this file attached")


def report(findings: Sequence[Finding]) -> str:
    """Format the file: every finding, then the versions of the libraries."""
    now = datetime.datetime.now(datetime.UTC)
    lines = [f"simpletune doctor: simpletune {__version__}, {now:%Y-%m-%d %H:%M} UTC", ""]
    lines += [line for finding in findings for line in finding.lines()]
    lines.append("")
    for name in (*LIBRARIES, "accelerate", "triton"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return "\n".join(lines) + "\n"


def private(text: str) -> str:
    """Remove tokens, passwords and home folders from a text."""
    text = redact(text).replace(str(Path.home()).rstrip("/") + "/", "~/")
    return re.sub(r"/(?:home|Users)/[^/\s:\"']+", "~", text)
