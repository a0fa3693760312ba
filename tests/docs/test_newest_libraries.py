"""What ``make canary`` says of libraries that are newer than our bounds, and the private names that we lean on."""

from __future__ import annotations

import http.server
import io
import re
import threading
import zipfile
from pathlib import Path

import pytest
from canary import outcome, requirements, table, unbounded
from packaging.requirements import Requirement
from private_names import LIBRARIES, RemoteFile, has, installed, missing, private_names, reader

ROOT = Path(__file__).resolve().parents[2]


def test_the_installed_libraries_have_every_private_name() -> None:
    names = private_names()
    assert "torch._C._autograd._top_saved_tensors_default_hooks" in names and len(names) > 40
    assert [*missing(names, LIBRARIES, installed)] == []


def test_private_names_are_found_however_they_are_imported(tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(
        "import torch\nimport torch._a.b as c\nfrom peft.x import _late as later\nfrom diffusers import public\n"
        "torch._C._d.e(c.f)\npublic._g.h\nself._ours = torch.public.__name__\n"
    )
    names = ["diffusers.public._g.h", "peft.x._late", "torch._C._d.e", "torch._a.b.f"]
    assert [name for name, files in private_names(tmp_path).items() if files != {"ON_OBJECTS"}] == names


WHEEL = {
    "peft/__init__.py": "from peft.layer import Layer\n",
    "peft/layer.py": "class Layer:\n    _kept = 1\n",
    "peft/_inner/__init__.py": "",
    "peft/_inner/part.pyi": "def _call(): ...\n",
    "peft/filling": "0" * 300_000,
}


class Parts(http.server.BaseHTTPRequestHandler):
    """A server that sends parts of one file, and its whole where ``parts`` is false."""

    data: bytes
    parts = True
    sent = 0

    def do_GET(self) -> None:
        first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers["Range"]).groups()  # type: ignore[union-attr]
        size = len(self.data)
        span = slice(int(first), int(last) + 1) if first else slice(size - int(last), size)
        body = self.data[span] if self.parts else self.data
        self.send_response(206 if self.parts else 200)
        self.send_header("Content-Range", f"bytes {span.start}-{span.stop - 1}/{size}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        type(self).sent += len(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_a_lost_name_is_named_and_a_wheel_is_read_in_parts() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in WHEEL.items():
            archive.writestr(path, text)
    kind = type("Server", (Parts,), {"data": file.getvalue()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/peft.whl"
        with zipfile.ZipFile(io.BufferedReader(RemoteFile(url))) as archive:
            read = reader(archive)
            known = {"peft.Layer._kept": {"a.py"}, "peft._inner.part._call": {"a.py"}}
            lost = {"peft.Layer._gone": {"b.py", "a.py"}, "peft._outer.part": {"a.py"}, "torch._x": {"a.py"}}
            assert [*missing(known | lost, ("peft",), read)] == [
                "peft.Layer._gone (a.py, b.py)", "peft._outer.part (a.py)",
            ]  # fmt: skip
        assert kind.sent < 100_000
        kind.parts = False
        with pytest.raises(OSError, match="sends no parts"):
            RemoteFile(url)
        server.shutdown()
    assert not has("torch._x", lambda path: None)


def test_upper_bounds_are_ignored_and_the_table_says_what_lies_beyond(tmp_path: Path) -> None:
    wanted = requirements(ROOT / "pyproject.toml")
    assert {"torch", "obstore", "pytest", "uvicorn"} <= set(wanted) and "simpletune" not in wanted
    texts = ["torch>=2.11,<2.14", "moto[s3]>=5.2,<6", "axe-core-python==0.1.0"]
    assert [unbounded(Requirement(text)) for text in texts] == ["torch>=2.11", "moto[s3]>=5.2", "axe-core-python"]
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="good"/>'
        '<testcase classname="tests.a" name="bad"><failure message="a | b&#10;more"/></testcase>'
        '<testcase classname="tests.a" name="dear"><skipped/></testcase></testsuite></testsuites>'
    )
    some = {name: Requirement(text) for name, text in zip(("torch", "moto", "axe-core-python"), texts, strict=True)}
    versions = {"torch": "2.15.0+cpu", "moto": "5.3", "axe-core-python": "0.1.0"}
    text = table(some, versions, ["torch._int_mm (ours.py)"], *outcome(report))
    assert "| torch | <2.14,>=2.11 | 2.15.0+cpu | beyond the bound, lacks torch._int_mm (ours.py) |" in text
    assert "| moto | <6,>=5.2 | 5.3 | within the bound |" in text
    assert "Tests: 1 passed, 1 failed, 1 skipped." in text and "| tests.a::bad | a \\| b |" in text
