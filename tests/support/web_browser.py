"""A real server of the pages, and a headless Chromium that reports what went wrong on a page."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = [
    *([] if find_spec("selenium") and find_spec("axe_core_python") else ["selenium and axe-core-python (pip)"]),
    *([] if DRIVER and BROWSER else ["chromium and chromedriver (apt-get install chromium chromium-driver)"]),
]
needs_browser = pytest.mark.skipif(bool(MISSING), reason=f"no browser: {' and '.join(MISSING)} missing")
DESKTOP, PHONE = (1280, 900), (390, 844)
HOSTILE = "a<img src=x onerror=document.title='owned'>'\"&amp;"


def images(folder: Path, count: int = 4) -> Path:
    """Write pictures that differ."""
    folder.mkdir(parents=True)
    for number in range(count):
        Image.effect_noise((96, 96), 60 + number).convert("RGB").save(folder / f"{number}.png")
    return folder


def make_run(folder: Path, **settings: object) -> Path:
    """Write a finished run as its files."""
    (folder / "samples").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"name": folder.name, "train": {"steps": 3}, **settings}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 3, "loss": 0.25}\n')
    (folder / "summary.json").write_text('{"steps": 3, "steps_per_epoch": 1, "output": "x"}')
    Image.new("RGB", (300, 100), "teal").save(folder / "samples" / "step-3.png")
    return folder


def make_root(root: Path) -> Path:
    """Write pictures and runs, one of each with a hostile name, and a hostile configuration."""
    images(root / "pics")
    images(root / HOSTILE.replace("/", ""))
    make_run(root / "runs" / "old", adapter={"rank": 4})
    make_run(root / "runs" / HOSTILE.replace("/", ""), about=HOSTILE, adapter={"rank": HOSTILE})
    (root / "hostile.json").write_text(
        json.dumps({"name": HOSTILE, "about": HOSTILE, "data": {"path": HOSTILE, "prompt": HOSTILE}, HOSTILE: 1})
    )
    return root


@dataclass
class Server:
    """A running ``simpletune web``."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(120)

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[Server]:
    """Serve the pages of a folder: its runs in ``runs``, itself the root."""
    command = [sys.executable, "-m", "simpletune", "web", "--port", str(port), "--runs", str(folder / "runs")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "--root", str(folder)], cwd=folder, env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    found: queue.Queue[str] = queue.Queue()
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            address = re.search(r"open (http://\S+)", line)
            if address:
                found.put(address[1].rstrip("/"))

    threading.Thread(target=read, daemon=True).start()
    try:
        yield Server(process, found.get(timeout=90), lines)
    finally:
        process.kill()
        process.wait(120)
        for record in (folder / "runs" / ".web" / "logs").glob("*.json"):  # what still runs in sessions of their own
            known = json.loads(record.read_text())
            if "code" not in known and known.get("pid"):
                end(known["pid"], known["started"])


def end(pid: int, started: int) -> None:
    """Kill a process, if it is the one that was started then."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if int(fields[19]) == started:
            os.kill(pid, signal.SIGKILL)
    except (OSError, ProcessLookupError):
        pass


@contextmanager
def browsing(dark: bool = False, size: tuple[int, int] = DESKTOP) -> Iterator[Browser]:
    """Open a browser."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"]
    for flag in (*flags, f"--window-size={size[0]},{size[1]}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, Service(DRIVER))
    try:
        driver.command_executor.client_config.timeout = 900
        driver.set_script_timeout(600)  # axe takes more than the usual 30 s on a busy machine
        browser = Browser(driver)
        browser.look(dark, size)
        yield browser
    finally:
        driver.quit()


class Limit:
    """Seconds of an idle machine. Those of a busy one count by the share of a processor that a running thread gets."""

    def __init__(self, seconds: float):
        self.left, self.seen = seconds, time.monotonic()

    def is_over(self) -> bool:
        now = time.monotonic()
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        self.left -= (now - self.seen) * min(1.0, len(os.sched_getaffinity(0)) / running)
        self.seen = now
        return self.left < 0


class Browser:
    """A browser with short methods for what the tests do."""

    def __init__(self, driver: Any):
        self.driver = driver
        self.seen: list[str] = []

    def open(self, url: str) -> None:
        self.driver.get(url)

    def find(self, css: str) -> Any:
        return self.until(lambda: next(iter(self.driver.find_elements("css selector", css)), None), css)

    def text(self, css: str) -> str:
        """The text of an element that may be replaced meanwhile; empty without it."""
        script = "const e = document.querySelector(arguments[0]); return e ? e.innerText : ''"
        return str(self.driver.execute_script(script, css))

    def raw(self, css: str) -> str:
        """The text of an element, folded or not."""
        script = "const e = document.querySelector(arguments[0]); return e ? e.textContent : ''"
        return str(self.driver.execute_script(script, css))

    def look(self, dark: bool, size: tuple[int, int]) -> None:
        """Choose the theme and the size of the window."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def fill(self, css: str, text: str) -> None:
        place = self.find(css)
        place.clear()
        place.send_keys(text)

    def click(self, css: str) -> None:
        """Scroll to an element and really click it; again if it was replaced meanwhile."""
        from selenium.common.exceptions import StaleElementReferenceException

        for _ in range(5):
            try:
                place = self.find(css)
                self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", place)
                place.click()
                return
            except StaleElementReferenceException:
                continue
        raise AssertionError(f"{css} is replaced too often")

    def until(self, true: Callable[[], Any], what: str = "", seconds: float = 60) -> Any:
        """Poll until it is true, for seconds of an idle machine; if the page replaces an element between finding and
        reading it, try again."""
        from selenium.common.exceptions import StaleElementReferenceException

        limit = Limit(seconds)
        while True:
            try:
                if found := true():
                    return found
            except StaleElementReferenceException:
                pass  # not yet: the loop asks the new element, until the time is up
            assert not limit.is_over(), f"{what}: not within {seconds} s; the page says {self.text('main')[:1500]}"
            time.sleep(0.05)

    def forget(self) -> None:
        """Leave the page of another test, and what it complained of."""
        self.driver.get("about:blank")
        self.complaints()

    def complaints(self) -> list[str]:
        """Errors of the console, and requests to other places than the server, since the last call.

        htmx logs two lines for a request that a newer one replaces, as the form's ``hx-sync`` asks; they are no fault.
        """
        found: list[str] = []
        for entry in self.driver.get_log("browser"):
            if "htmx:sendAbort" in entry["message"] and found and "htmx:afterRequest" in found[-1]:
                found.pop()
            elif entry["level"] in ("SEVERE", "WARNING"):
                found.append(entry["message"])
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if not re.match(r"(http://127\.0\.0\.1:\d+/|data:|about:|chrome:)", url):
                    found.append(f"request to {url}")
        return found

    def violations(self, *rules: str) -> list[str]:
        """What axe-core objects to on the page as it is, by all rules or by these."""
        import axe_core_python

        script = Path(axe_core_python.__file__).with_name("axe.min.js").read_text()
        if not self.driver.execute_script("return 'axe' in window"):
            self.driver.execute_script(script)
        result = self.driver.execute_async_script(
            "const [options, done] = arguments; axe.run(document, options).then(done)",
            {"runOnly": list(rules)} if rules else {},
        )
        return [
            f"{each['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
            for each in result["violations"]
            for node in each["nodes"]
        ]

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        whole = "document.documentElement"
        return int(self.driver.execute_script(f"return {whole}.scrollWidth - {whole}.clientWidth"))


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    """One for a module's tests, which use it as ``browser``."""
    with browsing() as found:
        yield found


@pytest.fixture
def browser(shared_browser: Browser) -> Browser:
    """It shows no page and has no complaints of another test."""
    shared_browser.forget()
    return shared_browser
