"""The model card beside every result, and ``simpletune push``."""

from __future__ import annotations

import argparse
import base64
import copy
import io
import json
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from PIL import Image
from safetensors import safe_open

from simpletune.apps.cli.generate import generate_arguments
from simpletune.apps.cli.main import main
from simpletune.commands.generate.generate import generate
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.runs.model_card import code, for_repository, front_matter, licence, shareable, snippet
from simpletune.stages.sample import ImageRequest
from simpletune.system.shell import login_command
from simpletune.training.train import train

MEDIUM = "stabilityai/stable-diffusion-3-medium-diffusers"
TOKEN = "hf_" + "marker" * 5
METHODS = {"lora": {"method": "lora", "rank": 2, "targets": "all_linear"}, "full": {"method": "full"}}


def make_run(tiny_config: dict, method: str = "lora", **data: Any) -> Path:
    config = copy.deepcopy(tiny_config) | {"adapter": METHODS[method], "optimizer": {"lr": 0.002}}
    config["data"] |= data
    config["validation"] = {"prompts": ['a "red" disc'], "negative_prompt": "blurry", "steps": 3, "loss_samples": 2}
    return train(validate(config, "test"))


def split_card(run: Path) -> tuple[dict[str, Any], str]:
    _, front, body = (run / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def blocks(body: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", body, re.DOTALL)


def differ(one: Path, other: Path) -> int:
    """The largest difference of two pictures, in levels of 255."""
    pixels = [Image.open(file).tobytes() for file in (one, other)]
    assert len(pixels[0]) == len(pixels[1])
    return max(abs(a - b) for a, b in zip(*pixels, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_the_card_says_what_the_result_is_and_its_lines_draw_it(
    method: str, tiny_config: dict, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tiny_config, method, prompt="a photo of `sks` disc: red, #1")
    front, body = split_card(run)
    assert front["library_name"] == "diffusers" and front["license"] == "other"
    assert front["instance_prompt"] == "a photo of `sks` disc: red, #1"
    assert method in front["tags"] and "base_model" not in front  # a local folder is no name that the hub knows
    summary = json.loads((run / "summary.json").read_text())
    assert "Trigger prompt: ``a photo of `sks` disc: red, #1``" in body
    assert f"{summary['eval_loss_before']:.4f} before, {summary['eval_loss_after']:.4f} after" in body
    for row in ("| pictures | 6 from `pictures` |", "| resolution | 32 px |", "| steps | 4 (batch 1,", "0.002 (adamw;"):
        assert row in body
    (link,) = re.findall(r"!\[[^]]*\]\(([^)]*)\)", body)
    assert (run / link).is_file()
    for file in (run / "README.md", *run.glob("*.safetensors"), *run.glob("transformer/*")):
        assert str(tmp_path.parent).encode() not in file.read_bytes(), f"{file} names a folder of this machine"

    monkeypatch.chdir(run)
    (source,) = blocks(body, "python")
    assert source.count("path/to/pipeline") == 1
    exec(compile(source.replace("path/to/pipeline", str(tiny_pipeline)), "README.md", "exec"), {})
    drawn = run / "samples" / "step-000004" / "prompt-00.png"
    assert differ(run / "picture.png", drawn) <= 1 < differ(run / "samples" / "base" / "prompt-00.png", drawn)

    (line,) = blocks(body, "sh")
    line = line.replace("\\\n", "")  # as a shell joins lines
    words = shlex.split(line.replace("path/to/this/folder", str(run)).replace("path/to/pipeline", str(tiny_pipeline)))
    assert (Path(__file__).resolve().parents[2] / words[1]).is_file()
    parser = argparse.ArgumentParser()
    generate_arguments(parser)
    assert differ(generate(parser.parse_args([*words[2:], "--output", str(tmp_path / "x.png")])), drawn) <= 1


def config_of(**changes: Any) -> TrainConfig:
    data = {"source": "folder", "path": "/home/ann/photos"}
    model = {"family": "sd3"} | changes.pop("model", {})
    return TrainConfig.model_validate({"name": "x", "data": data, "model": model, **changes})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, {"license": "other", "license_name": "stabilityai-ai-community"}),
        ({"pretrained": "stabilityai/stable-diffusion-3.5-medium"}, {"license_name": "stabilityai-ai-community"}),
        ({"pretrained": "ann/other"}, {"license": "other", "license_link": "https://huggingface.co/ann/other"}),
        ({"pretrained": "demo:tiny-sd3"}, {"license": "other"}),
        ({"init": "random"}, {"license": "other"}),
    ],
)
def test_the_licence_is_the_bases(model: dict, expected: dict) -> None:
    fields = licence(config_of(model=model))
    assert expected.items() <= fields.items()
    assert ("license_name" in fields) == ("license_name" in expected)
    front = yaml.safe_load(front_matter(config_of(model=model)).strip("-\n"))
    assert front.get("base_model") == ({"pretrained": MEDIUM} | model)["pretrained"] or "license_link" not in fields
    assert front["license"] == "other"


def test_front_matter_and_inline_code_hold_anything() -> None:
    prompt = "one: \"two\" 'three' #4 | {5}\n- sechs \U0001f600 \u2028 & %"
    config = config_of(data={"source": "folder", "path": "x", "prompt": prompt})
    front = yaml.safe_load(front_matter(config).strip("-\n"))
    assert front["instance_prompt"] == prompt and front["base_model"] == MEDIUM
    assert code("a b") == "`a b`" and code("a\n`b`") == "`` a `b` ``"


def test_the_snippet_follows_the_model() -> None:
    model = {"transformer": "/home/ann/other", "t5": False, "t5_length": 77, "revision": "main"}
    source = snippet(config_of(model=model), ImageRequest("a", 0))
    compile(source, "snippet", "exec")
    for part in (
        f'BASE = "{MEDIUM}"', 'TRANSFORMER = "path/to/other"', "text_encoder_3=None, tokenizer_3=None",
        "revision='main'", "max_sequence_length=77", "dtype=torch.bfloat16", "from_pretrained(TRANSFORMER, dtype",
    ):  # fmt: skip
        assert part in source
    assert "home" not in source


def test_a_shareable_configuration_has_no_local_path() -> None:
    model = {"pretrained": "/home/ann/sd3.safetensors", "vae": "/home/ann/vae", "text_encoders": MEDIUM}
    config = config_of(model=model, output={"runs": "/home/ann/runs"})
    shared = shareable(config)
    assert "/home" not in shared.model_dump_json()
    assert (shared.model.pretrained, shared.model.text_encoders) == ("sd3.safetensors", MEDIUM)
    assert shared.data.path == "photos" and config.data.path == "/home/ann/photos"


class Hub(ThreadingHTTPServer):
    """Answers as the hub does to an upload, and keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubAnswers)
        self.status, self.private = 200, False  # to refuse with, if not 200; whether the repository is private
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, Any]] = []


class HubAnswers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.answer({"_id": "1", "id": "ann/disc", "private": self.server.private, "tags": [], "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        rows = [json.loads(line) for line in body.splitlines() if line]
        self.server.asked.append((self.path, rows))
        if self.server.status != 200:
            self.answer({"error": "refused"}, self.server.status)
        elif self.path == "/api/repos/create":
            self.answer({"url": f"{huggingface_hub.constants.ENDPOINT}/ann/disc", "name": "ann/disc"})
        elif "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in rows[0]["files"]]
            self.answer({"files": files})
        elif "/commit/" in self.path:
            values = [row["value"] for row in rows if row["key"] == "file"]
            self.server.files |= {value["path"]: base64.b64decode(value["content"]) for value in values}
            page = f"{huggingface_hub.constants.ENDPOINT}/ann/disc/commit/0"
            self.answer({"commitOid": "0" * 40, "commitUrl": page, "success": True})
        else:
            self.answer({"errors": [], "warnings": []})  # validate-yaml

    def answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def finished(tiny_pipeline: Path, tiny_images: Path, shared_cache: Path, tmp_path_factory) -> Path:
    """One run for all tests that only read it."""
    folder = tmp_path_factory.mktemp("push")
    output = {"runs": f"{folder}/runs", "profiles": f"{folder}/profiles", "cache": str(shared_cache)}
    config = {
        "name": "tiny", "device": "cpu", "model": {"pretrained": str(tiny_pipeline), "t5_length": 8},
        "data": {"path": str(tiny_images), "resolution": 32}, "precision": {"weights": "fp32"}, "output": output,
        "train": {"steps": 4}, "memory": {"checkpointing": "none"}, "profile": {"max_traces": 0},
    }  # fmt: skip
    return make_run(config)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs" / "tiny"))


def test_push_uploads_the_result_and_nothing_else(hub: Hub, run: Path, tmp_path: Path, capsys) -> None:
    (run / ".cache").mkdir()
    (run / ".cache" / "secret").write_text("x")
    assert main(["push", str(run), "ann/disc", "--yes"]) == 0
    result = "pytorch_lora_weights.safetensors"
    assert set(hub.files) == {"README.md", "config.json", result, "samples/grid.png"}
    assert hub.files[result] == (run / result).read_bytes()
    shown = capsys.readouterr().out
    for name, content in hub.files.items():
        assert f"{len(content):,} bytes  {name}" in shown
        assert str(tmp_path.parent).encode() not in content and TOKEN.encode() not in content
    assert f"uploaded: {huggingface_hub.constants.ENDPOINT}/ann/disc" in shown and TOKEN not in shown
    card = hub.files["README.md"].decode()
    assert 'RESULT = "ann/disc"\n' in card and card == for_repository((run / "README.md").read_text(), "ann/disc")
    assert json.loads(hub.files["config.json"])["data"]["path"] == "pictures"
    with safe_open(run / result, "pt") as handle:
        header = json.loads(handle.metadata()["simpletune_config"])
    assert (header["name"], header["data"]["path"]) == ("tiny", "pictures")
    creation = next(rows[0] for path, rows in hub.asked if path == "/api/repos/create")
    assert "private" not in json.dumps(creation)


def test_push_of_a_full_model(hub: Hub, tiny_config: dict) -> None:
    run = make_run(tiny_config, "full")
    assert main(["push", str(run), "ann/disc", "--yes"]) == 0
    names = {"config.json", "diffusion_pytorch_model.safetensors"}
    assert {f"transformer/{name}" for name in names} == {n for n in hub.files if n.startswith("transformer/")}
    assert not [name for name in hub.files if "checkpoint" in name or "optimizer" in name]


def test_push_asks_first(hub: Hub, run: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["push", str(run), "ann/disc"]) == 2
    assert "Add --yes" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    sys.stdin.read()
    assert main(["push", str(run), "ann/disc"]) == 2  # no answer
    for answer, code_expected in (("", 2), ("n", 2), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda text, answer=answer: answer)
        assert hub.asked == []
        assert main(["push", str(run), "ann/disc"]) == code_expected
    assert hub.files


def test_push_private(hub: Hub, run: Path, capsys) -> None:
    assert main(["push", str(run), "ann/disc", "--private", "--yes"]) == 2
    assert "ann/disc exists and is public" in capsys.readouterr().err and not hub.files
    hub.private = True
    assert main(["push", str(run), "ann/disc", "--private", "--yes"]) == 0
    assert "private" in json.dumps(hub.asked[0][1]) and hub.files


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (401, "token (401). Log in again"),
        (403, "the token may not write to ann/disc"),
        (404, "ann/disc was not found"),
        (500, "the hub answered 500"),
        (None, "cannot reach the hub"),
        (huggingface_hub.errors.HFValidationError("odd"), "push: ann/disc is not a valid repository name (odd)"),
        (huggingface_hub.errors.OfflineModeIsEnabled("x"), "push: nothing was uploaded, because HF_HUB_OFFLINE is set. "
                                                           "Unset it"),
        (RuntimeError(TOKEN), "push: the upload failed (RuntimeError)"),
    ],
    ids=["401", "403", "404", "500", "unreachable", "name", "offline", "upload"],
)  # fmt: skip
def test_push_says_why_nothing_was_uploaded(refusal, message: str, hub: Hub, run: Path, capsys, monkeypatch) -> None:
    def fail(*words: object, **more: object) -> None:
        raise refusal

    if isinstance(refusal, int):
        hub.status = refusal
    elif refusal is None:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    assert main(["push", str(run), "ann/disc", "--yes"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and TOKEN not in error and not hub.files


def test_push_of_no_result_or_without_a_token(hub: Hub, run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "empty").mkdir()
    for folder, name, message in (
        (tmp_path / "nowhere", "ann/disc", "nowhere does not exist"),
        (tmp_path / "empty", "ann/disc", "is not a run's folder"),
        (run, "disc", "Give owner/name"),
    ):
        assert main(["push", str(folder), name, "--yes"]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["push", str(run), "ann/disc", "--yes"]) == 2
    shown = capsys.readouterr()
    assert "no token" in shown.err and f"Log in with `{login_command()}`" in shown.err and "README.md" in shown.out
    (run / "README.md").unlink()
    assert main(["push", str(run), "ann/disc", "--yes"]) == 2
    assert "has no README.md" in capsys.readouterr().err and hub.asked == []
