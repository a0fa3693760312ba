"""Pages over damaged files of runs, and odd addresses: an answer for every one, and the other runs as they are."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image
from recorded_runs import write_run
from web_pages import many_pages, open_pages

from simpletune.apps.web import hub_page, live, processes, queue, run_page

CONTENTS = [
    b"", b"[[[", b"\xff", b"1", b'"x"', b"null", b"[]", b"{}", b'{"step": 1e400}', b'{"step": "x", "loss": []}',
    b'{"train": "x", "data": [], "model": 3}', b'{"train": {"steps": "x"}}', b"[" * 100_000, b'{"steps": -1e308}',
    b'{"steps": 3, "best": 7, "stages": [], "eval_loss_after": "x", "peak_allocated_gib": {}}', b"[1]",
    b'[{"started": 5}]',
]  # fmt: skip
FILES = (
    "config.json", "summary.json", "metrics.jsonl", "evaluations.jsonl", "eval_before.json", "attempts.json",
    "environment.json", "best.json", "data.json", "planned.json", "predicted.json", "chosen.json", "skipped.jsonl",
    "overflows.jsonl", "control.json", "control_answers.jsonl", "evaluation.json", "drawn/drawn.jsonl",
)  # fmt: skip
PAGES = ("/", "/run/odd")  # of the damaged run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A root with two runs, of which one is damaged."""
    for name in ("odd", "whole"):
        write_run(tmp_path / "runs" / name)
    return tmp_path


def test_a_damaged_run_takes_no_page_down(folder: Path) -> None:
    run = folder / "runs" / "odd"

    async def damage() -> None:
        async with many_pages(folder) as pages:
            whole = (await pages.get("/run/whole")).text
            for name in FILES:
                file = run / name
                before = file.read_bytes() if file.exists() else None
                file.parent.mkdir(exist_ok=True)
                for content in CONTENTS:
                    file.write_bytes(content)
                    for page in PAGES:
                        assert (await pages.get(page)).status_code == 200, (name, content[:40], page)
                assert "odd" in (await pages.get("/runs/table")).text and (await pages.get("/run/whole")).text == whole
                file.unlink() if before is None else file.write_bytes(before)

    asyncio.run(damage())


def test_a_folder_in_place_of_a_file(folder: Path) -> None:
    run = folder / "runs" / "odd"

    async def replace() -> None:
        async with many_pages(folder) as pages:
            for name in FILES:
                place, aside = run / name, run / "aside"
                if place.exists():
                    place.rename(aside)
                place.mkdir(parents=True)
                for page in PAGES:
                    assert (await pages.get(page)).status_code == 200, (name, page)
                shutil.rmtree(place)
                if aside.exists():
                    aside.rename(place)

    asyncio.run(replace())


def test_a_damaged_run_is_a_row_that_says_so(folder: Path) -> None:
    pages = open_pages(folder)
    for content in (b"[[[", b"1", b"\xff"):
        (folder / "runs" / "odd" / "summary.json").write_bytes(content)
        assert "summary.json cannot be read" in pages.get("/").text


# every route of the pages, with the names that it reads from an address or a form, and what they are otherwise
PLACE = {"place": "pics", "source": "0", "model": "", "side": "", "upscale": ""}
IMAGE = {**PLACE, "name": "a.png"}
STATE = {"state": "{}"}
GETS: dict[str, dict[str, str]] = {
    "/": {}, "/events": {}, "/changes": {"since": "0"}, "/static/{name}": {},
    "/runs/table": {"run": "whole"}, "/runs/losses": {"run": "whole"}, "/runs/queue": {}, "/runs/thumbnail/{name}": {},
    "/start": {"folder": "pics", "file": "", "from": "", "base": "preset", "card": "here", "trigger": "", "what": "",
        "answers": "{}", "name": "a", "train.steps": "1", "model.pretrained": "demo:tiny-sd3"},
    "/start/live": {"key": "0" * 24, "last": "0" * 24},
    "/start/run": {}, "/start/config.json": {}, "/queue/{what}": {}, "/hub": {"model": "demo:tiny-sd3"},
    "/queued/{id}": {}, "/queued/{id}/part": {}, "/folders": {"folder": "pics"},
    "/data": {**PLACE, "folder": "", "show": "all", "q": "", "page": "1", "order": "name"},
    "/data/folders": {}, "/data/files": {**PLACE, "polled": ""}, "/data/strip": {**PLACE, "polled": ""},
    "/data/gallery": {**PLACE, "show": "all", "q": "", "page": "1", "order": "name"},
    "/data/thumbnail": {**IMAGE, "masked": "0"}, "/data/summary": PLACE, "/data/undo": {**PLACE, "refresh": ""},
    "/data/check": PLACE, "/data/captioning": PLACE, "/data/mask": IMAGE, "/data/mask/picture": IMAGE,
    "/data/mask/painted": IMAGE, "/run/{name}": {}, "/run/{name}/file/{path:path}": {}, "/run/{name}/now": {},
    "/run/{name}/small/{path:path}": {}, "/run/{name}/download": {"step": "4", "format": "comfyui"},
    "/run/{name}/delete": {}, "/runs/bin": {}, "/runs/bin/empty": {},
}  # fmt: skip
POSTS: dict[str, dict[str, str]] = {
    "/queue/{what}": {"id": "1"}, "/hub/token": {"token": "x"}, "/hub/token/delete": {},
    "/hub/download": {"model.pretrained": "x"}, "/hub/pause": {"model.pretrained": "x"},
    "/start/change": {**STATE, "choice": '["a", "b"]', "base": "preset", "card": "here", "trigger": "", "name": "a",
        "class": "", "what": "", "pick": "demo:tiny-sd3",
        "data.path": "pics", "model.pretrained": "demo:tiny-sd3", "output.cache": "", "optimizer.lr": "1",
        "train.steps": "1"},
    "/start/run": STATE, "/start/config.json": STATE,
    "/data/caption": {**IMAGE, "caption": "a", "digest": ""},
    "/data/preview": {**PLACE, "kind": "replace", "find": "a", "text": "b"},
    "/data/apply": {**PLACE, "kind": "replace", "find": "a", "text": "b", "fingerprint": ""},
    "/data/undo": {**PLACE, "number": "1", "refresh": "", "name": "a.png"},
    "/data/check": PLACE, "/data/captioning/stop": PLACE, "/data/mask": {**IMAGE, "digest": ""},
    "/data/captioning": {**PLACE, "model": "a/b", "prompt": "", "prefix": "", "trigger": "", "blacklist": "",
        "threshold": "0.1", "character-threshold": "0.1", "precision": "bf16", "device": "cpu", "which": "new"},
    "/run/{name}/ask": {"ask": "draw", "prompt": "a", "negative_prompt": "", "seed": "1", "steps": "1", "width": "64",
        "height": "64", "strength": "1", "guidance": "1"},
    "/run/{name}/compare": {"prompt": "a", "seed": "1", "step": "4", "strengths": "1"},
    "/run/{name}/choose": {"step": "4"}, "/run/{name}/convert": {"format": "comfyui", "step": "4"},
    "/run/{name}/mark": {"what": "star"}, "/run/{name}/delete": {}, "/runs/bin/restore": {"id": "1"},
    "/runs/bin/empty": {"ids": "1"},
    "/run/{name}/report": {}, "/run/{name}/finish": {"step": "4"}, "/run/{name}/continue": {"steps": "9"},
    "/run/{name}/stop": {"kind": "compare"},
    "/upload": {"name": "a", "bytes": "1"}, "/upload/{id}/file": {"path": "a.png", "size": "1"},
    "/upload/{id}/finish": {}, "/upload/{id}/cancel": {},
}  # fmt: skip
IN_ADDRESS = ("/upload/{id}/file", "/data/mask")  # posts that read their names from the address
HOSTILE = [
    "9" * 5000, "-" + "9" * 30, "x" * 5000, "a/" * 3000, "\0", "\ud800", "nan", "inf", "-1", "1e999",
    "\u0663", "..", "x\ny", "", "~nobody/x", "s3://x", "{{}}", "a" * 300,
]  # fmt: skip
FORM, PNG = {"content-type": "application/x-www-form-urlencoded"}, {"content-type": "image/png"}
READS = re.compile(r"""(?:query_params|query|given|form)(?:\.get(?:list)?\(|\[)['"]([\w.-]+)['"]""")


def test_every_route_and_every_name_that_the_pages_read_is_attacked(folder: Path) -> None:
    known = {"GET": GETS, "POST": POSTS}
    parts = {("GET", f"/run/{{name}}/{part}") for part in run_page.PARTS if part != "now"}  # as that of "now"
    routes = open_pages(folder).app.app.routes  # type: ignore[attr-defined]
    found = {(method, each.path) for each in routes for method in each.methods - {"HEAD"}} - parts
    assert found == {(method, path) for method, paths in known.items() for path in paths}
    names = {name for file in Path(run_page.__file__).parent.glob("*.py") for name in READS.findall(file.read_text())}
    attacked = {name for paths in known.values() for each in paths.values() for name in each}
    assert len(names) > 25 and names <= attacked, names - attacked


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"])
def test_no_value_in_an_address_or_a_form_fails_a_page(
    folder: Path, few: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each name of each route gets each hostile value while the others are sound; the fast test takes two of the values
    for each, in turn."""
    for owner, name in ((live.Estimator, "want"), (queue, "ensure_runner"), (processes, "start")):
        monkeypatch.setattr(owner, name, lambda *_, **__: None)
    monkeypatch.setattr(hub_page, "forget_token", lambda: None)  # this machine's own
    images = folder / "pics"
    images.mkdir()
    Image.new("RGB", (64, 64)).save(images / "a.png")
    (images / "a.txt").write_text("a cat")
    painted = io.BytesIO()
    Image.new("L", (64, 64), 255).save(painted, "PNG")
    values, white, failed = itertools.cycle(HOSTILE), painted.getvalue(), list[object]()

    def quoted(text: str) -> str:
        return "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "surrogatepass"))

    async def ask() -> None:
        async with many_pages(folder) as pages:
            for method, paths in (("GET", GETS), ("POST", POSTS)):
                for path, given in paths.items():
                    if path == "/events":
                        continue  # reads nothing, and does not end
                    within = re.findall(r"{(\w+)[:}]", path)
                    for name in [*within, *given]:
                        for value in itertools.islice(values, 2) if few else HOSTILE:
                            sound = {"name": "whole", "what": "up", "id": "1", "path": "samples", "file": "a"}
                            if name == "state":
                                value = json.dumps({"mine": {"data.path": value, "name": value}, "live": value})
                            sound |= {name: quoted(value)} if name in within else {}
                            place, fields = path.replace(":path", "").format(**sound), given
                            fields = fields if name in within else {**fields, name: value}
                            sent = "&".join(f"{key}={quoted(each)}" for key, each in fields.items() if each)
                            if method == "GET":
                                answer = await pages.get(f"{place}?{sent}")
                            elif path in IN_ADDRESS:
                                answer = await pages.post(f"{place}?{sent}", content=white, headers=PNG)
                            else:
                                answer = await pages.post(place, content=sent, headers=FORM)
                            if answer.status_code >= 500:
                                why = capsys.readouterr().err.strip().splitlines()[-1:]
                                failed.append((method, path, name, value[:20], len(value), why))

    asyncio.run(ask())
    assert failed == []
