"""Quantised bases on disk: bit for bit what quantising gives, read instead of the weights, and safe when damaged."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from simpletune.adapters.files.base_reader import BaseReader
from simpletune.config.load import validate
from simpletune.config.schema import cache_of_bases
from simpletune.engine.quant.precision import BF16, Int8, Int8Quanto, Nf4, WeightPrecision
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared import quantised_cache, weights
from simpletune.runs.weights import BASE, load_weights
from simpletune.system.atomic import STALE
from simpletune.system.console import verbose
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import write_safetensors
from simpletune.training.train import train

CPU = torch.device("cpu")
QUANTISED = [
    Int8(), Int8(compute="fp32"), Int8Quanto(), Int8Quanto(compute="fp32"), Nf4(), Nf4(compute="fp32"),
    Nf4(double_quantisation=False, modulation="nf4"), Int8(rotation="hadamard"), Nf4(rotation="hadamard"),
]  # fmt: skip
FAST = [Int8(), Int8Quanto(compute="fp32"), Nf4(compute="fp32"), *QUANTISED[-3:-1]]  # each kind once
WEIGHTS = "diffusion_pytorch_model.safetensors"


def name_of(precision: WeightPrecision) -> str:
    return "-".join(str(value) for value in precision.model_dump().values())


@pytest.fixture(autouse=True)
def details() -> Iterator[None]:
    """The cache says what it does to those who ask."""
    with verbose():
        yield


@pytest.fixture
def model(tiny_pipeline: Path, tmp_path: Path) -> SD3:
    """The tiny model in a folder of the test's own."""
    shutil.copytree(tiny_pipeline, tmp_path / "pipeline")
    return SD3().model_copy(update={"pretrained": str(tmp_path / "pipeline")})


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def no_quantising(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, opening the full-precision weights fails the test."""

    def fail(source: Path) -> None:
        raise AssertionError(f"{source} was opened")

    return lambda: monkeypatch.setattr(weights, "open_tensors", fail)


def folders(cache: Path) -> list[Path]:
    return sorted(folder for folder in (cache / "quantised").iterdir() if not folder.name.endswith(".damaged"))


def assert_equal_models(ours: nn.Module, theirs: nn.Module) -> None:
    """The same modules, types, modes and bits."""
    assert [(n, type(m)) for n, m in ours.named_modules()] == [(n, type(m)) for n, m in theirs.named_modules()]
    assert not ours.training and not any(p.requires_grad for p in ours.parameters())
    one, other = ours.state_dict(), theirs.state_dict()
    assert list(one) == list(other)
    for name, tensor in other.items():
        assert (one[name].dtype, one[name].device) == (tensor.dtype, tensor.device)
        assert torch.equal(one[name], tensor), name


@pytest.mark.parametrize(
    "precision",
    [pytest.param(each, id=name_of(each), marks=() if each in FAST else pytest.mark.slow) for each in QUANTISED],
)
def test_the_second_load_is_the_first_bit_for_bit_and_opens_no_weights(
    precision: WeightPrecision, model: SD3, cache: Path, no_quantising: Callable, capsys
) -> None:
    uncached = model.load_denoiser(precision, CPU)
    first = model.load_denoiser(precision, CPU, cache=cache)
    assert "cached in" in capsys.readouterr().out
    no_quantising()
    second = model.load_denoiser(precision, CPU, cache=cache)
    assert "loaded from the cache" in capsys.readouterr().out
    assert_equal_models(first, uncached)
    assert_equal_models(second, uncached)
    generator = torch.Generator().manual_seed(0)
    z_t = torch.randn(1, 16, 4, 4, generator=generator).to(precision.compute_dtype())
    text = torch.randn(1, 85, uncached.config.joint_attention_dim, generator=generator).to(z_t.dtype)
    pooled = torch.randn(1, uncached.config.pooled_projection_dim, generator=generator).to(z_t.dtype)
    with torch.no_grad():
        outputs = [each(z_t, text, pooled, torch.tensor([500.0]))[0] for each in (uncached, second)]
    assert torch.equal(*outputs)


def test_modules_that_stay_on_the_host_are_asked_for_by_name(model: SD3, cache: Path) -> None:
    model.load_denoiser(Int8Quanto(), CPU, cache=cache)
    asked: list[str] = []
    model.load_denoiser(Int8Quanto(), CPU, on_host=lambda name: asked.append(name) or False, cache=cache)
    names = {name for name, _ in model.load_denoiser(Int8Quanto(), CPU).named_modules()}
    assert "transformer_blocks.0.norm1.linear" in asked and set(asked) <= names


def test_modules_stay_on_the_host(model: SD3, cache: Path) -> None:
    """On the meta device as the device, what is elsewhere than on the host has no bytes."""
    meta = torch.device("meta")
    base = base_of(model, cache, Nf4())
    assert base.write(weights.open_tensors(model.files.part("transformer")))
    base._device = meta
    loaded = base.load(lambda name: name.startswith("transformer_blocks.0.norm1"))
    on_host = {name for name, tensor in loaded.state_dict().items() if tensor.device == CPU}
    assert on_host == {name for name in loaded.state_dict() if name.startswith("transformer_blocks.0.norm1")}
    assert on_host


def test_the_header_says_what_it_was_made_from_and_loaded_tensors_are_their_own(model: SD3, cache: Path) -> None:
    model.load_denoiser(Nf4(), CPU, cache=cache)
    (folder,) = folders(cache)
    file = folder / quantised_cache.FILE
    with safe_open(file, framework="pt") as handle:
        about = json.loads(handle.metadata()["simpletune_quantised_from"])
    known = Nf4(compute="bf16").model_dump(mode="json", exclude={"rotation"})  # as before rotation was an option
    assert about["precision"] == known
    assert about["weights"] == model.files.part("transformer").fingerprint()
    assert about["place"].endswith("pipeline/transformer")
    assert {path.name for path in folder.iterdir()} == {quantised_cache.FILE, quantised_cache.ABOUT}
    loaded = model.load_denoiser(Nf4(), CPU, cache=cache)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    file.write_bytes(bytes(file.stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())


def base_of(model: SD3, cache: Path, precision: WeightPrecision) -> quantised_cache.QuantisedBase:
    part, config = model.files.part("transformer"), model.files.denoiser_config()
    return quantised_cache.QuantisedBase(
        cache, config, lambda: model.architecture.empty_model(config), part, precision, CPU
    )


def test_every_precision_has_its_own_and_other_weights_too(model: SD3, cache: Path) -> None:
    """A change of one bit; not a copy, wherever it lies and whatever its time."""
    assert len({base_of(model, cache, precision).folder for precision in QUANTISED}) == len(QUANTISED)
    model.load_denoiser(Int8(), CPU, cache=cache)
    assert folders(cache) == [base_of(model, cache, Int8()).folder]
    file = Path(model.pretrained) / "transformer" / WEIGHTS
    before = file.stat()
    moved = model.model_copy(update={"pretrained": str(shutil.copytree(model.pretrained, cache.with_name("moved")))})
    assert base_of(moved, cache, Int8()).folder == folders(cache)[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x40
    file.write_bytes(content)
    os.utime(file, ns=(0, before.st_mtime_ns))
    changed = model.load_denoiser(Int8(), CPU, cache=cache)
    assert len(folders(cache)) == 2
    assert_equal_models(changed, model.load_denoiser(Int8(), CPU))


@pytest.mark.parametrize("precision", [BF16(), Int8()], ids=name_of)
def test_nothing_is_kept_of_what_is_not_quantised_or_not_from_files(
    precision: WeightPrecision, model: SD3, cache: Path
) -> None:
    random = model.model_copy(update={"init": "random"})
    random.load_denoiser(precision, CPU, cache=cache)
    if not precision.cacheable:
        model.load_denoiser(precision, CPU, cache=cache)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        (quantised_cache.FILE, lambda content: content[:-8], "has .* of .* bytes"),
        (quantised_cache.FILE, lambda content: content[:-1] + bytes([content[-1] ^ 1]), "SHA-256"),
        (quantised_cache.ABOUT, lambda content: b"{", "cannot be read"),
        (quantised_cache.FILE, None, "No such file"),
    ],
)
def test_a_damaged_one_is_named_set_aside_and_made_again(name, damage, reason, model: SD3, cache: Path, capsys) -> None:
    first = model.load_denoiser(Nf4(), CPU, cache=cache)
    (folder,) = folders(cache)
    file = folder / name
    file.write_bytes(damage(file.read_bytes())) if damage else file.unlink()
    capsys.readouterr()
    second = model.load_denoiser(Nf4(), CPU, cache=cache)
    said = capsys.readouterr().out
    assert re.search(reason, said)
    assert f"{folder} are damaged" in said and f"Renamed to {folder}.damaged" in said and "cached in" in said
    assert_equal_models(second, first)
    assert Path(f"{folder}.damaged").is_dir()
    model.load_denoiser(Nf4(), CPU, cache=cache)
    assert "loaded from the cache" in capsys.readouterr().out


def test_one_that_does_not_fit_the_model_is_made_again(model: SD3, cache: Path, capsys) -> None:
    model.load_denoiser(Nf4(), CPU, cache=cache)
    nf4 = folders(cache)[0]
    model.load_denoiser(Int8(), CPU, cache=cache)
    int8 = next(folder for folder in folders(cache) if folder != nf4)
    shutil.rmtree(int8)
    shutil.copytree(nf4, int8)
    model.load_denoiser(Int8(), CPU, cache=cache)
    assert "missing or unexpected tensors: transformer_blocks.0" in capsys.readouterr().out


def test_a_full_disk_is_said_once_and_the_run_goes_on(
    model: SD3, cache: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40 - 2**29, 2**29))
    for _ in range(2):
        loaded = model.load_denoiser(Int8(), CPU, cache=cache)
    assert_equal_models(loaded, model.load_denoiser(Int8(), CPU))
    said = capsys.readouterr().out
    assert said.count("cannot be cached") == 1
    assert "only 0.50 GiB is free" in said and "memory.cache_quantised=false" in said
    assert list((cache / "quantised").iterdir()) == []


def test_a_write_that_fails_half_way_leaves_nothing(model: SD3, cache: Path, capsys) -> None:
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        model.load_denoiser(Int8(), CPU, cache=cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "cannot be cached" in capsys.readouterr().out
    assert list((cache / "quantised").iterdir()) == []


def test_a_killed_run_s_remains_are_removed_when_they_are_old(model: SD3, cache: Path) -> None:
    model.load_denoiser(Int8(), CPU, cache=cache)
    (folder,) = folders(cache)
    shutil.rmtree(folder)
    old, young = (folder.with_name(f".{folder.name}.{pid}.part") for pid in (1, 2))
    for each in (old, young):
        each.mkdir()
    os.utime(old, (0, time.time() - STALE - 60))
    model.load_denoiser(Int8(), CPU, cache=cache)
    assert folder.is_dir() and young.is_dir() and not old.exists()


def test_of_several_processes_the_first_writes(model: SD3, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model.load_denoiser(Int8(), CPU, cache=cache)
    assert not cache.exists()


def test_a_mistake_in_the_weights_is_still_told(model: SD3, cache: Path) -> None:
    (Path(model.pretrained) / "transformer" / WEIGHTS).unlink()
    with pytest.raises(UserError, match="diffusion_pytorch_model.safetensors"):
        model.load_denoiser(Int8(), CPU, cache=cache)


def test_runs_and_pictures_use_it(tiny_config: dict, tmp_path: Path, no_quantising: Callable, capsys) -> None:
    tiny_config["output"]["cache"] = str(tmp_path / "own")
    tiny_config |= {"precision": {"weights": "nf4"}, "train": {"steps": 1}}
    run = train(validate(tiny_config, "first"))
    assert "nf4 weights cached in" in capsys.readouterr().out
    no_quantising()
    train(validate(tiny_config | {"name": "again"}, "second"))
    config = validate(tiny_config, "drawing")
    load_weights(config, BASE, CPU, [(32, 32)])
    assert capsys.readouterr().out.count("loaded from the cache") == 2
    assert (run / "summary.json").exists()
    off = validate(tiny_config | {"memory": {"checkpointing": "none", "cache_quantised": False}}, "off")
    assert cache_of_bases(off) is None and cache_of_bases(config) == tmp_path / "own"
    with pytest.raises(AssertionError, match="was opened"):
        load_weights(off, BASE, CPU, [(32, 32)])


def test_another_run_that_was_first_is_left_as_it_is(model: SD3, cache: Path, capsys, monkeypatch) -> None:
    first = model.load_denoiser(Int8(), CPU, cache=cache)
    (folder,) = folders(cache)
    sums = (folder / quantised_cache.ABOUT).read_bytes()
    capsys.readouterr()
    monkeypatch.setattr(quantised_cache.QuantisedBase, "load", lambda self, on_host, mapped=False, known=False: None)
    assert_equal_models(model.load_denoiser(Int8(), CPU, cache=cache), first)
    assert "cached in" in capsys.readouterr().out and folders(cache) == [folder]
    assert (folder / quantised_cache.ABOUT).read_bytes() == sums
    shutil.rmtree(folder)
    folder.write_text("in the way")
    assert_equal_models(model.load_denoiser(Int8(), CPU, cache=cache), first)
    assert "cannot be cached" in capsys.readouterr().out and folder.read_text() == "in the way"


def test_a_large_one_is_made_in_parts_and_a_killed_run_is_continued(
    model: SD3, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same bits as in one piece, each tensor read once, and never more than a part of them at a time."""
    whole, most = model.load_denoiser(Int8(), CPU), 135_000
    monkeypatch.setattr(quantised_cache, "PART", most)
    read: list[str] = []
    written: list[int] = []

    class Source(weights.WeightReader):
        def get(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().get(name)

    def write(tensors: dict[str, torch.Tensor], file: Path, about: dict[str, str]) -> Path:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(sum(each.nbytes for each in tensors.values()))
        return write_safetensors(tensors, file, about)

    part = model.files.part("transformer")
    assert part.folder is not None
    source = Source(weights.weight_files(part.folder))
    monkeypatch.setattr(quantised_cache, "write_safetensors", write)
    with pytest.raises(KeyboardInterrupt):
        base_of(model, cache, Int8()).write(source)
    before, files = set(read), sorted(path.name for path in (cache / "quantised").glob(".*.part/*.safetensors"))
    assert len(files) == 2 and 0 < max(written) <= most
    done = {name.rpartition(".")[0] for file in (cache / "quantised").glob(".*.part/*.safetensors")
            for name in weights.WeightReader([file]).names}  # fmt: skip
    monkeypatch.setattr(quantised_cache, "write_safetensors", write_safetensors)
    read.clear()
    base = base_of(model, cache, Int8())
    nothing: Callable = lambda: pytest.fail("quantised all in memory")  # noqa: E731
    found = base.make(lambda name: False, lambda: source, nothing)
    assert_equal_models(found, whole)
    assert len(read) == len(set(read)) and set(read) | before == source.names
    assert done and not done & {name.rpartition(".")[0] for name in read}
    (folder,) = folders(cache)
    assert folder == base.folder and files[0] in {path.name for path in folder.iterdir()}
    capsys.readouterr()
    assert_equal_models(model.load_denoiser(Int8(), CPU, cache=cache), whole)
    assert "loaded from the cache" in capsys.readouterr().out
    reader = BaseReader(str(folder))
    assert set(reader.shapes) == source.names
    (folder / files[1]).write_bytes(b"x")
    assert_equal_models(model.load_denoiser(Int8(), CPU, cache=cache), whole)
    assert f"{files[1]} has 1 of" in capsys.readouterr().out


def test_weights_that_do_not_fit_leave_nothing(model: SD3, cache: Path) -> None:
    base = base_of(model, cache, Int8())
    with pytest.raises(UserError, match="do not match their config.json"):
        base.write(weights.MadeTensors({"odd": (2, 2)}, lambda name, shape: torch.zeros(shape)))
    assert not list(cache.rglob("*.part"))
