"""A request's body to what is to be drawn: every value checked, all problems told at once.

The format is that of Vertex AI's serving containers for diffusion models (docs/serve.md says where it is written down):
``{"instances": [{"prompt" or "text": ...}, ...], "parameters": {...}}``. An instance's own values go before the
parameters.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simpletune.pipeline.sample import Request
from simpletune.serve.limits import GUIDANCE, SCALE, Limits

BASE = "base"
STEP = 16  # pixels
PROMPTS = ("prompt", "text")
PARAMETERS = (
    "negative_prompt", "width", "height", "num_inference_steps", "guidance_scale", "seed",
    "lora", "lora_id", "lora_scale",
)  # fmt: skip
SHOWN = 8  # problems in an answer


class Refusal(Exception):
    """A request that is not served.

    Args:
        status: of HTTP.
        message: what is wrong.
        problems: (where in the body, what is wrong there), if that can be said.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        problems: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.problems, self.headers = status, message, problems, dict(headers or {})


@dataclass(frozen=True)
class Order:
    """One picture that was asked for.

    Args:
        request: what to draw.
        lora: a name of the menu; ``base``: none.
        scale: strength of the LoRA.
    """

    request: Request
    lora: str = BASE
    scale: float = 1.0


@dataclass(frozen=True)
class Menu:
    """What can be asked for.

    Args:
        loras: names, ``base`` first.
        standard: what holds where a request says nothing.
        limits: of every request.
    """

    loras: tuple[str, ...]
    standard: Request
    limits: Limits


def read_orders(body: bytes, menu: Menu) -> list[Order]:
    """The pictures that a body asks for.

    Raises:
        Refusal: 400 for what is no JSON of this format, 422 for values that do not fit.
    """
    value = _parse(body)
    if not isinstance(value, dict):
        raise Refusal(400, 'The body must be an object: {"instances": [{"prompt": "..."}], "parameters": {}}')
    reader = _Reader(menu)
    reader.names("", value, ("instances", "parameters"))
    instances, parameters = value.get("instances"), value.get("parameters")
    common = reader.settings("parameters", {} if parameters is None else parameters, PARAMETERS)
    if not isinstance(instances, list) or not instances:
        reader.problem("instances", 'is required: a list such as [{"prompt": "a lighthouse at dusk"}]')
    elif len(instances) > menu.limits.instances:
        reader.problem("instances", f"has {len(instances)} entries. At most {menu.limits.instances} are drawn at once")
    else:
        orders = [reader.order(f"instances.{number}", each, common) for number, each in enumerate(instances)]
    if reader.problems:
        more = len(reader.problems) - SHOWN
        listed = "; ".join(f"{path}: {message}" if path else message for path, message in reader.problems[:SHOWN])
        raise Refusal(422, listed + (f"; and {more} more" if more > 0 else ""), reader.problems[:SHOWN])
    return orders


def _parse(body: bytes) -> Any:
    """Strict JSON: no key twice, no NaN, nothing nested deeper than Python reads."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{_show(next(n for n in names if names.count(n) > 1))} stands twice in one object")
        return found

    def no_number(name: str) -> Any:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        return json.loads(body.decode(), object_pairs_hook=once, parse_constant=no_number)
    except RecursionError:
        raise Refusal(400, "The body is nested too deeply") from None
    except ValueError as error:
        raise Refusal(400, f"The body is not JSON: {error}") from None


class _Reader:
    """Checks values and gathers what is wrong with them."""

    def __init__(self, menu: Menu):
        self.menu, self.limits = menu, menu.limits
        self.problems: list[tuple[str, str]] = []
        side = self._whole_between(STEP, self.limits.side, STEP)
        self.checks: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
            "width": ("width", side),
            "height": ("height", side),
            "num_inference_steps": ("steps", self._whole_between(1, self.limits.steps)),
            "guidance_scale": ("guidance", self._number_between(1, GUIDANCE)),
            "seed": ("seed", self._whole_between(0, 2**63 - 1)),
            "negative_prompt": ("negative_prompt", self._text),
            "lora": ("lora", self._lora),
            "lora_id": ("lora", self._lora),
            "lora_scale": ("scale", self._number_between(-SCALE, SCALE)),
        }

    def problem(self, path: str, message: str) -> None:
        """Note one."""
        self.problems.append((path, message))

    def names(self, path: str, value: Mapping[str, Any], known: Sequence[str]) -> None:
        """Note names that mean nothing here."""
        unknown = [name for name in value if name not in known]
        for name in unknown[:SHOWN]:
            near = difflib.get_close_matches(name[:40], known, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            shown = _show(name).strip('"')
            self.problem(f"{path}.{shown}" if path else shown, f"is not known. {hint}Known: {', '.join(known)}")
        if len(unknown) > SHOWN:
            self.problem(path, f"{len(unknown) - SHOWN} more names are not known")

    def settings(self, path: str, given: Any, known: Sequence[str]) -> dict[str, Any]:
        """What an object of parameters gives, under the names of Request and Order."""
        if not isinstance(given, dict):
            self.problem(path, "must be an object {...}")
            return {}
        self.names(path, given, known)
        if "lora" in given and "lora_id" in given and given["lora"] != given["lora_id"]:
            self.problem(f"{path}.lora_id", "contradicts lora. Give one of them")
        found = {}
        for name, (field, check) in self.checks.items():
            if given.get(name) is not None:
                found[field] = check(f"{path}.{name}", given[name])
        return found

    def order(self, path: str, instance: Any, common: Mapping[str, Any]) -> Order:
        """One instance, on top of what all share."""
        values = {**common, **self.settings(path, instance, (*PROMPTS, *PARAMETERS))}
        prompts = [instance[name] for name in PROMPTS if name in instance] if isinstance(instance, dict) else [""]
        if len(prompts) != 1:
            self.problem(path, "needs prompt or text, one of them: what to draw")
        elif isinstance(instance, dict):
            values["prompt"] = self._text(f"{path}.prompt" if "prompt" in instance else f"{path}.text", prompts[0])
            if isinstance(prompts[0], str) and not prompts[0].strip():
                self.problem(path, "the prompt is empty. Say what to draw")
        lora, scale = values.pop("lora", BASE), values.pop("scale", 1.0)
        return Order(replace(self.menu.standard, **values), lora, scale)

    def _text(self, path: str, value: Any) -> str:
        if not isinstance(value, str):
            self.problem(path, f"{_show(value)} is not text in quotes")
        elif len(value) > self.limits.prompt:
            self.problem(path, f"has {len(value)} characters. At most {self.limits.prompt} are read")
        elif any("\ud800" <= character <= "\udfff" for character in value):
            self.problem(path, "has half a surrogate pair, which is no character")
        else:
            return value
        return ""

    def _lora(self, path: str, value: Any) -> str:
        if isinstance(value, str) and value in self.menu.loras:
            return value
        self.problem(path, f"{_show(value)} is not served. Known: {', '.join(self.menu.loras)}")
        return BASE

    def _whole_between(self, least: int, most: int, multiple: int = 1) -> Callable[[str, Any], int]:
        """A whole number; 64.0 is one: what passes through protocol buffers has become a float."""

        def check(path: str, value: Any) -> int:
            number = int(value) if isinstance(value, float) and value.is_integer() else value
            if isinstance(number, bool) or not isinstance(number, int):
                self.problem(path, f"{_show(value)} is not a whole number")
            elif not least <= number <= most:
                self.problem(path, f"{_show(value)} is not from {least} to {most}")
            elif number % multiple:
                down = number - number % multiple
                near = " or ".join(str(n) for n in (down, down + multiple) if least <= n <= most)
                self.problem(path, f"{number} is not a multiple of {multiple}. Use {near}")
            else:
                return number
            return least

        return check

    def _number_between(self, least: float, most: float) -> Callable[[str, Any], float]:
        def check(path: str, value: Any) -> float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                self.problem(path, f"{_show(value)} is not a number")
            elif not (least <= value <= most and math.isfinite(value)):
                self.problem(path, f"{_show(value)} is not from {least:g} to {most:g}")
            else:
                return float(value)
            return least

        return check


def _show(value: Any) -> str:
    """A value of the request, cut short."""
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
