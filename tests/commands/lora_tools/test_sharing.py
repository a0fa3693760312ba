"""What an exported LoRA's header tells people: the model spec's fields, a thumbnail, and a hash that is verified."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin
from safetensors import safe_open
from safetensors.torch import save_file

from simpletune.adapters.files.describe import describe
from simpletune.adapters.files.updates import LoraUpdate
from simpletune.adapters.files.write import write_lora
from simpletune.apps.cli.main import main
from simpletune.commands.lora_tools.metadata import MOST, PREFIX, small_jpeg, trained_at, trigger_of
from simpletune.config.load import validate
from simpletune.system.safetensors_file import content_hash

LAYER = "transformer_blocks.0.attn.to_q"


@pytest.fixture
def run(tiny_config: dict, tmp_path: Path) -> Path:
    """A run's folder as export needs it: configuration, attempts, result, pictures of two steps."""
    folder = tmp_path / "my_style"
    folder.mkdir()
    settings = tiny_config | {"name": "my_style", "data": tiny_config["data"] | {"caption_prefix": "glim,"}}
    (folder / "config.json").write_text(validate(settings, "run").model_dump_json(by_alias=True))
    attempt = {"started": "2026-03-01T10:00:00Z", "device": "cpu", "from_step": 0, "last_step": 20, "seconds": 90.4}
    (folder / "attempts.json").write_text(json.dumps([attempt | {"ended": "finished"}]))
    update = LoraUpdate(torch.ones(2, 1536), torch.full((1536, 2), 0.5), 1.0)
    write_lora({LAYER: update}, folder / "pytorch_lora_weights.safetensors")
    for step, colour in ((10, "red"), (20, "blue")):
        place = folder / "samples" / f"step-{step:06d}"
        place.mkdir(parents=True)
        texts = PngImagePlugin.PngInfo()
        texts.add_text("prompt", "a secret prompt")
        Image.new("RGB", (640, 480), colour).save(place / "prompt-00.png", pnginfo=texts)
    return folder


def export(source: object, layout: str, out: Path, *words: str) -> None:
    assert main(["export", str(source), "--format", layout, "--out", str(out), *words]) == 0


def header(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as handle:
        return handle.metadata()


def image(uri: str) -> Image.Image:
    assert uri.startswith(PREFIX)
    return Image.open(io.BytesIO(base64.b64decode(uri.removeprefix(PREFIX))))


def test_the_header_has_the_fields_of_the_model_spec(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    words = ["--title", "Glim", "--author", "Mé 猫", "--tags", "stripes, toy"]
    export(run, "kohya", out, *words, "--description", 'A "style"\nof two lines')
    spec = {key: value for key, value in header(out).items() if key.startswith("modelspec.")}
    found = {key.removeprefix("modelspec."): value for key, value in spec.items()}
    thumbnail, digest = found.pop("thumbnail"), found.pop("hash_sha256")
    assert found == {
        "sai_model_spec": "1.0.1", "implementation": "diffusers", "architecture": "stable-diffusion-3-m/lora",
        "title": "Glim", "author": "Mé 猫", "description": 'A "style"\nof two lines', "tags": "stripes, toy",
        "date": "2026-03-01T10:01:30Z", "resolution": "32x32", "license": "other", "trigger_phrase": "glim",
        "usage_hint": "Write 'glim' into the prompt",
    }  # fmt: skip
    content = out.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    assert digest == f"0x{hashlib.sha256(content[start:]).hexdigest()}"
    shown = image(thumbnail)
    assert shown.format == "JPEG" and shown.size == (256, 256) and shown.getpixel((9, 9))[2] > 200  # the last step's
    assert b"secret" not in content and str(run.parent).encode() not in content


def test_a_checkpoint_has_its_own_picture_and_no_run_none(run: Path, tmp_path: Path) -> None:
    place = run / "checkpoints" / "step-000010"
    place.mkdir(parents=True)
    (place / "state.json").write_text("{}")
    (place / "pytorch_lora_weights.safetensors").write_bytes((run / "pytorch_lora_weights.safetensors").read_bytes())
    out = tmp_path / "out.safetensors"
    export(f"{run}@10", "kohya", out)
    assert image(header(out)["modelspec.thumbnail"]).getpixel((9, 9))[0] > 200  # red
    export(run, "kohya", out, "--overwrite", "--no-thumbnail")
    assert "modelspec.thumbnail" not in header(out)
    (run / "samples" / "step-000020" / "prompt-00.png").write_bytes(b"no picture")
    export(run, "kohya", out, "--overwrite")
    assert "modelspec.thumbnail" not in header(out)


def test_two_exports_of_a_run_are_the_same_file(run: Path, tmp_path: Path) -> None:
    files = [tmp_path / "first" / "a.safetensors", tmp_path / "second" / "a.safetensors"]
    for file in files:
        export(run, "kohya", file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert header(files[0])["modelspec.date"] < datetime.now(UTC).strftime("%Y-%m-%d")


def test_a_converted_file_keeps_what_its_author_said(run: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    export(run, "kohya", first, "--author", "somebody", "--description", "mine")
    export(first, "diffusers", second, "--tags", "new")
    old, new = header(first), header(second)
    for name in ("author", "description", "date", "thumbnail", "trigger_phrase"):
        assert new[f"modelspec.{name}"] == old[f"modelspec.{name}"], name
    assert (new["modelspec.title"], new["modelspec.tags"]) == ("b", "new")
    assert new["modelspec.hash_sha256"] == content_hash(second) != old["modelspec.hash_sha256"]


def test_inspect_reads_them_and_notices_changed_tensors(run: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.safetensors"
    export(run, "kohya", out, "--author", "somebody")
    capsys.readouterr()
    assert main(["inspect", str(out)]) == 0
    text = capsys.readouterr().out
    for words in ("hash       matches the tensors", "modelspec.thumbnail: image/jpeg, ", "modelspec.author: somebody"):
        assert words in text
    content = bytearray(out.read_bytes())
    content[-3] ^= 1
    out.write_bytes(content)
    assert describe(out)["hash_matches"] is False and "hash_matches" not in describe(out, values=False)
    assert main(["inspect", str(out)]) == 0 and "the file is damaged or was changed" in capsys.readouterr().out
    tensors = {f"transformer.{LAYER}.lora_A.weight": torch.ones(1, 2)}
    save_file(tensors, out, {"modelspec.thumbnail": "http://elsewhere"})
    assert describe(out)["metadata"]["modelspec.thumbnail"] == "http://elsewhere"


def test_a_thumbnail_is_small_whatever_the_picture(tmp_path: Path) -> None:
    noise = Image.effect_noise((600, 360), 200).convert("RGB")
    noise.save(tmp_path / "noise.png")
    uri = small_jpeg(tmp_path / "noise.png")
    assert uri is not None and len(uri) <= MOST and image(uri).size == (256, 256)
    Image.new("RGBA", (9, 200), (1, 2, 3, 4)).save(tmp_path / "odd.png")
    odd = small_jpeg(tmp_path / "odd.png")
    assert odd is not None and image(odd).mode == "RGB"
    assert small_jpeg(tmp_path / "none.png") is None


@pytest.mark.parametrize("words", [["--author", ""], ["--description", "x" * 5001]])
def test_fields_are_bounded(words: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.safetensors"
    with pytest.raises(SystemExit):
        main(["export", str(run), "--format", "kohya", "--out", str(out), *words])
    assert "characters; give 1 to 5,000" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("data", "trigger"),
    [
        ({"path": "demo:pictures", "prompt": "a photo of sks dog"}, "a photo of sks dog"),
        ({"path": "demo:pictures"}, None),
        ({"sources": [{"caption_prefix": "glim,"}, {"regularization": True}]}, "glim"),
        ({"sources": [{"caption_prefix": "a"}, {"caption_prefix": "b"}]}, None),
    ],
)
def test_the_words_that_call_it(data: dict, trigger: str | None) -> None:
    if "sources" in data:
        data = {"sources": [{"path": "demo:pictures"} | source for source in data["sources"]]}
    assert trigger_of(validate({"name": "x", "data": data}, "x")) == trigger


def test_a_damaged_record_of_attempts_leaves_the_date_out(tmp_path: Path) -> None:
    (tmp_path / "attempts.json").write_text('[{"started": 1}')
    assert trained_at(tmp_path) is None
