"""``tensorboard --logdir profiles`` as a user starts it, asked over HTTP what its pages ask."""

from __future__ import annotations

import copy
import gzip
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import pytest

from simpletune.config.load import validate
from simpletune.engine.profiling.traces import write_trace
from simpletune.training.train import train

pytestmark = pytest.mark.slow  # test_run.py reads the event files, test_traces.py the traces
SYNTHETIC = Path(__file__).parents[2] / "support" / "assets" / "synthetic_cuda_trace.json"
Ask = Callable[..., Any]
COMMAND = [sys.executable, "-m", "tensorboard.main", "--port", "0", "--host", "127.0.0.1", "--load_fast", "false"]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory, tiny_pipeline: Path, tiny_images: Path) -> Path:
    """A run of two epochs, and beside it one that holds the synthetic trace, renamed and as it was."""
    folder = tmp_path_factory.mktemp("board")
    config = {
        "name": "tiny", "device": "cpu", "model": {"pretrained": str(tiny_pipeline), "t5_length": 8},
        "data": {"path": str(tiny_images), "resolution": 32}, "train": {"steps": 12},
        "checkpoint": {"every": None}, "precision": {"weights": "fp32"},
        "validation": {"prompts": ["a red disc"], "steps": 2, "loss_samples": 2},
        "profile": {"memory": True, "record_shapes": True},
        "output": {name: str(folder / name) for name in ("runs", "profiles", "cache")},
    }  # fmt: skip
    train(validate(copy.deepcopy(config), "test"))
    renamed, plain = (folder / "profiles" / "synthetic" / name for name in ("epoch-000", "plain"))
    renamed.mkdir(parents=True)
    plain.mkdir()
    write_trace(lambda raw: shutil.copyfile(SYNTHETIC, raw), renamed, 10)
    (plain / "training.1.pt.trace.json.gz").write_bytes(gzip.compress(SYNTHETIC.read_bytes()))
    return folder / "profiles"


@pytest.fixture(scope="module")
def ask(logdir: Path) -> Iterator[Ask]:
    """A question to the server, once it has read everything."""
    log = logdir.parent / "log"
    with open(log, "w") as out:
        server = subprocess.Popen([*COMMAND, "--logdir", str(logdir)], stdout=out, stderr=subprocess.STDOUT)
    opener = build_opener(ProxyHandler({}))  # it is on this machine, whatever proxy there is

    def get(path: str, **query: str) -> Any:
        address = log.read_text().split("http://")[1].split()[0].rstrip("/")
        with opener.open(f"http://{address}/data/{path}?{urlencode(query)}", timeout=120) as answer:
            data = answer.read()
            packed = answer.headers.get("Content-Encoding") == "gzip"
        return json.loads(gzip.decompress(data) if packed else data)

    def ready() -> bool:
        try:
            state = get("plugin/pytorch_profiler/runs")
            return not state["loading"] and len(state["runs"]) == 4 and "tiny" in get("plugin/scalars/tags")
        except (IndexError, URLError, json.JSONDecodeError):
            return False

    try:
        deadline = time.monotonic() + 120
        while not ready():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield get
    finally:
        server.terminate()
        server.wait(120)


def profile(ask: Ask, view: str, run: str, **query: str) -> Any:
    (worker,) = ask("plugin/pytorch_profiler/workers", run=run, view="Overview")
    (span,) = ask("plugin/pytorch_profiler/spans", run=run, worker=worker)
    return ask(f"plugin/pytorch_profiler/{view}", run=run, worker=worker, span=span, **query)


def device_time(table: Any) -> float:
    rows = table["data"]
    return sum(row.get("device_total_duration", 0) for row in rows)


def test_scalars_pictures_and_texts(ask: Ask) -> None:
    tags = ask("plugin/scalars/tags")["tiny"]
    assert {"loss", "lr", "grad_norm", "seconds", "training_loss_fixed_noise"} <= set(tags)
    assert len(ask("plugin/scalars/scalars", run="tiny", tag="loss")) == 12
    assert "samples" in ask("plugin/images/tags")["tiny"]
    texts = ask("plugin/text/tags")["tiny"]
    assert {"config/text_summary", "summary/text_summary"} <= set(texts)
    (shown,) = ask("plugin/text/text", run="tiny", tag="config/text_summary")
    assert "pretrained" in shown["text"]


def test_each_epoch_is_a_run_with_all_its_views(ask: Ask) -> None:
    runs = ask("plugin/pytorch_profiler/runs")["runs"]
    epochs = ["tiny/epoch-000", "tiny/epoch-001"]
    assert sorted(runs) == ["synthetic/epoch-000", "synthetic/plain", *epochs]
    for run in epochs:
        assert {"Overview", "Operator", "Trace", "Memory"} <= set(ask("plugin/pytorch_profiler/views", run=run))
        overview = profile(ask, "overview", run)
        assert len(overview["steps"]["rows"]) == 2
        assert {"title": "Device Type", "value": "CPU"} in overview["environments"]
        operators = {row["name"] for row in profile(ask, "operation/table", run, group_by="Operation")["data"]}
        assert {"aten::mm", "aten::addmm"} <= operators
        names = {event.get("name") for event in profile(ask, "trace", run)["traceEvents"]}
        assert {"## data ##", "## noise ##", "## forward ##", "## loss ##", "## backward ##"} <= names
        assert profile(ask, "memory_curve", run)["rows"]["CPU"]


def test_device_time_shows_after_the_renaming(ask: Ask) -> None:
    assert json.loads(SYNTHETIC.read_text())["synthetic"].startswith("Written by hand")
    table = profile(ask, "operation/table", "synthetic/epoch-000", group_by="Operation")
    by_name = {row["name"]: row for row in table["data"]}
    assert by_name["aten::mm"]["device_self_duration"] == 600 and by_name["aten::add"]["device_self_duration"] == 200
    assert device_time(profile(ask, "operation/table", "synthetic/plain", group_by="Operation")) == 0
    assert {"Kernel", "Operator", "Trace"} <= set(ask("plugin/pytorch_profiler/views", run="synthetic/epoch-000"))
    kernels = profile(ask, "kernel/table", "synthetic/epoch-000", group_by="Kernel")["data"]["rows"]
    assert {row[0] for row in kernels} == {"synthetic_gemm", "synthetic_add"}
    devices = profile(ask, "overview", "synthetic/epoch-000")["environments"]
    assert {"title": "Device Type", "value": "GPU"} in devices
