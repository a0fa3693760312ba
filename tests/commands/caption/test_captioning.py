"""Captions by tiny random models of each kind: their inputs, what is written, what is left alone, what is refused."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_captioners import WRITERS

from simpletune.apps.cli.main import main
from simpletune.commands.caption import caption as captioning
from simpletune.commands.caption.caption import CaptionRequest, add_prefixes, run
from simpletune.commands.caption.captioner import Captioner
from simpletune.commands.caption.loading import (
    PRECISIONS,
    CaptionerInfo,
    estimate_memory,
    find_captioner,
    load_captioner,
)
from simpletune.commands.caption.record import RECORD, Record
from simpletune.data.sources.caption_files import ChangedCaption, caption_file, write_caption
from simpletune.data.sources.source import UnusableImage
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.precision import FP32, WeightPrecision
from simpletune.engine.tensors import all_tensors
from simpletune.estimate.simulate.simulate_stages import accounting_of
from simpletune.system.gpus import Card
from simpletune.system.options import UserError

CPU = torch.device("cpu")
KINDS = tuple(WRITERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("captioners")
    return {kind: write(place / kind) for kind, write in WRITERS.items()}


@pytest.fixture(scope="module", autouse=True)
def models_are_read_once() -> Iterator[None]:
    """``run`` reads and measures a model at its first use; later ones are copies."""
    models: dict[object, Captioner] = {}
    sizes: dict[object, tuple[int, int]] = {}

    def load(about: CaptionerInfo, precision: WeightPrecision, device: torch.device, prompt: str | None) -> Captioner:
        key = (about.place.folder, precision.weights, prompt)
        if key not in models:
            models[key] = load_captioner(about, precision, device, prompt)
        return copy.deepcopy(models[key])

    def estimate(about: CaptionerInfo, precision: WeightPrecision, *rest: int) -> tuple[int, int]:
        key = (about.place.folder, precision.weights, *rest)
        if key not in sizes:
            sizes[key] = estimate_memory(about, precision, *rest)
        return sizes[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captioning, "load_captioner", load)
        patch.setattr(captioning, "estimate_memory", estimate)
        yield


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Five pictures of noise in two folders, in different shapes."""
    place = tmp_path / "pictures"
    (place / "sub").mkdir(parents=True)
    for index, name in enumerate(("a.png", "b.jpg", "c.png", "sub/d e.png", "sub/f.webp")):
        noise(60 + 20 * index, 80, index).save(place / name)
    return place


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def texts(place: Path) -> dict[str, str]:
    return {file.relative_to(place).as_posix(): file.read_text() for file in sorted(place.rglob("*.txt"))}


def request(place: Path, model: Path, **changes: object) -> CaptionRequest:
    return CaptionRequest(place, str(model), **{"device": "cpu", "length": 6, "precision": "fp32", **changes})  # type: ignore[arg-type]


def loaded(folder: Path, prompt: str | None = None) -> Captioner:
    return captioning.load_captioner(find_captioner(str(folder)), FP32(), CPU, prompt)


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_florences_inputs_are_those_of_transformers_processor(folders: dict[str, Path]) -> None:
    from transformers import Florence2Processor

    captioner, batch = loaded(folders["florence"]), [noise(90, 60), noise(40, 120, 1)]
    captioner.tokenizer.image_token, captioner.tokenizer.image_token_id = "<image>", 3
    captioner.processor.image_seq_length = 5
    theirs = Florence2Processor(captioner.processor, captioner.tokenizer)
    expected = theirs(text=[captioner.prompt] * 2, images=batch, return_tensors="pt")
    ours = captioner.inputs(batch)
    assert set(ours) == set(expected)
    for name, value in ours.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_blips_inputs_are_those_of_transformers_processor(folders: dict[str, Path]) -> None:
    from transformers import BlipProcessor

    captioner, batch = loaded(folders["blip"], "a photo of"), [noise(90, 60), noise(40, 120, 1)]
    ours = captioner.inputs(batch)
    theirs = BlipProcessor(captioner.processor, captioner.tokenizer)(images=batch, return_tensors="pt")
    torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"], rtol=0, atol=0)
    assert captioner.tokenizer.decode(ours["input_ids"][0]) == "[DEC] a photo of[SEP]"
    (caption, _), _ = captioner.caption(batch, 6)
    assert caption.split()[:3] == ["a", "photo", "of"]


def test_qwens_rows_hold_each_pictures_own_number_of_tokens(folders: dict[str, Path]) -> None:
    captioner, batch = loaded(folders["qwen"]), [noise(64, 32), noise(32, 32, 1)]
    inputs = captioner.inputs(batch)
    rows = captioner.tokenizer.batch_decode(inputs["input_ids"])
    for row, tokens in zip(rows, (4 * 2, 2 * 2), strict=True):  # 16 px a token
        assert f"<|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>" in row
        assert row.count("<|image_pad|>") == tokens and row.endswith("assistant\n") and captioner.prompt in row
    assert rows[1].startswith("<|endoftext|>" * 4) and inputs["attention_mask"][1, :5].tolist() == [0, 0, 0, 0, 1]
    assert inputs["mm_token_type_ids"].sum(1).tolist() == [8, 4]


def test_a_large_picture_is_given_to_qwen_within_a_megapixel(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = shutil.copytree(folders["qwen"], tmp_path / "qwen")
    change(folder / "preprocessor_config.json", lambda found: found["size"].update(longest_edge=10**8))
    size = loaded(folder).processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (256, 1024 * 1024)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_says_what_single_pictures_say(kind: str, folders: dict[str, Path]) -> None:
    captioner, batch = loaded(folders[kind]), [noise(64, 32), noise(40, 90, 1), noise(32, 32, 2)]
    together, cut = captioner.caption(batch, 6)
    alone = [captioner.caption([image], 6) for image in batch]
    assert together == [caption for (caption,), _ in alone] and cut == [was for _, (was,) in alone]


def test_pictures_change_what_is_said(folders: dict[str, Path]) -> None:
    """Else the tests of this file could not tell one picture's caption from another's."""
    batch = [noise(64, 32), noise(40, 90, 1), Image.new("RGB", (50, 50), "red")]
    assert len(set(loaded(folders["qwen"]).caption(batch, 12)[0])) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_caption_longer_than_the_model_has_room_for_is_refused(
    kind: str, folders: dict[str, Path], images: Path
) -> None:
    captioner = loaded(folders[kind])
    places = captioner.model.config.text_config.max_position_embeddings
    given = 0 if kind == "florence" else captioner.inputs([noise(60, 80)])["input_ids"].shape[1]
    with pytest.raises(UserError, match=f"--max-new-tokens 2000: this model has room for {places - given:,} beside"):
        run(request(images, folders[kind], length=2000))
    assert texts(images) == {}


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
@pytest.mark.parametrize("kind", KINDS)
def test_predicted_weights_are_those_that_are_loaded(kind: str, precision: str, folders: dict[str, Path]) -> None:
    about, chosen = find_captioner(str(folders[kind])), PRECISIONS[precision]
    captioner = load_captioner(about, chosen, CPU, None)
    held = sum({tensor.data_ptr(): tensor.nbytes for tensor in all_tensors(captioner.model)}.values())
    weights, work = estimate_memory(about, chosen, 1, 20)
    assert weights == held
    if precision != "int8":
        assert estimate_memory(about, chosen, 4, 20) == (weights, 4 * work), "a batch of 4 takes 4 times the work"
    else:  # every linear layer but the last
        linear = [layer for layer in captioner.model.modules() if isinstance(layer, torch.nn.Linear)]
        (plain,) = (layer for layer in linear if not isinstance(layer, Int8Linear))
        assert plain.out_features == len(captioner.tokenizer)
        assert captioner.caption([noise(64, 32)], 6)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ("Florence-2-base", "BLIP-large", "Qwen3-VL-4B"))
def test_predicted_work_is_what_real_widths_take(name: str, tmp_path: Path) -> None:
    import wide_captioners

    about, chosen = find_captioner(str(wide_captioners.WRITERS[name](tmp_path / "model"))), PRECISIONS["bf16"]
    weights, work = estimate_memory(about, chosen, 1, 8)
    captioner = load_captioner(about, chosen, CPU, None)
    with accounting_of(all_tensors(captioner.model)) as accounting:
        captioner.caption([noise(1024, 1024)], 8)
    counted = accounting.peak.bytes - weights
    print(f"{name}: predicted {work / 2**20:.0f} MiB of work, counted {counted / 2**20:.0f}")
    assert counted <= work <= 1.5 * counted


# --- what is written ------------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_where_it_stopped(
    folders: dict[str, Path], images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = folders["qwen"], shutil.copytree(images, tmp_path / "whole")
    assert run(request(whole, model)).written == 5

    honest, calls = Captioner.caption, []

    def stopping(self: Captioner, *args: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Captioner, "caption", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(request(images, model))
    assert len(texts(images)) == 2
    monkeypatch.setattr(Captioner, "caption", honest)
    assert run(request(images, model)).written == 3
    assert texts(images) == texts(whole) and len(texts(whole)) == 5
    assert run(request(images, model)).written == 0


def test_captions_written_or_edited_by_hand_are_left_alone(folders: dict[str, Path], images: Path) -> None:
    model = folders["florence"]
    (images / "a.txt").write_text("my own caption\n")
    (images / "b.txt").write_text(" \n")  # no caption
    assert run(request(images, model)).written == 4
    (images / "c.txt").write_text("edited by hand")
    before = texts(images)
    assert run(request(images, model, rewrite="ours", trigger="sks")).written == 3
    after = texts(images)
    assert {name for name in before if before[name] == after[name]} == {"a.txt", "c.txt"}
    assert all(after[name] == f"sks, {before[name]}" for name in before if name not in ("a.txt", "c.txt"))
    assert run(request(images, model, rewrite="ours", trigger="sks")).written == 0  # same settings
    assert run(request(images, model, rewrite="all", prefix="x")).written == 5
    assert all(text.startswith("x ") for text in texts(images).values())


def test_a_caption_that_changes_while_the_model_works_is_left_alone(
    folders: dict[str, Path], images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Captioner.caption

    def edited(self: Captioner, batch: list[Image.Image], length: int) -> object:
        (images / "a.txt").write_text("typed meanwhile")
        return honest(self, batch, length)

    monkeypatch.setattr(Captioner, "caption", edited)
    with pytest.raises(UserError, match=r"(?s)1 entry has no new caption.*a.png: a.txt was changed by something else"):
        run(request(images, folders["blip"]))
    assert texts(images)["a.txt"] == "typed meanwhile" and len(texts(images)) == 5
    assert Record(images).find(caption_file(images, images / "a.png")) is None


def test_pictures_that_cannot_be_read_are_named_and_the_others_captioned(
    folders: dict[str, Path], images: Path
) -> None:
    (images / "b.jpg").write_bytes(b"no picture")
    (images / "c.png").write_bytes((images / "c.png").read_bytes()[:200])
    noise(4000, 10).save(images / "wide.png")  # Qwen takes no picture that is 200 times as wide as high
    with pytest.raises(UserError) as found:
        run(request(images, folders["qwen"], batch=3))
    said = str(found.value)
    assert "3 entries have no new caption" in said
    assert "b.jpg: is not a picture" in said and "c.png: is damaged" in said and "wide.png: the model does not" in said
    assert set(texts(images)) == {"a.txt", "sub/d e.txt", "sub/f.txt"}


def test_two_pictures_of_one_name_share_a_caption(folders: dict[str, Path], images: Path, capsys) -> None:
    noise(20, 20).save(images / "a.webp")
    assert run(request(images, folders["blip"])).written == 5
    assert "a.webp: the same name as another picture" in capsys.readouterr().out


def test_a_models_text_becomes_one_plain_line() -> None:
    assert add_prefixes(" a dog\n\n on\x1b[2J  grass\u202e ", "", "") == "a dog on [2J grass"
    assert add_prefixes("a dog", "a photo of", "sks") == "sks, a photo of a dog"
    assert add_prefixes("a sks dog", "", "sks") == "a sks dog"
    assert add_prefixes("a sks, dog", "", "sks dog") == "a sks, dog"
    assert add_prefixes("a dog", "", "sks dog") == "sks dog, a dog"
    assert add_prefixes("\x00\n", "prefix", "sks") == ""


def test_a_damaged_record_loses_no_caption(folders: dict[str, Path], images: Path) -> None:
    run(request(images, folders["blip"]))
    place = images / RECORD
    lines = place.read_bytes().split(b"\n")
    place.write_bytes(b"\n".join([b"no json", b'{"file": 3}', *lines[:3], lines[3][:20]]))  # cut off in the middle
    before = texts(images)
    assert run(request(images, folders["blip"], rewrite="ours", prefix="now")).written == 3
    changed = {name for name, text in texts(images).items() if text != before[name]}
    assert changed == {json.loads(line)["file"] for line in lines[:3]}
    assert len(Record(images)._made) == 3  # what was appended begins on a line of its own


def test_a_record_is_no_link(images: Path, tmp_path: Path, folders: dict[str, Path]) -> None:
    (tmp_path / "elsewhere").write_text("mine\n")
    (images / RECORD).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a symbolic link. Remove it"):
        run(request(images, folders["blip"]))
    assert (tmp_path / "elsewhere").read_text() == "mine\n"


# --- caption files --------------------------------------------------------------------------------------------------


def test_a_caption_goes_where_there_is_one(images: Path) -> None:
    (images / "a.caption").write_bytes(b"\xef\xbb\xbfold\r\nlines\n")
    found = caption_file(images, images / "a.png")
    assert found.text == "old\nlines"
    now = write_caption(found, " new ")
    assert (images / "a.caption").read_text() == "new\n" and not (images / "a.txt").exists()
    assert now == caption_file(images, images / "a.png")
    with pytest.raises(ChangedCaption, match="a.caption was changed by something else since it was read"):
        write_caption(found, "newer")
    for text, reason in (("", "is empty"), ("a\x1bb", "control character"), ("a" * 2**20, "longer than 1,048,576")):
        with pytest.raises(UserError, match=reason):
            write_caption(now, text)
    assert (images / "a.caption").read_text() == "new\n"
    (images / "a.txt").write_text("another")
    with pytest.raises(UnusableImage, match="two caption files: a.txt and a.caption"):
        caption_file(images, images / "a.png")


def test_a_caption_outside_the_folder_is_not_read(images: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (images / "a.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UnusableImage, match="a.txt is a symbolic link to a target outside"):
        caption_file(images, images / "a.png")


# --- what is refused ------------------------------------------------------------------------------------------------


def change(file: Path, how: Callable[[dict], object]) -> None:
    found = json.loads(file.read_text())
    how(found)
    file.write_text(json.dumps(found))


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change(folder / "tokenizer_config.json", lambda found: found.pop("chat_template", None))


def without_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name] for name in sorted(weights)[2:]}, folder / "model.safetensors", {"format": "pt"})


BROKEN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "other kind": ("blip", lambda f: change(f / "config.json", lambda c: c.update(model_type="llava")), "llava model"),
    "no json": ("blip", lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
    "no config": ("blip", lambda f: (f / "config.json").unlink(), "has no config.json, only"),
    "pickles": ("blip", lambda f: (f / "model.safetensors").rename(f / "model.bin"), "A pickle can run code"),
    "no weights": ("blip", lambda f: (f / "model.safetensors").unlink(), "contains neither"),
    "cut weights": (
        "blip",
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-99]),
        "cannot be loaded",
    ),
    "some weights": ("qwen", without_weights, "lacks 2 weights of its model"),
    "no tokenizer": ("florence", lambda f: (f / "tokenizer.json").unlink(), "has no usable tokenizer"),
    "no processor": ("qwen", lambda f: (f / "preprocessor_config.json").unlink(), "no usable preprocessor_config.json"),
    "no template": ("qwen", without_template, "has no chat template"),
    "remote code": (
        "florence",
        lambda f: change(f / "config.json", lambda c: c.update(auto_map={"AutoModel": "evil.Evil"})),
        "is of the first release, which runs code from its folder",
    ),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_broken_model_folder_is_refused_and_nothing_is_written(
    case: str, folders: dict[str, Path], images: Path, tmp_path: Path
) -> None:
    kind, damage, message = BROKEN[case]
    folder = shutil.copytree(folders[kind], tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match=message):
        run(request(images, folder))
    assert texts(images) == {} and not (images / RECORD).exists()


def test_no_code_of_a_folder_runs(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["blip"], tmp_path / "model")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: pass\n")
    code = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil", "AutoImageProcessor": "evil.Evil"}
    for name in ("tokenizer_config.json", "config.json", "preprocessor_config.json"):
        change(folder / name, lambda found: found.update(auto_map=code, tokenizer_class="Evil"))
    batch = [noise(64, 32)]
    assert loaded(folder).caption(batch, 6) == loaded(folders["blip"]).caption(batch, 6)
    assert not (tmp_path / "ran").exists()


def test_an_older_folders_template_is_the_processors(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, batch = shutil.copytree(folders["qwen"], tmp_path / "model"), [noise(64, 32)]
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    change(folder / "tokenizer_config.json", lambda found: found.pop("chat_template"))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert loaded(folder).caption(batch, 6) == loaded(folders["qwen"]).caption(batch, 6)


def test_wrong_requests_are_refused(folders: dict[str, Path], images: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--prompt 'what\\?': Florence-2 knows tasks, not questions. Use one of <CAPT"):
        run(request(images, folders["florence"], prompt="what?"))
    with pytest.raises(UserError, match="--model: nowhere does not exist"):
        run(request(images, Path("nowhere")))
    with pytest.raises(UserError, match="is a folder of pictures, which has no fields"):
        run(request(images, folders["blip"], overrides=("data.repeats=2",)))
    (images / "metadata.jsonl").write_text("")
    with pytest.raises(UserError, match="takes its captions from metadata.jsonl, not from text files"):
        run(request(images, folders["blip"]))
    assert texts(images) == {}


def test_a_configurations_folders_are_captioned(
    folders: dict[str, Path], images: Path, tmp_path: Path, tiny_config: dict
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_config | {"data": {"path": str(images), "captions": "txt", "resolution": 32}}))
    assert run(request(config, folders["blip"])).written == 5
    with pytest.raises(UserError, match="data.prompt is set, so no caption in .* would be read"):
        run(request(config, folders["blip"], overrides=("data.prompt=a dog",)))


def test_the_verb(folders: dict[str, Path], images: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["caption", str(images), "--model", str(folders["florence"]), "--device", "cpu", "--max-new-tokens", "6"]
    assert main([*words, "--predict"]) == 0 and texts(images) == {}
    assert main([*words, "--precision", "int8", "--batch-size", "2", "--trigger", "sks"]) == 0
    said = capsys.readouterr().out
    assert "caption 5 pictures" in said and "MiB on the device" in said and "of weights in int8" in said
    assert all(text.startswith("sks, ") for text in texts(images).values()) and len(texts(images)) == 5
    (images / "a.txt").write_text("mine")
    with pytest.raises(SystemExit):
        main([*words, "--again", "--replace"])
    assert (images / "a.txt").read_text() == "mine"


def test_a_full_device_says_what_helps(folders: dict[str, Path], images: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Captioner, "caption", full)
    with pytest.raises(UserError, match="the device is full. Captions so far are written") as found:
        run(request(images, folders["blip"]))
    assert found.value.code == captioning.OUT_OF_MEMORY == 5


def test_a_card_that_is_missing_too_small_or_too_old_is_said(
    folders: dict[str, Path], images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captioning, "driver_version", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(captioning, "load_captioner", None)
    with pytest.raises(UserError, match="--device: no NVIDIA GPU was found. Use --device cpu"):
        run(request(images, folders["blip"], device="auto"))
    card = Card("tiny", 1 / 64, (7, 5), found=1.0)
    monkeypatch.setattr(captioning, "choose_device", lambda *_, **__: (torch.device("cuda"), "tiny (sm_75)"))
    monkeypatch.setattr(captioning, "capability_of", lambda _: card.capability)
    monkeypatch.setattr(captioning, "card_at_hand", lambda _: (card, 0))
    with pytest.raises(UserError, match="--precision bf16 needs a card with bf16, and this is tiny"):
        run(request(images, folders["blip"], precision="bf16"))
    with pytest.raises(UserError, match="tiny has 16. Use --precision int8 or --batch-size 1 or a smaller"):
        run(request(images, folders["blip"], precision="fp32", batch=2))
