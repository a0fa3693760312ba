"""Data sets in shards: their readers, the order of an epoch, training and resuming, damage, and what is refused."""

from __future__ import annotations

import copy
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import stream_data
import torch
from launching import Launcher
from PIL import Image
from safetensors.torch import load_file
from stream_data import COUNT, FORMS, copy_mds, image, rows_of, write_parquet, write_tars
from stream_order import micro_batches

from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.config.resolve import file_problems
from simpletune.data.plan import GlobalBatch
from simpletune.data.row_order import epoch_order, substitute_unusable
from simpletune.data.samples import Crop, PlannedSample
from simpletune.data.sources.masks import latent_mask
from simpletune.data.sources.source import RejectedEntry, UnusableImage
from simpletune.data.storage.dataset import open_rows
from simpletune.data.storage.rows import Columns, LruCache, ShardedRows
from simpletune.estimate.job_estimate import counts_of
from simpletune.runs.checkpoint_folders import checkpoint_folder
from simpletune.runs.folder import read_metrics
from simpletune.stages.copy_cache import copy_cache
from simpletune.stages.plan_data import make_plan
from simpletune.stages.step.assignment import RankMicroBatches
from simpletune.stages.step.batch_loader import TrainingPasses
from simpletune.stages.stream_encode import StreamEncoder
from simpletune.stages.stream_plan import StreamPlan, stream_plan
from simpletune.system.options import ConfigError, UserError
from simpletune.training.train import train

COLUMNS = Columns("image", "text", ("width", "height"))
SQUARE = {"source": "stream", "resolution": 32, "aspect": "square"}


def rows_at(place: Path | str, columns: Columns = COLUMNS) -> ShardedRows:
    return open_rows(str(place), columns)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """20 rows in three parquet files, in row groups of three."""
    return write_parquet(tmp_path / "shards", rows_of(20))


def config_of(tiny_config: dict, place: Path | str, **more: object) -> dict:
    return copy.deepcopy(tiny_config) | {"data": {**SQUARE, "path": str(place), **more}}


def draws_of(plan: StreamPlan, steps: Iterable[int]) -> list[PlannedSample]:
    return [draw for step in steps for micro in range(len(plan.micros(step))) for draw in plan.micro_batch(step, micro)]


def epoch_of(plan: StreamPlan, number: int = 0) -> list[PlannedSample]:
    first = number * plan.steps_per_epoch
    return [draw for draw in draws_of(plan, range(first, first + plan.steps_per_epoch)) if draw.weight]


@pytest.mark.parametrize("form", FORMS)
def test_shards_that_mosaics_own_writer_made_are_read(form: str) -> None:
    rows = rows_at(stream_data.ASSETS / form)
    assert len(rows) == COUNT and len(rows.shards) > 2, "several shards"
    for number in np.random.default_rng(0).permutation(COUNT).tolist():
        found, drawn = (np.asarray(Image.open(io.BytesIO(data))) for data in (rows.image(number), image(number)))
        assert (found == drawn).all() and rows.caption(number) == stream_data.caption(number)
    assert rows.sizes().tolist() == [list(Image.open(io.BytesIO(image(n))).size) for n in range(COUNT)]
    tags = rows_at(stream_data.ASSETS / form, Columns("image", "tags"))
    assert tags.caption(3) == ["picture 3", "number 3"]
    assert len({rows.key(number) for number in range(COUNT)}) == COUNT
    noted = {"bare": ["the index has none"]}.get(form, [])
    assert len(rows.notes()) == len(noted) and all(text in note for text, note in zip(noted, rows.notes(), strict=True))


def test_parquet_rows_are_found_by_their_number(shards: Path) -> None:
    expected = rows_of(20)
    for place in (shards, shards / "*.parquet", shards / "train-*"):
        rows = rows_at(place)
        assert len(rows) == 20 and rows.starts.tolist() == [0, 3, 6, 7, 10, 13, 14, 17, 20]
        for number in (19, 0, 7, 6, 13):
            assert rows.image(number) == expected[number]["image"] and rows.caption(number) == f"row {number}"
        assert rows.sizes().tolist() == [[row["width"], row["height"]] for row in expected]
    assert rows.name(8) == "train-00001-of-00003.parquet#00000001"
    one = rows_at(shards / "train-00001-of-00003.parquet")
    assert [one.key(n) for n in range(7)] == [rows.key(n) for n in range(7, 14)], "whatever else is listed"
    assert len(open_rows(str(shards), COLUMNS, split="00002-of")) == 6


def test_a_block_is_read_once_while_it_fits() -> None:
    read, held = [], LruCache[str](10)

    def block(key: int) -> str:
        return held.get(key, lambda: (read.append(key) or str(key), 4))

    assert [block(key) for key in (0, 1, 0, 1, 2, 1, 0)] == list("0101210")
    assert read == [0, 1, 2, 0], "the one that was used longest ago has gone"


CASES = [(20, 4, 1, 5, 1), (50, 7, 3, 8, 4), (33, 5, 2, 100, 8), (9, 9, 9, 1, 2)]


@pytest.mark.parametrize(("count", "blocks", "buckets", "window", "batch"), CASES)
def test_the_order_is_that_of_the_reference(count: int, blocks: int, buckets: int, window: int, batch: int) -> None:
    chance = np.random.default_rng(count)
    block, bucket = np.sort(chance.integers(0, blocks, count)), chance.integers(0, buckets, count)
    for epoch in (0, 1, 5):
        order = epoch_order((3, epoch), block, bucket, window, batch)
        expected = micro_batches(3, epoch, list(zip(block.tolist(), bucket.tolist(), strict=True)), window, batch)
        assert [[n for n in row if n >= 0] for row in order.tolist()] == expected
        assert sorted(order[order >= 0].tolist()) == list(range(count))


def test_a_stretch_of_an_epoch_stays_in_few_blocks() -> None:
    block = np.repeat(np.arange(100), 50)
    order, other = (epoch_order((1, epoch), block, block * 0, 200, 4) for epoch in (0, 1))
    seen = [len(set(block[order[start : start + 50].reshape(-1)])) for start in range(0, 1250, 50)]
    assert max(seen) <= 5 and order[:50].reshape(-1).tolist() != sorted(order[:50].reshape(-1).tolist())
    assert len(set(block[order[:50]].reshape(-1)) & set(block[other[:50]].reshape(-1))) < 4


def test_the_place_of_an_unusable_row_goes_to_the_next_of_its_bucket() -> None:
    batches, bucket = np.array([[0, 1], [2, -1], [3, 4]]), np.array([0, 0, 1, 0, 0])
    assert substitute_unusable(batches, bucket, np.array([1, 3])).tolist() == [[0, 4], [2, -1], [4, 4]]
    assert substitute_unusable(batches, bucket, np.array([4])).tolist() == [[0, 1], [2, -1], [3, 0]], (
        "from the start again"
    )


def test_an_epoch_shows_every_row_once_in_buckets(tiny_config: dict, shards: Path) -> None:
    data = config_of(tiny_config, shards, aspect="buckets", shuffle_window=6)
    data["train"] = {"steps": 4, "batch_size": 3, "gradient_accumulation": 2}
    plan = stream_plan(validate(data, "stream"))
    assert {size: len(members) for size, members in plan.buckets.items()} == {(32, 32): 15, (48, 16): 5}
    assert plan.steps_per_epoch == 4 and plan.fillers == 1
    for number in (0, 1):
        seen = Counter(draw.caption for draw in epoch_of(plan, number))
        assert seen == {f"row {row}": 1 for row in range(20)}
    for step in range(8):
        for micro, area in enumerate(plan.areas(step)):
            draws = plan.micro_batch(step, micro)
            assert {width * height for width, height in (draw.view.bucket for draw in draws)} == {area}
    assert sorted({int(draw.caption[4:]) for draw in draws_of(plan, (1, 2))}) == plan.used_variants(1, 3).tolist()


def test_variants_are_used_in_turn_over_epochs(tiny_config: dict, tmp_path: Path) -> None:
    rows = [row | {"text": [f"{number} a", f"{number} b"]} for number, row in enumerate(rows_of(6))]
    data = config_of(tiny_config, write_parquet(tmp_path / "many", rows), variants=2, crop="random", flip=True)
    plan = stream_plan(validate(data, "stream"))
    seen = Counter(draw.caption for number in (0, 1) for draw in epoch_of(plan, number))
    assert seen == {f"{number} {letter}": 1 for number in range(6) for letter in "ab"}
    assert plan.used_variants(0, 100).tolist() == list(range(12)) and plan.used_variants(0, 6).tolist() == list(
        range(0, 12, 2)
    )


def require_same(run: Path, other: Path) -> None:
    """The same file of weights, and the same losses."""
    ours, theirs = (load_file(each / "pytorch_lora_weights.safetensors") for each in (run, other))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert [row["loss"] for row in read_metrics(run)] == [row["loss"] for row in read_metrics(other)]


@pytest.mark.parametrize(
    "form", ["parquet", pytest.param("zstd", marks=pytest.mark.slow), pytest.param(".tar", marks=pytest.mark.slow)]
)
def test_resuming_in_the_middle_of_an_epoch_is_exact(
    form: str, tiny_config: dict, shards: Path, tmp_path: Path, shared_cache: Path
) -> None:
    """With a cache that has only what the first steps need."""
    place = shards if form == "parquet" else stream_data.ASSETS / form
    if form == ".tar":
        place = write_tars(tmp_path / "tars", rows_of(20))
    data = config_of(tiny_config, place, aspect="buckets", shuffle_window=5, caption_dropout=0.2)
    data |= {"train": {"steps": 4, "batch_size": 2}, "memory": {"modulation": "plan", "modulation_window": 3}}
    data["validation"] = {"prompts": [], "loss_samples": 2}
    whole = train(validate({**data, "name": "whole", "checkpoint": {"every": 2}}, "stream"))
    half = shutil.copytree(whole, whole.with_name("half"))
    shutil.rmtree(checkpoint_folder(half, 4))
    data["output"] |= {"cache": str(tmp_path / "another cache")}
    require_same(train(validate({**data, "name": "half"}, "stream"), resume="latest"), whole)
    assert len(list((tmp_path / "another cache" / "latents").rglob("*.safetensors"))) < 8
    assert read_metrics(whole)[0]["loss"] != read_metrics(whole)[1]["loss"]


def test_a_stream_trains_on_the_pictures_that_a_table_reads(tiny_config: dict, shards: Path) -> None:
    plan = stream_plan(validate(config_of(tiny_config, shards), "stream"))
    table = {"source": "table", "path": str(shards), "resolution": 32}
    listed = {p.caption: p.read() for p in validate({**tiny_config, "data": table}, "table").data.scan(shards).images}
    streamed = {draw.caption: draw.view.image.read_same() for draw in epoch_of(plan)}
    assert streamed == listed and len(listed) == 20


@pytest.mark.parametrize("batch", [(1, 5), (3, 4)])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["parquet", "table", "folder", ".tar", *FORMS])
def test_each_process_count_shows_every_sample_once_an_epoch(
    form: str,
    processes: int,
    batch: tuple[int, int],
    tiny_config: dict,
    shards: Path,
    tiny_images: Path,
    tmp_path: Path,
) -> None:
    """And after a resume in the middle of the second epoch on another number of processes."""
    place = {"parquet": shards, "table": shards, "folder": tiny_images}.get(form, stream_data.ASSETS / form)
    if form == ".tar":
        place = write_tars(tmp_path / "tars", rows_of(20))
    data, listed = config_of(tiny_config, place), form in ("table", "folder")
    if listed:
        data["data"] |= {"source": form}
    data["train"] = {"steps": 9, "batch_size": batch[0], "gradient_accumulation": batch[1]}
    config = validate(data, "stream")
    plan = make_plan(config, config.data.scan(place).images) if listed else stream_plan(config)
    count, steps = len(plan.samples), plan.steps_per_epoch
    resumed = steps + steps // 2  # with the next number of processes
    seen: dict[int, Counter] = {0: Counter(), 1: Counter(), 2: Counter()}
    for step in range(3 * steps):
        number = processes if step < resumed else processes % 4 + 1
        for exact in (False, True) if number != 3 else (False,):
            for even in (False, True):
                passes = [TrainingPasses(plan, share=RankMicroBatches(n, number, exact, even)) for n in range(number)]
                dealt = [micro for each in passes for micro in each.micro_batches(step)]
                shown = Counter(draw.view.image.name for micro in dealt for draw in micro if draw.weight)
                if not (exact or even):
                    first = shown
                    seen[step // steps] += shown
                assert shown == first, "however it is dealt"
    for epoch in seen.values():
        assert len(epoch) == count and set(epoch.values()) == {1}


def test_the_plan_does_not_know_how_many_processes_there_are(tiny_config: dict, shards: Path) -> None:
    data = config_of(tiny_config, shards)
    data["train"] = {"steps": 4, "global_batch": 8, "batch_size": 2}
    one, four = (stream_plan(validate(data, "stream")) for _ in range(2))
    assert [one.micro_batch(3, m) for m in range(2)] == [four.micro_batch(3, m) for m in range(2)]
    larger = one.with_batch(GlobalBatch(4, 2))
    assert larger.batch_size == 4 and larger.steps_per_epoch == 3


def broken(folder: Path, write: Callable[..., Path] = write_parquet) -> Path:
    """Twelve rows of which one picture has no bytes, one is damaged, one is too small, and one has no caption."""
    small = io.BytesIO()
    Image.new("RGB", (8, 8)).save(small, "png")
    changes: dict[int, dict] = {
        1: {"image": {"bytes": b"", "path": "x.png"}},
        4: {"image": {"bytes": image(4)[:90], "path": None}},
        7: {"image": {"bytes": small.getvalue(), "path": None}},
        9: {"text": " "},
    }
    rows = [{**row, **changes.get(index, {})} for index, row in enumerate(rows_of(12))]
    return write(folder / "broken", rows, shards=2)


class Looks:
    """Caches that encode nothing, and look at every picture."""

    def __init__(self) -> None:
        self.text = self

    def fill_text(self, prompts: list[str]) -> None:
        assert all(isinstance(prompt, str) for prompt in prompts)

    def fill_images(self, parts: list[list[Crop]]) -> list[RejectedEntry]:
        found: dict[str, RejectedEntry] = {}
        for view in (view for part in parts for view in part):
            try:
                view.image.read_same()
            except UnusableImage as reason:
                found[view.image.name] = RejectedEntry(view.image.name, str(reason))
        return list(found.values())

    def truncated_prompts(self, prompts: list[str]) -> list[str]:
        return []


def filled(data: dict) -> StreamEncoder:
    """What preparing an epoch finds."""
    config = validate(data, "stream")
    filling = StreamEncoder(config, stream_plan(config), Looks())  # type: ignore[arg-type]
    filling.steps(0, filling.plan.steps_per_epoch)
    filling.evaluation(4)
    return filling


def test_the_places_of_unusable_rows_are_taken(tiny_config: dict, tmp_path: Path) -> None:
    filling = filled(config_of(tiny_config, broken(tmp_path), on_error="skip"))
    assert sorted(each.name[-3:] for each in filling.rejected) == ["001", "001", "003", "004"]
    whole, left = (plan._epoch(0).reshape(-1).tolist() for plan in (stream_plan(filling.config), filling.plan))
    changed = {before: after for before, after in zip(whole, left, strict=True) if before != after}
    assert set(changed) == {1, 4, 7, 9} and not set(changed.values()) & {1, 4, 7, 9}
    assert len(epoch_of(filling.plan)) == 12


def test_unusable_rows_stop_the_run_with_their_reasons(tiny_config: dict, tmp_path: Path) -> None:
    data = config_of(tiny_config, broken(tmp_path)) | {"train": {"epochs": 1, "batch_size": 2}}
    with pytest.raises(UserError, match="data.path: 4 pictures cannot be used") as error:
        train(validate(data, "stream"))
    for text in (
        "train-00000-of-00002.parquet#00000001: its cell contains no picture",
        "#00000004: is damaged",
        "train-00001-of-00002.parquet#00000001: is too small: 8x8 would be scaled up 4.0 times",
        "#00000003: its text is empty",
        "data.on_error=skip",
    ):
        assert text in str(error.value)


@pytest.mark.slow
def test_the_places_of_unusable_rows_are_taken_and_resuming_stays_exact(tiny_config: dict, tmp_path: Path) -> None:
    data = config_of(tiny_config, broken(tmp_path), on_error="skip")
    data |= {"train": {"steps": 6, "batch_size": 2}, "validation": {"prompts": [], "loss_samples": 2}}
    whole = train(validate(data, "stream"))
    half = {**data, "name": "half", "train": {"steps": 3, "batch_size": 2}, "checkpoint": {"every": 3}}
    train(validate(half, "stream"))
    require_same(train(validate({**half, "train": data["train"]}, "stream"), resume="latest"), whole)
    left_out = json.loads((whole / "data.json").read_text())["left_out"]
    assert {each["name"].partition("-of")[0] + each["name"][-3:] for each in left_out} == {
        "train-00000001", "train-00000004", "train-00001001", "train-00001003",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_parquet, partial(write_tars, suffix=".tgz")], ids=["parquet", "tgz"])
def test_two_processes_and_a_change_to_one_give_the_bits_of_one(
    write: Callable[..., Path], launcher: Launcher, tiny_config: dict, tmp_path: Path
) -> None:
    data = config_of(tiny_config, broken(tmp_path, write), on_error="skip", shuffle_window=5)
    data |= {"train": {"steps": 6, "gradient_accumulation": 2, "reduce": "exact"}, "checkpoint": {"every": 2}}
    data["output"] |= {"cache": str(tmp_path / "cache")}
    one = train(validate({**data, "name": "one", "checkpoint": {"every": None}}, "stream"))
    outcome = launcher.train(data, data, moments={0: "step.begun:5=kill"})
    assert outcome.codes[0] == -9, outcome.said
    outcome = launcher.train(data, resume="auto")
    assert outcome.codes == [0] and "step 4 of 6" in outcome.said[0], outcome.said
    require_same(Path(data["output"]["runs"]) / data["name"], one)


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        ({"text": ""}, {"on_error": "skip"}, "none of the 4 rows of 32x32 px can be used"),
        ({"width": 96}, {"aspect": "buckets"}, "#00000000: is 32x32, and its columns say another shape"),
        ({}, {"mask": "alpha"}, "has no transparency, which data.mask=alpha reads"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(
    change: dict, fields: dict, message: str, tiny_config: dict, tmp_path: Path
) -> None:
    place = write_parquet(tmp_path / "rows", [{**row, **change} for row in rows_of(4)])
    with pytest.raises(UserError, match=message):
        filled(config_of(tiny_config, place, **fields))


def test_masks_by_transparency(tiny_config: dict, tmp_path: Path) -> None:
    rows = [{"image": image(number, alpha=True), "text": f"row {number}"} for number in range(3)]
    place = write_parquet(tmp_path / "alpha", rows, shards=1)
    plan = stream_plan(validate(config_of(tiny_config, place, mask="alpha"), "stream"))
    table = {"source": "table", "path": str(place), "resolution": 32, "aspect": "square", "mask": "alpha"}
    config = validate({**tiny_config, "data": table}, "table")
    listed = make_plan(config, config.data.scan(place).images)
    for number in range(3):  # the last one is three times as wide as high
        masks = [latent_mask(each.view(each.samples[number], 0), 8) for each in (plan, listed)]
        assert (masks[0] == masks[1]).all() and 0 < masks[0].mean() < 255


def test_held_out_rows_are_not_trained_on(tiny_config: dict, shards: Path) -> None:
    data = config_of(tiny_config, shards)
    data |= {"train": {"epochs": 1, "batch_size": 2}, "validation": {"prompts": [], "split": 6}}
    config = validate(data, "stream")
    plan = stream_plan(config)
    trained, held = ({d.caption for d in draws} for draws in (epoch_of(plan), plan.evaluation(6)))
    assert len(trained) == 14 and len(held) == 6 and not trained & held


@pytest.mark.slow
def test_the_loss_is_one_of_held_out_rows(tiny_config: dict, shards: Path) -> None:
    data = config_of(tiny_config, shards)
    data |= {"train": {"steps": 2}, "validation": {"prompts": [], "split": 6, "loss_samples": 4}}
    config = validate(data, "stream")
    summary = json.loads((train(config) / "summary.json").read_text())
    assert summary["held_out_pictures"] == 6 and summary["eval_loss_is"].startswith("validation loss (4 of 6")


SHARD, PACKED, ROWS = "shard.00001.mds", "shard.00002.mds.zstd", "train-00001-of-00003.parquet"
DAMAGES = {
    "truncated": ("plain", SHARD, lambda data: data[:-5], rf"{SHARD} has \d+ bytes, and index.json"),
    "changed": ("plain", SHARD, lambda data: data[:-9] + b"x" + data[-8:],
                rf"{SHARD} is damaged: its sha1 is [0-9a-f]{{40}}, and index.json says"),
    "zipped": ("zstd", PACKED, lambda data: data[:20] + b"xyz" + data[23:], f"{PACKED} is damaged: its sha256 is"),
    "gz": ("gz", "shard.00000.mds.gz", lambda data: data[:40] + b"xyz" + data[43:], "shard.00000.mds.gz is damaged"),
    "offsets": ("bare", "shard.00000.mds", lambda data: data[:8] + b"\xff" * 4 + data[12:],
                "00000.mds is damaged: its offsets do not follow each other"),
    "count": ("bare", "shard.00000.mds", lambda data: b"\x09" + data[1:],
              "shard.00000.mds is damaged: its head does not list 3 samples"),
    "index": ("plain", "index.json", lambda data: data[:-9], "index.json is not the index of an MDS data set"),
    "missing": ("plain", SHARD, None, f"{SHARD} is missing, which index.json lists"),
    "outside": ("plain", "index.json", lambda data: data.replace(b"shard.00000.mds", b"../secret", 1),
                "is outside the data set"),
    "absolute": ("plain", "index.json", lambda data: data.replace(b"shard.00000.mds", b"/etc/passwd", 1),
                 "is outside the data set"),
    "footer": ("parquet", ROWS, lambda data: data[:-20] + b"x" * 12 + data[-8:], f"{ROWS} is damaged: its footer"),
    "page": ("parquet", ROWS, lambda data: data.replace(b"IDAT", b"IDAX", 1), f"{ROWS} is damaged: its row group 0"),
    "no footer": ("parquet", ROWS, lambda data: data[:-30], f"{ROWS} is damaged: its footer cannot"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named(damage: str, shards: Path, tmp_path: Path) -> None:
    form, name, change, said = DAMAGES[damage]
    place = shards if form == "parquet" else copy_mds(form, tmp_path / form)
    file = place / name
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UserError, match=said):
        rows = rows_at(place)
        for number in range(len(rows)):
            rows.image(number)


@pytest.mark.parametrize(("old", "new", "count", "said"), [
    (b"image", b"\xc0mage", -1, "its footer cannot be read .*UnicodeDecodeError"),  # the name of a column
    (b"\x16\x08", b"\x16\x10", 1, "its footer .*row groups do not have its 8 rows"),  # of the whole file
    (b"\x16\x08", b"\x16\x10", -1, "its row group 0 cannot be read .*4 of 8 rows"),  # of its row group, too
])  # fmt: skip
def test_a_footer_that_contradicts_itself_is_damage(
    old: bytes, new: bytes, count: int, said: str, tmp_path: Path
) -> None:
    file = min(write_parquet(tmp_path / "set", rows_of(4), shards=1, group=4).iterdir())
    data = file.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    file.write_bytes(data[:start] + data[start:-8].replace(old, new, count) + data[-8:])
    with pytest.raises(UserError, match=said):
        rows = rows_at(file)
        rows.caption(len(rows) - 1)


def test_a_pattern_matches_linked_folders_and_a_hidden_file_may_be_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "real", rows_of(20))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "part").symlink_to(tmp_path / "real")
    assert len(rows_at(tmp_path / "set" / "*" / "*.parquet")) == 20
    hidden = tmp_path / ".hidden.parquet"
    hidden.write_bytes(min((tmp_path / "real").iterdir()).read_bytes())
    assert len(rows_at(hidden)) == 7


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    place = copy_mds("bare", tmp_path / "bare")
    rows = rows_at(place)
    assert rows.image(0)
    (place / "shard.00000.mds").write_bytes(b"")
    with pytest.raises(UserError, match=r"shard.00000.mds gave 0 bytes instead of \d+. It is truncated"):
        rows.image(0)


@pytest.mark.parametrize(
    ("section", "change", "field"),
    [
        ("data", {"repeats": 2}, "data.repeats"),
        ("train", {"batch_size": "auto", "global_batch": 8}, "train.batch_size"),
        ("validation", {"split": 0.1}, "validation.split"),
        ("text", {"embeddings": {"token": "<x>", "initial": "cat"}}, "text"),
        ("prior", {"method": "class_pictures", "prompt": "a cat"}, "prior.method"),
        ("data", {"image_column": "picture"}, "data.image_column"),
        ("data", {"aspect": "buckets", "width_column": "w"}, "data.width_column"),
        ("data", {"format": "mds"}, "data.path"),
        ("data", {"split": "validation"}, "data.path"),
        ("data", {"path": "nowhere/*.parquet"}, "data.path"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_with_a_remedy(
    section: str, change: dict, field: str, tiny_config: dict, shards: Path
) -> None:
    data = config_of(tiny_config, shards)
    data[section] = {**data.get(section, {}), **change}
    try:
        found = file_problems(validate(data, "stream"))
    except ConfigError as error:
        found = error.problems
    assert field in {problem.path for problem in found}
    assert re.search(r"Use|Name|Give", str(ConfigError(found)))


def test_a_stream_copies_nothing_from_another_cache(tiny_config: dict, shards: Path, tmp_path: Path) -> None:
    config = validate(config_of(tiny_config, shards), "stream")
    with pytest.raises(UserError, match="--from: data.source=stream .*output.cache"):
        copy_cache(config, stream_plan(config), str(tmp_path))


def test_check_estimate_and_data_read_little(
    tiny_config: dict, shards: Path, write_config, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = config_of(tiny_config, shards) | {"train": {"steps": 3, "batch_size": 2}}
    read, honest = [], ShardedRows.image
    monkeypatch.setattr(ShardedRows, "image", lambda self, row: read.append(row) or honest(self, row))
    file = str(write_config(data))
    assert main(["check", file]) == 0
    counts = counts_of(validate(data, "stream"))
    assert counts is not None and (counts.images, counts.prompts, counts.samples, counts.steps) == (20, 6, 20, 10)
    assert counts.pixels == 6 * 32 * 32 and not read
    monkeypatch.setattr("simpletune.data.sources.stream.LOOKED_AT", 8)
    monkeypatch.setattr("simpletune.data.sources.stream.BLOCKS", 4)
    assert main(["data", file]) == 0
    said = capsys.readouterr().out
    assert "7 rows of 20 were examined" in said and "7 usable" in said
    assert len(set(read)) == 7
