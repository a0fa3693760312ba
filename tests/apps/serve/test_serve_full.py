"""``simpletune serve`` of a run that has trained the whole model: the true base stands beside it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from serving import PROMPT, Running, make_full_run, real, running

from simpletune.apps.cli.main import parse
from simpletune.apps.serve import models, server
from simpletune.apps.serve.models import Models, ServedModels
from simpletune.runs.weights import Weights
from simpletune.system.options import UserError


@pytest.fixture(scope="module")
def run(served_run: Path) -> Path:
    return make_full_run(served_run)


@pytest.fixture(scope="module")
def live(run: Path) -> Iterator[Running]:
    with running(real(run, "--max-side", "128")) as it:
        it.wait_ready()
        yield it


def test_base_is_the_base_and_the_full_model_has_the_runs_name(
    live: Running, run: Path, served_run: Path, generated: Callable[..., bytes]
) -> None:
    second = generated(served_run, "--lora", str(run.parent / "second"))
    expected = {"base": generated(served_run, "--base"), "whole": generated(run), "second": second}
    assert len(set(expected.values())) == 3
    names = ["whole", "base", "second", "whole"]
    asked = [{"prompt": PROMPT, "model": name} for name in names]
    assert live.images(*asked, seed=3) == [expected[name] for name in names]
    assert live.images(PROMPT, seed=3) == [expected["whole"]], "what is served is drawn where nothing is said"
    info = live.client.get("/info").json()
    assert info["loras"] == ["base", "whole", "second"] and info["tuned"] == "whole"
    assert live.service.capabilities.describe() == "base, whole (full model), second (LoRA)"


def test_its_pictures_say_which_model_drew_them_and_it_has_no_strength(live: Running) -> None:
    answer = live.predict(*({"prompt": PROMPT, "model": name} for name in ("base", "whole")))
    base, whole = (
        json.loads(Image.open(io.BytesIO(base64.b64decode(text))).text["simpletune"])  # type: ignore[attr-defined]
        for text in answer.json()["predictions"]
    )
    assert (base["weights"], whole["weights"]) == ("base", "whole") and whole["model"] == "whole" != base["model"]
    answer = live.predict({"prompt": PROMPT, "lora_scale": 0.5})
    assert answer.status_code == 422
    assert "0.5 is not allowed: whole is a full model and has no strength" in answer.json()["error"]["message"]
    assert live.predict({"prompt": PROMPT, "model": "base", "lora": "whole"}).status_code == 422


def test_the_start_names_them_and_no_lora_takes_the_runs_name(run: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(server.Service, "run", lambda self: self.socket.close())
    server.run(parse(["serve", "--run", str(run), "--port", "0"]))
    assert "serving base, whole (full model) at http" in capsys.readouterr().out
    with pytest.raises(UserError, match="--lora: whole is already in use"):
        server.build(parse(["serve", "--run", str(run), "--lora", f"whole={run.parent / 'second'}", "--port", "0"]))


@pytest.mark.parametrize("free", [2**50, 0], ids=["both in memory", "by turns"])
def test_both_are_in_memory_where_there_is_room(free: int, run: Path, live: Running, monkeypatch, capsys) -> None:
    loads: list[Weights] = []
    load = models.load_weights
    monkeypatch.setattr(models, "free_model_bytes", lambda device: free)
    monkeypatch.setattr(models, "load_weights", lambda *given: loads.append(given[1]) or load(*given))
    config = live.service.worker._generator.config  # type: ignore[union-attr]
    tuned = Weights("whole", denoiser=run / "transformer")
    both = Models(config, ServedModels({}, ("whole", tuned)), torch.device("cpu"), 64, lambda: None)
    assert len(loads) == 2, "what does not load is known at the start"
    seen = [both.use(name, 1.0)[0].proj_out.weight.clone() for name in ("whole", "base", "base", "whole")]
    assert torch.equal(seen[0], seen[3]) and torch.equal(seen[1], seen[2]) and not torch.equal(seen[0], seen[1])
    assert len(loads) == (2 if free else 4) and len(both._loaded) == (2 if free else 1)
    assert ("do not fit in memory together" in capsys.readouterr().out) == (not free)


def test_what_training_left_alone_is_in_memory_once(live: Running) -> None:
    loaded = live.service.worker._generator.models._loaded  # type: ignore[union-attr]
    whole = dict(loaded["whole"].denoiser.named_parameters())
    base = {path.replace(".base_layer.", "."): each for path, each in loaded["base"].denoiser.named_parameters()}
    apart = {path for path in whole if whole[path].data_ptr() != base[path].data_ptr()}
    assert apart == {"proj_out.weight", "proj_out.bias"}
