"""Receive pictures into a new folder of ``Roots.uploads``: checks of names, kinds, sizes and contents; zip files entry
by entry. The folder gets its name when it is complete. Until then it is hidden, and removed if the upload fails."""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import stat
import struct
import threading
import time
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from simpletune.apps.web.roots import Roots
from simpletune.commands.inspect_data.thumbnails import AT_ONCE
from simpletune.data.sources import captions
from simpletune.data.sources.captions import METADATA, TEXTS, validate_caption
from simpletune.data.sources.folder_names import meaning
from simpletune.data.sources.image_files import decode
from simpletune.data.sources.masks import LABEL
from simpletune.data.sources.source import UnusableImage
from simpletune.data.sources.walk import MAX_BYTES, OTHER_IMAGES, SUFFIXES, format_too_large, read_regular
from simpletune.system.atomic import remove, remove_stale, temporary_path
from simpletune.system.disk import DiskFull, describe_full_disk, existing_parent, format_bytes, free_disk_bytes
from simpletune.system.options import UserError, plural
from simpletune.system.portable import flush_to_disk
from simpletune.system.printable import STEERING, printable_name

HIDDEN = "simpletune-upload-"  # begins the name of an upload's folder while it is filled
DEFAULT = "pictures"  # name of a folder
ZIP, ARCHIVES = ".zip", (".7z", ".bz2", ".gz", ".rar", ".tar", ".tgz", ".xz", ".zst")
MOST_FILES, MOST_BYTES = 20_000, 32 * 2**30  # of an upload; a zip file counts packed and unpacked
LIMITS = {
    **dict.fromkeys(SUFFIXES, MAX_BYTES),
    **dict.fromkeys(TEXTS, captions.MAX_BYTES),
    ZIP: MOST_BYTES,
    METADATA: 64 * 2**20,
}
"""How many bytes a file may have, by what its path ends in."""
DIRECTORY_BYTES = 8 * 2**20  # of a zip file's list of entries, which zipfile reads at once
MOST_RATIO, SMALL = 100, 2**20  # unpacked to packed bytes of an entry with more bytes than SMALL
DEEPEST, LONGEST, LONGEST_PATH = 8, 200, 1000  # folders in a path; bytes of a name in it; bytes of a path
CHUNK = 2**20  # bytes unpacked at a time
THUMBNAIL = 64  # pixels: a JPEG is decoded at a fraction of its size
MOST_OPEN, IDLE = 8, 600  # uploads at once; seconds after which an abandoned one is removed
SKIPPED = {"__macosx", "thumbs.db", "desktop.ini"}  # besides hidden files: what systems leave between pictures
DRIVE = re.compile(r"[A-Za-z]:")
RESERVED = {  # by Windows, whatever follows the first dot; superscript digits count
    "CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$", *(f"{port}{n}" for port in ("COM", "LPT") for n in "123456789¹²³"),
}  # fmt: skip
FORBIDDEN = set('<>:"|?*')  # by Windows in a name, besides what is refused everywhere
DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OSError,
    struct.error,
)
# For bzip2 and LZMA, zipfile unpacks all that a read of packed bytes gives, whatever size the entry claims.
BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def path_parts(path: str) -> tuple[str, ...]:
    """Split the relative path of an uploaded file. UnusableImage: a name in it is not harmless on every system."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or "\\" in path or DRIVE.match(path) or ".." in parts:
        raise UnusableImage("has a name that leads out of the folder. Use plain names and / between folders")
    if STEERING.search(path) or "\n" in path or "\t" in path:
        raise UnusableImage("has control or direction characters in its name. Rename it")
    if not parts or len(parts) > DEEPEST:
        raise UnusableImage(f"is in more than {DEEPEST} folders, or has no name. Move it up")
    if len(path.encode()) > LONGEST_PATH or any(len(part.encode()) > LONGEST for part in parts):
        raise UnusableImage(f"has more than {LONGEST} bytes in its name, or {LONGEST_PATH} in its path. Rename it")
    for part in parts:
        if part.partition(".")[0].rstrip().upper() in RESERVED or part[-1] in ". " or FORBIDDEN & set(part):
            raise UnusableImage(f"has a name that Windows cannot use ({part}). Rename it")
    return parts


def new_folder_name(text: str) -> str:
    """Return the name for a new folder that a user gave, or the default. Raises UserError if it is not one."""
    name = unicodedata.normalize("NFC", text.strip()) or DEFAULT
    try:
        if len(path_parts(name)) > 1 or "/" in name or name.startswith("."):
            raise UnusableImage("is not a folder's name. Use one without /, and without a dot in front")
    except UnusableImage as reason:
        raise UserError(f"{printable_name(text)!r} {reason}") from None
    return name


def is_skipped(parts: tuple[str, ...]) -> bool:
    return any(part.startswith(".") or part.lower() in SKIPPED for part in parts)


def kind_of(parts: tuple[str, ...]) -> str | None:
    """Return which of ``LIMITS`` a file is by its path; None if it is skipped silently. Raises UnusableImage if it is
    none."""
    if is_skipped(parts):
        return None
    if parts == (METADATA,):
        return METADATA
    suffix = PurePosixPath(parts[-1]).suffix.lower()
    if suffix in LIMITS:
        return suffix
    if suffix in OTHER_IMAGES:
        raise UnusableImage(f"is a picture of a kind that is not read ({suffix}). Save it as JPEG or PNG")
    if suffix in ARCHIVES:
        raise UnusableImage("is an archive of another kind than zip. Unpack it, or pack the pictures as a zip file")
    raise UnusableImage(f"is neither a picture nor a caption ({', '.join((*SUFFIXES, *TEXTS, METADATA))})")


class Upload:
    """One upload: its hidden folder, what it has taken and what it has left out. One request at a time uses it."""

    def __init__(self, roots: Roots, name: str):
        self.id = secrets.token_hex(16)
        self.roots = roots
        self.name = name
        self.folder = temporary_path(roots.uploads / f"{HIDDEN}{self.id[:12]}", shared=True)
        self.left_out: list[str] = []  # sentences
        self.busy = False
        self.touched = time.monotonic()
        self._bytes = self._files = 0
        self._taken: dict[str, str] = {}  # paths of files by how any system would compare them; and of their folders:
        self._folders: set[str] = set()
        self._images: dict[str, str] = {}  # paths by SHA-256
        self._captions: list[str] = []
        self._kept: set[str] = set()  # paths of pictures, without endings
        self._dropped: set[str] = set()  # paths of what is left out, without endings
        with self._room():
            roots.uploads.mkdir(exist_ok=True)
            self.folder.mkdir()

    def admit(self, path: str, size: int) -> str | None:
        """Return the kind of the next file, as ``kind_of`` does, by its size, if known. Raises UserError if there are
        too many files."""
        self._files += 1
        if self._files > MOST_FILES:
            raise UserError(f"The upload has more than {MOST_FILES:,} files. Divide it over several folders")
        kind = kind_of(path_parts(path))
        if kind is not None and size > LIMITS[kind]:
            raise UnusableImage(format_too_large(size, LIMITS[kind]))
        return kind

    def leave_out(self, path: str, reason: UnusableImage, within: str = "") -> None:
        """Record that a file was left out, and which zip file it was in."""
        self._dropped.add(os.path.splitext(path)[0])
        self.left_out.append(f"{printable_name(within)}: " * bool(within) + f"{printable_name(path)} {reason}")

    @contextmanager
    def incoming(self, kind: str) -> Iterator[Callable[[bytes], None]]:
        """Give what writes a file's content, which ``settle`` then takes.

        Raises:
            UnusableImage: it has more bytes than its kind may have.
            UserError: the files together have too many, or the disk is full.
        """
        with self._room(), open(self._incoming, "wb") as file:
            size = 0

            def write(chunk: bytes) -> None:
                nonlocal size
                size += len(chunk)
                self._bytes += len(chunk)
                if size > LIMITS[kind]:
                    raise UnusableImage(format_too_large(size, LIMITS[kind]))
                if self._bytes > MOST_BYTES:
                    most = format_bytes(MOST_BYTES)
                    raise UserError(f"The upload is larger than {most}. Divide it over several folders")
                with self._room():
                    file.write(chunk)

            yield write

    def settle(self, path: str, kind: str) -> None:
        """Check the content that has come in for a path of a kind, and give it its name, or unpack it. Raises
        UnusableImage if it is left out."""
        name = PurePosixPath(*path_parts(path))
        if kind == ZIP:
            self._unpack(name)
            return
        data, digest = read_regular(self._incoming), ""
        if kind in SUFFIXES:
            with AT_ONCE:  # the largest takes a GiB
                decode(data, THUMBNAIL)  # training turns pictures as their EXIF says, so the file keeps its bytes
            if not name.stem.endswith(LABEL):  # masks may well be equal
                digest = hashlib.sha256(data).hexdigest()
                if digest in self._images:
                    raise UnusableImage(f"has the same content as {printable_name(self._images[digest])}")
        else:
            name = name.with_suffix(name.suffix.lower())
            try:
                text = data.decode("utf-8-sig")
            except UnicodeDecodeError:
                raise UnusableImage("is not UTF-8 text. Save it as UTF-8") from None
            if kind in TEXTS:
                validate_caption(text.replace("\r\n", "\n"), "its text")
        self._claim(name)
        with self._room():
            flush_to_disk(self._incoming)
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(self._incoming, self.folder / name)
        if digest:
            self._images[digest] = str(name)
        if kind in SUFFIXES:
            self._kept.add(os.path.splitext(name)[0])
        elif kind in TEXTS:
            self._captions.append(str(name))

    def finish(self) -> Path:
        """Give the folder its name, or the next free one such as NAME-2, and return it. Raises UserError if it has no
        picture."""
        if not self._images:
            why = "; ".join(self.left_out[:3]) or "there was none"
            raise UserError(f"No picture could be used, so no folder was made: {why}. Choose others")
        emptied = set[Path]()
        for name in self._captions:
            stem = os.path.splitext(name)[0]
            if stem not in self._kept:
                (self.folder / name).unlink()
                emptied.add((self.folder / name).parent)
                if stem not in self._dropped:
                    self.left_out.append(f"{printable_name(name)} is a caption, and no picture has its name")
        for folder in emptied:  # once each: some file systems list all that is in a folder before they refuse
            with suppress(OSError):  # of a folder that holds more
                os.removedirs(folder)
        self._incoming.unlink(missing_ok=True)
        with self._room():
            flush_to_disk(self.folder)
            for number in range(1, 10**6):
                target = self.folder.with_name(self.name if number == 1 else f"{self.name}-{number}")
                if target == self.roots.runs or os.path.lexists(target):
                    continue
                try:
                    os.rename(self.folder, target)
                except OSError:  # somebody else has made it meanwhile
                    if os.path.lexists(target):
                        continue
                    raise
                flush_to_disk(target.parent)
                return target
        raise UserError(f"All names like {self.name} are taken. Choose another")

    @property
    def images(self) -> int:
        """How many pictures it has taken, without masks."""
        return len(self._images)

    @property
    def _incoming(self) -> Path:
        return self.folder / ".incoming"

    def _claim(self, name: PurePosixPath) -> None:
        """Take a path for a file. Raises UnusableImage if some system would confuse it with one that is taken."""
        folders = [_fold_case(folder) for folder in name.parents[:-1]]
        key = _fold_case(name)
        if key in self._folders or any(folder in self._taken for folder in folders):
            raise UnusableImage("has the name of a folder. Rename it")
        if key in self._taken:
            other = printable_name(self._taken[key])
            raise UnusableImage(f"has the name of {other}, apart from case or the spelling of accents. Rename one")
        self._taken[key] = str(name)
        self._folders.update(folders)

    def _unpack(self, name: PurePosixPath) -> None:
        """Take the entries of the zip file that has come in. Raises UnusableImage if the whole file is left out."""
        packed = self.folder / ".zip"
        os.replace(self._incoming, packed)
        try:
            with _Bounded(io.FileIO(packed)) as file:
                try:
                    archive = zipfile.ZipFile(file)
                except DAMAGE as error:
                    raise UnusableImage(f"is not a zip file that can be read ({error})") from None
                entries = [each for each in archive.infolist() if not each.filename.endswith("/")]
                size = sum(each.file_size for each in entries)
                if len(entries) > MOST_FILES - self._files:
                    raise UnusableImage(f"holds {len(entries):,} files; an upload takes {MOST_FILES:,}. Divide it")
                if size > MOST_BYTES - self._bytes:
                    most = format_bytes(MOST_BYTES)
                    raise UnusableImage(f"would unpack to {format_bytes(size)}; an upload takes {most}. Divide it")
                _check_ratio(size, packed.stat().st_size)
                check_room(self.folder, size)
                paths = [PurePosixPath(each.filename).parts for each in entries]
                paths = [parts for parts in paths if not is_skipped(parts)]
                tops = {parts[:1] for parts in paths}
                # one folder that holds everything adds nothing, unless training reads its name
                alone = len(tops) == 1 and all(len(parts) > 1 for parts in paths) and meaning(paths[0][0]) is None
                for entry in entries:
                    try:
                        self._take_entry(archive, entry, name.parent, int(alone))
                    except UnusableImage as reason:
                        path = name.parent.joinpath(*PurePosixPath(entry.filename).parts[alone:])
                        self.leave_out(str(path), reason, name.name)
        finally:
            packed.unlink(missing_ok=True)

    def _take_entry(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, under: PurePosixPath, drop: int) -> None:
        """Take an entry, without its first ``drop`` folders. Raises UnusableImage if it is left out."""
        parts = path_parts(entry.orig_filename)  # not filename, which ends at a null byte
        if is_skipped(parts):
            return
        path = str(under.joinpath(*parts[drop:]))
        kind = self.admit(path, entry.file_size)
        if kind is None:
            return
        if kind == ZIP:
            raise UnusableImage("is a zip file in a zip file. Unpack it first")
        if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
            raise UnusableImage("is a link or a device, not a file. Pack the file itself")
        if entry.flag_bits & 1:
            raise UnusableImage("is encrypted. Pack it without a password")
        if entry.compress_type not in BOUNDED:
            known = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma"}
            method = known.get(entry.compress_type, f"method {entry.compress_type}")
            raise UnusableImage(f"cannot be unpacked, because it is packed by {method}. Pack it by deflate, as usual")
        _check_ratio(entry.file_size, entry.compress_size)
        try:
            with self.incoming(kind) as write, archive.open(entry) as stream:
                while chunk := stream.read(CHUNK):
                    write(chunk)
        except (UnusableImage, UserError):
            raise
        except DAMAGE as error:
            raise UnusableImage(f"cannot be unpacked ({error})") from None
        self.settle(path, kind)

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = describe_full_disk(error)
            if kind is None:
                raise
            raise _disk_full(self.folder, f"{kind}, so nothing of this upload was kept") from None


class _Bounded(io.BufferedReader):
    """A file that is not read whole: zipfile reads a list of entries at once, of any length that the file claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = os.fstat(self.fileno()).st_size - self.tell()
        if (left if size is None or size < 0 else min(size, left)) > DIRECTORY_BYTES:
            raise zipfile.BadZipFile("its list of entries is too long")
        return super().read(size)


class Uploads:
    """The open uploads of a server."""

    def __init__(self, roots: Roots):
        self._roots = roots
        self._open: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, size: int) -> Upload:
        """Begin an upload of ``size`` bytes to a new folder. Raises UserError if it cannot be."""
        folder = new_folder_name(name)
        with self._lock:
            for each in list(self._open.values()):
                if not each.busy and time.monotonic() - each.touched > IDLE:
                    self._end(each)
            if len(self._open) >= MOST_OPEN:
                raise UserError(f"{plural(MOST_OPEN, 'upload')} are under way. Wait until one ends, then try again")
            if size > MOST_BYTES:
                most = format_bytes(MOST_BYTES)
                raise UserError(
                    f"These are {format_bytes(size)}; an upload takes {most}. Divide them over several folders"
                )
            check_room(self._roots.uploads, size)
            try:
                upload = Upload(self._roots, folder)
            except OSError as error:
                why = f"cannot be written to ({error.strerror or error})"
                raise UserError(f"{self._roots.uploads} {why}. Start the page with another folder as --root") from None
            self._open[upload.id] = upload
        return upload

    def find(self, id: str) -> Upload | None:
        """Return an open upload; None if it has ended."""
        found = self._open.get(id)
        if found is not None:
            found.touched = time.monotonic()
        return found

    def end(self, upload: Upload) -> None:
        """Forget an upload, and remove what it has not finished."""
        with self._lock:
            self._end(upload)

    def _end(self, upload: Upload) -> None:
        self._open.pop(upload.id, None)
        remove(upload.folder)


def clean(roots: Roots) -> None:
    """Remove what uploads of this process, and of others that have ended, have left; called where none is open."""
    for each in roots.uploads.glob(temporary_path(roots.uploads / f"{HIDDEN}*", shared=True).name):
        remove(each)
    remove_stale(roots.uploads, f"{HIDDEN}*")


def check_room(folder: Path, size: int) -> None:
    """DiskFull: a folder's disk has less space than this."""
    free = free_disk_bytes(folder)
    if size > free:
        raise _disk_full(folder, f"has {format_bytes(free)} free, and {format_bytes(size)} are needed")


def _disk_full(folder: Path, what: str) -> DiskFull:
    return DiskFull(f"The disk of {existing_parent(folder.parent)} {what}. Free some space, then upload again")


def _check_ratio(size: int, packed: int) -> None:
    if size > SMALL and size > MOST_RATIO * packed:
        raise UnusableImage(f"would unpack to {size // max(1, packed):,} times its size, as no picture does")


def _fold_case(path: PurePosixPath) -> str:
    return unicodedata.normalize("NFC", str(path)).casefold()
