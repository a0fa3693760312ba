"""The page Data: thumbnails as training crops them, captions and edits, truncated captions, captioning."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from simpletune.apps.web import data_jobs
from simpletune.apps.web.data_set import (
    PAGE,
    SHOWN,
    DataSet,
    card_id,
    open_data_set,
    picture_tiles,
    select_pictures,
    suggestions,
)
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import Runs
from simpletune.apps.web.templates import read_form, render
from simpletune.commands.inspect_data.caption_edits import Edit, apply, preview, tag_counts
from simpletune.commands.inspect_data.prompt_cuts import Cutter
from simpletune.commands.inspect_data.thumbnails import kept_thumbnail
from simpletune.data.sources.caption_files import ChangedCaption, write_caption
from simpletune.data.sources.source import UnusablePicture
from simpletune.system.options import Json, UserError

TAGS = 60  # shown
CHANGES = 20  # shown in a preview
CHANGED = "captions-changed"  # event for the parts of the page that count captions
Form = Mapping[str, list[str]]


def routes() -> list[Route]:
    """Return the page's routes."""
    return [
        Route("/data", data),
        Route("/data/gallery", gallery),
        Route("/data/thumbnail", thumbnail),
        Route("/data/summary", summary),
        Route("/data/caption", caption, methods=["POST"]),
        Route("/data/preview", show_changes, methods=["POST"]),
        Route("/data/apply", apply_changes, methods=["POST"]),
        *data_jobs.routes(),
    ]


def stamps(roots: Roots, runs: Runs) -> dict[str, Hashable]:
    """Return the stamps of the topics ``data-check:KEY`` and ``data-caption:KEY``, for the page's processes."""
    return data_jobs.stamps(roots)


def _asked(request: Request, form: Form | None = None) -> DataSet:
    """The data set that a request names, in its address or its form."""
    given = {name: values[0] for name, values in form.items()} if form is not None else request.query_params
    return open_data_set(request.app.state.roots, given.get("place", ""), given.get("source", "0"))


def data(request: Request) -> Response:
    """GET /data: the page; without a place, a form that asks for one."""
    roots: Roots = request.app.state.roots
    place = request.query_params.get("place") or request.query_params.get("folder")
    if not place:
        return render(request, "data_choose.html", suggested=suggestions(roots))
    found = open_data_set(roots, place, request.query_params.get("source", "0"))
    root = roots.named[0]
    shown = found.folder.relative_to(root) if found.folder.is_relative_to(root) else found.folder
    return render(request, "data.html", data=found, shown=shown, query=found.query, **_gallery(request, found))


def gallery(request: Request) -> Response:
    """GET /data/gallery: a page of thumbnails and captions."""
    found = _asked(request)
    return render(request, "data_gallery.html", data=found, query=found.query, **_gallery(request, found))


def _gallery(request: Request, found: DataSet) -> Json:
    show, text = request.query_params.get("show", "all"), request.query_params.get("q", "")
    number = request.query_params.get("page", "1")
    entries = select_pictures(found, show if show in SHOWN else "all", text)
    pages = max(1, -(-len(entries) // PAGE))
    page = min(max(1, int(number)), pages) if number.isdecimal() and len(number) < 9 else 1
    cards = picture_tiles(found, entries[(page - 1) * PAGE : page * PAGE])
    shown: Json = {"show": show if show in SHOWN else "all", "text": text, "number": page, "pages": pages}
    return {"cards": cards, "count": len(entries), **shown}


def thumbnail(request: Request) -> Response:
    """GET /data/thumbnail: a picture as training crops it; a link with another version is another thumbnail."""
    found = _asked(request)
    roots: Roots = request.app.state.roots
    name = request.query_params.get("name", "")
    file = found.picture(name)
    if file is None:
        raise HTTPException(404)
    try:
        kept = kept_thumbnail(file, found.source, found.config.model.multiple, roots.own / "thumbnails")
    except UnusablePicture as reason:
        raise HTTPException(404, f"{name} {reason}") from None
    return FileResponse(kept, media_type="image/webp", headers={"cache-control": "private, max-age=86400"})


def summary(request: Request) -> Response:
    """GET /data/summary: tags, and how many captions are missing or truncated."""
    found = _asked(request)
    entries = found.entries()
    texts = [entry.text for entry in entries if entry.text]
    cutter = Cutter(found.config)
    cuts = cutter.cuts([found.prompt(text) for text in texts])
    cut = {name: sum(any(each.encoder == name for each in one) for one in cuts) for name in cutter.names}
    tags = tag_counts(texts, found.source.tag_separator)
    values: Json = {
        "pictures": len(entries),
        "captioned": len(texts),
        "cut": cut,
        "tags": tags[:TAGS],
        "all_tags": len(tags),
    }
    return render(request, "data_summary.html", data=found, problems=cutter.problems, **values)


async def caption(request: Request) -> Response:
    """POST /data/caption: write one caption, unless its file has changed since the page showed it."""
    return await _with_form(request, _write)


def _write(request: Request, form: Form) -> Response:
    found = _asked(request, form)
    _require_editable(found)
    name, typed = form.get("name", [""])[0], form.get("caption", [""])[0]
    try:
        entry = found.entry(name)
    except UserError as reason:
        return _unwritten(request, name, str(reason), typed)
    if entry.caption is None:
        return _unwritten(request, name, f"{name}: {entry.problem}", typed)
    said, changed, kept = "", entry.caption.digest != form.get("digest", [""])[0], None
    if not changed:
        try:
            write_caption(entry.caption, typed)
            said = "Saved"
        except ChangedCaption:
            changed = True
        except UserError as reason:
            said, kept = str(reason), typed
    values: Json = {"typed": typed if changed else kept, "said": said, "changed": changed}
    (card,) = picture_tiles(found, [found.entry(entry.name)])
    response = render(request, "data_card.html", card=card, data=found, query=found.query, **values)
    response.headers["hx-trigger"] = CHANGED
    return response


def _unwritten(request: Request, name: str, reason: str, typed: str) -> Response:
    """Show why there is nothing to write to, and return what the user typed."""
    return render(request, "data_unwritten.html", 422, id=card_id(name), name=name, reason=reason, typed=typed)


async def show_changes(request: Request) -> Response:
    """POST /data/preview: count what an edit would change, without writing."""
    return await _with_form(request, _preview)


def _preview(request: Request, form: Form) -> Response:
    found = _asked(request, form)
    _require_editable(found)
    edit = _edit(form)
    seen = preview(edit, found.entries())
    values: Json = {"edit": edit, "preview": seen, "most": CHANGES, "data": found}
    return render(request, "data_changes.html", **values)


async def apply_changes(request: Request) -> Response:
    """POST /data/apply: write an edit that a preview has shown."""
    return await _with_form(request, _apply)


def _apply(request: Request, form: Form) -> Response:
    found = _asked(request, form)
    _require_editable(found)
    done = apply(preview(_edit(form), found.entries()), form.get("fingerprint", [""])[0])
    response = render(request, "data_applied.html", done=done, query=found.query)
    response.headers["hx-trigger"] = CHANGED
    return response


def _edit(form: Form) -> Edit:
    kind = form.get("kind", [""])[0]
    if kind not in ("replace", "prefix"):
        raise UserError("Choose what to do: replace a text, or put a prefix before captions")
    texts = (form.get("find", [""])[0], form.get("text", [""])[0])
    return Edit("replace" if kind == "replace" else "prefix", *texts)


def _require_editable(found: DataSet) -> None:
    if found.why_not:
        raise UserError(found.why_not)


async def _with_form(request: Request, handle: Callable[[Request, Form], Response]) -> Response:
    """Read a form, and handle it in a thread, because it reads and writes files."""
    return await run_in_threadpool(handle, request, await read_form(request))
