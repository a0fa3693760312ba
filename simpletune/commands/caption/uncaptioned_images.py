"""Decide which pictures get a caption, and why others do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from simpletune.commands.caption.record import Record
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_data_folder
from simpletune.data.sources.caption_files import CaptionFile, caption_file
from simpletune.data.sources.captions import METADATA
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.masks import without_masks
from simpletune.data.sources.sidecars import METADATA_CSV
from simpletune.data.sources.source import RejectedEntry, UnusableImage
from simpletune.data.sources.walk import is_text, replace_surrogates, walk
from simpletune.system.console import note
from simpletune.system.options import UserError


@dataclass(frozen=True)
class UncaptionedImage:
    name: str  # path relative to its data folder
    image: Path
    before: CaptionFile
    record: Record


@dataclass
class CaptionWork:
    """Pictures of all folders, by what happens to them."""

    wanted: list[UncaptionedImage] = field(default_factory=list)
    kept: int = 0
    # pictures that share the caption file of another, such as a.png beside a.jpg
    sharing: list[str] = field(default_factory=list)
    rejected: list[RejectedEntry] = field(default_factory=list)  # entries that cannot get a caption, and why


def sources_of(place: Path, overrides: list[str]) -> list[Folder]:
    """List the folders to caption: those of a configuration, or the folder itself."""
    if place.is_dir():
        if overrides:
            raise UserError(f"{overrides[0]}: {place} is a folder of pictures, which has no fields. Leave it out")
        return [require_text_captions(Folder(path=str(place), reading="any", mask="files"), "")]
    read, notices = read_config(place, overrides, needs_model=False)
    note(notices)
    config = resolve_data_folder(read)
    folders: dict[str, Folder] = {}
    for source in config.sources:
        if not isinstance(source, Folder):
            raise UserError(f"data.source: {source.path} is a table, which holds its captions. Caption folders only")
        folders.setdefault(source.path, require_text_captions(source, "data.captions: "))
    return list(folders.values())


def require_text_captions(source: Folder, field: str) -> Folder:
    """Refuse a folder whose captions training would not read from text files."""
    folder = Path(source.path)
    if source.prompt is not None:
        raise UserError(f"data.prompt is set, so no caption in {source.path} would be read. Set data.prompt=null")
    names = set[str]()
    if source.captions in ("auto", "jsonl") and source.reading == "any":
        found = walk(folder, source.links).others
        names = {file.name for file in found if file.name.lower() in (METADATA, METADATA_CSV)}
    elif source.captions in ("auto", "jsonl") and (folder / METADATA).exists():
        names = {METADATA}
    if source.captions in ("jsonl", "filename") or (source.captions == "auto" and names):
        read = min(names, default=METADATA) if source.captions != "filename" else "file names"
        remedy = f"Set data.captions=txt in a configuration{f', or remove {read}' if names else ''}"
        raise UserError(f"{field}{source.path} takes its captions from {read}, not from text files. {remedy}")
    return source


def find_work(sources: Sequence[Folder], rewrite: str, model: str, settings: str) -> CaptionWork:
    """Examine every picture's caption without opening pictures.

    ``rewrite``: captions to write: ``missing``; ``ours``, also those that a model wrote with other settings; ``all``.
    """
    work = CaptionWork()
    for source in sources:
        root = Path(source.path)
        record = Record(root)
        found = walk(root, source.links, source.reading)
        files, _ = without_masks(
            found.images, source.mask, None if source.mask_path is None else Path(source.mask_path)
        )
        work.rejected += found.rejected
        texts: set[Path] = set()
        for file in files:
            name = file.relative_to(root).as_posix()
            try:
                if not is_text(name):
                    raise UnusableImage("its file name is not UTF-8 text. Rename it")
                before = caption_file(root, file)
            except UnusableImage as reason:
                work.rejected.append(RejectedEntry(replace_surrogates(name), str(reason)))
                continue
            if before.file in texts:
                work.sharing.append(name)
                continue
            texts.add(before.file)
            made = record.find(before)
            redo = made is not None and (made.model, made.settings) != (model, settings)
            # An empty file counts as no caption.
            if not before.text or rewrite == "all" or (rewrite == "ours" and redo):
                work.wanted.append(UncaptionedImage(name, file, before, record))
            else:
                work.kept += 1
    return work
