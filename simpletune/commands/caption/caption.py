"""``simpletune caption``: write a caption or tags beside each picture that has none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from simpletune.commands.caption.captioner import Captioner
from simpletune.commands.caption.defaults import default_model
from simpletune.commands.caption.loading import PRECISIONS, estimate_memory, find_captioner, load_captioner
from simpletune.commands.caption.tagger import TagChoice, Tagger, TaggerInfo, find_tagger, read_blacklist
from simpletune.commands.caption.uncaptioned_images import UncaptionedImage, find_work, sources_of
from simpletune.data.sources.caption_files import ChangedCaption, plain_line, sha256, write_caption
from simpletune.data.sources.image_files import decode
from simpletune.data.sources.source import UnusableImage
from simpletune.data.sources.walk import read_regular
from simpletune.estimate.job_estimate import MIB, shortage
from simpletune.estimate.run_estimate import card_at_hand
from simpletune.system.atomic import remove_stale
from simpletune.system.console import progress, say
from simpletune.system.devices import BF16_FROM, capability_of, choose_device, driver_version
from simpletune.system.hub import Unreachable
from simpletune.system.options import UserError, first_lines, join_names, plural
from simpletune.system.printable import printable_name

LISTED = 20  # pictures without a caption to list on the screen
OUT_OF_MEMORY = 5  # exit code


@dataclass(frozen=True)
class CaptionRequest:
    place: Path  # a folder of pictures or a configuration
    model: str | None = None  # folder or hub name of a captioner or a tagger; None: what fits the machine
    overrides: tuple[str, ...] = ()  # ``key.path=value`` overrides of the configuration
    prompt: str | None = None  # the question, task or beginning; None: the model's default
    prefix: str = ""  # text before every caption
    trigger: str = ""  # word at the beginning of every caption
    rewrite: str = "missing"  # which captions are written: ``missing``, ``ours`` or ``all``; see ``find_work``
    batch: int = 1  # pictures per batch
    precision: str = "bf16"  # ``bf16``, ``int8`` or ``fp32``
    length: int = 120  # maximum number of tokens in a caption
    device: str = "auto"  # ``auto``, ``cuda`` or ``cpu``
    only_predict: bool = False
    threshold: float | None = None  # of a tagger: least probability of a tag; None: the default
    character_threshold: float | None = None  # the same of characters' names
    blacklist: str = ""  # tags that a tagger leaves out, or a file of them; see ``read_blacklist``

    def settings(self) -> str:
        """Return all that decides a caption besides model and picture, in the form of the record."""
        names = ("prompt", "prefix", "trigger", "precision", "length")
        return json.dumps({name: getattr(self, name) for name in names}, ensure_ascii=False)


@dataclass(frozen=True)
class CaptionWriter:
    """What writes the captions, not loaded yet."""

    digest: str  # of its files
    settings: str  # all that decides a caption besides model and picture, in the form of the record
    require_room: Callable[[], None]  # prints the memory, and refuses a model that does not fit
    load: Callable[[], Captioner | Tagger]


@dataclass
class CaptionOutcome:
    written: int
    cut: int  # how many were cut off at the maximum length
    failed: list[str]  # pictures without a caption, and why


def run(request: CaptionRequest) -> CaptionOutcome:
    """Caption pictures. Captions already written stay if a later one fails."""
    sources = sources_of(request.place, list(request.overrides))
    tagger = None if request.model is None else find_tagger(request.model)
    writer = _captioner(request) if tagger is None else _tagger(request, tagger)
    work = find_work(sources, request.rewrite, writer.digest, writer.settings)
    kept = f", {plural(work.kept, 'picture')} with a caption that is kept" if work.kept else ""
    say(f"caption {plural(len(work.wanted), 'picture')}{kept}")
    if work.sharing:
        names = join_names([printable_name(name) for name in work.sharing], 3)
        say(f"note    {names}: the same name as another picture, so they share its caption file")
    writer.require_room()
    outcome = CaptionOutcome(0, 0, [f"{each.name}: {each.reason}" for each in work.rejected])
    if work.wanted and not request.only_predict:
        _caption_all(request, writer, work.wanted, outcome)
    say(f"written {plural(outcome.written, 'caption')}")
    if outcome.cut:
        longer = "Use a larger --max-new-tokens, or a prompt that asks for less"
        say(f"note    {plural(outcome.cut, 'caption')} cut off at the maximum length. {longer}")
    if outcome.failed:
        lines = first_lines([f"  {printable_name(line)}" for line in outcome.failed], LISTED)
        without = plural(len(outcome.failed), "entry has", "entries have")
        raise UserError(
            "\n".join([f"caption: {without} no new caption. Repair or remove them, and start again", *lines])
        )
    return outcome


def _captioner(request: CaptionRequest) -> CaptionWriter:
    """Find the image-to-text model, or choose one."""
    if request.threshold is not None or request.character_threshold is not None or request.blacklist:
        raise UserError(
            "--threshold, --character-threshold and --blacklist are for taggers, and this model writes sentences. "
            "Leave them out, or name a tagger, such as --model SmilingWolf/wd-vit-tagger-v3"
        )
    device = _device(request)
    name = request.model
    if name is None:
        card, held = card_at_hand(device) if device.type == "cuda" else (None, 0)
        chosen = default_model(card, held, request.precision)
        name = chosen.name
        say(f"model   {name} (fits {card.name if card else 'a CPU'}; {chosen.download()}); --model names another")
    try:
        about = find_captioner(name)
    except Unreachable as error:
        if request.model is not None:
            raise
        raise UserError(f"{error}. --model FOLDER names a model on this machine instead of {name}") from None
    precision = PRECISIONS[request.precision]
    weights, working = estimate_memory(about, precision, request.batch, request.length)
    return CaptionWriter(
        about.digest,
        request.settings(),
        lambda: _require_room(request, weights, working, device),
        lambda: load_captioner(about, precision, device, request.prompt),
    )


def _tagger(request: CaptionRequest, about: TaggerInfo) -> CaptionWriter:
    if request.prompt is not None:
        raise UserError("--prompt: a tagger takes none. Leave it out")
    given = {"threshold": request.threshold, "character": request.character_threshold}
    choice = TagChoice(
        **{name: value for name, value in given.items() if value is not None},
        blacklist=read_blacklist(request.blacklist),
    )
    settings = {"prefix": request.prefix, "trigger": request.trigger, **choice.settings()}
    return CaptionWriter(
        about.digest,
        json.dumps(settings, ensure_ascii=False),
        lambda: say(f"memory  {about.bytes / MIB:,.0f} MiB of weights; the rest is not predicted"),
        lambda: Tagger(about, choice, request.device),
    )


def _device(request: CaptionRequest) -> torch.device:
    """Choose the device, and print the choice."""
    if request.device == "auto" and not torch.cuda.is_available() and driver_version() is None:
        if request.model is None:
            say("device  cpu (no NVIDIA GPU was found; seconds to minutes a picture)")
            return torch.device("cpu")
        raise UserError(
            "--device: no NVIDIA GPU was found. Use --device cpu and accept seconds to minutes a picture, or a machine "
            "with a card"
        )
    device, why = choose_device(request.device, "auto", is_demo=False)
    capability = capability_of(device)
    if capability is not None and capability < BF16_FROM and request.precision != "fp32":
        raise UserError(
            f"--precision {request.precision} needs a card with bf16, and this is {why}. Use --precision fp32"
        )
    say(f"device  {why}")
    return device


def _require_room(request: CaptionRequest, weights: int, working: int, device: torch.device) -> None:
    """Print the predicted bytes, and refuse a model that does not fit on a card."""
    total = weights + working
    say(
        f"memory  predicted {total / MIB:,.0f} MiB on the device: {weights / MIB:,.0f} of weights in "
        f"{request.precision}, about {working / MIB:,.0f} for {plural(request.batch, 'picture')} at a time"
    )
    if device.type != "cuda":
        return
    card, held = card_at_hand(device)
    if short := shortage("memory: captioning", total, card, held):
        cheaper = [] if request.precision == "int8" else ["--precision int8"]
        cheaper += ["--batch-size 1"] if request.batch > 1 else []
        raise UserError(f"{short}. Use {' or '.join([*cheaper, 'a smaller model'])}")


def _caption_all(
    request: CaptionRequest, writer: CaptionWriter, wanted: Sequence[UncaptionedImage], outcome: CaptionOutcome
) -> None:
    for folder in {one.image.parent for one in wanted}:
        remove_stale(folder)  # left by a run that was killed
    captioner = writer.load()
    with progress("caption", len(wanted), "pictures") as advance:
        for start in range(0, len(wanted), request.batch):
            batch: list[tuple[UncaptionedImage, Image.Image]] = []
            for one in wanted[start : start + request.batch]:
                try:  # as training sees them: rotated by EXIF, on white, in sRGB
                    batch.append((one, decode(read_regular(one.image))))
                except UnusableImage as reason:
                    outcome.failed.append(f"{one.name}: {reason}")
            for one, written, cut in _captions(captioner, batch, request.length, outcome.failed):
                caption = add_prefixes(written, request.prefix, request.trigger)
                outcome.cut += cut
                if not caption:
                    outcome.failed.append(f"{one.name}: {captioner.silent}")
                    continue
                one.record.add(one.before, sha256(f"{caption}\n".encode()), writer.digest, writer.settings)
                try:
                    write_caption(one.before, caption)
                    outcome.written += 1
                except ChangedCaption as error:
                    outcome.failed.append(f"{one.name}: {error}")
            for _ in wanted[start : start + request.batch]:
                advance()


def _captions(
    captioner: Captioner | Tagger,
    batch: Sequence[tuple[UncaptionedImage, Image.Image]],
    length: int,
    failed: list[str],
) -> Iterator[tuple[UncaptionedImage, str, bool]]:
    """Caption a batch; if the model rejects one of its pictures, caption them one by one."""
    if not batch:
        return
    try:
        captions, cut = captioner.caption([image for _, image in batch], length)
    except torch.OutOfMemoryError:
        raise UserError(
            "memory: the device is full. Captions so far are written; use --precision int8, a smaller --batch-size or "
            "a smaller model, and start again",
            OUT_OF_MEMORY,
        ) from None
    except ValueError as error:
        if len(batch) > 1:
            for entry in batch:
                yield from _captions(captioner, [entry], length, failed)
        else:
            failed.append(f"{batch[0][0].name}: the model does not accept it ({error})")
        return
    for (one, _), caption, is_cut in zip(batch, captions, cut, strict=True):
        yield one, caption, is_cut


def add_prefixes(caption: str, prefix: str, trigger: str) -> str:
    """Put prefix and trigger before a caption, the trigger unless the text has it; empty if the model wrote nothing."""
    text = plain_line(caption)
    if not text:
        return ""
    text = f"{plain_line(prefix)} {text}".strip()
    words = Counter(text.replace(",", " ").replace(".", " ").split())
    wanted = plain_line(trigger)
    return f"{wanted}, {text}" if wanted and any(words[word] == 0 for word in wanted.split()) else text
