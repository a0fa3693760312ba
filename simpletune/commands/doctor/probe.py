"""Ask questions that need torch in a child process, so that a library that crashes or hangs does not stop the parent.

Parent and child exchange lines of text: a question, and a JSON answer after a marker, because libraries print, too.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import IO

from simpletune.system.options import Json
from simpletune.system.printable import describe_exception

MARK = "@doctor "
COMMAND = (sys.executable, "-m", "simpletune.commands.doctor.probe")
SECONDS = 120.0  # timeout for an answer
PINNED = 256 * 2**20
SIDE = 4096  # of the matrices of the product that is timed: 2 ms on an L4


class ProbeProcess:
    """Child process that answers questions; started at the first question, and again after it has died."""

    def __init__(self, command: tuple[str, ...] = COMMAND, seconds: float = SECONDS):
        self.command = command
        self.seconds = seconds
        self._answers: dict[str, Json] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def ask(self, question: str) -> Json:
        """Return the answer, cached for each question; it has ``error`` if there is none."""
        if question not in self._answers:
            self._answers[question] = self._ask(question)
        return self._answers[question]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(OSError), self._process.stdin:  # type: ignore[union-attr]
                self._process.wait()
            self._process = None

    def _ask(self, question: str) -> Json:
        """Ask, and read until there is an answer, the child ends, or time runs out."""
        if self._process is None:
            self._lines = queue.SimpleQueue()
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
            )
            threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{question}\n".encode())
            self._process.stdin.flush()
        except OSError:  # a broken pipe; on Windows it is an invalid argument
            return self._describe_end()
        deadline = time.monotonic() + self.seconds
        with suppress(queue.Empty):
            while line := self._lines.get(timeout=max(0.0, deadline - time.monotonic())):
                if line.startswith(MARK.encode()) and line.endswith(b"\n"):
                    return json.loads(line[len(MARK) :])
            return self._describe_end()
        self.close()
        return {"error": f"no answer within {self.seconds:.0f} s"}

    def _describe_end(self) -> Json:
        """Describe how the child ended, with its last line of output."""
        assert self._process is not None
        code = self._process.wait()
        self.close()
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        last = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return {"error": f"the process ended ({how}){': ' + last[-1][:200] if last else ''}"}


def _read(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Queue a pipe's lines, then no bytes. In a thread, because Windows cannot wait for a pipe with a timeout."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(b"")


def torch_facts() -> Json:
    """Return torch's version and the devices that it sees."""
    import torch

    from simpletune.system.devices import ALLOCATOR, choose_device
    from simpletune.system.options import UserError

    refused, devices = "", []
    try:
        choose_device("cuda", "fp32", is_demo=True)
    except UserError as error:
        refused = str(error)
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        capability = torch.cuda.get_device_capability(number)
        name = torch.cuda.get_device_name(number)
        devices.append({"name": name, "capability": capability, "free": free, "total": total})
    cuda, built = torch.version.cuda, torch.cuda.get_arch_list()
    return {
        "version": torch.__version__,
        "cuda": cuda,
        "architectures": built,
        "devices": devices,
        "refused": refused,
        "allocator": os.environ.get(ALLOCATOR, ""),  # choose_device may have changed it
    }


def bitsandbytes_facts() -> Json:
    """Return which library bitsandbytes has loaded."""
    from bitsandbytes.cextension import lib

    error = vars(lib).get("formatted_error")  # class of the stand-in for a library that does not load
    found: Json = {"version": version("bitsandbytes"), "cuda": bool(getattr(lib, "compiled_with_cuda", False))}
    return found | ({"error": next(line for line in str(error).splitlines() if line.strip()).strip()} if error else {})


def quanto_facts() -> Json:
    import optimum.quanto  # noqa: F401

    return {"version": version("optimum-quanto")}


def pinned_facts() -> Json:
    import torch

    return {"pinned": torch.empty(PINNED, dtype=torch.uint8, pin_memory=True).nbytes}


def int8_facts() -> Json:
    """Return why the card cannot multiply in int8, or None."""
    import torch

    from simpletune.engine.quant.int8_products import int8_problem

    reason = int8_problem(torch.device("cuda", torch.cuda.current_device()))
    return {"why_not": reason, "triton": None if reason else version("triton")}


def product_facts() -> Json:
    """Time a large product in 16 bits on the card; return its TFLOP/s, and those expected of such a card or None."""
    import torch

    from simpletune.estimate.timing.datasheet import DatasheetSpeeds
    from simpletune.estimate.timing.host_probes import device_seconds
    from simpletune.system.devices import BF16_FROM
    from simpletune.system.gpus import card_named_by_driver

    device = torch.device("cuda", torch.cuda.current_device())
    about = torch.cuda.get_device_properties(device)
    card = card_named_by_driver(about.name, about.total_memory, (about.major, about.minor))
    name = "bf16" if card.capability >= BF16_FROM else "fp16"
    a, b = (torch.ones(SIDE, SIDE, device=device, dtype=getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[name]))
            for _ in range(2))  # fmt: skip
    seconds = device_seconds(device, lambda: torch.mm(a, b.t()))
    stated = DatasheetSpeeds(card)
    expected = stated.seconds("product_tn", name, (SIDE, SIDE, SIDE)) if stated.is_known else None
    operations = 2 * SIDE**3 / 1e12
    return {"dtype": name, "tflops": operations / seconds, "expected": expected and operations / expected}


def host_facts() -> Json:
    """Return the processor, and what ``measure_host`` finds of the machine."""
    import torch

    from simpletune.estimate.timing.host_probes import measure_host
    from simpletune.system.environment import cpu_name

    found = measure_host(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return {"processor": cpu_name(), **found.model_dump()}


QUESTIONS: dict[str, Callable[[], Json]] = {
    "torch": torch_facts,
    "bitsandbytes": bitsandbytes_facts,
    "optimum-quanto": quanto_facts,
    "pinned memory": pinned_facts,
    "int8 products": int8_facts,
    "host": host_facts,
    "product": product_facts,
}


def answer(question: str) -> Json:
    """Answer one question; an exception becomes its reason, in one line."""
    try:
        if question.startswith("bench "):
            from simpletune.commands.doctor.bench_steps import measure

            return measure(*json.loads(question.partition(" ")[2]))
        if not question.startswith("steps "):
            return QUESTIONS[question]()
        from simpletune.commands.doctor.probe_steps import take_steps

        _, weights, count = question.split()
        return take_steps(weights, int(count))
    except Exception as error:
        traceback.print_exc()
        return {"error": describe_exception(error)}


def main() -> None:
    """Answer the questions that arrive on standard input."""
    for line in sys.stdin:
        print(f"\n{MARK}{json.dumps(answer(line.strip()))}", flush=True)


if __name__ == "__main__":
    main()
