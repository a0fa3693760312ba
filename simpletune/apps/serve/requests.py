"""Parse a request's body into image requests: check every value, and report all problems at once.

The format follows Vertex AI's serving containers for diffusion models (docs/how-to/serve.md cites it):
``{"instances": [{"prompt" or "text": ...}, ...], "parameters": {...}}``. Values in an instance override the parameters.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo
from pydantic_core import PydanticKnownError

from simpletune.apps.serve.limits import GUIDANCE, SCALE, Limits
from simpletune.config.error_text import did_you_mean, problems_of, show
from simpletune.data.sources.image_files import decode, decode_mask, header_size
from simpletune.data.sources.source import UnusableImage
from simpletune.stages.sample import ImageRequest, fit_inputs
from simpletune.system import strict_json
from simpletune.system.options import Option, Problem, UserError
from simpletune.system.strict_json import JsonError, JsonValue

if TYPE_CHECKING:
    from PIL import Image

BASE = "base"
PROMPTS = ("prompt", "text")
MODEL_NAMES = ("lora", "lora_id", "model")
MAX_NAMES = 64  # names per object; limits the time spent on unknown names
MAX_PROBLEMS = 8  # problems per response
MAX_PATH = 100  # characters of a problem's path


class RequestError(Exception):
    """A request that gets an error response: its HTTP status, the invalid values, if any, and its headers."""

    def __init__(
        self, status: int, message: str, problems: Sequence[Problem] = (), headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.problems = problems
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class ServedImage:
    """One image to generate."""

    request: ImageRequest
    lora: str = BASE  # served name of a LoRA or a model
    scale: float = 1.0  # strength of the LoRA


@dataclass(frozen=True)
class Capabilities:
    """What a server offers."""

    loras: tuple[str, ...]  # all names, ``base`` first, then the tuned model's
    defaults: ImageRequest  # values for settings that a request leaves out
    limits: Limits
    place: int  # pixels a side of a latent's place
    tuned: str | None = None  # name of the run's full model, if one is served; serves requests that name no model
    inpaints: bool = False  # whether the model reads a mask, so that the page asks for one

    def describe(self) -> str:
        """List all names; if there is a full model, with their kinds: ``base, mine (full model), other (LoRA)``."""
        if self.tuned is None:
            return ", ".join(self.loras)
        kinds = {BASE: "", self.tuned: " (full model)"}
        return ", ".join(f"{name}{kinds.get(name, ' (LoRA)')}" for name in self.loras)


def _capabilities(info: ValidationInfo) -> Capabilities:
    assert isinstance(info.context, Capabilities), "validate with Capabilities as the context"
    return info.context


def _check_limit(limit: Callable[[Limits], int]) -> AfterValidator:
    """Check a whole number against one of the server's limits."""

    def check(value: int, info: ValidationInfo) -> int:
        most = limit(_capabilities(info).limits)
        if value > most:
            raise PydanticKnownError("less_than_equal", {"le": most})
        return value

    return AfterValidator(check)


def _side(value: int, info: ValidationInfo) -> int:
    limits = _capabilities(info).limits
    if value < limits.multiple:
        raise PydanticKnownError("greater_than_equal", {"ge": limits.multiple})
    if value > limits.side:
        raise PydanticKnownError("less_than_equal", {"le": limits.side})
    if value % limits.multiple:
        raise PydanticKnownError("multiple_of", {"multiple_of": limits.multiple})
    return value


def _prompt(value: str, info: ValidationInfo) -> str:
    most = _capabilities(info).limits.prompt
    if len(value) > most:
        raise PydanticKnownError("string_too_long", {"max_length": most})
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise PydanticKnownError("string_unicode")
    return value


def _limit_instances(value: JsonValue, info: ValidationInfo) -> JsonValue:
    """Check the number of instances before they are validated: validating many takes long."""
    most = _capabilities(info).limits.instances
    if isinstance(value, list) and len(value) > most:
        raise PydanticKnownError("too_long", {"field_type": "List", "max_length": most, "actual_length": len(value)})
    return value


def _parse_whole(value: JsonValue) -> JsonValue:
    """Accept 64.0 as a whole number: protocol buffers turn all numbers into floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _model_name(name: str, info: ValidationInfo) -> str:
    known = _capabilities(info).loras
    if name not in known:
        raise ValueError(f"{show(name)} is not served.{did_you_mean(name, list(known))}")
    return name


Whole = Annotated[int, BeforeValidator(_parse_whole)]
Side = Annotated[Whole, AfterValidator(_side)]
Prompt = Annotated[str, AfterValidator(_prompt)]
Lora = Annotated[str, AfterValidator(_model_name)]


class Parameters(Option):
    """Settings of all instances; null means the server's default. Validate with Capabilities as the context."""

    negative_prompt: Prompt | None = None
    """What guidance steers away from."""
    width: Side | None = None
    """In pixels."""
    height: Side | None = None
    """In pixels."""
    steps: Annotated[Whole, Field(ge=1), _check_limit(lambda limits: limits.steps)] | None = Field(
        None, alias="num_inference_steps"
    )
    """Sampling steps."""
    guidance: Annotated[float, Field(ge=1, le=GUIDANCE)] | None = Field(None, alias="guidance_scale")
    """Classifier-free guidance; 1: none."""
    seed: Annotated[Whole, Field(ge=0, le=2**63 - 1)] | None = None
    """Seed of the initial noise."""
    lora: Lora | None = None
    """A served name: a LoRA, the run's full model, or ``base``."""
    lora_id: Lora | None = None
    """Alias of ``lora``."""
    model: Lora | None = None
    """Alias of ``lora``."""
    scale: Annotated[float, Field(ge=-SCALE, le=SCALE)] | None = Field(None, alias="lora_scale")
    """Strength of the LoRA."""
    image: str | None = None
    """A picture to start from or to paint into: PNG, JPEG or WebP in base64, centre-cropped to the size."""
    mask: str | None = Field(None, alias="mask_image")
    """Where to paint into ``image``, white on black: the same, of its shape. Without one, everywhere."""
    strength: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the steps to run from ``image``; by default 0.6, or with a mask 1."""


class Instance(Parameters):
    """One image: a prompt, and settings that override the parameters."""

    prompt: Prompt = ""
    """What to generate."""
    text: Prompt = ""
    """Alias of ``prompt``."""


class Body(Option):
    """A request's body."""

    parameters: Parameters | None = None
    """Settings of all instances."""
    instances: Annotated[list[Instance], BeforeValidator(_limit_instances)] = Field(min_length=1)
    """A list such as [{"prompt": "a lighthouse at dusk"}]."""


def read_requests(body: bytes, capabilities: Capabilities) -> list[ServedImage]:
    """Parse a body, JSON as UTF-8, into one image request for each instance, in order. Raises RequestError: 400 if the
    body is not strict JSON or not an object, 422 for invalid values."""
    try:
        value = strict_json.parse(body, capabilities.limits.body)
    except JsonError as error:
        place = f" (line {error.line}, column {error.column})" if error.line else ""
        raise RequestError(400, f"The body is not strict JSON: {error}{place}") from None
    if not isinstance(value, dict):
        raise RequestError(400, 'The body must be an object: {"instances": [{"prompt": "..."}], "parameters": {}}')
    # the body's objects by path; too many instances are skipped here and refused by the validation below
    listed = value.get("instances")
    listed = listed if isinstance(listed, list) and len(listed) <= capabilities.limits.instances else []
    parts = {"": value, "parameters": value.get("parameters")}
    parts |= {f"instances.{number}": each for number, each in enumerate(listed)}
    objects = {path: each for path, each in parts.items() if isinstance(each, dict)}
    crowded = [
        Problem(path, f"has {len(each)} names. At most {MAX_NAMES} are allowed")
        for path, each in objects.items()
        if len(each) > MAX_NAMES
    ]
    if crowded:
        raise _unprocessable(crowded, len(crowded))
    between = [problem for path, each in objects.items() for problem in _rules(path, each)]
    try:
        parsed = Body.model_validate(value, context=capabilities)
    except ValidationError as error:
        found = problems_of(error, value, Body, MAX_PROBLEMS)
        raise _unprocessable([*found, *between], error.error_count() + len(between)) from None
    if between:
        raise _unprocessable(between, len(between))
    common = _settings(parsed.parameters) if parsed.parameters else {}
    inputs = _Inputs(capabilities.limits)
    images, without = [], []
    for number, each in enumerate(parsed.instances):
        values = {**common, **_settings(each)}
        lora, scale = values.pop("lora", capabilities.tuned or BASE), values.pop("scale", 1.0)
        unusable = list(_unusable_inputs(values, inputs))
        for name, rule in unusable:
            own = name.removesuffix("_image") in each.model_fields_set  # mask_image is the alias of mask
            place = f"instances.{number}" if own else "parameters"
            problem = Problem(f"{place}.{name}", rule)
            without += [problem] if problem not in without else []  # parameters are those of every instance
        if unusable:
            continue
        try:
            request = fit_inputs(replace(capabilities.defaults, **values), capabilities.place)
        except UserError as error:
            without.append(Problem(f"instances.{number}.mask_image", str(error).removeprefix("--mask: ")))
            continue
        images.append(ServedImage(request, lora, scale))
        if lora == capabilities.tuned and scale != 1:
            rule = f"{scale:g} is not allowed: {lora} is a full model and has no strength. Leave lora_scale out"
            without.append(Problem(f"instances.{number}.lora_scale", rule))
    if without:
        raise _unprocessable(without, len(without))
    return images


def _rules(path: str, given: Mapping[str, JsonValue]) -> Iterator[Problem]:
    """Yield conflicts between the names of one object; the values are not validated yet."""
    names = [name for name in MODEL_NAMES if name in given]
    for name in names[1:]:
        if given[name] != given[names[0]]:
            yield Problem(f"{path}.{name}", f"contradicts {names[0]}. Use only one of them")
    prompts = [given[name] for name in PROMPTS if name in given]
    if not path.startswith("instances."):
        return
    if len(prompts) != 1:
        yield Problem(path, "needs either prompt or text: what to draw")
    elif isinstance(prompts[0], str) and not prompts[0].strip():
        yield Problem(path, "the prompt is empty. Describe what to draw")


class _Inputs:
    """The pictures and masks of a request: each is decoded once, and none after they have too many pixels together."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._pixels = 0
        self._decoded: dict[tuple[str, str], Image.Image] = {}

    def decode(self, name: str, text: str) -> Image.Image:
        """Decode the picture in a base64 text. Raises UserError if it is too large, UnusableImage if it cannot be used,
        ValueError if it is not base64."""
        if (name, text) not in self._decoded:
            data = base64.b64decode(text, validate=True)
            width, height = header_size(data)
            if width * height > self._limits.pixels:
                raise UserError(f"is {width}x{height}. Send at most {self._limits.pixels / 1e6:.1f} million pixels")
            self._pixels += width * height
            if self._pixels > self._limits.all_pixels:
                raise UserError(
                    f"brings the request's pictures and masks to {self._pixels / 1e6:.1f} million pixels. Send at most "
                    f"{self._limits.all_pixels / 1e6:.1f} million in a request"
                )
            self._decoded[name, text] = decode(data) if name == "image" else decode_mask(data, "file")
        return self._decoded[name, text]


def _unusable_inputs(values: dict[str, Any], inputs: _Inputs) -> Iterator[tuple[str, str]]:
    """Replace the picture and the mask among values by what they hold, and add the strength that a mask has by default;
    yield the name of each that cannot be used, and why."""
    for name, sent in (("image", "image"), ("mask", "mask_image")):
        if name not in values:
            continue
        try:
            values[name] = inputs.decode(name, values[name])
        except UserError as too_large:
            yield sent, str(too_large)
        except UnusableImage as reason:
            yield sent, f"{reason}. Send a PNG, JPEG or WebP in base64"
        except ValueError:
            yield sent, "is not base64"
    if "image" not in values:
        for name, sent in (("mask", "mask_image"), ("strength", "strength")):
            if name in values:
                yield sent, "needs image, the picture to paint into or to start from"
    if "mask" in values:
        values.setdefault("strength", 1.0)


def _settings(given: Parameters) -> dict[str, Any]:
    """Return the given values under the names of Request and ImageRequest."""
    values = given.model_dump(exclude_unset=True, exclude_none=True)
    for other, name in (("lora_id", "lora"), ("model", "lora"), ("text", "prompt")):
        if other in values:
            values[name] = values.pop(other)
    return values


def _unprocessable(problems: Sequence[Problem], count: int) -> RequestError:
    """Report the first of ``count`` problems, with long paths shortened."""
    shown = []
    for problem in problems[:MAX_PROBLEMS]:
        path = problem.path if len(problem.path) <= MAX_PATH else f"{problem.path[: MAX_PATH - 3]}..."
        shown.append(Problem(path, problem.message))
    more = f"; and {count - len(shown)} more" if count > len(shown) else ""
    return RequestError(422, "; ".join(map(str, shown)) + more, shown)
