"""Bodies of ``simpletune serve``: any JSON gives images or a RequestError that can be sent, in bounded time."""

from __future__ import annotations

import base64
import io
import json
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from simpletune.apps.serve import requests
from simpletune.apps.serve.limits import Limits
from simpletune.apps.serve.requests import Capabilities, RequestError, ServedImage, read_requests
from simpletune.data.sources.image_files import decode
from simpletune.stages.sample import ImageRequest, shown_inputs
from simpletune.system.options import Problem

DEFAULTS = ImageRequest("", 7, "blurry", 64, 64, 3, 3.0)
CAPABILITIES = Capabilities(("base", "one"), DEFAULTS, Limits(), 8)
NAMES = [
    "prompt", "text", "negative_prompt", "width", "height", "num_inference_steps", "guidance_scale", "seed", "lora",
    "lora_id", "model", "lora_scale", "image", "mask_image", "strength",
]  # fmt: skip
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec=None), max_size=4),
    st.sampled_from([64, 64.0, 1e300, 10**400, "base", "one", " ", "\ud800"]), st.lists(st.integers(), max_size=2),
)  # fmt: skip
OBJECTS = st.dictionaries(st.sampled_from(NAMES) | st.text(st.characters(codec=None), max_size=4), VALUES, max_size=5)


def requests_of(body: object) -> list[ServedImage]:
    return read_requests(json.dumps(body).encode(), CAPABILITIES)


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({"instances": st.lists(OBJECTS | VALUES, max_size=3), "parameters": OBJECTS | VALUES}))
@example({"instances": [{"prompt": "\ud800"}], "parameters": None})
@example({"instances": [{"prompt": "\ud800"}], "parameters": {"\ud800": 1, "lora": "\ud800"}})
def test_any_json_gives_images_or_an_error_that_can_be_sent(body: dict[str, object]) -> None:
    try:
        images = requests_of(body)
    except RequestError as error:
        assert error.status in (400, 422)
        (error.message + json.dumps(list(map(asdict, error.problems)), ensure_ascii=False)).encode()
        assert len(error.problems) <= 8
    else:
        for image in images:
            assert image.request.prompt.strip().encode() and image.lora in CAPABILITIES.loras
            assert 16 <= image.request.width <= 1024 and image.request.width % 16 == 0


def test_sides_are_multiples_of_the_familys() -> None:
    wide = replace(CAPABILITIES, limits=Limits(side=128, multiple=32))

    def ask(**sides: int) -> list[ServedImage]:
        return read_requests(json.dumps({"instances": [{"prompt": "a", **sides}]}).encode(), wide)

    (found,) = ask(width=96, height=128)
    assert (found.request.width, found.request.height) == (96, 128)
    for side, rule in ((48, "a multiple of 32. Use 32 or 64"), (16, "at least 32"), (160, "at most 128")):
        with pytest.raises(RequestError, match=f"width: {side} does not fit. It must be {rule}"):
            ask(width=side)


def test_an_instance_overrides_the_parameters_and_null_overrides_nothing() -> None:
    parameters = {"seed": 1, "width": 96.0, "lora_id": "one", "lora_scale": 2, "guidance_scale": None}
    body = {"instances": [{"text": "a"}, {"prompt": "b", "seed": 2, "width": None, "lora": "base"}]}
    first, second = requests_of({**body, "parameters": parameters})
    assert first == ServedImage(ImageRequest("a", 1, "blurry", 96, 64, 3, 3.0), "one", 2.0)
    assert second == ServedImage(ImageRequest("b", 2, "blurry", 96, 64, 3, 3.0), "base", 2.0)
    assert type(first.request.width) is int
    assert requests_of({"instances": [{"prompt": "a"}], "parameters": None}) == [
        ServedImage(ImageRequest("a", 7, "blurry", 64, 64, 3, 3.0))
    ]


def sent(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_a_picture_and_a_mask_are_read_from_base64() -> None:
    content, mask = Image.new("RGB", (128, 64), "red"), Image.new("L", (128, 64))
    mask.paste(255, (64, 0, 128, 64))
    given = {"image": sent(content), "mask_image": sent(mask)}
    whole, started = requests_of({"instances": [{"prompt": "a", **given}, {"prompt": "b", "image": sent(content)}]})
    found = shown_inputs(whole.request)
    assert whole.request.strength == 1 and found["picture"].getpixel((5, 5)) == (255, 0, 0)
    assert np.array_equal(np.asarray(found["mask"])[0], [0] * 32 + [255] * 32)  # the middle of both
    assert started.request.mask is None and started.request.strength == 0.6


@pytest.mark.parametrize(
    ("given", "path", "message"),
    [
        ({"image": "red?"}, "image", "is not base64"),
        ({"image": base64.b64encode(b"text").decode()}, "image", "Send a PNG, JPEG or WebP in base64"),
        ({"image": sent(Image.new("1", (5000, 5000)))}, "image", "is 5000x5000. Send at most 16.8 million pixels"),
        ({"mask_image": sent(Image.new("L", (64, 64), 255))}, "mask_image", "needs image, the picture to paint into"),
        ({"strength": 0.5}, "strength", "needs image, the picture to paint into or to start from"),
        (
            {"image": sent(Image.new("RGB", (64, 64))), "mask_image": sent(Image.new("L", (64, 32), 255))},
            "mask_image",
            "it is 64x32, another shape than the picture's 64x64. Paint it on the picture",
        ),
        (
            {"image": sent(Image.new("RGB", (64, 64))), "mask_image": sent(Image.new("L", (64, 64)))},
            "mask_image",
            "it is black in the 64x64 that are drawn",
        ),
    ],
)
def test_a_picture_or_a_mask_that_cannot_be_used_is_refused(given: dict[str, object], path: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        requests_of({"instances": [{"prompt": "a", **given}]})
    (problem,) = caught.value.problems
    assert caught.value.status == 422 and problem.path == f"instances.0.{path}" and message in problem.message


def test_the_pixels_of_a_request_are_counted_once_a_picture_and_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[tuple[int, int]] = []

    def counting(data: bytes) -> Image.Image:
        decoded.append((image := decode(data)).size)
        return image

    monkeypatch.setattr(requests, "decode", counting)
    monkeypatch.setattr(requests, "decode_mask", lambda data, kind: counting(data).convert("L"))
    limited = replace(CAPABILITIES, limits=Limits(pixels=100 * 100, all_pixels=2 * 100 * 100))
    content, other, mask = (sent(Image.new("RGB", (100, 100), colour)) for colour in ("red", "blue", "white"))

    def ask(parameters: dict[str, str], *instances: dict[str, str]) -> list[ServedImage]:
        body = {"parameters": parameters, "instances": [{"prompt": "a", **each} for each in instances]}
        return read_requests(json.dumps(body).encode(), limited)

    found = ask({"image": content, "mask_image": mask}, {}, {}, {}, {})
    assert [each.request.image.getpixel((5, 5)) for each in found if each.request.image] == [(255, 0, 0)] * 4
    assert decoded == [(100, 100)] * 2, "four pictures from one picture and its mask"
    decoded.clear()
    with pytest.raises(RequestError) as caught:
        ask({"image": content, "mask_image": mask}, {}, {"image": other}, {"image": sent(Image.new("L", (100, 101)))})
    rule = "brings the request's pictures and masks to 0.0 million pixels. Send at most 0.0 million in a request"
    assert list(caught.value.problems) == [
        Problem("instances.1.image", rule),
        Problem("instances.2.image", "is 100x101. Send at most 0.0 million pixels"),
    ]
    assert decoded == [(100, 100)] * 2
    decoded.clear()
    with pytest.raises(RequestError, match="is 5000x5000"):  # a file that ends early is not decoded to be sure
        requests_of({"instances": [{"prompt": "a", "image": sent(Image.new("1", (5000, 5000)))[:-400]}]})
    assert decoded == []


def test_rules_between_names_come_with_the_values_that_do_not_fit() -> None:
    with pytest.raises(RequestError) as caught:
        requests_of({"instances": [{"prompt": " ", "height": 63, "lora": "one", "lora_id": "base"}, {"x": 1}]})
    assert list(caught.value.problems) == [
        Problem("instances.0.height", "63 does not fit. It must be a multiple of 16. Use 48 or 64"),
        Problem("instances.1.x", f"unknown field. Known: {', '.join([*NAMES[2:], *NAMES[:2]])}"),
        Problem("instances.0.lora_id", "contradicts lora. Use only one of them"),
        Problem("instances.0", "the prompt is empty. Describe what to draw"),
        Problem("instances.1", "needs either prompt or text: what to draw"),
    ]


@pytest.mark.parametrize(
    "body, message",
    [
        (b'{"instances": [{' + b",".join(b'"%x": 0' % number for number in range(9_000)) + b"}]}", "has 9000 names"),
        (b'{"instances": [' + b",".join([b'{"a": 0}'] * 4_500) + b"]}", "at most 4. It has 4500"),
        (b"{" + b",".join(b'"%x": 0' % number for number in range(24_000)) + b"}", "more than 10,000 values"),
        (b'{"a": 0,' + b",".join(b'"%x": 0' % number for number in range(24_000)) + b"}", "appears twice"),
    ],
    ids=["unknown names", "instances", "names of a body", "a duplicate"],
)
def test_a_large_body_is_refused_in_little_time(body: bytes, message: str) -> None:
    assert 2**15 < len(body) <= CAPABILITIES.limits.body
    clock = time.process_time()
    with pytest.raises(RequestError, match=message):
        read_requests(body, CAPABILITIES)
    assert time.process_time() - clock < 3  # a hundred times what it takes, and half of what it once took
