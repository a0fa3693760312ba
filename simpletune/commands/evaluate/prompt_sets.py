"""Prompts of an evaluation: built-in slices, a file, or the run's own. Imports no torch.

A template has ``{token}``, the rare word that training taught, and ``{class}``, the common word for what it is: "a
{token} {class} in the snow". A picture is generated from the prompt with both, and scored by the prompt without the
token, because no encoder knows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from simpletune.config.schema import TrainConfig
from simpletune.data.demo import DATA, demo_scenes
from simpletune.system.options import UserError, first_lines, plural

PLACES = (
    "in the jungle", "in the snow", "on the beach", "on a cobblestone street", "on top of pink fabric",
    "on top of a wooden floor", "with a city in the background", "with a mountain in the background",
    "with a blue house in the background", "on top of a purple rug in a forest",
)  # fmt: skip
LOOKS = ("red", "purple", "shiny", "wet", "cube shaped")
OBJECTS = (
    "with a wheat field in the background", "with a tree and autumn leaves in the background",
    "with the Eiffel Tower in the background", "floating on top of water", "floating in an ocean of milk",
    "on top of green grass with sunflowers around it", "on top of a mirror",
    "on top of the sidewalk in a crowded street", "on top of a dirt road", "on top of a white rug",
)  # fmt: skip
LIVE = (
    "wearing a red hat", "wearing a santa hat", "wearing a rainbow scarf", "wearing a black top hat and a monocle",
    "in a chef outfit", "in a firefighter outfit", "in a police outfit", "wearing pink glasses",
    "wearing a yellow shirt", "in a purple wizard outfit",
)  # fmt: skip
DREAMBOOTH = {"dreambooth-object": OBJECTS, "dreambooth-live": LIVE}
"""The DreamBooth benchmark's two lists (arXiv:2208.12242, google/dreambooth): 25 prompts each, 15 of them shared."""
DEMO = "demo"
"""The tiny SD3's own prompts: sizes, places and backgrounds for a figure, scenes for a style."""
RUN = "run"
"""The run's validation prompts, or the captions of its first pictures."""
SLICES = (*DREAMBOOTH, DEMO, RUN)

DEMO_PROMPTS, MOST_CAPTIONS = 12, 16


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    text: str  # prompt to generate from
    scored: str  # prompt to compare pictures with, without the rare token

    @property
    def has_token(self) -> bool:
        """Whether the prompt names the subject; the scored text then asks for any other member of its class."""
        return self.text != self.scored


@dataclass(frozen=True)
class PromptSet:
    """Prompts with the name of their slice, which is printed beside every number."""

    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Words:
    """Words for a run's subject."""

    token: str  # the rare word; empty if unknown
    kind: str  # the common word, such as ``dog``; empty if unknown


def subject_words(config: TrainConfig, token: str | None, kind: str | None) -> Words:
    """Take the words that the user gave, or the demo's own."""
    style = (demo_scenes.STYLE_TRIGGER, "")
    own = {"demo:subject": (demo_scenes.SUBJECT_TRIGGER, "figure"), "demo:style": style, "demo:pictures": style}
    known = own.get(config.pictures.place, ("", ""))
    return Words(known[0] if token is None else token, known[1] if kind is None else kind)


def find_prompts(name: str | None, config: TrainConfig, words: Words, captions: Sequence[str]) -> PromptSet:
    """Find the prompts of an evaluation: of a slice, or of a file of templates, one a line.

    None: `DEMO` for the demo's data, otherwise `RUN`. Captions are those of the run's pictures.
    """
    if name is None:
        name = DEMO if config.pictures.place in DATA else RUN
    if name in DREAMBOOTH:
        return PromptSet(name, tuple(fill_template(template, words, name) for template in dreambooth(name)))
    if name == DEMO:
        scenes = demo_scenes.sample_scenes(DEMO_PROMPTS, seed=2024, held_out=True)
        if config.pictures.place == "demo:subject":  # its figure in the places of held-out scenes
            template = demo_scenes.SUBJECT_TEMPLATE.replace("{subject} figure", "{{token}} {{class}}")
            prompts = [fill_template(template.format(**vars(scene)), words, DEMO) for scene in scenes]
        else:  # held-out scenes in the demo's style
            prompts = _remove_tokens([demo_scenes.caption(scene, 0, words.token or None) for scene in scenes], words)
        return PromptSet(f"demo, {DEMO_PROMPTS} prompts", tuple(prompts))
    if name == RUN:
        texts = config.validation.prompts or list(dict.fromkeys(filter(None, captions)))[:MOST_CAPTIONS]
        if not texts:
            raise UserError(
                f"--prompts: the run has no prompts and no captions. Give a file, or one of {', '.join(DREAMBOOTH)}"
            )
        return PromptSet("the run's prompts", tuple(_remove_tokens(dict.fromkeys(texts), words)))
    return from_file(Path(name), words)


def dreambooth(name: str) -> list[str]:
    """Return the templates of one of the benchmark's two lists."""
    ways = (*PLACES, *DREAMBOOTH[name])
    return [*(f"a {{token}} {{class}} {way}" for way in ways), *(f"a {look} {{token}} {{class}}" for look in LOOKS)]


def _remove_tokens(texts: Iterable[str], words: Words) -> list[Prompt]:
    return [Prompt(text, remove_token(text, words.token)) for text in texts]


def from_file(file: Path, words: Words) -> PromptSet:
    """Read templates, one per line."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(SLICES)
        raise UserError(f"--prompts: {file} cannot be read ({error}). Give a text file, or one of {known}") from None
    faults = []
    for number, line in enumerate(lines):
        place, wrong = f"line {number + 1}", None
        try:
            unknown = [name for name in _fields(line) if name not in ("token", "class")]
        except ValueError as error:
            unknown, wrong = [], f"{place}: {error}. A brace belongs to {{token}} or {{class}}"
        if not line.strip():
            wrong = f"{place} is empty. Write a prompt, or remove the line"
        elif unknown:
            wrong = f"{place}: {{{unknown[0]}}} is unknown. Use {{token}} or {{class}}"
        elif wrong is None and line in lines[:number]:
            wrong = f"{place} repeats line {lines.index(line) + 1}. Remove it: seeds give more pictures of a prompt"
        if wrong:
            faults.append(wrong)
    if faults or not lines:
        shown = "\n  ".join(first_lines(faults, 8))
        raise UserError(f"--prompts: {file}: {plural(len(faults), 'problem')}\n  {shown or 'it is empty'}")
    return PromptSet(
        f"{file.name}, {plural(len(lines), 'prompt')}", tuple(fill_template(x, words, str(file)) for x in lines)
    )


def fill_template(template: str, words: Words, source: str) -> Prompt:
    needed = set(_fields(template))
    lacking = [
        option
        for option, name, word in (("--token", "token", words.token), ("--class", "class", words.kind))
        if name in needed and not word
    ]
    if lacking:
        raise UserError(f"--prompts: {source} needs {' and '.join(lacking)}, as in --token sks --class dog")
    text = _tidy(template.format(**{"token": words.token, "class": words.kind}))
    if not needed:
        return Prompt(text, remove_token(text, words.token))
    return Prompt(text, remove_token(_tidy(template.format(**{"token": "", "class": words.kind})), words.token))


def remove_token(text: str, token: str) -> str:
    """Remove every occurrence of a token, as a whole word."""
    return _tidy(re.sub(rf"(?<!\w){re.escape(token)}(?!\w)", "", text)) if token else text


def _tidy(text: str) -> str:
    return re.sub(r"(\s*,)+", ",", re.sub(r"\s+([,.])", r"\1", " ".join(text.split()))).strip(", ")


def _fields(template: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]
