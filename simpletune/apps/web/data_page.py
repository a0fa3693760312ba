"""The page Data: thumbnails as training crops them, captions and edits and their undo, truncated captions; and the
processes that it starts: the check of all pictures, and captioning by a model."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from simpletune.apps.http import whole_number
from simpletune.apps.web import processes
from simpletune.apps.web.data_set import (
    ANY,
    MODELS,
    ORDERS,
    PAGE,
    ROWS,
    SHOWN,
    DataSet,
    card_id,
    faults_of,
    image_tiles,
    open_data_set,
    select_images,
    suggestions,
)
from simpletune.apps.web.form.presets import card_here
from simpletune.apps.web.history import Change, History
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import Runs, stamps_in
from simpletune.apps.web.scans import WAIT, ImageScan, Scans
from simpletune.apps.web.templates import Form, render, with_form
from simpletune.commands.caption.defaults import CAPTIONERS, TAGGER, default_model
from simpletune.commands.init import Answers, FolderContents, suggest
from simpletune.commands.inspect_data.caption_edits import CaptionedImage, Edit, apply, preview, tag_counts
from simpletune.commands.inspect_data.prompt_cuts import Cutter
from simpletune.commands.inspect_data.report import FIGURES
from simpletune.commands.inspect_data.scan import DatasetReport
from simpletune.commands.inspect_data.thumbnails import thumbnail_of
from simpletune.data.sources.caption_files import ChangedCaption, caption_content, write_caption
from simpletune.data.sources.source import UnusableImage
from simpletune.data.sources.walk import replace_surrogates
from simpletune.system.atomic import write_json
from simpletune.system.hub import HUB_NAME
from simpletune.system.options import Json, UserError, plural

TAGS = 60  # shown
CHANGES = 20  # shown in a preview
GROUPS, EACH = 24, 6  # groups of duplicates shown, and pictures in each
LISTED = 200  # unusable entries
LINES = 12  # of a log
STRIP = 24  # pictures shown after an upload
ASKED_AGAIN = 200  # pictures up to which a saved caption has the folder scanned again
LONGEST = 2000  # characters of a field
CHANGED = "captions-changed"  # event for the parts of the page that count captions, or show what can be undone
UNDONE = "data-undone"  # event for the same parts but what can be undone, which says itself what was
CHECK, CAPTION = "data-check-", "data-caption-"
PRECISIONS, DEVICES = ("bf16", "int8", "fp32"), ("auto", "cpu", "cuda")
THRESHOLDS = {"threshold": "Least probability", "character-threshold": "Least probability of a character's name"}
REDO = "ours"
FolderScan = ImageScan[FolderContents] | ImageScan[DatasetReport]


def routes() -> list[Route]:
    return [
        Route("/data", data),
        Route("/data/gallery", gallery),
        Route("/data/files", files),
        Route("/data/folders", folders),
        Route("/data/strip", strip),
        Route("/data/thumbnail", thumbnail),
        Route("/data/summary", summary),
        Route("/data/caption", save_caption, methods=["POST"]),
        Route("/data/preview", preview_edit, methods=["POST"]),
        Route("/data/apply", apply_edit, methods=["POST"]),
        Route("/data/undo", undo_part, methods=["GET"]),
        Route("/data/undo", undo, methods=["POST"]),
        Route("/data/check", check, methods=["GET"]),
        Route("/data/check", start_check, methods=["POST"]),
        Route("/data/captioning", captioning, methods=["GET"]),
        Route("/data/captioning", start_captioning, methods=["POST"]),
        Route("/data/captioning/stop", stop_captioning, methods=["POST"]),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return the stamps of the topics ``data-check:KEY`` and ``data-caption:KEY``, for the page's processes."""
    found: dict[str, list[tuple[str, Hashable]]] = {}
    for name, stamp in sorted(stamps_in(roots.own / processes.LOGS).items()):
        if name.startswith("data-"):
            kind, _, key = Path(name).stem.rpartition("-")
            found.setdefault(f"{kind}:{key}", []).append((name, stamp))
    return {topic: tuple(files) for topic, files in found.items()}


def data_set_of(request: Request, given: Mapping[str, str]) -> DataSet:
    """Open the data set that a request names, in its address or its form."""
    names = ("place", "source", "model", "side", "upscale")
    return open_data_set(request.app.state.roots, *(given.get(name, "") for name in names))


def _scan(request: Request, found: DataSet, wait: float = WAIT) -> FolderScan | None:
    """Return the scan of a folder, which a configuration may say how to read; None for a table."""
    scans: Scans = request.app.state.scans
    if found.is_table:
        return None
    return (
        scans.scan_folder(found.folder, wait=wait)
        if found.model
        else scans.scan_data_set(found.config, found.folder, wait)
    )


def _report(scan: FolderScan | None) -> DatasetReport | None:
    found = scan.found if scan is not None else None
    return found.report if isinstance(found, FolderContents) else found


# Pictures


def data(request: Request) -> Response:
    """Show the page; without a place, a form that asks for one."""
    roots: Roots = request.app.state.roots
    place = request.query_params.get("place") or request.query_params.get("folder")
    if not place:
        return render(request, "data_choose.html", suggested=suggestions(roots), uploads=roots.uploads)
    found = data_set_of(request, {**request.query_params, "place": place})
    scan, card = _scan(request, found), card_here()
    if scan is not None and isinstance(scan.found, FolderContents) and not found.side:  # as a run would choose them
        chosen = suggest(found.folder, Answers(model=found.model), card, scan.found).config["data"]
        side = str(chosen.get("resolution", found.source.resolution))
        upscale = "" if chosen.get("max_upscale", 0) is not None else ANY
        found = open_data_set(roots, place, str(found.index), found.model, side, upscale)
    elif scan is not None and scan.is_running and not found.side:  # it is not known yet whether small ones are used
        found = open_data_set(roots, place, str(found.index), found.model, "", ANY)
    root = roots.named[0]
    shown = found.folder.relative_to(root) if found.folder.is_relative_to(root) else found.folder
    return render(
        request,
        "data.html",
        data=found,
        shown=shown,
        query=found.query,
        card=card,
        default=default_model(card),
        models=(*CAPTIONERS, TAGGER),
        bases=MODELS,
        scan=scan,
        report=_report(scan),
        polled=False,
        most=ASKED_AGAIN,
        **_gallery(request, found, scan),
    )


def files(request: Request) -> Response:
    """Show what each file of the folder is to training."""
    found = data_set_of(request, request.query_params)
    scan, polled = _scan(request, found), "polled" in request.query_params
    return render(
        request,
        "data_files.html",
        data=found,
        scan=scan,
        report=_report(scan),
        query=found.query,
        polled=polled,
        most=ASKED_AGAIN,
    )


def folders(request: Request) -> Response:
    """List the folders with pictures in the roots."""
    return render(request, "data_folders.html", suggested=suggestions(request.app.state.roots))


def strip(request: Request) -> Response:
    """Show the first pictures of a folder that an upload has made, and where to go on with them."""
    found = data_set_of(request, request.query_params)
    files = found.files()
    names = [replace_surrogates(file.relative_to(found.folder).as_posix()) for file in files[:STRIP]]
    return render(request, "data_strip.html", data=found, query=found.query, names=names, count=len(files))


def gallery(request: Request) -> Response:
    """Show a page of thumbnails and captions."""
    found = data_set_of(request, request.query_params)
    return render(
        request,
        "data_gallery.html",
        data=found,
        query=found.query,
        **_gallery(request, found, _scan(request, found, 0)),
    )


def _gallery(request: Request, found: DataSet, scan: FolderScan | None) -> Json:
    show, text = request.query_params.get("show", "all"), request.query_params.get("q", "")
    show = show if show in SHOWN else "all"
    number = whole_number(request.query_params.get("page", "1"))
    order = request.query_params.get("order", "name")
    order = order if order in ORDERS else "name"
    report = {} if order == "name" else _read_report(request.app.state.roots, found)
    entries: Sequence[CaptionedImage | Path]
    if show == "all" and order == "name" and not text and not found.is_table:
        entries = found.files()  # of many thousands of captions, only those of this page are read
    else:
        entries = select_images(found, show, text, order, report)
    pages = max(1, -(-len(entries) // PAGE))
    page = min(max(1, number or 1), pages)
    scanned = _report(scan)
    faults = {} if scanned is None else faults_of(scanned)
    cards = image_tiles(found, found.captioned(entries[(page - 1) * PAGE : page * PAGE]), faults)
    view = urlencode({**found.given, "show": show, "q": text, "order": order})
    return {
        "cards": cards,
        "count": len(entries),
        "show": show,
        "text": text,
        "number": page,
        "pages": pages,
        "view": view,
        "order": order,
        "orders": ORDERS,
        "unordered": order != "name" and not report,
        "rows": ROWS,
    }


def thumbnail(request: Request) -> Response:
    """Send a picture as training crops it, or only what its mask leaves; a link with another version is another
    thumbnail."""
    found = data_set_of(request, request.query_params)
    roots: Roots = request.app.state.roots
    name = request.query_params.get("name", "")
    try:
        content = found.content(name, request.query_params.get("masked") == "1")
        if content is None:
            raise HTTPException(404)
        kept = thumbnail_of(
            content.read,
            content.version,
            found.source,
            found.config.model.architecture.multiple,
            roots.own / "thumbnails",
            content.mask,
        )
    except UnusableImage as reason:
        raise HTTPException(404, f"{name} {reason}") from None
    return FileResponse(kept, media_type="image/webp", headers={"cache-control": "private, max-age=86400"})


def summary(request: Request) -> Response:
    """Show the tags, and how many captions are missing or truncated."""
    found = data_set_of(request, request.query_params)
    entries = found.entries()
    texts = [entry.text for entry in entries if entry.text]
    cutter = Cutter(found.config)
    cuts = cutter.cuts([found.prompt(text) for text in texts])
    cut = {name: sum(any(each.encoder == name for each in one) for one in cuts) for name in cutter.names}
    tags = tag_counts(texts, found.source.tag_separator)
    return render(
        request,
        "data_summary.html",
        data=found,
        problems=cutter.problems,
        images=len(entries),
        captioned=len(texts),
        cut=cut,
        tags=tags[:TAGS],
        all_tags=len(tags),
    )


# Captions


@with_form
def save_caption(request: Request, form: Form) -> Response:
    """Write one caption, unless its file has changed since the page showed it."""
    found = _editable(request, form)
    name, typed = form.get("name", ""), form.get("caption", "")
    try:
        entry = found.entry(name)
        if entry.caption is None:
            raise UserError(f"{name}: {entry.problem}")
    except UserError as reason:  # there is nothing to write to; what the user typed returns
        said = str(reason)
        return render(request, "data_unwritten.html", 422, id=card_id(name), name=name, reason=said, typed=typed)
    said, changed, kept, made = "", entry.caption.digest != form.get("digest", ""), None, None
    if not changed:
        try:
            contents = {entry.caption.file: caption_content(entry.caption.file, typed).encode()}
            with _history(request, found).change(f"caption of {entry.name}", contents) as made:
                write_caption(entry.caption, typed)
            said = "Saved"
        except ChangedCaption:
            changed = True
        except UserError as reason:
            said, kept = str(reason), typed
    return _card(request, found, entry.name, typed=typed if changed else kept, said=said, changed=changed, made=made)


def _card(
    request: Request, found: DataSet, name: str, typed: str | None, said: str, changed: bool, made: Change | None
) -> Response:
    """Show a picture after an attempt to write its caption; ``made`` can be undone."""
    values: Json = {"typed": typed, "said": said, "changed": changed, "made": made}
    (card,) = image_tiles(found, [found.entry(name)])
    response = render(request, "data_card.html", card=card, data=found, query=found.query, **values)
    response.headers["hx-trigger"] = CHANGED
    return response


@with_form
def preview_edit(request: Request, form: Form) -> Response:
    """Count what an edit would change, without writing."""
    found, edit = _editable(request, form), _edit(form)
    seen = preview(edit, found.entries())
    return render(request, "data_changes.html", edit=edit, preview=seen, most=CHANGES, data=found)


@with_form
def apply_edit(request: Request, form: Form) -> Response:
    """Write an edit that a preview has shown."""
    found = _editable(request, form)
    edit = _edit(form)
    seen, contents = preview(edit, found.entries()), {}
    for entry, after in seen.changes:
        assert entry.caption is not None
        contents[entry.caption.file] = caption_content(entry.caption.file, after).encode()
    with _history(request, found).change(f"{plural(len(contents), 'caption')} ({edit.kind})", contents):
        written, left = apply(seen, form.get("fingerprint", ""))
    response = render(request, "data_applied.html", written=written, left=left, query=found.query)
    response.headers["hx-trigger"] = CHANGED
    return response


def undo_part(request: Request) -> Response:
    """Show what can be undone."""
    found = data_set_of(request, request.query_params)
    last = _history(request, found).last()
    refresh = request.query_params.get("refresh", "")
    return render(
        request, "data_undo.html", data=found, last=last, query=found.query, refresh=refresh, undone="", left=[]
    )


@with_form
def undo(request: Request, form: Form) -> Response:
    """Give files what they held before a change; a form that names a picture gets its card."""
    found, number = data_set_of(request, form), whole_number(form.get("number", ""))
    if number is None:
        raise UserError("This is not the number of a change, so nothing was undone. Reload the page")
    history = _history(request, found)
    what, left = history.undo(number)
    if "name" in form:
        said = left[0] if left else "Undone"
        response = _card(request, found, form["name"], typed=None, said=said, changed=False, made=None)
    else:
        refresh = form.get("refresh", "")
        response = render(
            request,
            "data_undo.html",
            data=found,
            last=history.last(),
            query=found.query,
            refresh=refresh,
            undone=what,
            left=left,
        )
        if refresh and not left:
            response.headers["hx-refresh"] = "true"
    response.headers["hx-trigger"] = UNDONE if "name" not in form else CHANGED
    return response


def _history(request: Request, found: DataSet) -> History:
    return History(request.app.state.roots, found.key)


def _editable(request: Request, form: Form) -> DataSet:
    found = data_set_of(request, form)
    if found.why_not:
        raise UserError(found.why_not)
    return found


def _edit(form: Form) -> Edit:
    kind = form.get("kind", "")
    if kind not in ("replace", "prefix"):
        raise UserError("Choose what to do: replace a text, or put a prefix before captions")
    return Edit("replace" if kind == "replace" else "prefix", form.get("find", ""), form.get("text", ""))


# Processes


def check(request: Request) -> Response:
    """Show the last check's findings: duplicates side by side, and what is unusable and why."""
    return _check_part(request, data_set_of(request, request.query_params))


@with_form
def start_check(request: Request, form: Form) -> Response:
    """Decode and compare all pictures in a separate process (``simpletune data``)."""
    found, roots = data_set_of(request, form), request.app.state.roots
    place = _check_folder(roots, found)
    place.mkdir(parents=True, exist_ok=True)
    config: Json = found.config.model_dump(mode="json", by_alias=True)
    scan = _scan(request, found)
    if scan is not None and isinstance(scan.found, FolderContents):  # as a run of the folder would read it
        chosen = suggest(found.folder, Answers(model=found.model), card_here(), scan.found).config["data"]
        config["data"] |= chosen | {"resolution": found.source.resolution}
    write_json(place / "config.json", config, shared=True)
    words = ("data", str(place / "config.json"), "--out", str(place), "--pictures", "0")
    processes.start(roots, words, CHECK + found.key, title="The check of these pictures")
    return _check_part(request, found)


def _check_folder(roots: Roots, found: DataSet) -> Path:
    return roots.own / "data" / found.key


def _check_part(request: Request, found: DataSet) -> Response:
    roots: Roots = request.app.state.roots
    report = _read_report(roots, found)
    file = _check_folder(roots, found) / FIGURES
    checked = time.strftime("%d %B %Y, %H:%M", time.localtime(file.stat().st_mtime)) if report else ""
    groups = [("Identical files", report.get("duplicates", [])), ("Nearly identical", report.get("alike", []))]
    return render(
        request,
        "data_check.html",
        data=found,
        query=found.query,
        report=report,
        checked=checked,
        groups=groups,
        most_groups=GROUPS,
        each=EACH,
        listed=LISTED,
        **_state(roots, CHECK + found.key),
    )


def _read_report(roots: Roots, found: DataSet) -> Json:
    """Read the figures of the last check; empty without one."""
    try:
        report: Json = json.loads((_check_folder(roots, found) / FIGURES).read_bytes())
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) and "unusable" in report else {}  # another version wrote it


def captioning(request: Request) -> Response:
    """Show the form and the state of captioning."""
    return _captioning_part(request, data_set_of(request, request.query_params))


@with_form
def start_captioning(request: Request, form: Form) -> Response:
    """Start ``simpletune caption`` on the folder."""
    found, roots = data_set_of(request, form), request.app.state.roots
    try:
        if found.why_not:
            raise UserError(found.why_not)
        words = caption_words(roots, found.folder, form)
        processes.start(roots, words, CAPTION + found.key, title="Captioning of these pictures")
    except UserError as reason:
        return _captioning_part(request, found, str(reason))
    return _captioning_part(request, found)


def caption_words(roots: Roots, folder: Path, form: Mapping[str, str]) -> list[str]:
    """Build the command line that captions a folder as the form says. Raises UserError if the model is neither a hub
    name nor in a root, or a choice is unknown."""
    model = form.get("model", "").strip()
    if not model:
        raise UserError("The model is empty. Give a hub name, such as florence-community/Florence-2-base, or a folder")
    is_folder = os.path.exists(roots.named[0] / model) or not HUB_NAME.match(model) or ".." in model
    chosen = str(roots.resolve(model)) if is_folder else model
    words = ["caption", str(folder), f"--model={chosen}"]
    for name in ("prompt", "prefix", "trigger", "blacklist"):  # one word each, so that no value is read as a flag
        text = form.get(name, "").strip()
        if len(text) > LONGEST or "\0" in text:
            raise UserError(f"{name} has {len(text):,} characters. Use at most {LONGEST:,}")
        ends = "," if name == "blacklist" else ""  # a text without a comma could name a file outside of the roots
        words += [f"--{name}={text}{ends}"] if text else []
    for name, said in THRESHOLDS.items():
        text = form.get(name, "").strip()
        if text and not (len(text) < 20 and re.fullmatch(r"[0-9]*\.?[0-9]+", text) and float(text) <= 1):
            raise UserError(f"{said}: {text[:40]} is not a number from 0 to 1. Use one such as 0.35")
        words += [f"--{name}={text}"] if text else []
    for name, known in (("precision", PRECISIONS), ("device", DEVICES)):
        value = form.get(name, known[0])
        if value not in known:
            raise UserError(f"{name}: {value} is unknown. Use one of {', '.join(known)}")
        words.append(f"--{name}={value}")
    return [*words, "--again"] if form.get("which") == REDO else words


@with_form
def stop_captioning(request: Request, form: Form) -> Response:
    """End captioning; captions so far stay, and the next start continues."""
    found = data_set_of(request, form)
    processes.send_signal(request.app.state.roots, CAPTION + found.key)
    return _captioning_part(request, found)


def _captioning_part(request: Request, found: DataSet, said: str = "") -> Response:
    entries, state = found.entries(), _state(request.app.state.roots, CAPTION + found.key)
    captioned = sum(bool(entry.text) for entry in entries)
    return render(
        request,
        "data_captioning.html",
        422 if said else 200,
        data=found,
        said=said,
        images=len(entries),
        captioned=captioned,
        **state,
    )


def _state(roots: Roots, log_name: str) -> Json:
    return {
        "running": processes.is_running(roots, log_name),
        "lines": processes.tail(roots, log_name, LINES),
        "code": processes.exit_code(roots, log_name),
    }
