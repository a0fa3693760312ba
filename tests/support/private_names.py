"""The private names of other libraries that the package leans on, and which of them a library no longer has.

python tests/support/private_names.py           in what is installed
python tests/support/private_names.py --newest  in the newest wheels, of which only the files that matter are read

Exits with 1 if a name is missing. ``make canary`` runs it, too.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from imports import Import, imports_in

PACKAGE = Path(__file__).resolve().parents[2] / "simpletune"
LIBRARIES = ("torch", "diffusers", "peft", "transformers", "accelerate", "bitsandbytes")
ON_OBJECTS = {  # of classes of theirs, on objects, where no import shows whose they are; and what we override
    "torch.nn.modules.module.Module": "_buffers _forward_hooks _forward_pre_hooks _modules",
    "torch._C.TensorBase": "_version",
    "torch.storage.UntypedStorage": "_cdata",
    "torch._ops.OpOverload": "_schema",
    "torch._subclasses.fake_tensor.FakeTensor": "_fake_device",
    "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule": "_get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": "_lazy_init",
    "bitsandbytes.optim.optimizer.Optimizer8bit": "check_overrides fill_qmap init_state initialized name2qmap "
    "prefetch_state to_gpu update_step",
}
OF_CPP = (
    "torch/_C/__init__.pyi", "torch/_C/_VariableFunctions.pyi", "torch/autograd/profiler.py",
    "torchgen/packaged/ATen/native/native_functions.yaml",
)  # fmt: skip
Read = Callable[[str], str | None]
"""The text of a file by its path in site-packages; None: there is none."""


@functools.cache
def private_names(package: Path = PACKAGE) -> dict[str, set[str]]:
    """The files that use each dotted name of another library of which a part begins with one underscore."""
    found: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        names = {known: meant for known, meant in names_of(imports_in(text)).items() if is_of_libraries(meant)}
        if not names:
            continue
        chain = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})(?:\s*\.\s*\w+)*?\s*\.\s*_(?!_)")
        # only a file that may use one is parsed: to parse all takes seconds
        tree = ast.parse(text) if chain.search(text) else ast.Module([], [])
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        for use in {*names.values(), *(dotted(node, names) for node in nodes)}:
            if re.search(r"\._(?!_)", use):
                found.setdefault(use, set()).add(str(file.relative_to(package.parent)))
    for owner, words in ON_OBJECTS.items():
        found |= {f"{owner}.{word}": {"ON_OBJECTS"} for word in words.split()}
    # of a chain, such as torch._C._autograd and torch._C, the longest
    return {use: found[use] for use in sorted(found) if not any(other.startswith(f"{use}.") for other in found)}


def names_of(imports: Iterable[Import]) -> dict[str, str]:
    """What imports call a module or a name, and the dotted name that it stands for."""
    names: dict[str, str] = {}
    for node in imports:
        if isinstance(node, ast.Import):
            tops = {alias.name.partition(".")[0] for alias in node.names if not alias.asname}
            names |= {top: top for top in tops} | {alias.asname: alias.name for alias in node.names if alias.asname}
        else:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name of an expression such as ``a.b.c``; empty if it is none."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value, names)):
        return f"{owner}.{node.attr}"
    return ""


def is_of_libraries(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


def has(name: str, read: Read) -> bool:
    """Whether a library has a dotted name: its modules are files, and the words after them stand in the last one.

    Names that a package imports from one of its modules are looked for there; those of torch's C++, in its lists.
    """
    parts, place = name.split("."), ""
    texts: list[str] = []
    while parts:
        folder = f"{place}/{parts[0]}".lstrip("/")
        candidates = [f"{folder}.py", f"{folder}/__init__.py", f"{folder}.pyi", f"{folder}/__init__.pyi"]
        here = [text for path in candidates if (text := read(path)) is not None]
        if not here:
            break
        place, texts, parts = folder, here, parts[1:]
    for module in modules_that_bring(parts[0], texts[0]) if parts and texts else ():
        path = module.replace(".", "/")
        texts += filter(None, (read(f"{path}.py"), read(f"{path}/__init__.py")))
    texts += filter(None, map(read, OF_CPP if name.startswith("torch.") else ()))
    return bool(place) and all(any(part in words_of(text) for text in texts) for part in parts)


def modules_that_bring(name: str, text: str) -> list[str]:
    """The modules from which a module imports a name."""
    nodes = [node for node in brought_in(text) if isinstance(node, ast.ImportFrom) and not node.level]
    return [str(node.module) for node in nodes if name in [alias.name for alias in node.names]]


@functools.cache
def brought_in(text: str) -> list[Import]:
    return imports_in(text)


@functools.cache
def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@functools.cache
def installed(path: str) -> str | None:
    file = Path(sysconfig.get_path("platlib")) / path
    return file.read_text(encoding="utf-8") if file.is_file() else None


class RemoteFile(io.RawIOBase):
    """A file on a web server, of which only what is read is fetched.

    Raises:
        OSError: the server sends no parts.
    """

    def __init__(self, url: str) -> None:
        self.url, self.place, self.size = url, 0, 0
        self.size = int(self._fetch("bytes=-1")[0].rpartition("/")[2])

    def _fetch(self, span: str) -> tuple[str, bytes]:
        request = urllib.request.Request(self.url, headers={"Range": span, "Accept-Encoding": "identity"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url}: the server sends no parts of files")
            return answer.headers["Content-Range"], answer.read()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + (0, self.place, self.size)[whence]
        return self.place

    def readinto(self, buffer) -> int:
        last = min(self.place + len(buffer), self.size) - 1
        if last < self.place:
            return 0
        data = self._fetch(f"bytes={self.place}-{last}")[1]
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)


def newest(library: str) -> tuple[str, str]:
    """The newest version of a library for this Python, and its wheel's address; downloads metadata only."""
    if tuple(map(int, metadata.version("pip").split(".")[:2])) < (23, 3):
        sys.exit(
            f"{sys.executable} has pip {metadata.version('pip')}, which would download whole wheels: upgrade it first."
        )
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--quiet"]
        subprocess.run([sys.executable, "-m", "pip", *words, "--report", report, library], check=True)
        found = json.loads(report.read_text())["install"][0]
    return found["metadata"]["version"], found["download_info"]["url"]


def reader(archive: zipfile.ZipFile) -> Read:
    names = set(archive.namelist())
    return functools.cache(lambda path: archive.read(path).decode() if path in names else None)


def missing(names: dict[str, set[str]], libraries: tuple[str, ...], read: Read) -> Iterator[str]:
    for name, files in names.items():
        if name.partition(".")[0] in libraries and not has(name, read):
            yield f"{name} ({', '.join(sorted(files))})"


def newest_missing(names: dict[str, set[str]]) -> Iterator[tuple[str, str, list[str]]]:
    """(library, newest version, missing names) of each library that we lean on."""
    for library in LIBRARIES:
        version, url = newest(library)
        file = open(url.removeprefix("file://"), "rb") if url.startswith("file://") else io.BufferedReader(
            RemoteFile(url), 1 << 20
        )  # fmt: skip
        with file, zipfile.ZipFile(file) as archive:
            yield library, version, [*missing(names, (library,), reader(archive))]


if __name__ == "__main__":
    names = private_names()
    print(f"{len(names)} private names of other libraries")
    if sys.argv[1:] == ["--newest"]:
        lacking = {f"{library} {version}": lost for library, version, lost in newest_missing(names)}
    else:
        lacking = {"installed": [*missing(names, LIBRARIES, installed)]}
    for where, lost in lacking.items():
        print(f"{where}: {'all there' if not lost else ''}", *lost, sep="\n  " if lost else "")
    sys.exit(1 if any(lacking.values()) else 0)
