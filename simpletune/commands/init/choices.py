"""Suggest a configuration for a folder of pictures and a device: its choices one by one, each with its reason. Prints
and asks nothing."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from simpletune.commands.init.answers import ABOUT, LENGTHS, Answers, What
from simpletune.commands.init.inspect_folder import (
    FolderContents,
    describe_refused,
    describe_splits,
    describe_unread,
    inspect_folder,
    source_of,
)
from simpletune.commands.inspect_data.text import format_limit
from simpletune.config.load import read_json, shipped_names
from simpletune.config.schema import DEMO, run_name
from simpletune.data.clip_words import is_clip_word
from simpletune.data.concept import Direction
from simpletune.data.demo import MODELS, TINY_KLEIN, TINY_SD3, TINY_SDXL
from simpletune.data.sources.accounts import Accounts
from simpletune.data.sources.masks import LABEL
from simpletune.data.split import split_images
from simpletune.models.families import FAMILIES, likely_family
from simpletune.models.shared.family import Family
from simpletune.system.console import silence
from simpletune.system.gpus import Card
from simpletune.system.options import Json, UserError, join_names, plural
from simpletune.system.printable import printable_name

TINY_SIDE = 64  # pixels
PROFILES = ("4gb", "6gb", "8gb", "12gb", "16gb", "24gb")
USABLE = 0.9  # share of its nominal memory that a card reports: 22.03 GiB of an L4's 24, 11.75 of 12
DEFAULT_PROFILE = "8gb"  # profile for an unknown card
TINY: Mapping[str, Mapping[str, str]] = {
    TINY_SD3: {"subject": "demo_subject", "style": "demo", "general": "demo"},
    TINY_SDXL: {"subject": "demo_sdxl", "style": "demo_sdxl", "general": "demo_sdxl"},
    TINY_KLEIN: {"subject": "demo_klein", "style": "demo_klein", "general": "demo_klein"},
}
"""Shipped configurations to take settings from, as a family's ``templates``, by the tiny model's name."""
BY_CARD = ("precision", "memory", "optimizer")  # sections that differ between configurations for cards
KEPT = ("model", "adapter", "optimizer", "schedule", "objective", "train", "memory", "validation")
FEW = 30  # up to this many pictures without captions are taken for one subject
MANY = 200  # from this many captioned pictures on, the set is taken for a general one
STEPS: dict[What, tuple[int, int, int]] = {
    "subject": (100, 400, 1500),
    "style": (60, 800, 4000),
    "general": (10, 2000, 20000),
}
"""Steps per picture, and the least and most steps of a run of normal length."""
SIDES = (1024, 768, 512)  # in pixels, of models that are not told how pictures were cut
NEAR, ENOUGH = 0.8, 0.75  # this share of the pictures reaches this share of the resolution
CHECKPOINTS = 4  # number of checkpoints of a run, all of them kept
HELD_OUT, FROM = 0.1, 50  # share of the pictures to hold out, and from how many pictures on
TRIGGER = "sks"  # a word without meaning to the text encoders, commonly used for this
GENERAL = "A photo of a lighthouse at dusk, waves against the rocks"
TINY_SLIDER = 60, 8  # steps and batch, as demo_slider
SLIDER_RANK, SLIDER_STEPS, SLIDER_SIDE, SLIDER_RATE = 4, 500, 768, 2e-4
SLIDER_DEFAULTS = {name: info.get_default() for name, info in Direction.model_fields.items()}
OWN_SIZE, DRAWN_SMALL = "the tiny model's own size", "drawing takes most of a step, and less at this size"
LISTED = 3
UNASKED = Answers()
ORDER = (
    "about", "name", "device", "model", "data", "concept", "adapter", "precision", "optimizer", "schedule", "objective",
    "train", "prior", "memory", "checkpoint", "validation",
)  # fmt: skip
WITHOUT_TOKENIZERS = "a single file has no tokenizers; only what it lacks is downloaded"
UNDER = "ordinary training undoes drawing in few steps, so it trains under this LoRA and draws without it"
NO_PHOTOS = "it draws flat figures of 64 px, no photos"
WITHOUT_CARD = f"no graphics card here, so use the tiny model that comes with simpletune, for trying out: {NO_PHOTOS}"


@dataclass(frozen=True)
class Reason:
    """Why a field has its value."""

    path: str
    value: object
    why: str
    override: str = ""  # what to say on the command line for another value


@dataclass(frozen=True)
class Choice:
    """An answer to a question: what it means, and the fields that it sets (or ``trigger``); none: to mend the files, or
    to take a folder ``below`` instead."""

    words: str
    overrides: Json
    below: str = ""


@dataclass(frozen=True)
class Question:
    """What the pictures do not tell, so that a person decides before anything is written or trained."""

    text: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Suggestion:
    """A configuration and the reasons for its choices."""

    config: Json
    reasons: tuple[Reason, ...]  # in the order of its sections
    notes: tuple[str, ...] = ()  # what the user should know about the pictures or the machine
    smaller: tuple[tuple[str, Json], ...] = ()
    """Names and sections (``BY_CARD``) of shipped configurations that need less memory, the largest first."""
    questions: tuple[Question, ...] = ()  # while there are any, the configuration is not to be written
    files: Accounts = field(default_factory=Accounts)  # what each file of the folder is


def guess_what(seen: FolderContents) -> tuple[What, str]:
    """Guess what the pictures teach; also return the evidence."""
    count, captioned = len(seen.images), 2 * len(set(seen.own_captions)) > len(seen.images)
    if not captioned and count <= FEW:
        return "subject", f"{plural(count, 'picture')} without captions of their own"
    if captioned and count >= MANY:
        return "general", f"{plural(count, 'captioned picture')}"
    return "style", f"{plural(count, 'picture')} {'with' if captioned else 'without'} captions"


def default_trigger(seen: FolderContents, what: What) -> str | None:
    """Return words to name what is learned, if captions do not name it: for a subject, with the class that the folder's
    name may be."""
    if seen.own_captions:
        return None
    return f"{TRIGGER} {seen.kind}" if what == "subject" and seen.kind else TRIGGER


def profile_of(card: Card | None) -> tuple[str, str]:
    """Return the memory profile for a card, and the reason."""
    if card is None:
        return DEFAULT_PROFILE, "for an 8 GiB card, since none is here: --device names yours"
    fitting = [name for name in PROFILES if card.gib * card.found >= USABLE * int(name[:-2])]
    if not fitting:
        return PROFILES[0], f"{card.name} has less than 4 GiB: the profile that takes the least"
    return fitting[-1], f"for {card.name}"


def templates_for(name: str, profile: str) -> list[str]:
    """Return the shipped configurations of a name in ``templates`` for a card, the largest first; for a card that is
    smaller than all of them, the smallest. Those for cards have levers of their own, not those of a profile."""
    if "{card}" not in name:
        return [name]
    shipped = shipped_names()
    sizes = [size for size in PROFILES if name.format(card=size) in shipped]
    fitting = [size for size in sizes if PROFILES.index(size) <= PROFILES.index(profile)] or sizes[:1]
    return [name.format(card=size) for size in reversed(fitting)]


class ModelChoices:
    """A configuration under construction: the model, and the settings that fit the machine.

    Args:
        name: of the run.
        what: what it teaches, of the base's ``templates``.
        answers: what the user has said.
        device: the card; None: there is none.
    """

    def __init__(self, name: str, what: What, answers: Answers, device: Card | None):
        self.answers = answers
        self.device = device
        self.what: What = what
        self.config: Json = {"name": name}
        self.reasons: list[Reason] = []
        self.notes: list[str] = []
        self.family: Family = FAMILIES[0]
        self.tiny = False
        self.shipped_steps = 0
        self.resolution = 0  # in pixels, of the base
        self.smaller: list[tuple[str, Json]] = []

    def set(self, path: str, value: object, why: str = "") -> None:
        """Set a field, with a reason if there is one to give."""
        *sections, leaf = path.split(".")
        section = self.config
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = value
        if why:
            self.reasons.append(Reason(path, value, why))

    def choose_base(self) -> None:
        """Choose the model, and the settings of the shipped configuration closest to it."""
        model, said = self.answers.model, self.answers.model is not None
        if model is None:
            model = TINY_SD3 if self.device is None else FAMILIES[0].pretrained
        self.tiny = model.startswith(DEMO)
        if not self.tiny:
            self.family = likely_family(model)
        templates = self.family.words.templates_of(model)
        if self.tiny:
            templates = TINY[model if model in MODELS else TINY_SD3]  # an unknown one is refused with the others
        if not templates:
            raise UserError(
                f"{model} is a {self.family.words.title} model, and no configuration for those ships that init could "
                "start from. Write one (docs/reference/configuration.md), or name another model"
            )
        profile, fits = profile_of(self.device)
        origin, *smaller = templates_for(templates[self.what], profile)
        template = read_json(Path(origin))
        by_card = origin != templates[self.what]
        for name in smaller:
            of_card = read_json(Path(name))
            self.smaller.append((name, {section: of_card.get(section, {}) for section in BY_CARD}))
        for section in (*KEPT, *BY_CARD) if by_card else KEPT:
            if section in template:
                self.config[section] = copy.deepcopy(template[section])
        self.shipped_steps = self.config["train"].pop("steps")
        self.resolution = max(self.family.words.resolution, template["data"].get("resolution", 0))
        for name in ("prompts", "every"):
            self.config["validation"].pop(name, None)
        why = "you named it" if said else WITHOUT_CARD
        if self.device is not None and not said:
            why = f"Stable Diffusion 3 Medium, for {self.device.name} ({self.device.gib:.1f} GiB)"
        self.set("model.pretrained", model, why)
        if (objective := self.answers.objective) not in (None, self.config.get("objective", {}).get("name")):
            self.config["objective"] = {}  # fields of another one mean nothing
            self.set("objective.name", objective, "you said so: no file tells what its base was trained by")
        if self.tiny:
            return
        if self.family.family != FAMILIES[0].family:
            self.set("model.family", self.family.family)
        base = self.family.model_copy(update={"pretrained": model})
        with suppress(UserError, KeyError, TypeError):  # the check of the whole configuration refuses it
            if base.files.denoiser_config(fetch=False) is not None and base.inpaints:
                self.notes.append(f"{model} inpaints: it learns to fill holes in the pictures, and draws with a mask")
        if loras := base.known_assistants:
            self.set("model.loras", loras, UNDER)
        if base.files.lacks_tokenizers:
            self.set("model.text_encoders", base.files.text_example, WITHOUT_TOKENIZERS)
        if self.device is None and self.answers.on_cpu:
            self.set("device", "cpu", "you asked for the CPU: seconds to minutes a step")
            return
        if self.device is None:
            self.notes.append(
                "no graphics card here: train on a machine with one, or set device=cpu and accept seconds "
                "to minutes a step"
            )
        if by_card:
            self.reasons.append(Reason("precision, memory", f"those of {origin}", fits))
        else:
            self.set("memory.profile", profile, fits)

    def in_order(self) -> Json:
        """Return the configuration with its sections in the order of the schema, and the precision of a tiny model."""
        if self.tiny:
            self.config["precision"] = {"weights": "int8", "compute": "fp32"}
        return {name: self.config[name] for name in ORDER if self.config.get(name)}


class Choices(ModelChoices):
    """A configuration for a folder of pictures under construction."""

    def __init__(self, seen: FolderContents, answers: Answers, device: Card | None, chosen: Json):
        guess, by = guess_what(seen)
        super().__init__(run_name(seen.folder.name, "pictures"), answers.what or guess, answers, device)
        self.seen = seen
        self.chosen = chosen
        self.captioned = seen.own_captions
        self.questions: list[Question] = []
        self.by = "you said so" if answers.what else f"a guess from {by}"
        self.trigger = answers.words or default_trigger(seen, self.what)

    def choose_images(self) -> None:
        """Choose the folder, the resolution, and what to do about unusable pictures."""
        seen = self.seen
        sizes = sorted((image.size for image in seen.images), key=lambda size: size[0] * size[1])
        sides = [(width * height) ** 0.5 for width, height in sizes]  # of squares with the pictures' areas
        (low_width, low_height), (width, height) = sizes[0], sizes[-1]
        range_ = f"{low_width}x{low_height}" + (f" to {width}x{height}" if sizes[0] != sizes[-1] else "")
        self.config["data"] = source_of(seen)
        self.reasons.append(
            Reason("data.path", str(seen.folder), f"{plural(len(seen.images), 'usable picture')} of {range_} px")
        )
        if seen.kohya:
            self.reasons.append(Reason("data.folder_names", "kohya", "; ".join(seen.report.notes)))
        if seen.splits and "train" not in seen.splits:
            counts = [f"{name} ({plural(count, 'picture')})" for name, count in seen.splits.items()]
            self.ask(
                f"no pictures are of the split train, but of {join_names(counts)}",
                *(Choice(f"train on {name}", {"data.split": name}) for name in seen.splits),
                Choice("train on all", {"data.split": None}),
            )
        elif seen.splits:
            self.reasons.append(Reason("data.split", "train", describe_splits(seen.splits)))
        if self.tiny:
            side = TINY_SIDE
            self.set("data.resolution", side, OWN_SIZE)
        else:
            lower = self.resolution >= SIDES[0] and not self.family.text.reads_framing
            known = SIDES if lower else (self.resolution,)
            large = {side: sum(each >= NEAR * side for each in sides) for side in known}
            side = next((side for side in known if large[side] >= ENOUGH * len(sides)), known[-1])
            why = f"{large[side]} of {plural(len(sides), 'picture')} reach it, nearly or in full"
            if self.family.text.reads_framing and large[side] < len(sides):
                why += ", and the model is told the others' own sizes"
            self.set("data.resolution", side, why)
        small = 0 if self.tiny else sum(2 * each < side for each in sides)
        if small and small > len(sides) * (1 - ENOUGH):
            told = ", which the model is told: larger ones would teach more detail"
            blurred = " and become blurred: larger ones would teach more"
            so = told if self.family.text.reads_framing else blurred
            self.set("data.max_upscale", None, f"{plural(small, 'picture')} would be scaled up more than twice{so}")
            small = 0
        names = [printable_name(each.name) for each in seen.report.rejected]
        faults = []
        if names:
            faults.append(f"{plural(len(names), 'entry', 'entries')} cannot be used ({join_names(names, LISTED)})")
        if small:
            faults.append(f"{plural(small, 'picture')} too small")
        if faults:
            self.set("data.on_error", "skip", f"{' and '.join(faults)}: they are left out. simpletune data lists them")

    def note_remarks(self) -> None:
        """Note what the scan found odd; ask about sd-scripts' folders that are deeper than their names are read."""
        report, named = self.seen.report, self.seen.named
        if len(named) > 1:
            self.ask(
                f"folders are named as for kohya's scripts ({join_names([printable_name(n) for n in named], LISTED)}), "
                "which is read only in the folder that you give; pictures for regularization would be learned, too",
                *(
                    Choice(f"take {printable_name(top)} alone", {}, top)
                    for top in dict.fromkeys(name.rpartition("/")[0] for name in named)
                ),
                Choice("learn from all alike, whatever their folders are called", {"data.folder_names": "plain"}),
            )
        elif named:
            above = self.seen.folder / named[0].rpartition("/")[0]
            self.notes.append(f"{printable_name(named[0])}: its repeats and words are read if you give {above}")
        for groups, what in ((report.exact, "identical files"), (report.near, "nearly identical pictures")):
            if groups:
                count, names = plural(len(groups), "group"), [printable_name(name) for name in groups[0]]
                self.notes.append(
                    f"{count} of {what}, such as {join_names(names, LISTED)}: each copy counts. Keep one of each"
                )
        if report.long:
            many = plural(len(report.long), "caption")
            self.notes.append(f"{many} longer than {format_limit(report)}. simpletune data lists them")
        if not self.seen.kohya and not self.seen.masks.aside:
            self.notes.extend(report.hints)

    def ask(self, text: str, *choices: Choice) -> None:
        """Ask, unless the fields of an answer have been chosen, whatever their values."""
        answers = [choice.overrides for choice in choices if choice.overrides]
        if not any(all(path in self.chosen for path in fields) for fields in answers):
            self.questions.append(Question(text, choices))

    def choose_masks(self) -> None:
        """Use the masks if every picture has one of its size; ask if not. Nothing is said of masks by transparency."""
        seen, masks = self.seen, self.seen.masks
        if not masks.aside or "data.mask" in self.chosen:
            return
        of = {file.relative_to(seen.folder).as_posix() for file in masks.masks}
        without = [image.name for image in seen.images if image.name not in of]
        whole = Choice("learn from the whole pictures; the masks are left alone", {"data.mask": None})
        if lost := seen.lost_masks:
            self.ask(
                f"{len(lost)} of {plural(len(masks.masks), 'mask')} lie where training does not look, such as "
                f"{printable_name(lost[0].relative_to(seen.folder).as_posix())}. It reads NAME{LABEL}.png beside each "
                "picture, or one folder (data.mask_path) with the paths of the pictures",
                whole,
                Choice("move them, and call this again", {}),
            )
            return
        use: Json = {"data.mask": "files"}
        if masks.folder is not None:
            use["data.mask_path"] = str(masks.folder)
        if not without and not seen.other_masks and masks.masks:
            for path, value in use.items():
                self.set(path, value)
            example = printable_name(next(iter(masks.masks.values())).name)
            why = f"every picture has a mask, such as {example}: only its white parts are learned"
            self.reasons.append(Reason("data.mask", "files", why, "data.mask=null leaves the masks alone"))
            return
        if not masks.masks:
            self.notes.append(f"{plural(len(masks.aside), 'mask')} without a picture, such as {masks.aside[0].name}")
            return
        if seen.other_masks:
            names = join_names([printable_name(name) for name in seen.other_masks], LISTED)
            self.ask(
                f"{_format_share(len(seen.other_masks), len(masks.masks), 'mask')} another size than their picture, or "
                f"cannot be read ({names})",
                Choice(
                    "scale those of the same shape, and leave out the other pictures", use | {"data.on_error": "skip"}
                ),
                whole,
            )
            return
        names = join_names([printable_name(name) for name in without], LISTED)
        self.ask(
            f"{_format_share(len(masks.masks), len(seen.images), 'picture')} a mask; without one: {names}",
            whole,
            Choice(f"leave out the {len(without)} without a mask", {**use, "data.on_error": "skip"}),
        )

    def prompt_for(self, trigger: str | None) -> str:
        """Return the prompt that names what is learned."""
        forms: dict[What, str] = {
            "subject": f"a photo of {trigger}",
            "style": f"a picture in {trigger} style",
            "general": f"a picture of {trigger}",
        }
        return forms[self.what]

    def choose_captions(self) -> None:
        """Choose one prompt, or the pictures' own captions with the trigger before them."""
        seen, trigger = self.seen, self.trigger
        one = self.prompt_for(trigger or default_trigger(seen, self.what) or TRIGGER)
        if not self.captioned:
            if (seen.refused or seen.unread) and "data.prompt" not in self.chosen:
                self.ask(
                    f"no caption can be used. {describe_refused(seen)}",
                    Choice("mend the files, and call this again", {}),
                    Choice("use one prompt for all pictures, and no captions", {"data.prompt": one}),
                )
            self.set(
                "data.prompt",
                self.chosen.get("data.prompt") or one,
                "no captions were found: a .txt beside each picture would teach what else is in it",
            )
            return
        refused = [each for each in seen.refused if each.kind == "picture"]
        if len(refused) >= len(self.captioned):
            self.ask(
                f"{_format_share(len(refused), len(seen.images) + len(refused), 'picture')} a caption that cannot be "
                f"used. {describe_refused(seen)}",
                Choice("mend the files, and call this again", {}),
                Choice(f"leave {_format_these(len(refused))} out", {"data.on_error": "skip"}),
                Choice("use one prompt for all pictures, and no captions", {"data.prompt": one}),
            )
        self.reasons.append(
            Reason(
                "data.captions",
                self.config["data"].get("captions", "auto"),
                f"captions from {seen.report.captions}, such as {self.captioned[0][:60]!r}",
            )
        )
        lines = [each for each in seen.refused if each.kind == "line"]
        if seen.lacking and (seen.unread or lines):
            found = (
                f"files that may hold some are not read. {describe_unread(seen)}"
                if seen.unread
                else f"lines with some cannot be used. {describe_refused(seen)}"
            )
            self.ask(
                f"{_format_share(len(seen.lacking), len(seen.images), 'picture')} no caption, and {found}",
                Choice("mend the files, and call this again", {}),
                Choice(f"use one prompt for {_format_these(len(seen.lacking))}", {"data.missing_prompt": one}),
                Choice(
                    f"leave {_format_these(len(seen.lacking))} out",
                    {"data.missing_prompt": None, "data.on_error": "skip"},
                ),
            )
        if seen.lacking:
            names = join_names([printable_name(name) for name in seen.lacking], LISTED)
            of = f"{_format_share(len(seen.lacking), len(seen.images), 'picture')} no caption ({names})"
            get, them = ("it gets", "it") if len(seen.lacking) == 1 else ("they get", "them")
            others = f"write captions for {them}, or leave {them} out: data.missing_prompt=null data.on_error=skip"
            self.set("data.missing_prompt", one, f"{of}: {get} this one. Or {others}")
        if not trigger:
            return
        having = sum(trigger.lower() in caption.lower() for caption in self.captioned)
        if not having:
            self.set("data.caption_prefix", f"{trigger},", "no caption has the trigger word")
        elif having < len(self.captioned):
            self.notes.append(
                f"{trigger!r} is in {having} of {plural(len(self.captioned), 'caption')}: write it into the rest"
            )

    def choose_method(self) -> None:
        """Choose the adapter, and how to preserve the subject's class."""
        self.reasons.append(
            Reason(
                "adapter.method",
                f"{self.config['adapter']['method']}, rank {self.config['adapter'].get('rank')}",
                f"{self.what} ({ABOUT[self.what]}): {self.by}",
                "" if self.answers.what else "--what overrides it",
            )
        )
        if self.what == "general" and not self.tiny:
            self.set("adapter.rank", 32, "many different subjects need more capacity")
        if not self.tiny and self.what != "subject":
            self.set("data.caption_dropout", 0.05, "helps guidance")
        noun = (self.trigger or "").partition(" ")[2]  # the class: the trigger's words after the first
        if self.what != "subject":
            return
        words = self.seen.words
        if not noun and words and not self.captioned and not self.answers.words and "data.prompt" not in self.chosen:
            known = [word for word in words if is_clip_word(word)][:LISTED]
            known = [" ".join(words), *known] if len(words) <= LISTED else known
            self.ask(
                f"what do the pictures of {self.seen.folder.name!r} show? With its class, such as dog, the base keeps "
                "what it knows of others",
                *(Choice(word, {"trigger": f"{TRIGGER} {word}"}) for word in dict.fromkeys(known)),
                Choice(f"something else (without a class; or put its class behind {TRIGGER})", {"trigger": TRIGGER}),
            )
        if not noun:
            self.notes.append("name the class too, as in the trigger 'sks dog', and the base keeps what it knows of it")
            return
        prompt = f"a photo of {'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
        prior = (
            {"method": "base_prediction", "prompt": noun, "trigger": self.trigger}
            if self.captioned
            else {"method": "base_prediction", "prompt": prompt}
        )
        self.config["prior"] = prior
        why, override = f"every {noun} would become yours otherwise. A step takes about twice the time", ""
        if not self.answers.words:
            why += ". The folder's name is taken for the class"
            override = f"--trigger '{TRIGGER} CLASS' names another, --trigger {TRIGGER} none"
        self.reasons.append(Reason("prior.method", "base_prediction", why, override))
        self.set("validation.class_prompt", prompt)

    def choose_length(self) -> None:
        """Choose steps, warm-up and checkpoints."""
        count, train = len(self.seen.images), self.config.setdefault("train", {})
        batch = min(train.get("batch_size", 1), count)
        each, least, most = STEPS[self.what]
        normal = self.shipped_steps if self.tiny else min(max(each * count // batch, least), most)
        steps = max(10, round(normal * LENGTHS[self.answers.length] / 10) * 10)
        self.config["train"] = {"steps": steps, "batch_size": batch}
        passes = steps * batch / count
        self.reasons.append(
            Reason(
                "train.steps",
                steps,
                f"{self.answers.length}: each picture about {plural(max(1, round(passes)), 'time')}",
            )
        )
        schedule = self.config.get("schedule", {})
        if schedule.get("warmup_steps"):
            schedule["warmup_steps"] = min(schedule["warmup_steps"], steps // 10)
        self.set("checkpoint.every", -(-steps // CHECKPOINTS), f"{CHECKPOINTS} checkpoints to choose from")
        self.set("checkpoint.keep_last", CHECKPOINTS)

    def choose_validation(self) -> None:
        """Choose prompts to generate, and pictures to hold out."""
        count = len(self.seen.images)
        self.set("validation.every", self.config["checkpoint"]["every"])
        prefix = self.config["data"].get("caption_prefix")
        captions = list(dict.fromkeys(self.captioned))
        one = self.config["data"].get("prompt") or self.config["data"].get("missing_prompt")
        chosen = [captions[0], captions[len(captions) // 2]] if captions else []
        prompts = [f"{prefix} {caption}" if prefix else caption for caption in dict.fromkeys(chosen)]
        prompts += [one] if one else []
        if self.what == "subject" and self.trigger:
            prompts.append(f"a photo of {self.trigger} on a beach at sunset")
        elif self.trigger:
            prompts.append(f"a lighthouse at dusk, {self.trigger} style" if self.what == "style" else GENERAL)
        if self.what != "subject":
            prompts.append(GENERAL)
        prompts = list(dict.fromkeys(prompts))
        self.set("validation.prompts", prompts, "drawn by base and tuned model from the same noise")
        if count < FROM:
            return
        split: float = HELD_OUT
        try:
            split_images(self.seen.images, split)
        except UserError:  # by chance no hash lies below the share
            split = max(1, round(HELD_OUT * count))
        self.set(
            "validation.split",
            split,
            f"{plural(count, 'picture')}: a tenth is held out, so that the loss on them "
            "shows when the model only memorises",
        )

    def describe(self) -> None:
        """Describe what the configuration is for; put its sections in the order of the schema."""
        count, model = plural(len(self.seen.images), "picture"), self.config["model"]["pretrained"]
        teaches = f"A LoRA of {count} ({self.what}), written by simpletune init."
        about = (
            f"For trying out: {teaches} The tiny model draws flat figures of 64 px, no photos; on a machine with an "
            "NVIDIA card, simpletune init writes one for Stable Diffusion 3 Medium."
            if self.tiny
            else f"{teaches} Base: {model}."
        )
        self.config["about"] = about
        self.config = self.in_order()


def _format_share(count: int, total: int, noun: str) -> str:
    """Format a sentence's beginning: some of several have something."""
    return f"{count:,} of {plural(total, noun)} {'has' if count == 1 else 'have'}"


def _format_these(count: int) -> str:
    return "this picture" if count == 1 else f"these {count:,}"


def suggest(
    folder: Path,
    answers: Answers = UNASKED,
    device: Card | None = None,
    seen: FolderContents | None = None,
    chosen: Json | None = None,
) -> Suggestion:
    """Suggest a configuration. ``chosen``: fields that the user has set, by path (``data.mask``); they answer
    questions, and the caller puts them into the configuration."""
    chosen = chosen or {}
    if seen is None:
        with silence():
            seen = inspect_folder(folder, data_fields(chosen))
    choices = Choices(seen, answers, device, chosen)
    choices.choose_base()
    choices.choose_images()
    choices.choose_masks()
    choices.note_remarks()
    choices.choose_captions()
    choices.choose_method()
    choices.choose_length()
    choices.choose_validation()
    choices.describe()
    return Suggestion(
        choices.config,
        tuple(choices.reasons),
        tuple(choices.notes),
        tuple(choices.smaller),
        tuple(choices.questions),
        seen.report.files,
    )


def suggest_slider(direction: Direction, answers: Answers = UNASKED, device: Card | None = None) -> Suggestion:
    """Suggest a configuration that trains a direction between prompts, without pictures."""
    ends = [prompt for prompt in (direction.positive, direction.negative) if prompt]
    choices = ModelChoices(run_name(ends[0] if ends else "", "slider"), "style", answers, device)
    choices.choose_base()
    config = choices.config
    side = TINY_SIDE if choices.tiny else min(choices.resolution, SLIDER_SIDE)
    given = {name: value for name, value in direction.model_dump().items() if value != SLIDER_DEFAULTS.get(name)}
    config["concept"] = {"directions": [given], "resolutions": [side]}
    choices.reasons.append(Reason("concept.resolutions", [side], OWN_SIZE if choices.tiny else DRAWN_SMALL))
    if not choices.tiny:  # whose layers and rate are its own
        config["adapter"], config["optimizer"] = {"method": "lora"}, config.get("optimizer", {}) | {"lr": SLIDER_RATE}
    config["adapter"]["rank"] = SLIDER_RANK
    choices.reasons.append(Reason("adapter.rank", SLIDER_RANK, "a direction needs little capacity"))
    # which weighs the levels of a picture's loss
    config["objective"] = {k: v for k, v in config.get("objective", {}).items() if k in ("name", "prediction")}
    normal, batch = TINY_SLIDER if choices.tiny else (SLIDER_STEPS, 1)
    steps = max(10, round(normal * LENGTHS[answers.length] / 10) * 10)
    config["train"] = {"steps": steps, "batch_size": batch}
    choices.reasons.append(Reason("train.steps", steps, f"{answers.length}: a slider needs few"))
    config["schedule"] = {"name": "constant", "warmup_steps": min(20, steps // 10)}
    choices.set("checkpoint.every", -(-steps // 2), "to see it half-way")
    prompts = list(dict.fromkeys(prompt for prompt in (direction.target, *ends) if prompt))[:1]
    config["validation"] = config.get("validation", {}) | {"every": config["checkpoint"]["every"]}
    for name in ("loss_samples", "unrelated_prompts"):
        config["validation"].pop(name, None)
    choices.set(
        "validation.prompts", prompts, "drawn at the strengths -2 to 2 from the same noise; name some of your own"
    )
    base = config["model"]["pretrained"]
    config["about"] = f"A slider from prompts alone, written by simpletune init. {direction.describe()}. Base: {base}."
    return Suggestion(choices.in_order(), tuple(choices.reasons), tuple(choices.notes), tuple(choices.smaller))


def data_fields(chosen: Json) -> Json:
    """Return the fields of ``data`` among those that the user has set."""
    return {path.removeprefix("data."): value for path, value in chosen.items() if path.startswith("data.")}
