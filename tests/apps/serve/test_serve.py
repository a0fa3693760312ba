"""``simpletune serve``: exact pictures, right status codes, a bounded queue, an orderly end."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from serving import PROMPT, BlockingGenerator, Running, blocking, pixels, real, running, until

from simpletune.apps import http
from simpletune.apps.cli.main import main, parse
from simpletune.apps.serve import app, server
from simpletune.apps.serve.app import HttpOptions, guard_app
from simpletune.apps.serve.limits import Limits
from simpletune.apps.serve.metrics import Metrics
from simpletune.apps.serve.requests import Capabilities, RequestError, ServedImage, read_requests
from simpletune.apps.serve.worker import FAILED, GenerationJob, JobCancelled
from simpletune.data import demo
from simpletune.system.options import UserError

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def run(served_run: Path) -> Path:
    return served_run


@pytest.fixture(scope="module")
def live(served_run: Path) -> Iterator[Running]:
    """The real model, served."""
    with running(real(served_run, "--max-side", "128", "--max-steps", "20", "--max-prompt", "300")) as it:
        it.wait_ready()
        yield it


@pytest.fixture
def stub() -> Iterator[Running]:
    """A generator that does not wait."""
    with running(blocking(BlockingGenerator(blocked=False))) as it:
        it.wait_ready()
        yield it


def problems(answer: httpx.Response) -> dict[str, str]:
    return {each["path"]: each["message"] for each in answer.json()["error"]["problems"]}


# Pictures


@pytest.mark.parametrize(
    "parameters, words",
    [
        ({}, ["--base"]),
        ({"lora": "first", "lora_scale": 0.7}, ["--lora", "first", "--scale", "0.7"]),
        ({"lora_id": "second"}, ["--lora", "second"]),
        ({"guidance_scale": 1, "width": 96, "num_inference_steps": 2},
         ["--base", "--guidance", "1", "--size", "96x64", "--steps", "2"]),
    ],
    ids=["base", "lora", "other lora", "no guidance"],
)  # fmt: skip
def test_a_picture_is_the_one_that_generate_draws(
    parameters: dict[str, Any], words: list[str], live: Running, run: Path, generated: Callable[..., bytes]
) -> None:
    words = [str(run.parent / word) if word in ("first", "second") else word for word in words]
    assert live.images(PROMPT, seed=3, **parameters) == [generated(run, *words)]


def test_the_base_is_untouched_by_loras_and_each_lora_by_the_other(live: Running) -> None:
    names = ["base", "first", "second"]
    once = {name: live.images(PROMPT, lora=name, num_inference_steps=1)[0] for name in names}
    assert len(set(once.values())) == 3
    mixed = [{"text": PROMPT, "lora": name} for name in ("second", "base", "first", "base")]
    assert live.images(*mixed, num_inference_steps=1) == [once[name] for name in ("second", "base", "first", "base")]
    assert live.images(PROMPT, lora="first", lora_scale=0, num_inference_steps=1)[0] == once["base"]


@pytest.mark.parametrize("number", [6, pytest.param(32, marks=pytest.mark.slow)])
def test_many_at_once_and_none_depends_on_the_others(number: int, live: Running) -> None:
    prompts = [PROMPT, PROMPT.replace("red", "blue"), PROMPT.replace("circle", "star")]
    asked = [
        ({"prompt": prompts[n // 3 % 3], "seed": n, "lora": ("base", "first", "second")[n % 3]}) for n in range(number)
    ]
    with ThreadPoolExecutor(number) as pool:
        together = list(pool.map(lambda instance: live.images(instance, num_inference_steps=1), asked))
    alone = [live.images(instance, num_inference_steps=1) for instance in reversed(asked)]
    assert together == alone[::-1]
    assert len({each[0] for each in together}) == number


def test_drawing_can_be_given_up_before_every_step(live: Running) -> None:
    generator = live.service.worker._generator
    image = ServedImage(replace(live.service.capabilities.defaults, prompt=PROMPT))
    assert generator is not None
    asked: list[int] = []

    def check_cancelled() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise JobCancelled

    with pytest.raises(JobCancelled):
        generator.generate(image, check_cancelled)
    assert len(asked) == 3
    whole = generator.generate(image, lambda: asked.append(1))
    assert len(asked) == 3 + 1 + 3  # the beginning, and three steps
    assert live.images(PROMPT) == [pixels(base64.b64encode(whole).decode())]


def test_a_picture_says_how_it_was_made_and_its_prompt_is_not_written_anywhere(live: Running, run: Path) -> None:
    """An instance goes before the parameters."""
    before = set(run.parent.rglob("*"))
    answer = live.predict({"prompt": PROMPT, "seed": 5, "lora": "first"}, seed=1, negative_prompt="nobody wrote this")
    assert answer.headers["content-type"] == "application/json"
    image: Any = Image.open(io.BytesIO(base64.b64decode(answer.json()["predictions"][0])))
    made = json.loads(image.text["simpletune"])
    assert made["prompt"] == PROMPT and made["seed"] == 5 and made["negative_prompt"] == "nobody wrote this"
    assert made["weights"] == "LoRA first x 1" and made["loras"] == [["first", 1.0]]
    assert "<lora:first:1>" in image.text["parameters"]
    assert set(run.parent.rglob("*")) == before
    peak = re.search(r"^simpletune_peak_memory_process_bytes (\S+)$", live.client.get("/metrics").text, re.M)
    assert peak and 2**27 < float(peak[1]) < 2**36


def test_with_a_modulation_plan_the_base_is_untouched_and_a_lora_of_what_it_takes_out_is_refused(
    run: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    second, file = str(run.parent / "second"), tmp_path / "generated.png"
    plan = ["--model", str(demo.SHIPPED), "--precision", "fp32", "--modulation", "plan", "--device", "cpu"]
    service = server.build(parse(["serve", *plan, "--lora", f"second={second}", "--port", "0"]))
    settings = {"width": 64, "height": 64, "num_inference_steps": 1, "seed": 3, "guidance_scale": 3}
    with running(service) as it:
        it.wait_ready()
        before, tuned, after = it.images(
            *({"prompt": PROMPT, "lora": name} for name in ("base", "second", "base")), **settings
        )
    assert before == after != tuned
    words = ["--size", "64x64", "--steps", "1", "--seed", "3", "--guidance", "3", "--prompt", PROMPT]
    assert main(["generate", *plan, *words, "--lora", second, "--output", str(file)]) == 0
    # generate encodes both prompts at once: last bits of T5's 256 tokens may differ
    generated = np.asarray(Image.open(file).convert("RGB"), float).ravel()
    assert np.abs(np.frombuffer(tuned, np.uint8) - generated).max() <= 2
    with running(server.build(parse(["serve", *plan, "--lora", f"x={run}", "--port", "0"]))) as it:
        it.thread.join(60)
        assert isinstance(it.failure, UserError)
        assert "norm1.linear" in str(it.failure) and "--modulation resident" in str(it.failure)


@pytest.mark.gpu
@pytest.mark.values
def test_on_a_gpu_the_base_is_untouched_and_the_devices_memory_is_told(run: Path) -> None:
    with running(real(run, "--device", "cuda")) as it:
        it.wait_ready()
        names = ("base", "first", "base", "second", "base")
        drawn = it.images(*({"prompt": PROMPT, "lora": name} for name in names[:3]))
        drawn += it.images(*({"prompt": PROMPT, "lora": name} for name in names[3:]))
        assert drawn[0] == drawn[2] == drawn[4] and len(set(drawn)) == 3
        peak = re.search(r"^simpletune_peak_memory_device_bytes (\S+)$", it.client.get("/metrics").text, re.M)
        assert peak and float(peak[1]) > 2**20
    gc.unfreeze()


# What does not fit


@pytest.mark.parametrize(
    "parameters, told",
    [
        ({"width": 1000}, "1000 does not fit. It must be at most 128"),
        ({"width": 72}, "72 does not fit. It must be a multiple of 16. Use 64 or 80"),
        ({"height": 64.5}, "64.5 does not fit. It must be a whole number"),
        ({"height": "64"}, '"64" does not fit. It must be a whole number, without quotes. Write 64'),
        ({"num_inference_steps": 21}, "21 does not fit. It must be at most 20"),
        ({"num_inference_steps": True}, "true does not fit. It must be a whole number"),
        ({"guidance_scale": 0.5}, "0.5 does not fit. It must be at least 1"),
        ({"seed": -1}, "-1 does not fit. It must be at least 0"),
        ({"seed": 1e30}, "at most 9223372036854775807"),
        ({"lora": "../second"}, '"../second" is not served. Did you mean second?'),
        ({"lora": "x"}, '"x" is not served. Known: base, first, second'),
        ({"lora": ["first"]}, '["first"] does not fit. It must be text in quotes'),
        ({"lora_scale": 5}, "5 does not fit. It must be at most 4"),
        ({"negative_prompt": 7}, "7 does not fit. It must be text in quotes"),
        ({"negative_prompt": "x" * 301}, "It must be text of at most 300 characters. It has 301"),
        ({"num_inference_step": 2}, "unknown field. Did you mean num_inference_steps?"),
        ({"images": "x"}, "unknown field. Did you mean image?"),
        ({"image": "/etc/passwd"}, "is not base64"),
    ],
)
def test_a_parameter_that_does_not_fit_is_named(parameters: dict[str, Any], told: str, live: Running) -> None:
    answer = live.predict(PROMPT, **parameters)
    assert answer.status_code == 422
    assert told in problems(answer)[f"parameters.{next(iter(parameters))}"]
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "instances, where, told",
    [
        ([], "instances", "a list of at least 1"),
        (None, "instances", "null does not fit. It must be a list"),
        ([{"prompt": PROMPT}] * 5, "instances", "a list of at most 4. It has 5"),
        (["a star"], "instances.0", "It must be an object"),
        ([{"prompt": PROMPT}, {}], "instances.1", "prompt or text"),
        ([{"prompt": PROMPT, "text": PROMPT}], "instances.0", "either prompt or text"),
        ([{"prompt": "x" * 301}], "instances.0.prompt", "at most 300 characters. It has 301"),
        ([{"text": 7}], "instances.0.text", "7 does not fit. It must be text in quotes"),
        ([{"prompt": None}], "instances.0.prompt", "null does not fit. It must be text in quotes"),
        ([{"prompt": "  "}], "instances.0", "the prompt is empty"),
        ([{"prompt": PROMPT, "height": 63}], "instances.0.height", "a multiple of 16. Use 48 or 64"),
        ([{"prompt": PROMPT, "lora": "first", "lora_id": "second"}], "instances.0.lora_id", "contradicts lora"),
    ],
)
def test_an_instance_that_does_not_fit_is_named(instances: Any, where: str, told: str, live: Running) -> None:
    answer = live.client.post("/predict", json={"instances": instances})
    assert answer.status_code == 422
    assert told in problems(answer)[where]


def test_all_problems_are_told_at_once(live: Running) -> None:
    answer = live.predict("", width=1, sed=2)
    assert set(problems(answer)) == {"instances.0", "parameters.width", "parameters.sed"}


def with_parameters(parameters: bytes) -> bytes:
    return b'{"instances": [{"prompt": "a"}], "parameters": {' + parameters + b"}}"


@pytest.mark.parametrize(
    "body, status, told",
    [
        (b"", 400, "is not strict JSON"),
        (b"{", 400, "is not strict JSON"),
        (b"[]", 400, "must be an object"),
        (b"\xff\xfe", 400, "is not strict JSON"),
        (b"[" * 60_000, 400, "nested too deeply"),
        (with_parameters(b'"seed": 1, "seed": 2'), 400, 'the key "seed" appears twice'),
        (with_parameters(b'"guidance_scale": NaN'), 400, "NaN is not a JSON number"),
        (with_parameters(b'"lora_scale": -Infinity'), 400, "-Infinity is not a JSON number"),
        (with_parameters(b'"guidance_scale": 1e999'), 400, "1e999 does not fit in 64 bits"),
        (with_parameters(b'"width": 1e999'), 400, "1e999 does not fit in 64 bits"),
        (with_parameters(b'"seed": ' + b"9" * 5000), 400, "is not strict JSON"),
        (with_parameters(b'"seed": 9223372036854775808'), 400, "9223372036854775808 does not fit in 64 bits"),
        (b'{"instances": [{"prompt": "\\ud800"}]}', 422, "not a character"),
        (b'{"instances": [{"prompt": "a"}], "parameters": []}', 422, "must be an object"),
        (b'{"instances": [{"prompt": "a"}], "path": "x"}', 422, "path: unknown field. Known: parameters, instances"),
        (b'{"instances": [{"prompt": "a", "\\ud800": 1}]}', 422, 'instances.0: "\\ud800" does not fit'),
        (b"{}", 422, "instances: is required: a list such as"),
        (json.dumps(dict.fromkeys(map(str, range(64)))).encode(), 422, "; and 57 more"),
        (json.dumps(dict.fromkeys(map(str, range(65)))).encode(), 422, "has 65 names. At most 64"),
        (json.dumps({"instances": [dict.fromkeys(map(str, range(65)))]}).encode(), 422, "instances.0: has 65 names"),
        (b'{"' + b"k" * 9000 + b'": 0}', 422, "k...: unknown field"),
    ],
)  # fmt: skip
def test_a_body_that_does_not_fit(body: bytes, status: int, told: str, live: Running) -> None:
    answer = live.client.post("/predict", content=body, headers=JSON)
    assert answer.status_code == status
    assert told in answer.json()["error"]["message"]


def test_what_is_no_request_of_ours_and_what_every_answer_forbids(stub: Running) -> None:
    body = b'{"instances": [{"prompt": "a"}]}'
    ask = stub.client.request
    assert ask("GET", "/predict").status_code == 405 and ask("GET", "/predict").headers["allow"] == "POST"
    assert ask("POST", "/").status_code == 405 and ask("DELETE", "/health").status_code == 405
    assert "Allowed: POST" in ask("GET", "/predict").json()["error"]["message"]
    assert ask("OPTIONS", "/predict", headers={"Origin": "http://elsewhere"}).status_code == 405
    for path in ("/nothing", "/predict/", "/page/page.js", "/%2e%2e/app.py", "/..%2fapp.py"):
        assert ask("GET", path).status_code == 404
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = ask("POST", "/predict", content=body, headers={"Content-Type": kind} if kind else {})
        assert answer.status_code == 415 and "Send application/json" in answer.text
    assert ask("POST", "/predict", content=body, headers={"Content-Type": "application/json; charset=utf-8"}).is_success
    assert ask("GET", "/", headers={"Host": "attacker.example"}).status_code == 421
    for answer in (ask("GET", "/"), ask("GET", "/nothing"), stub.predict("a"), stub.predict("")):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert not [name for name in answer.headers if name.startswith("access-control") or name == "server"]
    about = ask("GET", "/info").json()
    assert set(about) == {"loras", "tuned", "standard", "limits", "inpaints", "status"} and about["status"] == "ready"
    assert about["limits"]["steps"] >= about["standard"]["steps"]


def test_large_bodies_are_not_read(stub: Running) -> None:
    large = b" " * (Limits.body + 1)
    assert stub.client.post("/predict", content=large, headers=JSON).status_code == 413
    pieces = (b" " * 2**20 for _ in range(Limits.body // 2**20 + 1))  # of unknown length
    assert stub.client.post("/predict", content=pieces, headers=JSON).status_code == 413
    host, port = stub.service.socket.getsockname()
    with socket.create_connection((host, port)) as raw:
        raw.sendall(b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n")
        raw.sendall(b"Content-Length: 99999999\r\n\r\n")
        assert raw.recv(64).startswith(b"HTTP/1.1 413")
    assert stub.predict("a").is_success


# The queue


def test_no_more_wait_than_may_and_those_that_wait_are_served() -> None:
    generator = BlockingGenerator(steps=100_000)
    with running(blocking(generator, Limits(queue=5))) as it, ThreadPoolExecutor(32) as pool:
        it.wait_ready()
        asked = [pool.submit(it.predict, "a star", seed=0)]
        until(lambda: len(generator.started) == 1)
        asked += [pool.submit(it.predict, "a star", seed=n) for n in range(1, 32)]
        until(lambda: sum(each.done() for each in asked) == 26)
        refused = [each.result() for each in asked if each.done()]
        assert {each.status_code for each in refused} == {429}
        assert all(1 <= int(each.headers["retry-after"]) <= 600 for each in refused)
        assert it.service.worker.waiting == 5
        assert "simpletune_queue_length 5.0" in it.client.get("/metrics").text
        generator.release.set()
        assert sorted(each.result().status_code for each in asked) == [200] * 6 + [429] * 26
        assert 'simpletune_requests_total{route="predict",status="429"} 26' in it.client.get("/metrics").text


def test_a_full_queue_refuses_a_picture_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    monkeypatch.setattr(app, "read_requests", lambda *given: decoded.append(1) or read_requests(*given))
    generator = BlockingGenerator(steps=100_000)
    with running(blocking(generator, Limits(queue=1))) as it, ThreadPoolExecutor(2) as pool:
        it.wait_ready()
        asked = [pool.submit(it.predict, "a star")]
        until(lambda: len(generator.started) == 1)
        asked.append(pool.submit(it.predict, "a star"))
        until(lambda: it.service.worker.waiting == 1)
        assert it.predict({"prompt": "a star", "image": "no picture"}).status_code == 429
        assert len(decoded) == 2
        generator.release.set()
        assert [each.result().status_code for each in asked] == [200, 200]


def test_two_requests_are_decoded_at_a_time_and_no_more_are_read_than_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 at once 6 have a place: 5 that may wait, and that which will be drawn first."""
    decoding, most, go, lines = [0], [0], threading.Event(), list[str]()

    def slowly(*given: Any) -> list[ServedImage]:
        decoding[0] += 1
        most.append(decoding[0])
        assert go.wait(60)
        decoding[0] -= 1
        return read_requests(*given)

    monkeypatch.setattr(app, "read_requests", slowly)
    generator = BlockingGenerator(steps=100_000)
    with running(blocking(generator, Limits(queue=5), log=lines.append)) as it, ThreadPoolExecutor(12) as pool:
        it.wait_ready()
        asked = [pool.submit(it.predict, "a star", seed=n) for n in range(12)]
        until(lambda: sum(each.done() for each in asked) == 6)
        assert {each.result().status_code for each in asked if each.done()} == {429}
        assert decoding == [2] and it.service.worker.waiting == 0, "four wait for their turn"
        go.set()
        until(lambda: it.service.worker.waiting == 5)
        generator.release.set()
        assert sorted(each.result().status_code for each in asked) == [200] * 6 + [429] * 6
        assert max(most) == 2 and len(most) == 7
        until(lambda: it.service.worker.waiting == 0)
        go.clear()
        held = [pool.submit(it.predict, "a star") for _ in range(2)]
        until(lambda: decoding == [2])
        lines.clear()
        with asking(it):
            until(lambda: it.service.worker._places == 3)
        go.set()
        assert [each.result().status_code for each in held] == [200, 200]
        until(lambda: sum('"/predict"' in line for line in lines) == 3)
        assert sorted(json.loads(line)["status"] for line in lines) == [200, 200, 499]
        assert len(most) == 9, "the request of the client that left was not decoded"
        monkeypatch.setattr(app, "PATIENCE", 0.05)
        go.clear()
        held = [pool.submit(it.predict, "a star") for _ in range(2)]
        until(lambda: decoding == [2])
        late = it.predict("a star")
        assert late.status_code == 503 and "other requests are being decoded" in late.text
        go.set()
        assert [each.result().status_code for each in held] == [200, 200]
        assert it.service.worker._places == 0


def asking(it: Running) -> socket.socket:
    """A connection on which two pictures were asked for."""
    body = json.dumps({"instances": [{"prompt": "a"}] * 2}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    raw = socket.create_connection(it.service.socket.getsockname())
    raw.sendall(head.encode() + b"\r\n\r\n" + body)
    return raw


def test_the_work_of_a_client_that_leaves_is_given_up() -> None:
    generator, lines = BlockingGenerator(steps=100_000), list[str]()
    with running(blocking(generator, log=lines.append)) as it, ThreadPoolExecutor(1) as pool:
        it.wait_ready()
        with asking(it):
            until(lambda: len(generator.started) == 1)
        until(lambda: generator.cancelled == 1)  # it was in hand
        assert len(generator.started) == 1
        first = pool.submit(it.predict, "b")
        until(lambda: len(generator.started) == 2)
        with asking(it):
            until(lambda: it.service.worker.waiting == 1)
        until(lambda: it.service.worker.waiting == 0)
        generator.release.set()
        assert first.result().status_code == 200
        assert [image.request.prompt for image in generator.started] == ["a", "b"]
        until(lambda: sum('"/predict"' in line for line in lines) == 3)  # written after the answer is sent
        assert [json.loads(line)["status"] for line in lines if '"/predict"' in line] == [499, 499, 200]
        assert 'status="499"} 2' in it.client.get("/metrics").text


def test_what_takes_too_long_is_given_up() -> None:
    generator = BlockingGenerator(steps=100_000)
    with running(blocking(generator, Limits(seconds=1))) as it:
        it.wait_ready()
        answer = it.predict("a")
        assert answer.status_code == 504 and "within 1 s" in answer.text
        until(lambda: generator.cancelled == 1)
        generator.release.set()
        it.service.worker.limits = Limits(seconds=60)
        assert it.predict("a").is_success


# Beginning and end


def test_it_says_that_it_is_not_ready_before_it_is() -> None:
    loaded, generator = threading.Event(), BlockingGenerator(blocked=False)
    service = blocking(generator)
    service.worker._load = lambda: loaded.wait() and generator  # type: ignore[assignment,return-value]
    with running(service) as it:
        until(lambda: it.client.get("/health").status_code == 503)
        assert it.client.get("/health").json() == {"status": "loading"}
        answer = it.predict("a")
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert "simpletune_ready 0" in it.client.get("/metrics").text
        assert it.client.get("/").is_success
        loaded.set()
        it.wait_ready()
        assert it.client.get("/health").json() == {"status": "ready"}
        assert it.predict("a").is_success


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> BlockingGenerator:
        raise UserError("no such weights")

    service = blocking(BlockingGenerator())
    service.worker._load = load
    with running(service) as it:
        it.thread.join(60)
        assert isinstance(it.failure, UserError)


def test_a_request_is_answered_even_if_the_worker_ends_in_it() -> None:
    class Ending(BlockingGenerator):
        def encode(self, images: Any) -> None:
            raise SystemExit("the device is gone")

    service = blocking(Ending())
    service.worker._load, job = lambda: Ending(), GenerationJob([], 60)  # type: ignore[assignment,return-value]
    service.worker._waiting.append(job)
    service.worker.run()
    assert service.worker.state == "ended" and isinstance(service.worker.failure, SystemExit)
    with pytest.raises(RequestError, match=re.escape(FAILED)):
        job.done.result(0)


def test_the_first_signal_lets_the_request_in_hand_finish() -> None:
    generator = BlockingGenerator(steps=100_000)
    with running(blocking(generator)) as it, ThreadPoolExecutor(3) as pool:
        it.wait_ready()
        in_hand, address = pool.submit(it.predict, "a", "b"), it.service.address
        until(lambda: len(generator.started) == 1)
        waiting = pool.submit(it.predict, "c")
        until(lambda: it.service.worker.waiting == 1)
        it.service.server.handle_exit(signal.SIGTERM, None)
        assert waiting.result().status_code == 503
        assert it.predict("d").status_code == 503
        assert it.client.get("/health").status_code == 503
        generator.release.set()
        assert len(in_hand.result().json()["predictions"]) == 2
        it.thread.join(60)
        assert not it.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            httpx.get(address, timeout=60)


def test_the_second_signal_does_not() -> None:
    generator = BlockingGenerator(steps=100_000)
    with running(blocking(generator)) as it, ThreadPoolExecutor(1) as pool:
        it.wait_ready()
        in_hand = pool.submit(it.predict, "a")
        until(lambda: len(generator.started) == 1)
        for _ in range(2):
            it.service.server.handle_exit(signal.SIGINT, None)
        assert in_hand.result().status_code == 503
        it.thread.join(60)
        assert not it.thread.is_alive() and it.failure is None


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simpletune", "serve", "--run", str(run), "--port", "0", "--max-side", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.readline()
        address = re.search(r"serving base, first at (http://127\.0\.0\.1:\d+/); loading", first)
        assert address, first
        until(lambda: httpx.get(f"{address[1]}health", timeout=60).status_code == 200)
        answer = httpx.post(f"{address[1]}predict", json={"instances": [{"text": PROMPT}]}, timeout=60)
        assert len(pixels(answer.json()["predictions"][0])) == 3 * 64 * 64
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=120)
    assert process.returncode == 0 and out.rstrip().endswith("stopped")
    line = json.loads(log.splitlines()[-1])
    expected = {"method": "POST", "path": "/predict", "status": 200, "pictures": 1, "loras": ["base"]}
    assert expected.items() <= line.items()
    assert PROMPT not in log


# Set-up


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("simpletune.system.extras.find_spec", lambda name: name != "prometheus_client" or None)
    assert main(["serve"]) == 3
    assert re.search(r"needs prometheus_client .*-m pip install -e .*\[serve\]", capsys.readouterr().err)


@pytest.mark.parametrize(
    "words, told",
    [
        ("--lora x", "--lora: x is not NAME=FILE"),
        ("--lora ../x=y", "is not NAME=FILE"),
        ("--lora base=y", "--lora: base is already in use"),
        ("--lora first=y", "--lora: first is already in use"),
        ("--lora x=nowhere.safetensors", "nowhere.safetensors does not exist"),
        ("--max-side 40", "--max-side: 40 is not allowed. Use a multiple of 16 from 16 to 512"),
        ("--max-side 1024", "--max-side: 1024 is not allowed"),
        ("--host 203.0.113.9", "--port: cannot listen on 203.0.113.9"),
    ],
)
def test_arguments_that_do_not_fit(words: str, told: str, run: Path) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        server.build(parse(["serve", "--run", str(run), "--port", "0", *words.split()]), {})


def test_vertex_says_where_it_wants_to_be_answered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    wants = {"AIP_HTTP_PORT": str(port), "AIP_PREDICT_ROUTE": "/v1/models/7:predict", "AIP_HEALTH_ROUTE": "/v1/ok"}
    service = server.build(parse(["serve", "--run", str(run), "--predictions", "object"]), wants)
    assert service.socket.getsockname() == ("0.0.0.0", port)
    service.worker._load = lambda: BlockingGenerator(blocked=False)
    with running(service) as it:
        it.wait_ready()
        at = f"http://127.0.0.1:{port}"
        assert it.client.get(f"{at}/v1/ok").status_code == 200
        answer = it.client.post(f"{at}/v1/models/7:predict", json={"instances": [{"text": "a"}]})
        assert list(answer.json()["predictions"][0]) == ["output"]
    with pytest.raises(UserError, match="AIP_HTTP_PORT: no is not a port"):
        server.build(parse(["serve", "--run", str(run)]), {"AIP_HTTP_PORT": "no"})
    with pytest.raises(UserError, match="AIP_PREDICT_ROUTE: predict is not a path"):
        server.build(parse(["serve", "--run", str(run)]), {"AIP_PREDICT_ROUTE": "predict"})


def test_figures_count_and_an_error_in_the_model_ends_one_request_alone(
    stub: Running, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = stub.predict("break")
    assert answer.status_code == 500 and "something in the model" not in answer.text
    assert "RuntimeError: something in the model" in capfd.readouterr().err
    stub.predict("a", "b")
    stub.predict({"prompt": "c", "lora": "one"})
    stub.predict("")
    text = stub.client.get("/metrics").text
    for line in (
        'simpletune_requests_total{route="predict",status="200"} 2.0',
        'simpletune_requests_total{route="predict",status="422"} 1.0',
        'simpletune_pictures_total{lora="base"} 2.0',
        'simpletune_pictures_total{lora="one"} 1.0',
        'simpletune_request_seconds_bucket{le="+Inf"} 2.0',
        "simpletune_picture_seconds_count 3.0",
        "simpletune_peak_memory_process_bytes 1024.0",
        "simpletune_ready 1.0",
        "simpletune_queue_length 0.0",
    ):
        assert line in text.splitlines()
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [0-9.e+-]+', line), line


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 4, 32])
def test_it_keeps_up_with_clients(clients: int, live: Running) -> None:
    """Prints what docs/how-to/serve.md shows."""
    each = max(1, 32 // clients)
    live.images(PROMPT)

    def client(number: int) -> list[float]:
        seconds = []
        for turn in range(each):
            clock = time.perf_counter()
            live.images(PROMPT, seed=number * each + turn)
            seconds.append(time.perf_counter() - clock)
        return seconds

    clock = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        seconds = sorted(second for some in pool.map(client, range(clients)) for second in some)
    total = time.perf_counter() - clock
    p95 = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
    rate, median = len(seconds) / total, statistics.median(seconds)
    print(f"{clients} clients: {rate:.1f} pictures/s, median {median:.3f} s, p95 {p95:.3f} s")
    assert len(seconds) == clients * each
    assert seconds[-1] <= total + 0.01


@pytest.mark.parametrize("begun", [False, True])
def test_a_failure_in_the_server_is_an_answer_and_a_line_of_the_log(begun: bool, capsys) -> None:
    sent, lines = [], []

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("a mistake of ours")

    async def send(message: Any) -> None:
        sent.append(message)

    guard = guard_app(broken, {"/predict": "predict"}, Metrics(), HttpOptions(hosts=None, log=lines.append))
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": [], "client": ("127.0.0.1", 1)}
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == json.loads(lines[0])["status"] == (200 if begun else 500)
    assert begun or b"The server failed; see its log" in sent[1]["body"]
    assert b"a mistake" not in repr(sent).encode() and "a mistake of ours" in capsys.readouterr().err
    asyncio.run(guard({"type": "websocket"}, None, send))  # type: ignore[arg-type]
    assert len(lines) == 1 and len(sent) == (1 if begun else 2)


def test_bodies_are_not_read_in_the_loop_that_answers_others(stub: Running, monkeypatch: Any) -> None:
    held = threading.Event()

    def slow(body: bytes, capabilities: Capabilities) -> list[Any]:
        assert held.wait(120)
        raise RequestError(400, "slow")

    monkeypatch.setattr(app, "read_requests", slow)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(stub.predict, "a")
        for _ in range(5):
            assert stub.client.get("/health").status_code == 200
        assert not sent.done()
        held.set()
        assert sent.result().status_code == 400


def test_a_request_that_takes_longer_than_its_headers_may_is_answered(monkeypatch: Any) -> None:
    generator, due = BlockingGenerator(steps=100_000), threading.Event()
    honest = http.TimedProtocol._close_unless_headers_came

    def close(connection: http.TimedProtocol) -> None:
        honest(connection)
        if generator.started:
            due.set()

    with running(blocking(generator)) as it, ThreadPoolExecutor(1) as pool:
        it.wait_ready()
        monkeypatch.setattr(http, "HEADER_TIMEOUT", 1.0)
        monkeypatch.setattr(http.TimedProtocol, "_close_unless_headers_came", close)
        asked = pool.submit(httpx.post, f"{it.service.address}predict", json={"instances": [{"text": "a"}]}, timeout=60)
        assert due.wait(60)
        generator.release.set()
        assert asked.result().status_code == 200
