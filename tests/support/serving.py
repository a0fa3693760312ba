"""Shared by the tests of ``simpletune serve``: a run, servers in threads, a generator that waits."""

from __future__ import annotations

import base64
import html
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from PIL import Image

from simpletune.adapters.methods.full import Full
from simpletune.adapters.methods.lora import Lora
from simpletune.apps.cli.main import main, parse
from simpletune.apps.http import bind
from simpletune.apps.serve import server
from simpletune.apps.serve.app import HttpOptions
from simpletune.apps.serve.limits import Limits
from simpletune.apps.serve.requests import Capabilities, ServedImage
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.engine.quant.precision import FP32
from simpletune.runs.folder import CONFIG
from simpletune.stages.sample import ImageRequest
from simpletune.stages.text_cache import TextCache

PROMPT = "a flat picture of a small red circle on the left, on a mint background"
STYLE = ["text_embedder.linear_1", "attn.add_k_proj", "attn.add_v_proj", "norm1.linear"]  # the demo's kind of targets


def make_run(folder: Path) -> Path:
    """A run of the bundled tiny SD3, as if trained: ``first``; and another LoRA: ``second``."""
    data = {
        "name": "first", "device": "cpu", "precision": {"weights": "fp32"},
        "model": {"pretrained": "demo:tiny-sd3", "t5_length": 24}, "data": {"path": "demo:pictures", "resolution": 64},
        "validation": {"steps": 3, "guidance": 3.0, "seed": 7}, "output": {"cache": str(folder / "cache")},
    }  # fmt: skip
    config = validate(data, "first")
    run = folder / "first"
    run.mkdir()
    (run / CONFIG).write_text(config.model_dump_json(by_alias=True))
    model = resolve_folders(config).model
    text = TextCache(model, config.precision.encoder_dtype(), folder / "cache")
    for prompt in (PROMPT, ""):
        text.fill([prompt], torch.device("cpu"))  # each by itself, as the server does: equal to the last bit
    for number, (place, lora) in enumerate({run: Lora(rank=4, targets=STYLE), folder / "second": Lora(rank=2)}.items()):
        place.mkdir(exist_ok=True)
        transformer = model.load_denoiser(FP32(), torch.device("cpu"))
        lora.attach(transformer, seed=number)
        for name, weight in transformer.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(number))
        lora.export(transformer, place, {})
    return run


def make_full_run(run: Path, name: str = "whole") -> Path:
    """Another run of the same configuration, as if its full model was trained: the last layer has other weights."""
    folder = run.parent / name
    folder.mkdir()
    config = json.loads((run / CONFIG).read_text()) | {"name": name, "adapter": {"method": "full"}}
    (folder / CONFIG).write_text(json.dumps(config))
    transformer = resolve_folders(validate(config, name)).model.load_denoiser(FP32(), torch.device("cpu"))
    for path, parameter in transformer.named_parameters():
        if path.startswith("proj_out"):
            parameter.data.mul_(1.5)
    Full().export(transformer, folder, {})
    return folder


def generate(file: Path, run: Path, *words: str) -> bytes:
    """The pixels that ``simpletune generate`` draws of a run, with seed 3."""
    given = ["--run", str(run), "--prompt", PROMPT, "--seed", "3", "--out", str(file), "--overwrite"]
    assert main(["generate", *given, *words]) == 0
    return Image.open(file).convert("RGB").tobytes()


class BlockingGenerator:
    """Returns a fixed image once ``release`` is set; records what it started, counts what was cancelled."""

    def __init__(self, blocked: bool = True, steps: int = 400):
        self.release, self.steps = threading.Event(), steps
        self.started: list[ServedImage] = []
        self.cancelled = 0
        if not blocked:
            self.release.set()

    def encode(self, images: Sequence[ServedImage]) -> None:
        """Nothing."""

    def generate(self, image: ServedImage, check_cancelled: Callable[[], None]) -> bytes:
        """Steps of 5 ms each until it is released, then the image."""
        self.started.append(image)
        if image.request.prompt == "break":
            raise RuntimeError("something in the model")
        try:
            for _ in range(self.steps):
                check_cancelled()
                if self.release.wait(0.005):
                    break
        except Exception:
            self.cancelled += 1
            raise
        buffer = io.BytesIO()
        Image.new("RGB", (16, 16), self.colour(image)).save(buffer, format="PNG")
        return buffer.getvalue()

    def colour(self, image: ServedImage) -> str:
        """Of the fixed image."""
        return "red"

    def peak_bytes(self) -> dict[str, float]:
        """A fixed figure."""
        return {"process": 1024.0}


class Running:
    """A server in a thread, and a client of it."""

    def __init__(self, service: server.Service):
        self.service, self.client = service, httpx.Client(base_url=service.address, timeout=60)
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as failure:
            self.failure = failure

    def wait_ready(self) -> None:
        """Until it is."""
        until(lambda: self.client.get("/health").status_code == 200)

    def predict(self, *instances: Any, **parameters: Any) -> httpx.Response:
        """Ask for pictures."""
        body = {"instances": [{"prompt": each} if isinstance(each, str) else each for each in instances]}
        return self.client.post("/predict", json={**body, "parameters": parameters})

    def images(self, *instances: Any, **parameters: Any) -> list[bytes]:
        """Ask for pictures, and have their pixels."""
        answer = self.predict(*instances, **parameters)
        assert answer.status_code == 200, answer.text
        return [pixels(text) for text in answer.json()["predictions"]]


@contextmanager
def running(service: server.Service) -> Iterator[Running]:
    """A server while the context lasts."""
    it = Running(service)
    try:
        yield it
    finally:
        it.client.close()
        service.worker.stop(at_once=True)
        it.thread.join(60)
        assert not it.thread.is_alive()


def real(run: Path, *words: str) -> server.Service:
    """A server of the run, with the second LoRA."""
    second = f"second={run.parent / 'second'}"
    return server.build(parse(["serve", "--run", str(run), "--lora", second, "--port", "0", *words]))


def blocking(
    generator: BlockingGenerator,
    limits: Limits = Limits(),  # noqa: B008 frozen
    names: tuple[str, ...] = ("base", "one"),
    tuned: str | None = None,
    **options: Any,
) -> server.Service:
    """A server of a generator that waits."""
    capabilities = Capabilities(names, ImageRequest("", 7, "", 64, 64, 3, 3.0), limits, 8, tuned)
    options = {"hosts": {"127.0.0.1"}, "log": lambda line: None, **options}
    return server.Service(lambda: generator, capabilities, bind("127.0.0.1", 0), HttpOptions(**options))


def pixels(text: str) -> bytes:
    """The values of a base64 PNG."""
    return Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB").tobytes()


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for a condition; an AssertionError if it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def element(text: str, name: str) -> str:
    """An element of that id, its tag with attributes and what is in it, up to the next of its kind."""
    match = re.search(rf'<(\w+)[^>]*\bid="{name}".*?</\1>', text, re.S)
    assert match, name
    return html.unescape(match[0])
