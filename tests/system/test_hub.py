"""Models from the hub: only what is needed, no damaged file in the cache, and every failure in plain words."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fake_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import COMMIT, TOKEN, Failure, FakeHub
from filelock import FileLock
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http, _xet, close_session, validate_repo_id
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter
from serving import until
from tiny_encoders import write_clip
from tiny_tagger import TAGS, write_tagger

from simpletune.apps.cli.main import main
from simpletune.commands.caption.tagger import find_tagger
from simpletune.commands.evaluate.encoders import find_encoder
from simpletune.models.sdxl.sdxl_config import bundled_configs
from simpletune.system import hub as ours
from simpletune.system.hub import (
    HubFile,
    HubPart,
    Repository,
    cached_folder,
    data_set_folder,
    explain_hub_errors,
    fetch,
    hub_file,
    is_hub_name,
    needed_files,
    part_folder,
)
from simpletune.system.options import UserError
from simpletune.system.signals import Stopped, handle_signals

NAME = "owner/tiny-sd3"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
DUPLICATES = {
    "transformer/diffusion_pytorch_model.fp16.safetensors": b"half",
    "text_encoder/model.fp16.safetensors": b"half",
    "text_encoder/pytorch_model.bin": b"pickle",
    "text_encoder_3/model.safetensors.index.fp16.json": b"{}",
    "text_encoder_3/model.fp16-00001-of-00002.safetensors": b"half",
    "sd3_medium.safetensors": b"original",
    "README.md": b"text",
}


@pytest.fixture
def hub(tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the tiny pipeline, an empty cache, a token, and no long waits."""
    with fake_hub.serve(tiny_pipeline, **DUPLICATES) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        impatient(monkeypatch, 20.0)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
        monkeypatch.setattr(ours, "PAUSE", 0.0)
        for module in (file_download, _http):
            monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
        forget()
        yield hub
        forget()


def impatient(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The hub has this time for an answer."""
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(constants, name, seconds)


def forget() -> None:
    """As a new process begins: nothing is known of the hub."""
    ours.listing.cache_clear()
    ours._FETCHED.clear()


@pytest.fixture
def run(tiny_config: dict, write_config, capsys):
    """Runs ``simpletune train`` or ``prepare`` on the hub's model; gives the exit code and what was said."""

    def run(verb: str = "prepare", **model: object) -> tuple[int, str]:
        forget()
        data = {**tiny_config, "model": {"pretrained": NAME, "t5_length": 8, **model}}
        data["train"] = {**data["train"], "steps": 1}
        code = main([verb, str(write_config(data))])
        said = capsys.readouterr()
        assert TOKEN not in said.out + said.err
        assert "Traceback" not in said.err
        return code, said.out + said.err

    return run


def error(said: str) -> str:
    """The message, which is one paragraph."""
    assert said.count("error: ") == 1
    message = said.split("error: ")[1].strip()
    assert "\n" not in message
    return message


def test_trains_with_only_the_needed_files(hub: FakeHub, run, tmp_path: Path) -> None:
    code, said = run("train")
    assert code == 0, said
    assert (tmp_path / "runs" / "tiny" / "pytorch_lora_weights.safetensors").exists()
    assert not hub.fetched() & set(DUPLICATES)
    assert hub.fetched() == {path for path in hub.files if "/" in path} - set(DUPLICATES)
    assert "fetching 0.0" in said and f"files from {NAME}" in said
    assert all(seen for _, _, _, seen in hub.requests)  # HF_TOKEN went along

    hub.requests.clear()
    assert run("train")[0] == 0
    assert len(hub.requests) == 1  # the listing: all is in the cache


def test_neither_t5_nor_weights_where_they_are_not_needed(hub: FakeHub, run) -> None:
    assert run(t5=False, init="random")[0] == 0
    assert not [path for path in hub.fetched() if path.startswith(("text_encoder_3", "tokenizer_3"))]
    assert "transformer/config.json" in hub.fetched() and WEIGHTS not in hub.fetched()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("sdxl", {"cross_attention_dim": 1280}, "owner/tiny-sd3: a refiner of Stable Diffusion XL, which cannot be tr"),
        ("sdxl", {"in_channels": 8}, "owner/tiny-sd3: .*in_channels 8 .*InstructPix2Pix"),
        ("sd15", {}, "owner/tiny-sd3: .* set model.family to sdxl"),
    ],
)
def test_a_unet_that_cannot_be_trained_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, tiny_config: dict, write_config, capsys, family: str, changes: dict, message: str
) -> None:
    parts = bundled_configs()["sdxl"] | {"tokenizer": {}, "tokenizer_2": {}}
    parts["unet"] = parts["unet"] | changes
    hub.files = {f"{part}/config.json": json.dumps(config).encode() for part, config in parts.items()}
    for part in ("unet", "vae"):
        hub.files[f"{part}/diffusion_pytorch_model.safetensors"] = b"weights"
    for part in ("text_encoder", "text_encoder_2"):
        hub.files[f"{part}/model.safetensors"] = b"weights"
    data = {**tiny_config["data"], "resolution": 64}
    config = write_config({**tiny_config, "model": {"family": family, "pretrained": NAME}, "data": data})
    assert main(["train", str(config)]) == 2
    assert re.search(message, error(capsys.readouterr().err))
    assert hub.fetched() == {"unet/config.json"}


def test_a_single_file_takes_only_tokenizers_from_the_hub(hub: FakeHub, run, tiny_pipeline, tmp_path: Path) -> None:
    import original_layout
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "pipeline"
    shutil.copytree(tiny_pipeline, folder)
    clip = load_file(folder / "text_encoder" / "model.safetensors")
    clip["text_projection.weight"] = torch.eye(len(clip["text_projection.weight"]))
    save_file(clip, folder / "text_encoder" / "model.safetensors", {"format": "pt"})
    file = original_layout.write(folder, tmp_path / "sd3.safetensors", "transformer clip")
    code, said = run(pretrained=str(file), text_encoders=NAME, vae=NAME)
    assert "does not match its configuration (bundled)" in error(said) and code == 2
    parts = {path.split("/")[0] for path in hub.fetched()}
    assert parts == {"vae", "tokenizer", "tokenizer_2", "tokenizer_3", "text_encoder_3"}


def fetched_weights(hub: FakeHub, method: str = "GET") -> list[str | None]:
    """The Range header of each request for the transformer's weights."""
    return [asked for verb, path, asked, _ in hub.requests if verb == method and path.endswith(WEIGHTS)]


def assert_no_weights_in_cache() -> None:
    """Neither the file nor a part of it, and offline the part is not used."""
    repository = Repository(NAME)
    assert not list(repository.cache.rglob("*.incomplete"))
    assert not list(repository.cache.glob(f"snapshots/*/{WEIGHTS}"))
    assert cached_folder(HubPart(repository, "transformer", weights=True)) is None


def test_resumes_after_a_cut_without_fetching_anything_twice(hub: FakeHub, run, monkeypatch) -> None:
    (handler,) = logging.getLogger("huggingface_hub").handlers
    monkeypatch.setattr(handler, "stream", io.StringIO())
    monkeypatch.setattr(ours, "MIB", 1000)
    hub.cut_at, hub.cuts = 1000, 3
    code, said = run()
    assert code == 0
    size = len(hub.files[WEIGHTS])
    assert hub.sent[WEIGHTS] == size
    assert fetched_weights(hub) == [None, "bytes=1000-", "bytes=2000-", "bytes=3000-"]
    assert f"fetch {WEIGHTS}: {size // 1000} MiB in " in said
    logged = handler.stream.getvalue()
    assert logged.count("Trying to resume") == 3
    assert "from the hub: " in logged and hub.url not in logged  # an address may be signed


def test_a_cut_for_good_says_so_and_the_next_run_begins_the_file_anew(hub: FakeHub, run) -> None:
    hub.cut_at, hub.cuts = 0, 100
    code, said = run()
    assert code == 2
    size = len(hub.files[WEIGHTS])
    assert error(said) == (
        f"{NAME}: the connection was interrupted while fetching {WEIGHTS} ({size:,} bytes). "
        "Start again: this file is fetched from the start, complete files are kept"
    )
    assert_no_weights_in_cache()

    hub.cuts = 0
    whole = [path for path in hub.fetched() if path != WEIGHTS]
    hub.requests.clear()
    assert run()[0] == 0
    assert WEIGHTS in hub.fetched() and not hub.fetched() & set(whole)


@pytest.mark.parametrize("status", [503, "reset"])
def test_tries_again_where_huggingface_hub_does_not(status: int | str, hub: FakeHub, run) -> None:
    hub.failure = Failure(status, on="weights", method="GET", times=2)
    code, said = run()
    assert code == 0
    assert f"attempt 3 of {ours.TRIES}" in said

    shutil.rmtree(constants.HF_HUB_CACHE)
    hub.requests.clear()
    hub.failure = Failure(status, on="weights", method="GET")
    assert run()[0] == 2
    assert len(fetched_weights(hub)) == ours.TRIES
    assert_no_weights_in_cache()


def test_a_file_that_stalls(hub: FakeHub, run, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1.0)
    hub.failure = Failure("stall", on="weights", method="GET")
    code, said = run()
    assert code == 2
    assert f"timed out while fetching {WEIGHTS}" in error(said) and "(HF_HUB_DOWNLOAD_TIMEOUT" in said
    until(lambda: len(fetched_weights(hub)) >= 6)  # the server may note the last one after the client has given it up
    assert len(fetched_weights(hub)) == 6  # huggingface_hub's own tries, and no more
    assert_no_weights_in_cache()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("damage", f"{NAME}: {WEIGHTS} arrived damaged (wrong sha256) and was deleted. Start again"),
        ("short", f"{NAME} cannot be fetched (OSError). Try again, or use a local folder"),
    ],
)
def test_a_file_that_is_damaged_or_lacks_its_end_is_not_kept(fault: str, message: str, hub: FakeHub, run) -> None:
    setattr(hub, fault, True)
    code, said = run()
    assert code == 2 and error(said) == message
    assert_no_weights_in_cache()
    setattr(hub, fault, False)
    assert run()[0] == 0


def test_a_disk_that_fills_up_while_fetching(hub: FakeHub, run, tmp_path: Path) -> None:
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(hub.files[WEIGHTS]) - 1, limits[1]))
    try:
        code, said = run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert code == 6
    assert error(said) == (
        f"{NAME}: the disk of {tmp_path / 'hf'} allows no larger file; complete files are kept. "
        "Free space, or set HF_HOME to a larger disk, and start again"
    )
    assert_no_weights_in_cache()
    assert run()[0] == 0


FAILURES: dict[str, tuple[Failure | dict, str]] = {  # how the hub fails, or what of it is changed
    "gated, no access": (
        Failure(403, "GatedRepo", on="resolve"),
        f"{NAME} is gated, and your token's account has not accepted its licence (403). Accept it at",
    ),
    "gated, token refused": (
        Failure(401, "GatedRepo", on="resolve"),
        f"{NAME} is gated, and the token was not accepted (401). Accept its licence at huggingface.co/{NAME}, then",
    ),
    "gated, at the listing": (Failure(403, "GatedRepo"), "Accept it at huggingface.co/"),
    "not found": (Failure(404, "RepoNotFound"), f"{NAME} was not found on the hub, or it is private (404). Check the"),
    "not found, unknown": (Failure(401, "RepoNotFound"), "was not found on the hub, or it is private (401). Check the"),
    "not found, a mirror": (
        Failure(404),
        "was not found on the hub, or it is private (404). Check the name, or log in",
    ),
    "bad token": (
        Failure(401),
        f"{NAME}: the hub rejects your token (401): is it mistyped or expired? To renew it, log in",
    ),
    "forbidden": (Failure(403), f"{NAME}: your token has no read access (403)"),
    "many requests": (Failure(429), f"{NAME}: the hub limits the rate of requests (429). Wait"),
    "trouble": (Failure(500), f"{NAME}: the hub has an internal error (status 500). Try again later, or use a local"),
    "trouble with files": (Failure(500, on="weights"), "internal error (status 500)"),
    "no file": (Failure(404, "EntryNotFound", on="weights"), f"{NAME} has no {WEIGHTS} (404)"),
    "hangs up": (
        Failure("close"),
        f"{NAME} is not in the local cache, and the hub cannot be reached (RemoteProtocolErr",
    ),
    "hangs up on files": (Failure("close", on="weights"), f"the connection was interrupted while fetching {WEIGHTS} ("),
    "slow": (
        {"delay": 0.7},
        f"{NAME} is not in the local cache, and the hub did not respond in time. Check the network and HTTPS_PROXY",
    ),
    "another kind": (
        {"files": {f"{part}/config.json": b"{}" for part in ("unet", "vae", "scheduler")}},
        f"{NAME} has no transformer/ folder (diffusers' layout), only scheduler, unet, vae. Name a "
        "pipeline of model.family, or set model.family to the pipeline's",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_in_plain_words(case: str, hub: FakeHub, run, monkeypatch) -> None:
    how, expected = FAILURES[case]
    if case == "slow":
        impatient(monkeypatch, 0.2)
    vars(hub).update(how if isinstance(how, dict) else {"failure": how})
    code, said = run()
    assert code == 2
    assert expected in error(said)


def test_a_wrong_revision(hub: FakeHub, run) -> None:
    code, said = run(revision="v9")
    expected = f"{NAME} has no revision 'v9' (404). Check the revision: a branch, tag or commit"
    assert code == 2 and error(said) == expected
    assert run(revision=COMMIT)[0] == 0


def test_no_network(hub: FakeHub, run, monkeypatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    code, said = run()
    message = "the hub cannot be reached (ConnectError). Check the network and HTTPS_PROXY, try again, or use"
    assert code == 2 and message in error(said)


def test_a_proxy_that_refuses(hub: FakeHub, run, monkeypatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", hub.url)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    close_session()  # it keeps the proxies it has read
    try:
        code, said = run()
    finally:
        close_session()
    assert code == 2
    assert error(said) == f"{NAME}: the proxy refuses the connection to the hub. Check HTTPS_PROXY and NO_PROXY"


def test_offline_uses_the_cache_or_says_what_is_missing(hub: FakeHub, run, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, said = run()
    assert code == 2
    assert error(said).startswith(
        f"{NAME} is not in the local cache, and HF_HUB_OFFLINE forbids access to the hub. Unset"
    )

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert run(t5=False)[0] == 0
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, said = run("train", t5=False)
    assert code == 0 and not hub.requests
    assert "the hub is offline or unreachable; transformer comes from the cache" in said
    assert run()[0] == 2  # T5 was not fetched


def test_the_disk_is_looked_at_first(hub: FakeHub, run, monkeypatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    monkeypatch.setattr(ours, "GIB", 1000)
    code, said = run()
    assert code == 6
    size = sum(len(data) for path, data in hub.files.items() if "/" in path and path not in DUPLICATES)
    assert (
        f"{NAME}: the download needs {size / 1000:.2f} GiB, and 10.00 GiB are free at {tmp_path / 'hf'}. Free "
        in error(said)
    )
    t5 = sum(len(d) for path, d in hub.files.items() if path.startswith("text_encoder_3/") and path not in DUPLICATES)
    assert f"or set model.t5=false (saves {t5 / 1000:.1f} GiB)" in said
    assert not hub.fetched()  # nothing was begun


def test_shards_but_no_other_precision() -> None:
    def listed(*paths: str) -> list[HubFile]:
        return [HubFile(Repository(NAME), COMMIT, path, 1, None) for path in paths]

    paths = ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    paths += ["model-00002-of-00002.safetensors"]
    half = ["model.safetensors.index.fp16.json", "model.fp16-00001-of-00002.safetensors", "model.fp16.safetensors"]
    files = listed(*(f"text_encoder_3/{path}" for path in [*paths, *half, "tf_model.h5", "onnx/config.json"]))
    part = HubPart(Repository(NAME), "text_encoder_3", weights=True)
    assert {file.path for file in needed_files(part, files)} == {f"text_encoder_3/{path}" for path in paths}
    assert (
        needed_files(part, files)[-1].path == "text_encoder_3/config.json"
    )  # its presence tells that the part is whole
    with pytest.raises(UserError, match="text_encoder_3/ has no diffusion_pytorch_model.safetensors, only config.json"):
        needed_files(part, listed("text_encoder_3/config.json", "text_encoder_3/model.fp16.bin"))
    only = ["text_encoder_3/model.fp16.safetensors", "text_encoder_3/config.json"]  # as of SD 1.5's inpainting model
    assert [file.path for file in needed_files(part, listed(*reversed(only), "text_encoder_3/model.bin"))] == only


def test_a_repository_of_an_autoencoder_alone(hub: FakeHub, tiny_pipeline) -> None:
    hub.files = {file.name: file.read_bytes() for file in (tiny_pipeline / "vae").iterdir()}
    part = HubPart(Repository(NAME), "vae", weights=True)
    fetch([part])
    assert {file.name for file in part_folder(part).iterdir()} == {"config.json", Path(WEIGHTS).name}


@pytest.mark.slow
def test_environment_and_exit_code_in_a_process_of_its_own(hub: FakeHub, tiny_config, write_config, tmp_path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_TOKEN are huggingface_hub's own; the message and exit code are ours."""
    hub.failure = Failure(401, "GatedRepo", on="weights")
    config = write_config({**tiny_config, "model": {"pretrained": NAME}})
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    done = subprocess.run(
        [sys.executable, "-m", "simpletune", "train", str(config), "--prepare"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {NAME} is gated, and the token was not accepted (401).")
    assert TOKEN not in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert str(tmp_path / "home" / "hub") in done.stdout
    assert json.loads(config.read_text())["model"]["pretrained"] == NAME


def test_a_lora_comes_from_a_repository_and_then_from_the_cache(hub: FakeHub) -> None:
    from simpletune.runs.weights import lora_weights

    with pytest.raises(UserError, match="owner/tiny-sd3 has no pytorch_lora_weights.safetensors. Check the name"):
        lora_weights(NAME, 1.0)
    hub.files["pytorch_lora_weights.safetensors"] = b"a lora"
    forget()
    hub.failure = Failure(500)
    with pytest.raises(UserError, match="internal error"):
        lora_weights(NAME, 1.0)
    forget()
    hub.failure = None
    weights = lora_weights(NAME, 0.5)
    assert weights.lora is not None and weights.lora.read_bytes() == b"a lora"
    assert weights.label == "LoRA owner/tiny-sd3 x 0.5"
    forget()
    hub.failure = Failure(500)
    assert lora_weights(NAME, 1.0).lora.read_bytes() == b"a lora"


def test_a_data_set_comes_from_the_hub(hub: FakeHub, tiny_images: Path, tmp_path: Path) -> None:
    from simpletune.data.sources.table import Table

    table, source = tmp_path / "rows.parquet", Table(path=NAME, split="train")
    row = {"image": next(tiny_images.glob("*.png")).read_bytes(), "text": "a disc"}
    pq.write_table(pa.Table.from_pylist([row]), table)
    hub.files = {"README.md": b"text", "data/test-0.parquet": b"another split"}
    with pytest.raises(UserError, match=r"has no file that matches \*train\*.parquet or .*, only README.md, data/test"):
        source.scan(Path(NAME))
    hub.files["data/train-0.parquet"] = table.read_bytes()
    forget()
    assert [image.caption for image in source.scan(Path(NAME)).images] == ["a disc"]
    assert hub.fetched() == {"data/train-0.parquet"}
    assert all("/datasets/" in path for _, path, _, _ in hub.requests)
    forget()
    hub.failure = Failure(403, "GatedRepo")  # and it serves on, from the cache
    assert [image.read() for image in source.scan(Path(NAME)).images] == [row["image"]]
    shutil.rmtree(constants.HF_HUB_CACHE)
    forget()
    with pytest.raises(UserError, match="is gated, .* Accept it at huggingface.co/datasets/owner/tiny-sd3"):
        data_set_folder(NAME, ["*"])


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (OSError(errno.ENOSPC, "full"), "is full; complete files are kept. Free space, or set HF_HOME", 6),
        (RuntimeError("IO Error: No space left on device (os error 28)"), "is full; complete files", 6),
        (OSError(errno.EROFS, "Read-only file system"), r"cannot be written \(Read-only file system\). Set HF_H", 2),
        (OSError("odd"), r"cannot be fetched \(OSError\). Try again, or use a local folder", 2),
        (RuntimeError("Task error"), r"\(RuntimeError\). Try again, set HF_HUB_DISABLE_XET=1, or use", 2),
        (ConnectionError("hf_xet's"), r"and the hub cannot be reached \(ConnectionError\). Check the network", 2),
        (TimeoutError("hf_xet's"), "and the hub did not respond in time. Check the network", 2),
    ],
    ids=["full", "full, hf_xet", "read-only", "odd", "hf_xet", "connection", "timeout"],
)
def test_what_the_disk_and_hf_xet_do_in_plain_words(error: Exception, message: str, code: int) -> None:
    with pytest.raises(UserError, match=message) as told, explain_hub_errors(Repository(NAME)):
        raise error
    assert told.value.code == code


def test_what_is_a_name_on_the_hub() -> None:
    assert is_hub_name("stabilityai/stable-diffusion-3-medium-diffusers")
    assert not is_hub_name("models/sd3_medium.safetensors") and not is_hub_name("a/b/c")
    assert not any(map(is_hub_name, ("./model.ckpt", "models/base.ckpt", "./pictures", "../model")))
    with pytest.raises(UserError, match="a--b is not a valid name on the hub"), explain_hub_errors(Repository("a--b")):
        validate_repo_id("a--b")


def test_content_that_is_in_the_cache_takes_no_room(hub: FakeHub) -> None:
    (file,) = (each for each in ours.listing(Repository(NAME)) if each.path == WEIGHTS)
    later = dataclasses.replace(file, commit="f" * 40)  # another commit with the same weights
    assert file.bytes_to_fetch == later.bytes_to_fetch == file.size
    ours.fetch_files([file])
    assert later.bytes_to_fetch == 0 and not later.place.exists()


def test_progress_of_hf_xet_counts_network_and_disk_once() -> None:
    counted: list[None] = []
    options = {"total": 3 * ours.MIB, "log_level": logging.WARNING, "reconstruction_desc": WEIGHTS}
    with (
        ours._watch(lambda: counted.append(None)) as (bar, _),
        XetDownloadProgressReporter(tqdm_class=bar, **options) as reporter,
    ):
        for done in (0.5, 1.5, 3.0):
            progress = {"total_bytes_completed": int(done * ours.MIB), "total_bytes": 3 * ours.MIB}
            progress["total_transfer_bytes_completed"] = int(done * ours.MIB) // 2  # it is compressed
            rates = {"total_bytes_completion_rate": 1.0, "total_transfer_bytes_completion_rate": 1.0}
            reporter.update_progress(SimpleNamespace(**progress, **rates))
    assert len(counted) == 3


def test_an_encoder_comes_from_the_hub_without_pickles(hub: FakeHub, tmp_path: Path) -> None:
    files = {file.name: file.read_bytes() for file in write_clip(tmp_path / "clip").iterdir()}
    hub.files = files | {"pytorch_model.bin": b"pickle", "tf_model.h5": b"other", "more/config.json": b"{}"}
    files["chat_template.jinja"] = hub.files["chat_template.jinja"] = b"{{ messages }}"  # what captioners need
    about = find_encoder(NAME)
    assert (about.kind.name, about.title) == ("clip", "tiny-sd3")
    assert hub.fetched() == set(files)
    hub.failure = Failure("close")
    forget()
    assert find_encoder(NAME) == about, "without a network it comes from the cache"
    hub.failure = None
    forget()
    del hub.files["model.safetensors"]
    with pytest.raises(UserError, match="has no model.safetensors with a config.json, only .*pytorch_model.bin"):
        find_encoder(NAME)


def test_a_tagger_comes_from_the_hub_with_its_two_files(hub: FakeHub, tmp_path: Path, capsys) -> None:
    files = {file.name: file.read_bytes() for file in write_tagger(tmp_path / "tagger").iterdir()}
    hub.files = files | {"config.json": b"{}", "model.safetensors": b"the same for timm", "README.md": b""}
    about = find_tagger(NAME)
    assert about is not None and len(about.tags) == len(TAGS) and hub.fetched() == set(files)
    assert f"in 2 files from {NAME} to " in capsys.readouterr().out
    hub.failure = Failure("close")
    forget()
    assert find_tagger(NAME) == about, "without a network it comes from the cache"
    assert find_tagger("owner/other") is None, "what cannot be asked for is left to the captioners, which say why"
    hub.failure = None
    forget()
    del hub.files["selected_tags.csv"]
    assert find_tagger(NAME) is None


@pytest.fixture
def in_xet(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> HubFile:
    """The weights, in Xet: the library downloads them by hf_xet, which counts as stalled after 0.5 s."""
    hub.xet = "stalls"
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(ours, "STALLED", 0.5)
    monkeypatch.setattr(ours, "LOOK", 0.02)
    (file,) = (each for each in ours.listing(Repository(NAME)) if each.path == WEIGHTS)
    return file


def xet_requests(hub: FakeHub) -> int:
    return sum(path.startswith(fake_hub.XET) for _, path, _, _ in hub.requests)


def test_a_download_that_does_not_move_is_ended_and_tried_without_xet(in_xet: HubFile, hub: FakeHub, capsys) -> None:
    """And the later files of this start come without it, too."""
    began = time.monotonic()
    ours.fetch_files([in_xet])
    said = capsys.readouterr().out
    assert f"fetch {WEIGHTS}: nothing has arrived for 0.5 s; tries again without xet (HF_HUB_DISABLE_XET=1" in said
    assert in_xet.place.read_bytes() == hub.files[WEIGHTS] and 0.5 < time.monotonic() - began < 30
    assert not list(in_xet.repository.cache.rglob("*.incomplete")), "the aborted download left a part"
    asked = xet_requests(hub)
    other = next(each for each in ours.listing(Repository(NAME)) if each.path == "vae/" + Path(WEIGHTS).name)
    ours.fetch_files([other])
    assert 0 < asked == xet_requests(hub) and "without xet" not in capsys.readouterr().out


def test_a_second_stall_ends_in_words(in_xet: HubFile, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.failure = Failure("stall", on="weights", method="GET")
    impatient(monkeypatch, 0.2)
    with pytest.raises(UserError, match=f"the download timed out while fetching {WEIGHTS}.*Start again.*sets the seco"):
        ours.fetch_files([in_xet])
    assert xet_requests(hub) > 0


@pytest.mark.parametrize(
    ("xet", "said"),
    [("refuses", "failed (RuntimeError)"), ("no token", "failed (ReadTimeout)")],
)
def test_hf_xet_that_fails_is_done_without(
    xet: str, said: str, in_xet: HubFile, hub: FakeHub, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own request for its token would wait for ever."""
    hub.xet = xet
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    ours.fetch_files([in_xet])
    assert f"fetch {WEIGHTS}: {said}; tries again without xet" in capsys.readouterr().out
    assert in_xet.place.read_bytes() == hub.files[WEIGHTS]


def test_a_download_that_moves_slowly_is_left_alone(
    in_xet: HubFile, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*, incomplete_path: Path, tqdm_class: type, **_: object) -> None:
        bar = tqdm_class(total=in_xet.size)
        for _ in range(12):
            time.sleep(0.1)
            bar.update(1)
        incomplete_path.write_bytes(hub.files[WEIGHTS])

    aborted: list[bool] = []
    monkeypatch.setattr(file_download, "xet_get", slow)
    monkeypatch.setattr(_xet, "abort_xet_session", lambda: aborted.append(True))
    ours.fetch_files([in_xet])
    assert in_xet.place.read_bytes() == hub.files[WEIGHTS] and not aborted


@pytest.mark.parametrize("brings", [True, False])
def test_a_download_waits_for_another_process_that_fetches_the_same_file(
    brings: bool, in_xet: HubFile, hub: FakeHub, capsys
) -> None:
    """And is watched where that one has given up."""
    blob = in_xet.repository.cache / "blobs" / str(in_xet.sha256)
    lock = in_xet.repository.cache.parent / ".locks" / in_xet.repository.cache.name / f"{in_xet.sha256}.lock"

    def fetch_it() -> None:
        time.sleep(1.0)  # twice as long as a download may stand still
        blob.parent.mkdir(parents=True, exist_ok=True)
        if brings:
            blob.write_bytes(hub.files[WEIGHTS])
        held.release()

    lock.parent.mkdir(parents=True)
    held = FileLock(lock, thread_local=False)
    held.acquire()
    other = threading.Thread(target=fetch_it)
    other.start()
    ours.fetch_files([in_xet])
    other.join()
    assert in_xet.place.read_bytes() == hub.files[WEIGHTS]
    assert ("without xet" not in capsys.readouterr().out) == (xet_requests(hub) == 0) == (hub.sent == {}) == brings


def test_ctrl_c_ends_a_download_that_does_not_move(
    in_xet: HubFile, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "STALLED", 60.0)
    threading.Thread(target=lambda: (until(lambda: xet_requests(hub)), os.kill(os.getpid(), signal.SIGTERM))).start()
    began = time.monotonic()
    with pytest.raises(Stopped), handle_signals():
        ours.fetch_files([in_xet])
    assert time.monotonic() - began < 30
    assert_no_weights_in_cache()


def test_a_file_of_a_repository_is_told_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert hub_file("me/mine/v2/style.safetensors") == ("me/mine", "v2/style.safetensors")
    others = ("me/mine", "style.safetensors", "runs/mine/style.safetensors", "./me/mine/a.safetensors", "a/b/c.bin")
    assert not any(map(hub_file, (*others, "/a/b/c.safetensors")))
