"""Faults of disk, files, numbers and side stages: each has its outcome, and what was finished stays whole."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from slow_cases import slow_but
from tiny_runs import TrainOnce, run_with, saved_weights

from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.data.storage.cache import FileCache, checksum
from simpletune.engine.optim.rounding import key_draws
from simpletune.estimate import disk_needs as space
from simpletune.models.shared.autoencoder import Autoencoder
from simpletune.models.text.prompts import Prompts
from simpletune.runs import checkpoint
from simpletune.runs.folder import SKIPPED, read_metrics, read_rows
from simpletune.stages.step.batch_loader import BatchLoader
from simpletune.stages.step.train_step import TrainStep
from simpletune.system import disk
from simpletune.system.options import ConfigError, UserError
from simpletune.training.checkpointer import Checkpointer
from simpletune.training.validation_images import Previews

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict, Path], dict[str, str]]:
    """A function that copies a cache that a run has filled, to be damaged: the tests' own has entries of other
    encoders, too. It returns the option ``output``."""
    own = tmp_path_factory.mktemp("own") / "cache"

    def copied(config: dict, place: Path) -> dict[str, str]:
        if not own.exists():
            run_with(config, name="filler", train={"steps": 1}, output={"cache": str(own)})
        shutil.copytree(own, place)
        return {"cache": str(place)}

    return copied


def run_of(tiny_config: dict) -> Path:
    return Path(tiny_config["output"]["runs"]) / "tiny"


def steps_of(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir())


# --- disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, kind", [(errno.ENOSPC, "full"), (errno.EDQUOT, "quota"), (errno.EFBIG, "larger")])
def test_every_errno_of_a_full_disk_is_said_with_what_was_needed(number: int, kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{kind}.*1\.0 MiB were needed.*--resume latest") as caught:
        with disk.room_for("saving", tmp_path / "run", 2**20):
            raise OSError(number, os.strerror(number))
    assert caught.value.code == 6
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), disk.room_for("saving", tmp_path / "run", 2**20):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_ends_in_a_message_and_the_run_continues(
    call: str, tiny_config: dict, write_config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tiny_config | {"checkpoint": {"every": 2}}))
    honest, calls = getattr(os, call), []

    def failing(*arguments: Any) -> None:
        paths = arguments if call == "replace" else [os.readlink(f"/proc/self/fd/{arguments[0]}")]
        saving = any("step-000004" in str(each) for each in paths)
        calls.append(saving)
        if saving:
            raise OSError(errno.EIO, os.strerror(errno.EIO), *(arguments[:1] if call == "replace" else ()))
        honest(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        assert main(["train", config]) == 2
    assert re.search(r"error: /\S+: Input/output error.* Repair or remove it", capsys.readouterr().err) and any(calls)
    assert main(["train", config, "--resume", "auto"]) == 0
    assert read_metrics(run_of(tiny_config))[-1]["step"] == 4


@pytest.mark.parametrize("file", [checkpoint.OPTIMIZER, checkpoint.STATE])
def test_full_while_saving(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, file: str, train_once: TrainOnce
) -> None:
    honest = checkpoint.flush_to_disk
    calls: list[Path] = []

    def flush(path: Path) -> None:
        if file in path.name and "step-000004" in str(path):
            calls.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        honest(path)

    with monkeypatch.context() as patch:
        patch.setattr("simpletune.system.atomic.flush_to_disk", flush)
        patch.setattr(checkpoint, "flush_to_disk", flush)
        with pytest.raises(UserError, match=r"the disk of .*were needed, .* were free.*--resume latest") as caught:
            run_with(tiny_config, checkpoint={"every": 2})
    run = run_of(tiny_config)
    assert calls and caught.value.code == 6 and steps_of(run) == ["step-000002"]
    run_with(tiny_config, "latest", checkpoint={"every": 2})
    torch.testing.assert_close(saved_weights(run, 4), saved_weights(train_once(tiny_config), 4), rtol=0, atol=0)


def test_full_while_logging(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        """A file that takes half of what is written, and no more."""

        def __init__(self, path: Path, *args: object, **named: object):
            self.file = open(path, "a")

        def __enter__(self) -> Failing:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, text: str) -> None:
            if '"step": 3' in text:
                self.file.write(text[:9])
                self.file.flush()
                raise OSError(errno.ENOSPC, "No space left on device")
            self.file.write(text)

    monkeypatch.setattr("simpletune.runs.folder.open", Failing, raising=False)
    with pytest.raises(UserError, match="is full while writing metrics.jsonl") as caught:
        run_with(tiny_config, checkpoint={"every": 2})
    assert caught.value.code == 6
    run = run_of(tiny_config)
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    monkeypatch.undo()
    run_with(tiny_config, "latest")
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]


def test_full_while_caching(tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def flush(path: Path) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("simpletune.system.atomic.flush_to_disk", flush)
    cache = {"cache": str(tmp_path / "own")}
    with pytest.raises(UserError, match="is full while writing .*safetensors") as caught:
        run_with(tiny_config, output=cache)
    assert caught.value.code == 6
    left = [file for file in (tmp_path / "own").rglob("*") if file.is_file() and ".locks" not in file.parts]
    assert len(left) == 2 and all(file.suffix == ".safetensors" for file in left)
    assert not run_of(tiny_config).exists()
    monkeypatch.undo()
    run_with(tiny_config, output=cache)


FILL = """
import os, subprocess, sys
from simpletune.apps.cli.main import main
config, mounted = sys.argv[1:]
print("code", main(["train", config, "--force"]), flush=True)
steps = sorted(os.listdir(f"{mounted}/runs/tiny/checkpoints"))
print(*steps, sep="\\n")
last = int(steps[-1].removeprefix("step-"))
subprocess.run(["mount", "-o", "remount,size=2m", mounted], check=True)
more = ["checkpoint.every=null", f"train.steps={last + 1}"]
print("code", main(["train", config, "--resume", "latest", *more, "--force"]), flush=True)
"""


@pytest.mark.slow
def test_on_a_file_system_that_is_really_full(tiny_config: dict, tmp_path: Path, train_once: TrainOnce) -> None:
    train_once(tiny_config)  # the cache is filled
    mounted = tmp_path / "small"
    mounted.mkdir()
    data = tiny_config | {
        "train": {"steps": 200}, "checkpoint": {"every": 1, "keep_last": 100}, "tracking": {"tensorboard": False},
        "output": {**tiny_config["output"], "runs": str(mounted / "runs"), "profiles": str(tmp_path / "profiles")},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(data))
    command = f"mount -t tmpfs -o size=1m tmpfs {mounted}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "sh", "-c", command]).returncode:
        pytest.skip("no file system may be mounted here")
    script = f'{command} && exec "$@"'
    program = ["sh", sys.executable, "-c", FILL, str(tmp_path / "config.json"), str(mounted)]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, *program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    first, second = done.stdout.split("code 6\n")
    assert "warning this run writes about" in first and "(--force)" in first
    assert "is full while" in done.stderr and "were needed" in done.stderr and "were free" in done.stderr
    assert "step-000002" in second and ".part" not in second and "resume  from" in second and "code 0" in second


def test_too_little_room_is_refused_before_anything_is_made(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = {"cache": str(tmp_path / "cold")}
    monkeypatch.setattr(space, "free_disk_bytes", lambda path: 100_000)
    with pytest.raises(UserError, match=r"disk: this run writes about .*checkpoints .*cached pictures .*are free") as e:
        run_with(tiny_config, output=output, train={"steps": 2}, checkpoint={"every": 1})
    assert e.value.code == 6
    assert not (tmp_path / "cold" / "latents").exists() and not run_of(tiny_config).exists()
    monkeypatch.setattr(space, "free_disk_bytes", lambda path: 300_000)
    run_with(tiny_config, output=output, train={"steps": 2}, checkpoint={"every": 1})
    assert "nearly full" in capsys.readouterr().out


def test_the_space_that_is_foreseen_is_what_is_written(tiny_config: dict, tmp_path: Path) -> None:
    data = tiny_config | {"checkpoint": {"every": 1, "keep_last": 3}, "ema": {}, "adapter": {"rank": 64}}
    run = run_with(data)
    one, result = space.checkpoint_bytes(validate(data, "test"))
    written = sum(file.stat().st_size for file in (run / "checkpoints" / "step-000004").iterdir())
    assert one - space.HEADERS <= written <= one
    assert result <= (run / "pytorch_lora_weights.safetensors").stat().st_size <= result + 20_000


# --- checksums ------------------------------------------------------------------------------------------------------


def spoil(file: Path, damage: str) -> None:
    data = file.read_bytes()
    flipped = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
    file.write_bytes({"flip": flipped, "cut": data[:-7], "empty": b""}[damage])


@pytest.mark.parametrize(
    ("kind", "damage"),
    slow_but([("latents", "flip"), ("prompts", "cut")], product(("latents", "prompts"), ("flip", "cut", "empty"))),
)
def test_a_damaged_cache_file_is_set_aside_and_made_again(
    tiny_config: dict, filled: Any, train_once: TrainOnce, tmp_path: Path, kind: str, damage: str, capsys: Any
) -> None:
    output, whole = filled(tiny_config, tmp_path / "own"), train_once(tiny_config)
    used = sorted((tmp_path / "own" / kind).rglob("*.safetensors"))
    spoiled = next(file for file in used if load_file(file))
    before = {name: tensor.clone() for name, tensor in load_file(spoiled).items()}  # not mapped
    for file in used:
        spoil(file, damage)
    capsys.readouterr()
    again = run_with(tiny_config, output=output)
    assert "is damaged" in (said := capsys.readouterr().out) or "truncated" in said or "not a safetensors" in said
    assert "encoding it again" in said
    aside = list((tmp_path / "own" / kind).rglob("*.damaged"))
    assert aside and all(place.with_suffix("").exists() for place in aside)
    if spoiled.with_name(f"{spoiled.name}.damaged") in aside:
        torch.testing.assert_close(load_file(spoiled), before, rtol=0, atol=0)
    torch.testing.assert_close(saved_weights(again, 4), saved_weights(whole, 4), rtol=0, atol=0)


def test_damage_that_comes_later_is_found_when_the_file_is_read(tmp_path: Path) -> None:
    FileCache(tmp_path).save("key", {"z_0": torch.arange(6.0), "tokens": torch.tensor(3)})
    spoil(FileCache(tmp_path).file("key"), "flip")
    with pytest.raises(UserError, match="checksum does not match.*renamed to .*damaged.*--resume latest"):
        FileCache(tmp_path).load("key")
    assert "key" not in FileCache(tmp_path)


def test_a_checksum_tells_names_shapes_types_and_bits_apart() -> None:
    one = torch.ones(2, 3)
    others = [{"b": one}, {"a": one.T.contiguous()}, {"a": one.view(torch.int32)}, {"a": one * 2}]
    assert len({checksum(tensors) for tensors in [{"a": one}, *others]}) == 5


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, str]]:
    """Fill it with {step: what becomes NaN or infinite}; steps are counted as the loop counts them."""
    wanted: dict[int, str] = {}
    now: list[int] = []
    honest, keyed = TrainStep.step, "simpletune.stages.step.train_step.key_draws"
    monkeypatch.setattr(keyed, lambda optimizer, seed, step: (now.append(step), key_draws(optimizer, seed, step)))

    fetched = BatchLoader.fetch

    def fetch(self: BatchLoader, step: int) -> list:
        batches = fetched(self, step)
        if wanted.get(step) == "latents":
            batches[0].z_0[-1, 0, 0, 0] = math.nan
        return batches

    def step(self: TrainStep, batches: list, gate: object = None) -> object:
        kind = wanted.get(now[-1])
        if kind not in ("gradient", "nan"):
            return honest(self, batches, gate)
        hook = self.parameters[3].register_hook(lambda grad: grad * (math.nan if kind == "nan" else math.inf))
        try:
            return honest(self, batches, gate)
        finally:
            hook.remove()

    monkeypatch.setattr(TrainStep, "step", step)
    monkeypatch.setattr(BatchLoader, "fetch", fetch)
    yield wanted


CLIPS = [{}, {"clip_norm": None}, {"clip": "per_parameter"}]


@pytest.mark.parametrize(
    ("kind", "clip"),
    slow_but(
        [("latents", CLIPS[0]), ("gradient", CLIPS[1]), ("nan", CLIPS[2]), ("gradient", CLIPS[2])],
        product(("latents", "gradient", "nan"), CLIPS),
    ),
    ids=str,
)
def test_stops_at_that_step_and_says_why(tiny_config: dict, poison: dict[int, str], kind: str, clip: dict) -> None:
    poison[2] = kind
    with pytest.raises(UserError, match="step 3: the (loss|gradient norm) is") as caught:
        run_with(tiny_config, train={"batch_size": 2, **clip}, checkpoint={"every": 2})
    said = str(caught.value)
    assert caught.value.code == 4 and re.search("last checkpoint is .*step-000002", said)
    if kind == "latents":
        assert said.count(".png: its cached latents are non-finite") == 1
    else:
        assert "Non-finite gradients: transformer_blocks.0.attn.to_k.lora_B.default.weight. " in said
    run = run_of(tiny_config)
    assert steps_of(run) == ["step-000002"]
    assert all(tensor.isfinite().all() for tensor in saved_weights(run, 2).values())


def test_with_updates_in_the_backward_pass_it_is_seen_at_that_step_too(tiny_config: dict, poison: dict) -> None:
    poison[2] = "gradient"
    with pytest.raises(UserError, match="step 3: the gradient norm is .*gradients: transformer_blocks.0.attn"):
        run_with(
            tiny_config,
            train={"clip": "per_parameter"}, memory={"optimizer_in_backward": True}, checkpoint={"every": 1},
        )  # fmt: skip
    assert steps_of(run_of(tiny_config)) == ["step-000001", "step-000002"]


def test_skip_leaves_the_weights_and_the_state_as_they_were(
    tiny_config: dict, poison: dict[int, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison |= {1: "latents", 2: "gradient", 5: "latents"}
    settings: dict = {
        "train": {"steps": 7, "on_nonfinite": "skip"}, "checkpoint": {"every": 3, "keep_last": 9}, "ema": {},
    }  # fmt: skip
    whole = run_with(tiny_config, name="whole", **settings)
    assert [row["step"] for row in read_metrics(whole)] == [1, 4, 5, 7]
    skipped = list(read_rows(whole / SKIPPED))
    assert [row["step"] for row in skipped] == [2, 3, 6] and all(row["samples"] for row in skipped)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["skipped_steps"] == 3 and len(summary["warnings"]) == 3
    assert "Skipped the update" in capsys.readouterr().out
    one, three = (load_file(checkpoint.checkpoint_folder(whole, step) / "ema.safetensors") for step in (3, 6))
    assert not all(torch.equal(one[name], three[name]) for name in one)
    again = shutil.copytree(whole, whole.with_name("again"))
    shutil.rmtree(checkpoint.checkpoint_folder(again, 7))
    shutil.rmtree(checkpoint.checkpoint_folder(again, 6))
    run_with(tiny_config, "latest", name="again", **settings)
    torch.testing.assert_close(saved_weights(again, 7), saved_weights(whole, 7), rtol=0, atol=0)
    assert list(read_rows(again / SKIPPED)) == skipped


def test_a_skipped_step_is_no_step(tiny_config: dict, poison: dict[int, str]) -> None:
    poison |= {3: "gradient"}
    run = run_with(tiny_config, train={"on_nonfinite": "skip", "steps": 4}, checkpoint={"every": 3}, ema={})
    for file in (checkpoint.TRAINABLE, checkpoint.OPTIMIZER, checkpoint.AVERAGE):
        before, after = (load_file(checkpoint.checkpoint_folder(run, step) / file) for step in (3, 4))
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_too_many_skips_in_a_row_end_the_run_also_across_a_resume(tiny_config: dict, poison: dict[int, str]) -> None:
    poison |= dict.fromkeys(range(1, 9), "latents")
    settings: dict = {"train": {"steps": 12, "on_nonfinite": "skip"}, "checkpoint": {"every": 3}}
    for resume in (None, "latest"):
        with pytest.raises(UserError, match="step 6: .*5 non-finite steps in a row") as caught:
            run_with(tiny_config, resume, **settings)
        assert caught.value.code == 4


def test_skip_and_updates_in_the_backward_pass_exclude_each_other(tiny_config: dict) -> None:
    changes = {"memory": {"optimizer_in_backward": True}, "train": {"on_nonfinite": "skip", "clip_norm": None}}
    with pytest.raises(ConfigError, match="train.on_nonfinite: skip needs all gradients.*Use stop"):
        validate(tiny_config | changes, "test")


def test_what_has_diverged_is_not_saved(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Checkpointer.save

    def save(self: Checkpointer, step: int) -> None:
        with torch.no_grad():
            self.core.parameters[1][0] = math.nan if step == 4 else self.core.parameters[1][0]
        honest(self, step)

    monkeypatch.setattr(Checkpointer, "save", save)
    with pytest.raises(UserError, match="step 4: 1 trained parameters are non-finite.*last checkpoint"):
        run_with(tiny_config, checkpoint={"every": 2})
    assert steps_of(run_of(tiny_config)) == ["step-000002"]


def test_cached_latents_that_are_not_finite_are_set_aside_and_made_again(
    tiny_config: dict, filled: Any, tmp_path: Path
) -> None:
    output = filled(tiny_config, tmp_path / "own")
    for file in (tmp_path / "own" / "latents").rglob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            key, z_0 = handle.metadata()["key"], handle.get_tensor("z_0")
        FileCache(file.parent).save(key, {"z_0": z_0 * math.nan})
    with pytest.raises(UserError, match="step 1: .*cached latents are non-finite. Set aside.*: .*damaged"):
        run_with(tiny_config, output=output, train={"steps": 1})
    assert len(list((tmp_path / "own").rglob("*.damaged"))) == 1


def test_a_picture_that_the_autoencoder_overflows_on_is_named(
    tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Autoencoder.encode
    monkeypatch.setattr(Autoencoder, "encode", lambda *args: honest(*args) * math.inf)
    with pytest.raises(UserError, match="000.png: .*NaN.* in torch.float32"):
        run_with(tiny_config, output={"cache": str(tmp_path / "own")})


def test_a_caption_that_a_text_encoder_overflows_on_is_named(
    tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Prompts.encode

    def encode(self: Prompts, encoder: Any, prompts: list[str], **rest: Any) -> Iterator[dict[str, torch.Tensor]]:
        for prompt, parts in zip(prompts, honest(self, encoder, prompts, **rest), strict=True):
            bad = prompt == prompts[1] and encoder.name == "clip_g"
            yield {**parts, "hidden": parts["hidden"] * math.inf} if bad else parts

    monkeypatch.setattr(Prompts, "encode", encode)
    with pytest.raises(UserError, match="clip_g .*caption '.*NaN or infinity.*precision.compute=fp32") as caught:
        run_with(tiny_config, output={"cache": str(tmp_path / "own")})
    assert caught.value.code == 4
    cached = (tmp_path / "own").rglob("*.safetensors")
    assert all(tensor.isfinite().all() for file in cached for tensor in load_file(file).values())


# --- stages ---------------------------------------------------------------------------------------------------------


def test_side_stages_do_not_take_the_run_down(
    tiny_config: dict, train_once: TrainOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict = {
        "validation": {"prompts": ["a disc"], "every": 1, "steps": 2, "loss_samples": 2},
        "profile": {"max_traces": 1}, "output": {"report": True},
    }  # fmt: skip
    whole, calls = train_once(tiny_config), []

    def fail(*args: object, **named: object) -> None:
        calls.append(args)
        raise torch.OutOfMemoryError("CUDA out of memory (injected)") if len(calls) < 3 else RuntimeError("broken")

    monkeypatch.setattr("simpletune.training.validation_images.generate_images", fail)
    monkeypatch.setattr("simpletune.training.validation_loss.LossEvaluator.evaluate", fail)
    monkeypatch.setattr("simpletune.training.finish.write_card", fail)
    monkeypatch.setattr("simpletune.runs.report.report_at_end", fail)
    monkeypatch.setattr("simpletune.engine.profiling.traces.Window.start", fail)
    monkeypatch.setattr("simpletune.training.trackers.tensor_board.TensorBoard.scalars", fail)
    run = run_with(tiny_config, **settings)
    said = json.loads((run / "summary.json").read_text())["warnings"]
    for words in (
        "the validation loss failed (OutOfMemoryError", "drawing validation pictures failed (RuntimeError",
        "the model card failed", "the report failed", "the profiler failed", "TensorBoard failed",
    ):  # fmt: skip
        assert len([text for text in said if text.startswith(words)]) == 1, (words, said)
    torch.testing.assert_close(saved_weights(run, 4), saved_weights(whole, 4), rtol=0, atol=0)
    assert (run / "pytorch_lora_weights.safetensors").exists()


def test_after_a_failure_the_next_validation_is_tried(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base's pictures, too, whose drawing fails before the first step and at the first validation."""
    honest, calls = Previews.images, []

    def draw(self: Previews, *args: object) -> list[Image.Image]:
        calls.append(args)
        if len(calls) in (1, 2, 6):
            raise torch.OutOfMemoryError("injected")
        return honest(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Previews, "images", draw)
    run = run_with(tiny_config, validation={"prompts": ["a disc"], "every": 1, "steps": 2})
    left = sorted(entry.name for entry in (run / "samples").iterdir())
    assert left == ["base", "grid.png", "step-000001", "step-000002", "step-000004"] and len(calls) == 7
    assert Image.open(run / "samples/grid.png").width == 8 + 4 * 168
