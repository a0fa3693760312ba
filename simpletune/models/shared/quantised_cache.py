"""Cache the quantised base on disk, so that the next start neither reads nor quantises the full-precision weights.

``<cache>/quantised/<key>/`` holds ``transformer.safetensors``, with every tensor of the quantised model, and
``made_from.json``, with the inputs of the key and the file's size and SHA-256. The folder is written atomically. The
key includes the device type, because a GPU and the CPU may round ties differently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from simpletune.engine.denoiser import Denoiser, quantised_layer, quantised_layers
from simpletune.engine.memory.machine_weights import host_copy
from simpletune.engine.quant.precision import WeightPrecision
from simpletune.engine.tensors import to_device
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part
from simpletune.models.shared.weights import put_module
from simpletune.system.atomic import quarantine, remove, remove_stale, temporary_path
from simpletune.system.checksums import sha256_of
from simpletune.system.console import detail, say
from simpletune.system.disk import DiskFull, free_disk_bytes
from simpletune.system.locks import lock_of, wait_for_lock
from simpletune.system.options import UserError, join_names
from simpletune.system.portable import flush_to_disk, replace
from simpletune.system.processes import is_first_process
from simpletune.system.safetensors_file import WeightReader, write_safetensors

VERSION = 1  # increment when quantisation or the layout of a quantised layer changes
FILE, ABOUT = "transformer.safetensors", "made_from.json"
ROOM = 2**30  # bytes to leave free on the disk for the run's own files


class _DamagedBase(Exception):
    """The reason why a cached base is unusable."""


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

    def load(self, on_host: Callable[[str], bool]) -> Denoiser | None:
        """Load the frozen denoiser; return None if the entry is missing or damaged, and log damage."""
        if not self.folder.is_dir():
            return None
        try:
            self._check_bytes()
            model = self._read(on_host)
        except (_DamagedBase, UserError, OSError, SafetensorError) as error:
            damage = f"{self._what} in {self.folder} are damaged: {error}"
            try:
                place = quarantine(self.folder)  # renamed, so that it can be inspected and is not read again
            except OSError as reason:
                say(f"{damage}. Delete the folder; it cannot be renamed ({reason})")
            else:
                say(f"{damage}. Renamed to {place}; quantising again")
            return None
        detail(f"{self._what} loaded from the cache {self.folder}")
        model.eval().requires_grad_(False)
        return model

    def make(self, on_host: Callable[[str], bool], fresh: Callable[[], Denoiser]) -> Denoiser:
        """Quantise the denoiser (``fresh``) and cache it. Of several runs the first does, the others wait."""
        if not is_first_process():  # only the first process writes
            return fresh()
        with wait_for_lock(lock_of(self.folder), f"{self._what}: waiting for another run to quantise this model"):
            return self.load(on_host) or self.keep(fresh())

    def keep(self, model: Denoiser) -> Denoiser:
        """Write a freshly quantised denoiser to the cache, and return it; if that fails, log why and continue."""
        part = temporary_path(self.folder, shared=True)
        try:
            size = self._write(model, part)
        except (OSError, SafetensorError, DiskFull) as error:
            _say_once(
                f"{self._what} cannot be cached in {self.folder}: {error}. The run continues; the next start will "
                "quantise again. Free some space, set output.cache to another disk, or set memory.cache_quantised=false"
            )
        else:
            detail(f"{self._what} cached in {self.folder} ({size / 2**30:.2f} GiB) for the next start")
        finally:
            remove(part)
        return model

    def _write(self, model: nn.Module, part: Path) -> int:
        """Write the entry atomically and return the size of its file."""
        tensors = model.state_dict()
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(self.folder.parent)
        free = free_disk_bytes(self.folder.parent)
        if free < needed + ROOM:
            raise OSError(
                f"they need {needed / 2**30:.2f} GiB, but only {free / 2**30:.2f} GiB is free, of which the run needs "
                f"{ROOM / 2**30:g} GiB"
            )
        part.mkdir()
        about = json.dumps(self.made_from | {"place": self._place}, sort_keys=True)
        file = write_safetensors(tensors, part / FILE, {"simpletune_quantised_from": about})
        size = file.stat().st_size
        sums = {"place": self._place, "size": size, "sha256": sha256_of(file)}
        (part / ABOUT).write_text(json.dumps({**self.made_from, **sums}, indent=2) + "\n", encoding="utf-8")
        flush_to_disk(part / ABOUT)
        try:
            replace(part, self.folder)
        except OSError:
            if not self.folder.is_dir():
                raise
            return size  # another run has already written the same bytes
        flush_to_disk(self.folder.parent)
        return size

    def _check_bytes(self) -> None:
        """Verify the file's size and SHA-256, which takes about a second per one or two GB."""
        try:
            about = json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))
            size, checksum = about["size"], about["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise _DamagedBase(f"{ABOUT} cannot be read ({error!r})") from None
        file = self.folder / FILE
        if file.stat().st_size != size:
            raise _DamagedBase(f"{FILE} has {file.stat().st_size:,} of {size:,} bytes")
        if sha256_of(file) != checksum:
            raise _DamagedBase(f"the SHA-256 of {FILE} does not match")

    def _read(self, on_host: Callable[[str], bool]) -> Denoiser:
        """Build the model on the meta device with quantised layers, then load each tensor from the mapped file."""
        model = self._empty()
        names = {name for name, _ in model.named_modules()}
        for name in quantised_layers(model, self._precision):
            put_module(model, name, quantised_layer(model, name, self._precision))
        reader = WeightReader([self.folder / FILE])
        expected = model.state_dict()
        if odd := sorted(reader.names ^ set(expected)):
            raise _DamagedBase(f"{FILE} has missing or unexpected tensors: {join_names(odd, 4)}")
        tensors = {}
        for name, shaped in expected.items():
            value, owner = reader.get(name), name
            while owner not in names:  # the tensor's own name may contain dots (quanto's weight._data)
                owner = owner.rpartition(".")[0]
            tensors[name] = host_copy(value) if on_host(owner) else to_device(value, self._device)
            if tensors[name].shape != shaped.shape:
                raise _DamagedBase(f"{FILE}: {name} has shape {list(tensors[name].shape)}, not {list(shaped.shape)}")
        model.load_state_dict(tensors, assign=True)
        return model


@lru_cache(maxsize=32)
def _say_once(text: str) -> None:
    say(text)
