"""Suggest a configuration for a folder of pictures and a device: its choices one by one, each with its reason. Prints
and asks nothing."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from simpletune.commands.init.answers import ABOUT, LENGTHS, WHAT, Answers, What
from simpletune.commands.init.inspect_folder import FolderContents, inspect_folder, source_of
from simpletune.config.load import read_json, shipped_names
from simpletune.config.schema import DEMO, run_name
from simpletune.data.demo import MODELS, TINY_SD3, TINY_SDXL
from simpletune.data.split import split_pictures
from simpletune.models.families import FAMILIES, family_by_name, family_of
from simpletune.models.shared.family import Family
from simpletune.system.console import silent
from simpletune.system.gpus import Card
from simpletune.system.options import Json, UserError, join_names, plural
from simpletune.system.printable import printable_name

TINY_SIDE = 64  # pixels
PROFILES = ("4gb", "6gb", "8gb", "12gb", "16gb", "24gb")
USABLE = 0.9  # share of its nominal memory that a card reports: 22.03 GiB of an L4's 24, 11.75 of 12
DEFAULT_PROFILE = "8gb"  # profile for an unknown card
TEMPLATES: dict[str, dict[What, str]] = {
    TINY_SD3: {"subject": "demo_subject", "style": "demo", "general": "demo"},
    TINY_SDXL: dict.fromkeys(WHAT, "demo_sdxl"),
    "sd3": {"subject": "sd3_medium_dreambooth_lora", "style": "sd3_medium_lora_8gb", "general": "sd3_medium_lora_8gb"},
    "sd15": {"subject": "sd15_lora", "style": "sd15_lora", "general": "sd15_lora"},
    "sdxl": {"subject": "sdxl_lora_{card}", "style": "sdxl_lora_{card}", "general": "sdxl_lora_{card}"},
}
"""Shipped configurations to take settings from, by the model's family or the tiny model's name. ``{card}`` is the size
of a card, one of ``PROFILES``: such a configuration has levers of its own, not those of a profile."""
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
LISTED = 3
UNASKED = Answers()
ORDER = (
    "about", "name", "device", "model", "data", "adapter", "precision", "optimizer", "schedule", "objective", "train",
    "prior", "memory", "checkpoint", "validation",
)  # fmt: skip
WITHOUT_TOKENIZERS = "a single file has no tokenizers; only what it lacks is downloaded"
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
class Suggestion:
    """A configuration and the reasons for its choices."""

    config: Json
    reasons: tuple[Reason, ...]  # in the order of its sections
    notes: tuple[str, ...] = ()  # what the user should know about the pictures or the machine
    smaller: tuple[tuple[str, Json], ...] = ()
    """Names and sections (``BY_CARD``) of shipped configurations that need less memory, the largest first."""


def guess_what(seen: FolderContents) -> tuple[What, str]:
    """Guess what the pictures teach; also return the evidence."""
    captions = seen.caption_texts
    count, captioned = len(seen.pictures), 2 * len(set(captions)) > len(captions)
    if not captioned and count <= FEW:
        return "subject", f"{plural(count, 'picture')} without captions of their own"
    if captioned and count >= MANY:
        return "general", f"{plural(count, 'captioned picture')}"
    return "style", f"{plural(count, 'picture')} {'with' if captioned else 'without'} captions"


def default_trigger(seen: FolderContents, what: What) -> str | None:
    """Return words to name what is learned, if captions do not name it: for a subject, with the class that the folder's
    name may be."""
    if seen.caption_texts:
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
    """Return the shipped configurations of a name in ``TEMPLATES`` for a card, the largest first; for a card that is
    smaller than all of them, the smallest."""
    if "{card}" not in name:
        return [name]
    shipped = shipped_names()
    sizes = [size for size in PROFILES if name.format(card=size) in shipped]
    fitting = [size for size in sizes if PROFILES.index(size) <= PROFILES.index(profile)] or sizes[:1]
    return [name.format(card=size) for size in reversed(fitting)]


class Choices:
    """A configuration under construction."""

    def __init__(self, seen: FolderContents, answers: Answers, device: Card | None):
        self.seen, self.answers, self.device = seen, answers, device
        self.captioned = seen.caption_texts
        guess, by = guess_what(seen)
        self.what: What = answers.what or guess
        self.by = "you said so" if answers.what else f"a guess from {by}"
        self.trigger = answers.words or default_trigger(seen, self.what)
        self.config: Json = {"name": run_name(seen.folder.name, "pictures")}
        self.reasons: list[Reason] = []
        self.notes: list[str] = []
        self.family: Family = FAMILIES[0]
        self.tiny = False
        self.shipped_steps = 0
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

    def base(self) -> None:
        """Choose the model, and the settings of the shipped configuration closest to it."""
        model, said = self.answers.model, self.answers.model is not None
        if model is None:
            model = TINY_SD3 if self.device is None else FAMILIES[0].pretrained
        self.tiny = model.startswith(DEMO)
        if not self.tiny:
            self.family = family_of(model) or family_by_name(model) or FAMILIES[0]
        kind = self.family.family
        if self.tiny:
            kind = model if model in MODELS else TINY_SD3  # an unknown one is refused with the others
        profile, fits = profile_of(self.device)
        origin, *smaller = templates_for(TEMPLATES[kind][self.what], profile)
        template = read_json(Path(origin))
        by_card = origin != TEMPLATES[kind][self.what]
        for name in smaller:
            of_card = read_json(Path(name))
            self.smaller.append((name, {section: of_card.get(section, {}) for section in BY_CARD}))
        for section in (*KEPT, *BY_CARD) if by_card else KEPT:
            if section in template:
                self.config[section] = copy.deepcopy(template[section])
        self.shipped_steps = self.config["train"].pop("steps")
        for name in ("prompts", "every"):
            self.config["validation"].pop(name, None)
        why = "you named it" if said else WITHOUT_CARD
        if self.device is not None and not said:
            why = f"Stable Diffusion 3 Medium, for {self.device.name} ({self.device.gib:.1f} GiB)"
        self.set("model.pretrained", model, why)
        if self.tiny:
            return
        if kind != FAMILIES[0].family:
            self.set("model.family", kind)
        base = self.family.model_copy(update={"pretrained": model})
        with suppress(UserError, KeyError, TypeError):  # the check of the whole configuration refuses it
            if base.denoiser_config(fetch=False) is not None and base.inpaints:
                self.notes.append(f"{model} inpaints: it learns to fill holes in the pictures, and draws with a mask")
        if base.lacks_tokenizers:
            self.set("model.text_encoders", base.text_example, WITHOUT_TOKENIZERS)
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

    def pictures(self) -> None:
        """Choose the folder, the resolution, and what to do about unusable pictures."""
        seen = self.seen
        sizes = sorted((picture.size for picture in seen.pictures), key=lambda size: size[0] * size[1])
        sides = [(width * height) ** 0.5 for width, height in sizes]  # of squares with the pictures' areas
        (low_width, low_height), (width, height) = sizes[0], sizes[-1]
        range_ = f"{low_width}x{low_height}" + (f" to {width}x{height}" if sizes[0] != sizes[-1] else "")
        self.config["data"] = source_of(seen.folder, seen.captions, seen.kohya)
        self.reasons.append(
            Reason("data.path", str(seen.folder), f"{plural(len(seen.pictures), 'usable picture')} of {range_} px")
        )
        if self.tiny:
            side = TINY_SIDE
            self.set("data.resolution", side, "the tiny model's own size")
        else:
            lower = self.family.resolution >= SIDES[0] and not self.family.reads_framing
            known = SIDES if lower else (self.family.resolution,)
            large = {side: sum(each >= NEAR * side for each in sides) for side in known}
            side = next((side for side in known if large[side] >= ENOUGH * len(sides)), known[-1])
            why = f"{large[side]} of {plural(len(sides), 'picture')} reach it, nearly or in full"
            if self.family.reads_framing and large[side] < len(sides):
                why += ", and the model is told the others' own sizes"
            self.set("data.resolution", side, why)
        small = 0 if self.tiny else sum(2 * each < side for each in sides)
        if small and small > len(sides) * (1 - ENOUGH):
            told = ", which the model is told: larger ones would teach more detail"
            blurred = " and become blurred: larger ones would teach more"
            so = told if self.family.reads_framing else blurred
            self.set("data.max_upscale", None, f"{plural(small, 'picture')} would be scaled up more than twice{so}")
            small = 0
        lacking = seen.uncaptioned
        names = [printable_name(each.name) for each in seen.report.rejected if each.name not in lacking]
        faults = []
        if lacking:
            shown = join_names([printable_name(name) for name in lacking], LISTED)
            faults.append(
                f"{plural(len(lacking), 'picture')} without a caption beside {len(seen.pictures)} with one ({shown})"
            )
        if names:
            faults.append(f"{plural(len(names), 'entry', 'entries')} cannot be used ({join_names(names, LISTED)})")
        if small:
            faults.append(f"{plural(small, 'picture')} too small")
        if faults:
            self.set("data.on_error", "skip", f"{' and '.join(faults)}: they are left out. simpletune data lists them")

    def remarks(self) -> None:
        """Note what the scan found odd."""
        report = self.seen.report
        for groups, what in ((report.exact, "identical files"), (report.near, "nearly identical pictures")):
            if groups:
                count, names = plural(len(groups), "group"), [printable_name(name) for name in groups[0]]
                self.notes.append(
                    f"{count} of {what}, such as {join_names(names, LISTED)}: each copy counts. Keep one of each"
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
        """Choose one prompt, or the pictures' own captions with the trigger before them."""
        seen, trigger = self.seen, self.trigger
        if not self.captioned:
            prompts = {
                "subject": f"a photo of {trigger}",
                "style": f"a picture in {trigger} style",
                "general": f"a picture of {trigger}",
            }
            self.set(
                "data.prompt",
                prompts[self.what],
                "no captions were found: a .txt beside each picture would teach what else is in it",
            )
            return
        where = {
            "texts": "texts beside the pictures",
            "metadata": "metadata.jsonl",
            "names": "the pictures' file names",
        }
        self.reasons.append(
            Reason(
                "data.captions",
                self.config["data"].get("captions", "auto"),
                f"captions from {where.get(seen.captions, 'the folders')}, such as {self.captioned[0][:60]!r}",
            )
        )
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
        why, override = f"every {noun} would become yours otherwise", ""
        if not self.answers.words:
            why += ". The folder's name is taken for the class"
            override = f"--trigger '{TRIGGER} CLASS' overrides it"
        self.reasons.append(Reason("prior.method", "base_prediction", why, override))
        self.set("validation.class_prompt", prompt)

    def length(self) -> None:
        """Choose steps, warm-up and checkpoints."""
        count, train = len(self.seen.pictures), self.config.setdefault("train", {})
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

    def validation(self) -> None:
        """Choose prompts to draw, and pictures to hold out."""
        count = len(self.seen.pictures)
        self.set("validation.every", self.config["checkpoint"]["every"])
        prefix = self.config["data"].get("caption_prefix")
        captions = list(dict.fromkeys(self.captioned))
        chosen = [captions[0], captions[len(captions) // 2]] if captions else [self.config["data"]["prompt"]]
        prompts = [f"{prefix} {caption}" if prefix else caption for caption in dict.fromkeys(chosen)]
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
            split_pictures(self.seen.pictures, split)
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
        count, model = plural(len(self.seen.pictures), "picture"), self.config["model"]["pretrained"]
        teaches = f"A LoRA of {count} ({self.what}), written by simpletune init."
        about = (
            f"For trying out: {teaches} The tiny model draws flat figures of 64 px, no photos; on a machine with an "
            "NVIDIA card, simpletune init writes one for Stable Diffusion 3 Medium."
            if self.tiny
            else f"{teaches} Base: {model}."
        )
        if self.tiny:
            self.config["precision"] = {"weights": "int8", "compute": "fp32"}
        self.config["about"] = about
        self.config = {name: self.config[name] for name in ORDER if self.config.get(name)}


def suggest(
    folder: Path, answers: Answers = UNASKED, device: Card | None = None, seen: FolderContents | None = None
) -> Suggestion:
    if seen is None:
        with silent():
            seen = inspect_folder(folder)
    choices = Choices(seen, answers, device)
    choices.base()
    choices.pictures()
    choices.remarks()
    choices.captions()
    choices.method()
    choices.length()
    choices.validation()
    choices.describe()
    return Suggestion(choices.config, tuple(choices.reasons), tuple(choices.notes), tuple(choices.smaller))
