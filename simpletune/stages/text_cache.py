"""Cached prompts: one entry for each, with the outputs of all text encoders, for training and for generating."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from simpletune.adapters.text.encoding import TextEncoding
from simpletune.adapters.text.inputs import PromptTokenizer, TextInputs
from simpletune.adapters.text.side import PLAIN, TextSide
from simpletune.adapters.text.text_option import NO_TEXT, Text
from simpletune.data.storage.cache import Cache, FileCache, name_of
from simpletune.data.storage.claims import ALONE, KeyRange
from simpletune.data.storage.place import CachePlace, open_cache
from simpletune.models.families import Model
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.text.clip import HIDDEN_ALONE
from simpletune.models.text.encoder import TextEncoder
from simpletune.models.text.prompts import Prompts, unpack
from simpletune.stages.latent_cache import all_finite, free_memory
from simpletune.system.atomic import remove
from simpletune.system.console import detail, progress
from simpletune.system.locks import lock_of
from simpletune.system.options import UserError
from simpletune.system.signals import poll

Parts = dict[str, Tensor]  # an encoder's outputs for a prompt
TOGETHER = 512  # prompts claimed together; each portion loads T5's layers once
KIND = "prompts"  # the folder of the entries
OLDER = "text"  # where earlier versions stored each encoder's outputs, in a folder of its own
NOT_FINITE = {
    "caption": "Its weights may be damaged, or overflow in this precision. Download it again, or use "
    "precision.compute=fp32",
    "prompt": "Its weights or a LoRA's may be damaged, or overflow in this precision. Use precision.compute=fp32",
}


class PromptEntries:
    """The outputs of some text encoders, one entry for each prompt, so that one read brings all of them.

    An entry's tensors are called ``ENCODER.tensor``. The encoders run one after the other, because not all fit on a
    card. So the outputs of all but the last wait as single files in folders beside the entries. Once the last encoder
    has a prompt's output, all of them are stored as its entry, atomically, and the waiting files are removed: a kill
    loses at most what was being encoded, and nothing stays stored twice. What this machine already has of an encoder,
    in the entries of another combination of encoders or in the form of earlier versions, is taken from there.

    Args:
        place: the place of the whole cache; a path: a folder of single files.
        prompts: identifies the encoders.
        encoders: which of them.
    """

    def __init__(self, place: CachePlace | Path, prompts: Prompts, encoders: Sequence[TextEncoder]):
        self.place, self.encoders = CachePlace(place) if isinstance(place, Path) else place, tuple(encoders)
        self._prints = {each.name: prompts.fingerprint(each, self.place.folder) for each in encoders}
        self.name = "+".join(self._prints.values())
        self.cache = open_cache(self.place, KIND, self.name)
        folder = self.place.local / KIND
        self._waiting = {
            each.name: FileCache(
                folder / self.name / each.name, lock_of(folder / f"{self.name}-{each.name}"), self._prints[each.name]
            )
            for each in encoders[:-1]
        }
        older = [FileCache(self.place.local / OLDER / each) for each in self._prints.values()]
        self._superseded = [*self._waiting.values(), *(older if self.place.form == "files" else [])]

    def fill(
        self,
        prompts: Mapping[str, str],
        outputs: Callable[[TextEncoder, list[str]], Iterator[Parts]],
        noun: str,
        device: torch.device,
        share: KeyRange = ALONE,
    ) -> set[str]:
        """Encode the prompts that have no entry yet, one encoder at a time.

        Args:
            prompts: the prompts by their keys.
            outputs: encodes prompts with one encoder.
            noun: what messages call a prompt.
            device: where the encoders run.
            share: what this process encodes first, if others fill the cache too.

        Returns:
            The prompts that this process has encoded with at least one encoder.

        Raises:
            UserError: an embedding is not finite.
        """
        missing, encoded = self.cache.lacking(prompts, share), set[str]()
        for cache in self._superseded:  # what a process left that was killed before it removed them
            left = {file.stem for file in cache.folder.glob("*.safetensors")}
            for key in set(prompts).difference(missing) if left else ():
                if name_of(key) in left:
                    remove(cache.file(key))
        if self.cache.remote and share.of > 1:  # on other machines the outputs wait elsewhere
            missing, share = [key for key in missing if share.owner(key) == share.number], ALONE
        for encoder in self.encoders if missing else ():
            encoded |= self._encode(encoder, {key: prompts[key] for key in missing}, outputs, noun, share)
            free_memory(device)
        return encoded

    def _encode(
        self,
        encoder: TextEncoder,
        missing: Mapping[str, str],
        outputs: Callable[[TextEncoder, list[str]], Iterator[Parts]],
        noun: str,
        share: KeyRange,
    ) -> set[str]:
        """Encode prompts with one encoder, and return those that this process has encoded."""
        encoded, waiting = set[str](), self._waiting.get(encoder.name)
        if waiting is None:
            todo, claim = list(missing), self.cache.claim
        else:
            todo = waiting.lacking([key for key in missing if key not in self.cache], share)
            # in this order, because an entry is stored before its waiting files are removed
            claim = partial(waiting.claim, is_done=lambda key: key in waiting or key in self.cache)
        known = self._known(encoder, todo)
        with progress(f"text  {encoder.name}", share.count(len(todo)), "prompts", detail) as advance:
            for group in claim(todo, share, TOGETHER):  # no name for the iterator: its locks must end with this loop
                new = outputs(encoder, [missing[key] for key in group if key not in known])
                for key in group:
                    parts = self._take(key, *known[key]) if key in known else None
                    if parts is None:
                        parts = next(outputs(encoder, [missing[key]]) if key in known else new)
                        encoded.add(missing[key])
                    if not all_finite(parts.values()):
                        named = f"{encoder.name} encodes the {noun} {missing[key][:80]!r} to NaN or infinity"
                        raise UserError(f"{named}. {NOT_FINITE[noun]}", code=4)
                    if waiting is None:
                        self._complete(key, encoder, parts)
                    else:
                        waiting.save(key, parts)
                    advance()
                    poll()
        return encoded

    def _complete(self, key: str, last: TextEncoder, parts: Parts) -> None:
        """Store a prompt's entry from the last encoder's output and those that wait, and remove these."""
        try:
            found = {name: cache.load(key) for name, cache in self._waiting.items()} | {last.name: parts}
        except FileNotFoundError:
            if key not in self.cache:
                raise
            return  # another process has completed it, on a file system without locks
        self.cache.save(key, {f"{name}.{part}": t for name, each in found.items() for part, t in each.items()})
        for cache in self._superseded:
            remove(cache.file(key))

    def _known(self, encoder: TextEncoder, keys: list[str]) -> dict[str, tuple[Cache, str]]:
        """Return where else this machine has the encoder's outputs: caches, and what their tensors' names begin
        with."""
        found = dict[str, tuple[Cache, str]]()
        if not keys or self.cache.remote:
            return found
        own = self._prints[encoder.name]
        places = [(OLDER, own, "")] if (self.place.local / OLDER / own).is_dir() else []
        alike = {own, own.removesuffix(HIDDEN_ALONE)}  # the latter's entries have more than is needed, never less
        for folder in sorted((self.place.local / KIND).glob("*")):
            if not alike.isdisjoint(folder.name.split("+")) and folder.name != self.name:
                places.append((KIND, folder.name, f"{encoder.name}."))
        for kind, name, start in places:
            cache = open_cache(self.place, kind, name)
            there = [key for key in keys if key not in found and key in cache]
            damaged = set(cache.lacking(there)) if there else set()
            found |= {key: (cache, start) for key in there if key not in damaged}
        return found

    def _take(self, key: str, cache: Cache, start: str) -> Parts | None:
        """Copy an encoder's outputs from another cache; None if another process has removed them meanwhile."""
        try:
            tensors = cache.load(key)
        except FileNotFoundError:
            return None
        return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}

    def load(self, key: str, only: str | None = None) -> dict[str, Parts]:
        """Load a prompt's outputs by the encoder's name, or only the tensors of one name."""
        found: dict[str, Parts] = {encoder.name: {} for encoder in self.encoders}
        names = None if only is None else [f"{encoder.name}.{only}" for encoder in self.encoders]
        for name, tensor in self.cache.load(key, names).items():
            encoder, _, part = name.partition(".")
            found[encoder][part] = tensor
        return found


class TextCache:
    """A run's prompt embeddings by prompt.

    Args:
        model: the model, with folders resolved.
        dtype: the type of the encoders' weights and of the embeddings.
        place: of the cache; a path: a folder of single files.
        text: what trains on the text side. A new token is encoded as its words; encoders that run in every step are not
            cached, and zeros replace their embeddings.
    """

    def __init__(self, model: Model, dtype: torch.dtype, place: CachePlace | Path, text: Text = NO_TEXT):
        self.prompts, self.dtype = Prompts(model.text, dtype), dtype
        self.tokens, self._trains = PromptTokenizer(text, model, self.prompts), text.trains
        encoders = [e for e in self.prompts.encoders if e.name not in self.tokens.resident]
        self._entries = PromptEntries(place, self.prompts, encoders) if encoders else None
        self.caches: list[Cache] = [self._entries.cache] if self._entries else []
        """The cache of the entries; none if all encoders run in every step."""
        self._regions = model.text.regions() if self.tokens.resident else {}

    def fill(self, prompts: Iterable[str], device: torch.device, share: KeyRange = ALONE) -> int:
        """Encode the prompts that are not cached yet, one encoder at a time.

        Args:
            prompts: the prompts.
            device: where the encoders run.
            share: what this process encodes first, if others fill the cache too; afterwards the cache holds all
                prompts.

        Returns:
            The number of prompts that this process has encoded with at least one encoder.
        """
        if self._entries is None:
            return 0
        wanted = {expanded: expanded for expanded in map(self.tokens.expanded, prompts)}
        return len(self._entries.fill(wanted, partial(self.prompts.encode, device=device), "caption", device, share))

    def lacking(self, prompts: Iterable[str]) -> set[str]:
        """Return the prompts that have to be encoded."""
        wanted = {self.tokens.expanded(prompt): prompt for prompt in prompts}
        return {wanted[key] for cache in self.caches for key in cache.lacking(wanted)}

    def load(self, prompt: str) -> Conditioning:
        """Load the conditioning of one prompt."""
        return self.prompts.assemble(self.parts(prompt))

    def pooled(self, prompt: str) -> Tensor | None:
        """Load the pooled embedding [p] of one prompt, without reading the rest; None for a family without one."""
        text = self.prompts.text
        return text.pool(self.parts(prompt, "pooled")) if text.pooled_width else None

    def parts(self, prompt: str, only: str | None = None) -> dict[str, Parts]:
        """Load every encoder's outputs for one prompt, or only the tensors of one name; zeros for the encoders that
        run in every step."""
        cached = {} if self._entries is None else self._entries.load(self.tokens.expanded(prompt), only)
        return self._zeros | {name: unpack(each, self.dtype) for name, each in cached.items()}

    @cached_property
    def _zeros(self) -> dict[str, Parts]:
        found = {}
        for name in self.tokens.resident:
            region = self._regions[name]
            pooled = torch.zeros(0 if region.pooled is None else region.pooled[1], dtype=self.dtype)
            hidden = torch.zeros(self.tokens.length(name), region.width, dtype=self.dtype)
            found[name] = {"hidden": hidden, "pooled": pooled}
        return found

    def places(self, prompt: str) -> Iterator[tuple[Cache, str]]:
        """Return where a prompt is cached."""
        return ((cache, self.tokens.expanded(prompt)) for cache in self.caches)

    def inputs(self, prompts: Sequence[str]) -> TextInputs | None:
        """Return the trained text side's inputs for a micro-batch's prompts; None if nothing trains there."""
        return self.tokens.of(prompts) if self._trains else None

    def truncated_prompts(self, prompts: Iterable[str]) -> list[str]:
        """List the prompts that the first encoder truncates."""
        first, entries = self.prompts.encoders[0].name, self._entries
        limit = self.tokens.length(first)
        if entries is None or first in self.tokens.resident or entries.cache.remote:  # not a request for each
            return [prompt for prompt in prompts if self.tokens.count(prompt) > limit]
        return [prompt for prompt in prompts if int(self.parts(prompt, "tokens")[first]["tokens"]) > limit]

    def describe_truncation(self) -> str:
        """Say what happens to ``truncated_prompts`` prompts, for messages."""
        first = self.prompts.encoders[0]
        limit = self.tokens.length(first.name)
        return f"longer than {limit} tokens: the {first.kind} encoders see only the first {limit}"


class PromptStore:
    """Prompts for generating, encoded with learned embeddings and updated text encoders.

    A prompt that neither changes has the same key as in training, so both share its entry. Otherwise the encoders that
    they change for this prompt have an entry of their own, whose key includes a digest of the vectors and updates, so
    that no encoding outlives a change of either; the others share the entry of a run that trains the former.

    Args:
        model: the model, with folders resolved.
        dtype: the type of the encoders' weights and of the embeddings.
        place: of the cache; a path: a folder of single files.
        side: embeddings and updates of the text encoders.

    Raises:
        UserError: vectors or updates are for other encoders than the model's.
    """

    def __init__(self, model: Model, dtype: torch.dtype, place: CachePlace | Path, side: TextSide = PLAIN):
        self.encoding, self._place = TextEncoding(model, dtype, side), place
        self._known: dict[tuple[TextEncoder, ...], PromptEntries] = {}

    def _entries(self, prompt: str) -> Iterator[tuple[PromptEntries, str]]:
        """Return where a prompt's outputs are stored, with its keys there."""
        by_key: dict[str, list[TextEncoder]] = {}
        for encoder in self.encoding.prompts.encoders:
            by_key.setdefault(self.encoding.key(encoder, prompt), []).append(encoder)
        for key, encoders in by_key.items():
            alike = tuple(encoders)
            if alike not in self._known:
                self._known[alike] = PromptEntries(self._place, self.encoding.prompts, alike)
            yield self._known[alike], key

    def fill(self, prompts: Iterable[str], device: torch.device) -> int:
        """Encode the prompts that are not cached yet, one encoder at a time.

        Returns:
            The number of prompts that at least one encoder has encoded.
        """
        wanted: dict[PromptEntries, dict[str, str]] = {}
        for prompt in dict.fromkeys(prompts):
            for entries, key in self._entries(prompt):
                wanted.setdefault(entries, {})[key] = prompt
        encoded, outputs = set[str](), partial(self.encoding.encode, device=device)
        for entries, own in wanted.items():
            encoded |= entries.fill(own, outputs, "prompt", device)
        return len(encoded)

    def load(self, prompt: str) -> Conditioning:
        """Load the conditioning of one prompt."""
        parts: dict[str, Parts] = {}
        for entries, key in self._entries(prompt):
            parts |= entries.load(key)
        return self.encoding.assemble(prompt, parts)
