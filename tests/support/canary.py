"""The suite with the newest of every library, upper bounds ignored, in an environment of its own.

    make canary        or: python tests/support/canary.py [--out FILE] [PYTEST ARGUMENT...]

Prints, or writes, a table: each library with our bound, the newest version, whether that lies beyond the bound, and the
private names (tests/support/private_names.py) that it lacks; then the tests that fail.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from private_names import LIBRARIES, private_names

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-canary"
PYTHON = ENVIRONMENT / "bin" / "python"
SUITE = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile")


def requirements(project: Path) -> dict[str, Requirement]:
    """What the project and its extras need, by name, as far as it applies to this machine."""
    table = tomllib.loads(project.read_text())["project"]
    found = [Requirement(text) for text in sum(table["optional-dependencies"].values(), table["dependencies"])]
    return {
        each.name: each for each in found if each.name != table["name"] and (not each.marker or each.marker.evaluate())
    }


def unbounded(requirement: Requirement) -> str:
    """The requirement with its lower bounds alone."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return (
        requirement.name
        + extras
        + str(SpecifierSet(",".join(str(s) for s in requirement.specifier if s.operator == ">=")))
    )


def outcome(report: Path) -> tuple[Counter[str], list[tuple[str, str]]]:
    """How many tests passed, failed and were skipped, and (test, error) of those that failed, from JUnit's XML."""
    counts: Counter[str] = Counter()
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag: child for child in case}
        failed = kinds.get("failure", kinds.get("error"))
        counts["failed" if failed is not None else "skipped" if "skipped" in kinds else "passed"] += 1
        if failed is not None:
            message = (failed.get("message") or "").partition("\n")[0].replace("|", "\\|")[:160]
            failures.append((f"{case.get('classname')}::{case.get('name')}", message))
    return counts, failures


def table(
    wanted: dict[str, Requirement],
    versions: dict[str, str],
    lacking: list[str],
    counts: Counter[str],
    failures: list[tuple[str, str]],
) -> str:
    counted = Counter(name.partition(".")[0] for name in private_names())
    lines = ["| library | bound | newest | result |", "|---|---|---|---|"]
    for name, requirement in wanted.items():
        version = versions.get(name, "none")
        words = [f"{'within' if requirement.specifier.contains(version, prereleases=True) else 'beyond'} the bound"]
        if name in LIBRARIES and counted[name]:
            lost = [each for each in lacking if each.startswith(f"{name}.")]
            words.append(f"lacks {'; '.join(lost)}" if lost else f"has our {counted[name]} private names")
        lines.append(f"| {name} | {requirement.specifier} | {version} | {', '.join(words)} |")
    numbers = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    lines += ["", f"Tests: {numbers}.", ""]
    if failures:
        lines += [
            "| test that fails | error |",
            "|---|---|",
            *(f"| {test} | {error} |" for test, error in failures),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of the table")
    options, arguments = parser.parse_known_args()
    wanted = requirements(ROOT / "pyproject.toml")
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
    index = os.environ.get("SIMPLETUNE_TORCH_INDEX")
    if index:
        subprocess.run([*pip, "--index-url", index, "torch"], check=True)
    chosen = [unbounded(each) for each in wanted.values() if not (index and each.name == "torch")]
    subprocess.run([*pip, "pip", *chosen], check=True)
    listed = subprocess.run([PYTHON, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True)
    versions = {each["name"].lower().replace("_", "-"): each["version"] for each in json.loads(listed.stdout)}
    names = subprocess.run([PYTHON, ROOT / "tests" / "support" / "private_names.py"], capture_output=True, text=True)
    lacking = [line.strip() for line in names.stdout.splitlines() if line.startswith("  ")]
    report = ENVIRONMENT / "junit.xml"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [PYTHON, "-m", "pytest", "-q", f"--junitxml={report}", *(arguments or SUITE)]
    report.unlink(missing_ok=True)
    subprocess.run(command, cwd=ROOT, env=environment)
    counts, failures = outcome(report)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    about = f"{datetime.now(UTC):%d %B %Y}, commit {commit.stdout.strip()}, Python {platform.python_version()}."
    suite = f"pytest {' '.join(arguments)}" if arguments else "The fast suite"
    newest = f"{suite} with the newest of everything, upper bounds ignored (`make canary`)"
    text = f"# The newest libraries\n\n{newest}. {about}\n\n"
    text += table(wanted, versions, lacking, counts, failures)
    print(text)
    if options.out:
        options.out.write_text(text)
    sys.exit(1 if failures or lacking or not counts else 0)


if __name__ == "__main__":
    main()
