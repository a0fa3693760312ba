"""A user's answers about the pictures, and three questions on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

Word = TypeVar("Word", bound=str)
What = Literal["subject", "style", "general"]
Length = Literal["short", "normal", "long"]
WHAT: tuple[What, ...] = get_args(What)
LENGTHS: dict[Length, float] = {"short": 0.5, "normal": 1.0, "long": 2.0}
"""Factor of each length on a run's steps."""
ABOUT: dict[What, str] = {
    "subject": "one thing, animal or person",
    "style": "a look that many pictures share",
    "general": "many captioned pictures of different things",
}
MOST = 3  # attempts at an answer
LONGEST = 200  # characters of a trigger


@dataclass(frozen=True)
class Answers:
    """The user's answers; None: decide by the pictures."""

    what: What | None = None  # what the pictures teach
    trigger: str | None = None  # words to name the subject; those after the first are its class, as in ``sks dog``
    length: Length = "normal"
    model: str | None = None  # hub name, folder or file of the base; None: chosen for the machine
    on_cpu: bool = False  # whether to train on the CPU, whatever the model
    objective: str | None = None  # what the base was trained by; None: as its family's usual models

    @property
    def words(self) -> str | None:
        """The trigger on one line; None if there is none."""
        return " ".join((self.trigger or "").split())[:LONGEST] or None


def ask(answers: Answers, guess: What, trigger: str | None, read: Callable[[str], str] = input) -> Answers:
    """Ask for the missing answers; Enter and end of input take the default."""
    if answers.what is None:
        kinds = "; ".join(f"{name}: {ABOUT[name]}" for name in WHAT)
        answers = replace(answers, what=_choice(read, f"What do the pictures show? ({kinds})", WHAT, guess))
    if answers.words is None:
        if trigger and answers.what != "subject":
            trigger = trigger.split()[0]  # only a subject has a class
        said = _line(read, f"A word to name it, and its class, such as sks dog [{trigger or 'none'}] ")
        answers = replace(answers, trigger=said or trigger)
    chosen: Length = _choice(read, f"How long? ({', '.join(LENGTHS)})", tuple(LENGTHS), answers.length)
    return replace(answers, length=chosen)


def _choice(read: Callable[[str], str], question: str, known: Sequence[Word], default: Word) -> Word:
    for _ in range(MOST):
        said = _line(read, f"{question} [{default}] ").lower()
        if not said:
            return default
        near = [name for name in known if name.startswith(said)]
        if len(near) == 1:
            return near[0]
    return default


def _line(read: Callable[[str], str], question: str) -> str:
    try:
        return read(question).strip()
    except EOFError:
        return ""
