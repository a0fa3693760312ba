"""The reference's draws, buckets and pictures against values worked out by hand or by other tools."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import plan
import pytest
import torch
from image_files import fit, list_folder, open_upright
from PIL import Image
from plan import Settings, buckets, draw_dropped, draw_sigma, micro_batches, nearest, pass_order, stream

SETTINGS = Settings(
    seed=7,
    resolution=64,
    batch_size=2,
    accumulation=3,
    steps=5,
    lr=1e-3,
    weight_decay=0.0,
    clip_norm=1.0,
    sigma="uniform",
    shift=1.0,
    caption_dropout=0.5,
    t5=False,
    t5_length=8,
)
MEMBERS = [(64, 64)] * 3 + [(48, 80)] * 4 + [(80, 48)]


def test_stream_key_is_what_b2sum_prints() -> None:
    """`printf '[7,"noise",2,1,40]' | b2sum -l 128`, read as a little-endian number."""
    digest = bytes.fromhex("957d7faa1102764d3e248b49d525c969")
    low, high = np.frombuffer(digest, dtype="<u8")
    assert stream(7, "noise", 2, 1, 40).bit_generator.state["state"]["key"].tolist() == [low, high]


def test_buckets_of_64_by_hand() -> None:
    upright = [(32, 96), (32, 112), (32, 128), (48, 80)]
    assert buckets(64, 4.0) == sorted([*upright, (64, 64), *[(h, w) for w, h in upright]])
    assert buckets(64, 1.0) == [(64, 64)]


@pytest.mark.parametrize(("image", "bucket"), [((300, 200), (80, 48)), ((10, 12), (64, 64)), ((1, 9), (32, 128))])
def test_nearest_bucket(image: tuple[int, int], bucket: tuple[int, int]) -> None:
    assert nearest(buckets(64, 4.0), *image) == bucket


def test_ties_go_to_the_larger_area_then_the_narrower() -> None:
    assert nearest([(32, 32), (64, 64)], 10, 10) == (64, 64)
    assert nearest([(64, 16), (16, 64)], 10, 10) == (16, 64)


class Rotation:
    """Stands in for a random stream: every permutation moves each place on by one."""

    asked: list[tuple] = []

    def __init__(self, *key: int | str) -> None:
        self.asked.append(key)

    def permutation(self, n: int) -> list[int]:
        return [*range(1, n), 0]


def test_a_pass_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket (32, 96) gives (4, 5) and a short (1,); (64, 64) gives (2, 3) and (6, 0); then one place on."""
    monkeypatch.setattr(plan, "stream", Rotation)
    monkeypatch.setattr(Rotation, "asked", [])
    square, upright = (64, 64), (32, 96)
    members = [square, upright, square, square, upright, upright, square]
    assert pass_order(7, 5, members, 2) == [(1,), (2, 3), (6, 0), (4, 5)]
    assert Rotation.asked == [(7, "bucket-order", 5, 32, 96), (7, "bucket-order", 5, 64, 64), (7, "pass-order", 5)]


def test_draws_come_from_streams_named_for_them() -> None:
    noise = plan.draw_noise(SETTINGS, 2, 1, 40, (16, 2, 3))
    assert noise.dtype == np.float32
    np.testing.assert_array_equal(noise, stream(7, "noise", 2, 1, 40).standard_normal((16, 2, 3), dtype=np.float32))
    assert draw_sigma(SETTINGS, 2, 1, 40) == np.float32(stream(7, "sigma", 2, 1, 40).random())
    drawn = stream(7, "dropout", 2, 1, 40).random()
    assert draw_dropped(replace(SETTINGS, caption_dropout=drawn + 1e-9), 2, 1, 40)
    assert not draw_dropped(replace(SETTINGS, caption_dropout=drawn), 2, 1, 40)


def test_an_epoch_holds_every_sample_once_and_a_bucket_ends_short() -> None:
    rows = pass_order(7, 0, MEMBERS, 2)
    assert len(rows) == 2 + 2 + 1
    assert all(len({MEMBERS[i] for i in row}) == 1 for row in rows)
    assert sorted(i for row in rows for i in row) == list(range(8))
    assert sorted(map(len, rows)) == [1, 1, 2, 2, 2]


def test_the_last_step_of_an_epoch_has_what_is_left() -> None:
    steps = micro_batches(SETTINGS, MEMBERS)
    assert [len(step) for step in steps] == [3, 2, 3, 2, 3]
    flat = [batch for step in steps for batch in step]
    numbers = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14]
    assert [(batch.step, batch.micro, batch.first) for batch in flat] == [(k // 3, k % 3, 2 * k) for k in numbers]
    epochs = [pass_order(7, number, MEMBERS, 2) for number in range(3)]
    assert [batch.samples for batch in flat] == epochs[0] + epochs[1] + epochs[2][:3]
    assert epochs[0] != epochs[1]


def test_sigma_densities_and_shift() -> None:
    halves = replace(SETTINGS, sigma="logit_normal", mean=0.0, std=0.0)
    assert draw_sigma(halves, 0, 0, 0) == 0.5
    assert draw_sigma(replace(halves, shift=3.0), 0, 0, 0) == 0.75
    wide = replace(SETTINGS, sigma="logit_normal", mean=1.0, std=0.5)
    logits = [math.log(s / (1 - s)) for s in (float(draw_sigma(wide, 0, 0, i)) for i in range(2000))]
    assert np.mean(logits) == pytest.approx(1.0, abs=0.05)
    assert np.std(logits) == pytest.approx(0.5, abs=0.05)
    flat = [float(draw_sigma(SETTINGS, 0, 0, i)) for i in range(2000)]
    assert np.mean(flat) == pytest.approx(0.5, abs=0.03)
    assert np.var(flat) == pytest.approx(1 / 12, abs=0.01)


def test_dropout_rate() -> None:
    assert np.mean([draw_dropped(SETTINGS, 0, 0, i) for i in range(2000)]) == pytest.approx(0.5, abs=0.05)
    assert not any(draw_dropped(replace(SETTINGS, caption_dropout=0.0), 0, 0, i) for i in range(50))


def test_density_must_be_known_and_complete() -> None:
    with pytest.raises(ValueError, match="neither"):
        replace(SETTINGS, sigma="cosmap")
    with pytest.raises(ValueError, match="needs mean and std"):
        replace(SETTINGS, sigma="logit_normal")


def test_exif_turn_and_alpha_on_white(tmp_path: Path) -> None:
    turned = Image.new("RGB", (20, 10), "black")
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert open_upright(tmp_path / "turned.jpg").size == (10, 20)
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert open_upright(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)
    (tmp_path / "clear.txt").write_text("nothing\n", encoding="utf-8")
    assert list_folder(tmp_path) == [(tmp_path / "clear.png", "nothing"), (tmp_path / "turned.jpg", "")]


def test_fit_crops_the_centre_and_ends_at_plus_and_minus_one() -> None:
    image = Image.new("RGB", (96, 32), "black")
    image.paste("white", (32, 0, 64, 32))
    pixels = fit(image, (32, 32))
    assert pixels.shape == (1, 3, 32, 32)
    torch.testing.assert_close(pixels, torch.ones(1, 3, 32, 32), rtol=0, atol=0)
    assert fit(image, (96, 32)).min() == -1
