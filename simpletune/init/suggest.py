"""Suggest a configuration for a folder of pictures and a device, with a reason for each choice. Pure: prints and asks
nothing."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

from simpletune.cards import Card
from simpletune.config.load import read_json
from simpletune.config.schema import DEMO
from simpletune.data.split import split_pictures
from simpletune.families import FAMILIES
from simpletune.families.recognise import family_of
from simpletune.init.answers import ABOUT, LENGTHS, Answers, What
from simpletune.init.look import Look, look, read_captions, sizes_in_words, source_of
from simpletune.models.family import Family
from simpletune.options import Json, UserError, plural, shortened

TINY = "demo:tiny-sd3"
PROFILES = ("4gb", "6gb", "8gb", "12gb", "16gb", "24gb")
USABLE = 0.9  # share of a size that a card of that size reports: 22.03 GiB of an L4's 24, 11.75 of 12
DEFAULT_PROFILE = "8gb"  # for a card that is not known
TEMPLATES: dict[str, dict[What, str]] = {
    "tiny": {"subject": "demo_subject", "style": "demo", "general": "demo"},
    "sd3": {"subject": "sd3_medium_dreambooth_lora", "style": "sd3_medium_lora_8gb", "general": "sd3_medium_lora_8gb"},
    "sd15": {"subject": "sd15_lora", "style": "sd15_lora", "general": "sd15_lora"},
}
"""Shipped configurations that the settings come from, by the model's kind."""
KEPT = ("model", "adapter", "optimizer", "schedule", "objective", "train", "memory", "validation")
FEW = 30  # pictures without captions that are taken for one subject
MANY = 200  # captioned pictures that are taken for a general set
STEPS: dict[What, tuple[int, int, int]] = {
    "subject": (100, 400, 1500),
    "style": (60, 800, 4000),
    "general": (10, 2000, 20000),
}
"""Steps a picture, and the least and most of a run of normal length."""
SIDES = (1024, 768, 512)  # of SD3, in pixels
NEAR, ENOUGH = 0.8, 0.75  # this share of the pictures reaches this share of the resolution
CHECKPOINTS = 4  # of a run, all of them kept
HELD_OUT, FROM = 0.1, 50  # share of the pictures that is held out, and from how many on
TRIGGER = "sks"  # a word without a meaning to the text encoders, in common use for this
GENERAL = "A photo of a lighthouse at dusk, waves against the rocks"
LISTED = 3


@dataclass(frozen=True)
class Reason:
    """Why a field has its value.

    Args:
        path: of the field.
        value: of the field.
        why: in words.
    """

    path: str
    value: object
    why: str


@dataclass(frozen=True)
class Suggestion:
    """A configuration and why it is so.

    Args:
        config: as JSON; ``check`` accepts it.
        reasons: in the order of its sections.
        notes: what the user should know about the pictures or the machine.
    """

    config: Json
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()


def suggest(
    folder: Path, answers: Answers = Answers(), device: Card | None = None, seen: Look | None = None
) -> Suggestion:
    """Suggest a configuration.

    Args:
        folder: of pictures.
        answers: what the user said.
        device: the card to train on; None: there is none.
        seen: the look at the folder, if it was taken already.

    Raises:
        UserError: no picture can be used, or the model is of no known family.
    """
    choices = _Choices(seen or look(folder), answers, device)
    choices.base()
    choices.pictures()
    choices.captions()
    choices.method()
    choices.length()
    choices.validation()
    choices.describe()
    return Suggestion(choices.config, tuple(choices.reasons), tuple(choices.notes))


def guess_what(seen: Look) -> tuple[What, str]:
    """What the pictures seem to teach, and by what."""
    count, captioned = len(seen.pictures), bool(read_captions(seen))
    if not captioned and count <= FEW:
        return "subject", f"{plural(count, 'picture')} without captions"
    if captioned and count >= MANY:
        return "general", f"{plural(count, 'captioned picture')}"
    return "style", f"{plural(count, 'picture')} {'with' if captioned else 'without'} captions"


def default_trigger(seen: Look) -> str | None:
    """The word that names what is learned, where no caption can."""
    return None if read_captions(seen) else TRIGGER


class _Choices:
    """A configuration in the making."""

    def __init__(self, seen: Look, answers: Answers, device: Card | None):
        self.seen, self.answers, self.device = seen, answers, device
        self.captioned = read_captions(seen)
        guess, by = guess_what(seen)
        self.what: What = answers.what or guess
        self.by = "you said so" if answers.what else f"a guess by {by}: --what says otherwise"
        self.trigger = answers.words or default_trigger(seen)
        self.config: Json = {"name": seen.name}
        self.reasons: list[Reason] = []
        self.notes: list[str] = []
        self.family: Family = FAMILIES[0]
        self.tiny = False
        self.shipped_steps = 0

    def set(self, path: str, value: object, why: str = "") -> None:
        """Set a field, with a reason if there is one to give."""
        *sections, leaf = path.split(".")
        section = self.config
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = value
        if why:
            self.reasons.append(Reason(path, value, why))

    def base(self) -> None:
        """The model, and the settings of the shipped configuration nearest to it."""
        model, said = self.answers.model, self.answers.model is not None
        if model is None:
            model = TINY if self.device is None else FAMILIES[0].pretrained
        self.tiny = model.startswith(DEMO)
        if not self.tiny:
            self.family = family_of(model) or FAMILIES[0]
        kind = "tiny" if self.tiny else self.family.family
        template = read_json(Path(TEMPLATES[kind][self.what]))
        for section in KEPT:
            if section in template:
                self.config[section] = copy.deepcopy(template[section])
        self.shipped_steps = self.config["train"].pop("steps")
        for name in ("prompts", "every"):
            self.config["validation"].pop(name, None)
        card = self.device
        why = "you named it" if said else f"Stable Diffusion 3 Medium, for {card.name} ({card.gib:.1f} GiB)" if card else (
            "no graphics card here, so the tiny model that comes with simpletune, for trying out: it draws flat figures of 64 px, "
            "no photos")  # fmt: skip
        self.set("model.pretrained", model, why)
        if not self.tiny:
            self._device(kind)

    def _device(self, kind: str) -> None:
        if kind != FAMILIES[0].family:
            self.set("model.family", kind)
        if self.device is None and self.answers.on_cpu:
            self.set("device", "cpu", "you asked for the CPU: seconds to minutes a step")
            return
        if self.device is None:
            self.notes.append("no graphics card here: train on a machine with one, or set device=cpu and accept seconds "
                              "to minutes a step")  # fmt: skip
        profile, why = profile_of(self.device)
        self.set("memory.profile", profile, why)

    def pictures(self) -> None:
        """The folder, the resolution, and what to do about unusable pictures."""
        seen = self.seen
        self.config["data"] = source_of(seen.folder, seen.captions, seen.kohya)
        self.reasons.append(Reason("data.path", str(seen.folder), f"{plural(len(seen.pictures), 'usable picture')} of "
                                   f"{sizes_in_words(seen)} px"))  # fmt: skip
        side = self._resolution()
        small = 0 if self.tiny else sum(2 * picture < side for picture in seen.sides)
        if small and small > len(seen.sides) * (1 - ENOUGH):
            self.set("data.max_upscale", None, f"{plural(small, 'picture')} would be scaled up more than twice, and so "
                     "blurred: larger ones would teach more")  # fmt: skip
            small = 0
        if seen.unusable or small:
            names = [each.name for each in seen.report.rejected]
            said = f"{plural(seen.unusable, 'entry', 'entries')} cannot be used ({shortened(names, LISTED)})" * bool(
                names
            )
            said = " and ".join(filter(None, [said, f"{plural(small, 'picture')} too small" * bool(small)]))
            self.set("data.on_error", "skip", f"{said}: they are left out. simpletune data lists them")
        self._remarks()

    def _resolution(self) -> int:
        if self.tiny:
            self.set("data.resolution", 64, "the tiny model's own size")
            return 64
        known = SIDES if self.family.resolution >= SIDES[0] else (self.family.resolution,)
        large = {side: sum(each >= NEAR * side for each in self.seen.sides) for side in known}
        side = next((side for side in known if large[side] >= ENOUGH * len(self.seen.sides)), known[-1])
        why = f"{large[side]} of {plural(len(self.seen.sides), 'picture')} reach it, nearly or in full"
        self.set("data.resolution", side, why)
        return side

    def _remarks(self) -> None:
        report = self.seen.report
        for groups, what in ((report.exact, "identical files"), (report.near, "nearly identical pictures")):
            if groups:
                count = plural(len(groups), "group")
                self.notes.append(
                    f"{count} of {what}, such as {shortened(groups[0], LISTED)}: each counts. Keep one of each"
                )
        if report.left_alone:
            listed = ", ".join(f"{count} {suffix}" for suffix, count in sorted(report.left_alone.items()))
            self.notes.append(f"not read: {listed}. Convert them to jpg, png or webp to train on them")
        if report.long:
            self.notes.append(
                f"{plural(len(report.long), 'caption')} longer than CLIP's 77 tokens. simpletune data lists them"
            )
        self.notes.extend(hint for hint in report.hints if not self.seen.kohya)

    def captions(self) -> None:
        """One prompt, or the pictures' own captions with the trigger before them."""
        seen, trigger = self.seen, self.trigger
        if not self.captioned:
            prompts = {"subject": f"a photo of {trigger}", "style": f"a picture in {trigger} style",
                       "general": f"a picture of {trigger}"}  # fmt: skip
            self.set("data.prompt", prompts[self.what], "no captions were found: a .txt beside each picture would teach "
                     "what else is in it")  # fmt: skip
            return
        where = {
            "texts": "texts beside the pictures",
            "metadata": "metadata.jsonl",
            "names": "the pictures' file names",
        }
        self.reasons.append(Reason("data.captions", self.config["data"].get("captions", "auto"), "captions from "
                                   f"{where.get(seen.captions, 'the folders')}, such as {self.captioned[0][:60]!r}"))  # fmt: skip
        if not trigger:
            return
        having = sum(trigger.lower() in caption.lower() for caption in self.captioned)
        if not having:
            self.set("data.caption_prefix", f"{trigger},", "no caption has the trigger word")
        elif having < len(self.captioned):
            self.notes.append(
                f"{trigger!r} is in {having} of {plural(len(self.captioned), 'caption')}: write it into the rest"
            )

    def method(self) -> None:
        """The adapter, and what keeps the class of a subject."""
        self.reasons.append(Reason("adapter.method", f"{self.config['adapter']['method']}, rank "
                                   f"{self.config['adapter'].get('rank')}", f"{self.what} ({ABOUT[self.what]}): {self.by}"))  # fmt: skip
        if self.what == "general" and not self.tiny:
            self.set("adapter.rank", 32, "many different things need room")
        if not self.tiny and self.what != "subject":
            self.set("data.caption_dropout", 0.05, "helps guidance")
        noun = self.answers.class_words
        if self.what != "subject":
            return
        if noun is None:
            self.notes.append("name the class too, as in --trigger 'sks dog', and the base keeps what it knows of it "
                              "(prior.method)")  # fmt: skip
            return
        prompt = f"a photo of {'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
        prior = {"method": "base_prediction", "prompt": noun, "trigger": self.trigger} if self.captioned else {
            "method": "base_prediction", "prompt": prompt}  # fmt: skip
        self.config["prior"] = prior
        self.reasons.append(Reason("prior.method", "base_prediction", f"every {noun} would become yours otherwise"))
        self.set("validation.class_prompt", prompt)

    def length(self) -> None:
        """Steps, warm-up and checkpoints."""
        count, train = len(self.seen.pictures), self.config.setdefault("train", {})
        batch = min(train.get("batch_size", 1), count)
        each, least, most = STEPS[self.what]
        normal = self.shipped_steps if self.tiny else min(max(each * count // batch, least), most)
        steps = max(10, round(normal * LENGTHS[self.answers.length] / 10) * 10)
        self.config["train"] = {"steps": steps, "batch_size": batch}
        passes = steps * batch / count
        self.reasons.append(Reason("train.steps", steps, f"{self.answers.length}: each picture about "
                                   f"{plural(max(1, round(passes)), 'time')}"))  # fmt: skip
        schedule = self.config.get("schedule", {})
        if schedule.get("warmup_steps"):
            schedule["warmup_steps"] = min(schedule["warmup_steps"], steps // 10)
        self.set("checkpoint.every", -(-steps // CHECKPOINTS), f"{CHECKPOINTS} checkpoints to choose from")
        self.set("checkpoint.keep_last", CHECKPOINTS)

    def validation(self) -> None:
        """Prompts to draw, and pictures to hold out."""
        count = len(self.seen.pictures)
        self.set("validation.every", self.config["checkpoint"]["every"])
        self.set("validation.prompts", self._prompts(), "drawn by base and tuned model from the same noise")
        if count < FROM:
            return
        split: float = HELD_OUT
        try:
            split_pictures(self.seen.pictures, split)
        except UserError:  # by chance no hash lies below the share
            split = max(1, round(HELD_OUT * count))
        self.set("validation.split", split, f"{plural(count, 'picture')}: a tenth is held out, so that the loss on them "
                 "shows when the model only memorises")  # fmt: skip

    def _prompts(self) -> list[str]:
        prefix = self.config["data"].get("caption_prefix")
        captions = list(dict.fromkeys(self.captioned))
        chosen = [captions[0], captions[len(captions) // 2]] if captions else [self.config["data"]["prompt"]]
        prompts = [f"{prefix} {caption}" if prefix else caption for caption in dict.fromkeys(chosen)]
        if self.what == "subject" and self.trigger:
            prompts.append(f"a photo of {self.trigger} on a beach at sunset")
        elif self.trigger:
            prompts.append(f"a lighthouse at dusk, {self.trigger} style" if self.what == "style" else GENERAL)
        return list(dict.fromkeys([*prompts, *([] if self.what == "subject" else [GENERAL])]))

    def describe(self) -> None:
        """What the configuration is for, in its own words; sections in the order of the schema."""
        count, model = plural(len(self.seen.pictures), "picture"), self.config["model"]["pretrained"]
        teaches = f"A LoRA of {count} ({self.what}), written by simpletune init."
        about = (
            f"For trying out: {teaches} The tiny model draws flat figures of 64 px, no photos; on a machine with an NVIDIA "
            "card, simpletune init writes one for Stable Diffusion 3 Medium."
            if self.tiny
            else f"{teaches} Base: {model}."
        )
        order = ("about", "name", "device", "model", "data", "adapter", "precision", "optimizer", "schedule", "objective",
                 "train", "prior", "memory", "checkpoint", "validation")  # fmt: skip
        if self.tiny:
            self.config["precision"] = {"weights": "int8", "compute": "fp32"}
        self.config["about"] = about
        self.config = {name: self.config[name] for name in order if self.config.get(name)}


def profile_of(card: Card | None) -> tuple[str, str]:
    """The memory profile for a card, and why."""
    if card is None:
        return DEFAULT_PROFILE, "for an 8 GB card, since none is here: --device names yours"
    fitting = [name for name in PROFILES if card.gib * card.found >= USABLE * int(name[:-2])]
    if not fitting:
        return PROFILES[0], f"{card.name} has less than 4 GB: the profile that takes least"
    return fitting[-1], f"for {card.name}"
