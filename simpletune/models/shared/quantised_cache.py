"""Cache the quantised base on disk, so that the next start neither reads nor quantises the full-precision weights.

``<cache>/quantised/<key>/`` holds ``transformer.safetensors``, with every tensor of the quantised model, or several
files of it, and ``made_from.json``, with the inputs of the key and each file's size and SHA-256. The key includes the
device type, because a GPU and the CPU may round ties differently.

A large model is quantised and written in parts, so that no memory ever holds more than one. The folder appears when all
are written; a run that was killed before leaves those that were, and the next one goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from simpletune.engine.denoiser import Denoiser, quantised_layer, quantised_layers
from simpletune.engine.memory.machine_weights import host_copy
from simpletune.engine.quant.precision import WeightPrecision
from simpletune.engine.tensors import own_tensors, to_device
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part
from simpletune.models.shared.weights import TensorSource, fill_layer, put_module, require_names
from simpletune.system.atomic import quarantine, remove, remove_stale, temporary_path
from simpletune.system.checksums import sha256_of
from simpletune.system.console import detail, progress, say
from simpletune.system.disk import DiskFull, free_disk_bytes
from simpletune.system.locks import lock_of, wait_for_lock
from simpletune.system.options import UserError, join_names
from simpletune.system.portable import flush_to_disk, replace
from simpletune.system.processes import is_first_process
from simpletune.system.safetensors_file import WeightReader, write_safetensors

VERSION = 1  # increment when quantisation or the layout of a quantised layer changes
FILE, ABOUT = "transformer.safetensors", "made_from.json"
PART = 2**29  # bytes of a quantised model that are in memory together, and in one file
ROOM = 2**30  # bytes to leave free on the disk for the run's own files


class _DamagedBase(Exception):
    """The reason why a cached base is unusable."""


@dataclass
class _Part:
    """Modules whose tensors stand in one file, and the bytes of these."""

    modules: list[str] = field(default_factory=list)
    nbytes: int = 0


class QuantisedBase:
    """The entry of one quantised denoiser in the cache's root folder ``cache``; it may not exist yet.

    Args:
        config: the denoiser's ``config.json``.
        empty: builds the denoiser on the meta device.
        part: the location of its full-precision weights.
        precision: must be ``cacheable``.
        device: the device that quantises.
        overlay: JSON that tells what changes the weights before; None if nothing does.
    """

    def __init__(
        self,
        cache: Path,
        config: ModelConfig,
        empty: Callable[[], Denoiser],
        part: Part,
        precision: WeightPrecision,
        device: torch.device,
        overlay: object = None,
    ):
        self._empty, self._precision, self._device = empty, precision, device
        self.made_from: dict[str, Any] = {
            "version": VERSION,
            "weights": part.fingerprint(cache),
            "config": dict(config),
            "precision": precision.cache_key(),
            "device": device.type,
        }
        if overlay is not None:
            self.made_from["overlay"] = overlay
        key = hashlib.sha256(json.dumps(self.made_from, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = cache / "quantised" / key
        self._what = f"base    {self.made_from['precision']['weights']} weights"
        self._place = part.place

    def load(
        self, on_host: Callable[[str], bool], mapped: Callable[[str], bool] | None = None, known: bool = False
    ) -> Denoiser | None:
        """Load the frozen denoiser; return None if the entry is missing or damaged, and log damage.

        Args:
            on_host: whether the module of a given name stays in host memory.
            mapped: whether those of one of these stay in the pages of the files; None: no module's do.
            known: whether it was written just now, so that its bytes need no check.
        """
        if not self.folder.is_dir():
            return None
        try:
            files = files_of(self.folder)
            if not known:
                self._check_bytes(files)
            model = self._read(list(files), on_host, mapped)
        except (_DamagedBase, UserError, OSError, SafetensorError) as error:
            damage = f"{self._what} in {self.folder} are damaged: {error}"
            try:
                place = quarantine(self.folder)  # renamed, so that it can be inspected and is not read again
            except OSError as reason:
                say(f"{damage}. Delete the folder; it cannot be renamed ({reason})")
            else:
                say(f"{damage}. Renamed to {place}; quantising again")
            return None
        if not known:
            detail(f"{self._what} loaded from the cache {self.folder}")
        model.eval().requires_grad_(False)
        return model

    def make(
        self,
        on_host: Callable[[str], bool],
        tensors: Callable[[], TensorSource],
        fresh: Callable[[], Denoiser],
        mapped: Callable[[str], bool] | None = None,
    ) -> Denoiser:
        """Quantise the denoiser part by part into the cache, and load it from there. Of several runs the first does,
        the others wait.

        Args:
            on_host: as for ``load``.
            tensors: opens the full-precision weights.
            fresh: quantises all of them in memory, for processes that do not write, and where nothing can be written.
            mapped: as for ``load``; every process then waits for the files.

        Raises:
            UserError: weights are missing, or do not match the configuration, or nothing can be written and mapped.
        """
        if not is_first_process() and mapped is None:  # only the first process writes
            return fresh()
        with wait_for_lock(lock_of(self.folder), f"{self._what}: waiting for another run to quantise this model"):
            if (found := self.load(on_host, mapped)) is not None:
                return found
            written = self.write(tensors())
        if (found := self.load(on_host, mapped, known=True) if written else None) is not None:
            return found
        if mapped is not None:
            raise UserError(
                f"memory.host_weights mapped and objective.levels leave weights in the file of the quantised base, but "
                f"it is not in {self.folder}. Free some space, or set output.cache to another disk"
            )
        return fresh()

    def write(self, tensors: TensorSource) -> bool:
        """Quantise the weights and write them; if that fails, log why and return False."""
        part = temporary_path(self.folder)
        try:
            size = self._write(tensors, part)
        except (OSError, SafetensorError, DiskFull) as error:
            remove(part)
            _say_once(
                f"{self._what} cannot be cached in {self.folder}: {error}. The run continues; the next start will "
                "quantise again. Free some space, set output.cache to another disk, or set memory.cache_quantised=false"
            )
            return False
        except UserError:
            remove(part)
            raise
        detail(f"{self._what} cached in {self.folder} ({size / 2**30:.2f} GiB) for the next start")
        return True

    def _write(self, tensors: TensorSource, folder: Path) -> int:
        """Write the entry, in ``folder`` until it is complete, and return the size of its files."""
        model = self._empty()
        require_names(model, tensors, self._place)
        parts = self._parts()
        names = [FILE] if len(parts) == 1 else [
            f"{Path(FILE).stem}-{number + 1:05d}-of-{len(parts):05d}.safetensors" for number in range(len(parts))
        ]  # fmt: skip
        missing = [number for number, name in enumerate(names) if not (folder / name).is_file()]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        os.utime(folder)  # what a killed run left is not stale, however old
        remove_stale(self.folder.parent)
        needed, free = sum(parts[number].nbytes for number in missing), free_disk_bytes(self.folder.parent)
        if free < needed + ROOM:
            raise OSError(
                f"they need {needed / 2**30:.2f} GiB, but only {free / 2**30:.2f} GiB is free, of which the run needs "
                f"{ROOM / 2**30:g} GiB"
            )
        about = json.dumps(self.made_from | {"place": self._place}, sort_keys=True)
        quantised, sums = quantised_layers(model, self._precision), dict[str, dict[str, Any]]()
        with progress(self._what, len(parts), "parts", detail) as advance:
            for number, name in enumerate(names):
                file = folder / name
                if number in missing:
                    found = self._quantised(model, parts[number].modules, tensors, quantised)
                    write_safetensors(found, file, {"simpletune_quantised_from": about})
                    del found
                sums[name] = {"size": file.stat().st_size, "sha256": sha256_of(file)}
                advance()
        told = sums[FILE] if len(parts) == 1 else {"files": sums}
        made_from = json.dumps({**self.made_from, "place": self._place, **told}, indent=2) + "\n"
        (folder / ABOUT).write_text(made_from, encoding="utf-8")
        flush_to_disk(folder / ABOUT)
        try:
            replace(folder, self.folder)
        except OSError:
            if not self.folder.is_dir():
                raise
            remove(folder)  # another run has already written the same bytes
        else:
            flush_to_disk(self.folder.parent)
        return sum(each["size"] for each in sums.values())

    def _parts(self) -> list[_Part]:
        """Divide the model's modules, in their order, into parts of at most ``PART`` bytes, or of one module."""
        model = self._shaped()
        sizes = dict.fromkeys((name for name, _ in self._empty().named_modules()), 0)
        for name, tensor in model.state_dict().items():
            sizes[_owner(name, sizes)] += tensor.nbytes
        parts: list[_Part] = []
        for name, nbytes in sizes.items():
            if not parts or 0 < parts[-1].nbytes > PART - nbytes:
                parts.append(_Part())
            parts[-1].modules.append(name)
            parts[-1].nbytes += nbytes
        return parts

    def _quantised(
        self, model: Denoiser, modules: Sequence[str], tensors: TensorSource, quantised: Collection[str]
    ) -> dict[str, Tensor]:
        """Return the tensors of some modules of an empty model, quantised on the device, and forget the modules."""
        found: dict[str, Tensor] = {}
        for name in modules:
            fill_layer(model, name, tensors, self._precision, self._device, name in quantised, self._place)
            module = model.get_submodule(name)
            leaf = next(module.children(), None) is None
            own = {f"{name}.{own}".removeprefix(".") for own, _ in own_tensors(module)}
            state = module.state_dict(prefix=f"{name}." if name else "")
            found |= {key: tensor.cpu() for key, tensor in state.items() if leaf or key in own}
            if leaf and name:
                put_module(model, name, nn.Identity())
        return found

    def _check_bytes(self, files: Mapping[Path, Mapping[str, Any]]) -> None:
        """Verify the files' sizes and SHA-256, which takes about a second per one or two GB."""
        for file, sums in files.items():
            if file.stat().st_size != sums["size"]:
                raise _DamagedBase(f"{file.name} has {file.stat().st_size:,} of {sums['size']:,} bytes")
            if sha256_of(file) != sums["sha256"]:
                raise _DamagedBase(f"the SHA-256 of {file.name} does not match")

    def _shaped(self) -> Denoiser:
        """Build the model on the meta device with quantised layers."""
        model = self._empty()
        for name in quantised_layers(model, self._precision):
            put_module(model, name, quantised_layer(model, name, self._precision))
        return model

    def _read(
        self, files: list[Path], on_host: Callable[[str], bool], mapped: Callable[[str], bool] | None
    ) -> Denoiser:
        """Load each tensor from the mapped files."""
        names = {name for name, _ in self._empty().named_modules()}
        model, reader = self._shaped(), WeightReader(files)
        expected = model.state_dict()
        if odd := sorted(reader.names ^ set(expected)):
            raise _DamagedBase(f"{FILE} has missing or unexpected tensors: {join_names(odd, 4)}")
        tensors = {}
        for name, shaped in expected.items():
            value = reader.get(name)
            if on_host(owner := _owner(name, names)):
                tensors[name] = value if mapped is not None and mapped(owner) else host_copy(value)
            else:
                tensors[name] = to_device(value, self._device)
            if tensors[name].shape != shaped.shape:
                raise _DamagedBase(f"{FILE}: {name} has shape {list(tensors[name].shape)}, not {list(shaped.shape)}")
        model.load_state_dict(tensors, assign=True)
        return model


def _owner(tensor: str, modules: Collection[str]) -> str:
    """Return the module that owns a tensor, whose own name may contain dots (quanto's weight._data)."""
    owner = tensor.rpartition(".")[0]
    while owner not in modules:
        owner = owner.rpartition(".")[0]
    return owner


def files_of(folder: Path) -> Mapping[Path, Mapping[str, Any]]:
    """Return an entry's files, with the size and SHA-256 of each. Raises ``UserError`` if its description is damaged,
    OSError if it is missing."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        files = about.get("files") or {FILE: about}
        return {folder / name: {"size": sums["size"], "sha256": sums["sha256"]} for name, sums in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{ABOUT} cannot be read ({error!r})") from None


@lru_cache(maxsize=32)
def _say_once(text: str) -> None:
    say(text)
