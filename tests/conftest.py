"""Shared fixtures: a tiny model, a tiny data set, runs trained once, and the folder of real inputs."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dry
import failpoints
import pytest
from hypothesis import settings
from launching import Launcher

from simpletune.system.devices import prepare_environment

if TYPE_CHECKING:
    from tiny_runs import TrainOnce

    from simpletune.config.schema import TrainConfig
    from simpletune.estimate.simulate.reports import StepReport

os.environ["OMP_NUM_THREADS"] = "1"  # a run sets what it says, as processes do that tests start
os.environ.pop("SIMPLETUNE_NOTIFY_URL", None)  # a developer's own phone
prepare_environment()
settings.register_profile("repeatable", derandomize=True)  # a change that breaks nothing must not find an old defect
settings.load_profile("default" if os.environ.get("SIMPLETUNE_FUZZ") else "repeatable")
ROOT = Path(__file__).resolve().parents[1]
TRAININGS: list[str] = []  # names of the runs that this process trained; those in child processes are not counted
LAUNCHER = pytest.StashKey[Launcher]()
COUNTED = pytest.StashKey[int]()  # trainings of the workers that have ended


def pytest_configure(config: pytest.Config) -> None:
    """Count trainings, except in a process that only distributes tests and need not import torch.

    Collecting garbage while torch is imported and asserts are rewritten would take half of a worker's start.
    """
    gc.disable()
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        count_trainings()
        make_once()


def count_trainings() -> None:
    """Wrap ``training.train.train`` to count its calls, before a test module imports it."""
    from simpletune.training import train as verb

    honest = verb.train

    @functools.wraps(honest)
    def train(config: TrainConfig, *args: Any, **named: Any) -> Path:
        TRAININGS.append(config.name)
        return honest(config, *args, **named)

    verb.train = train


def make_once() -> None:
    """Make what is the same for each run and each command once: the command line's parser, the pages' templates and the
    versions of libraries. Each takes as long as a step of a tiny run."""
    from simpletune.apps.cli import main
    from simpletune.runs.report import page
    from simpletune.system import environment

    main.parser = functools.cache(main.parser)
    page.page_template = functools.cache(page.page_template)
    environment.version = functools.cache(environment.version)


def pytest_collection_finish() -> None:
    """What was imported stays until the end."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need the stub of CUDA if it is not loaded."""
    if dry.is_loaded():
        return
    for item in items:
        if item.get_closest_marker("dry"):
            item.add_marker(pytest.mark.skip(reason=dry.WHY_SKIPPED))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Pass a worker's count to the process that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["trainings"] = len(TRAININGS)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Fork the launcher that tests ask for while there are no threads and nothing is patched."""
    needed = any("launcher" in getattr(item, "fixturenames", ()) for item in session.items)
    if not needed or session.config.option.collectonly:
        return (yield)
    with Launcher() as session.config.stash[LAUNCHER]:
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add a worker's count; a crashed one has passed on none."""
    counted = node.config.stash.get(COUNTED, 0)
    node.config.stash[COUNTED] = counted + getattr(node, "workeroutput", {}).get("trainings", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the number of trainings, which decides how long the suite takes."""
    number = len(TRAININGS) + config.stash.get(COUNTED, 0)
    terminalreporter.write_line(f"{number} trainings in this run, without those in child processes")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread: tiny products are fastest on it, and sums have one order."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread_remains() -> Iterator[None]:
    """With another number of threads some processors round otherwise, so what a later test encodes would differ in its
    last bits from what an earlier one has left in the shared cache."""
    import torch

    yield
    if (threads := torch.get_num_threads()) != 1:
        torch.set_num_threads(1)
        pytest.fail(f"the test has left {threads} threads")


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """``fsync`` does nothing: a run calls it 19 times, and only a machine that loses power would show a difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which also refuses what is not open
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_drawn_for_tensors_without_memory() -> Iterator[None]:
    """Libraries initialise every layer that they build, even on the meta device, where that changes nothing: a tenth of
    what loading a model takes."""
    import torch

    def on_memory(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(draw)
        def drawn(tensor: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
            return tensor if tensor.device.type == "meta" else draw(tensor, *more, **named)

        return drawn

    names = ("uniform_", "normal_", "trunc_normal_", "zeros_", "ones_", "kaiming_uniform_", "xavier_uniform_")
    known = sys.modules.get("transformers.initialization")  # which keeps them from its import on
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(torch.nn.init, name, own := on_memory(getattr(torch.nn.init, name)))
            if known is not None:
                patch.setitem(known.TORCH_INIT_FUNCTIONS, name, own)
        yield


@pytest.fixture(autouse=True)
def nothing_armed() -> Iterator[None]:
    """No moment at which a test fails or kills a run outlives the test."""
    yield
    failpoints.disarm()


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_not_collected() -> None:
    """Exclude imported objects from garbage collection, which otherwise takes half of a tiny run: each run collects
    several times, a quarter of a second each. Repeated per module, because some tests unfreeze them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of one layer and one head, in diffusers' layout, fp32."""
    from benchmarks.tiny_models import tiny_sd3

    folder = tmp_path_factory.mktemp("tiny") / "pipeline"
    tiny_sd3.build(folder, tiny_sd3.MINIMAL, seed=1, dtype="fp32")
    return folder


@pytest.fixture(scope="session")
def tiny_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six captioned pictures of 32 px."""
    from simpletune.data.demo import demo_scenes

    folder = tmp_path_factory.mktemp("tiny") / "pictures"
    scenes = demo_scenes.sample_scenes(6, seed=3, style="flat")
    demo_scenes.write_folder(folder, scenes, seed=3, pixels=32)
    return folder


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all runs of the session, so that prompts and pictures are encoded once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny_config(tiny_pipeline: Path, tiny_images: Path, shared_cache: Path, tmp_path: Path) -> dict:
    """The JSON of a run that takes a fraction of a second, with outputs in the test's own folder."""
    return {
        "name": "tiny",
        "device": "cpu",
        "model": {"pretrained": str(tiny_pipeline), "t5_length": 8},
        "data": {"path": str(tiny_images), "resolution": 32},
        "adapter": {"method": "lora", "rank": 2},
        "precision": {"weights": "fp32"},
        "optimizer": {"lr": 0.01},
        "train": {"steps": 4},
        "memory": {"checkpointing": "none"},
        "checkpoint": {"every": None},
        "validation": {"prompts": [], "loss_samples": 0},
        "profile": {"max_traces": 0},
        "output": {
            "runs": str(tmp_path / "runs"),
            "profiles": str(tmp_path / "profiles"),
            "cache": str(shared_cache),
            "report": False,
        },
    }


@pytest.fixture(scope="session")
def train_once(tmp_path_factory: pytest.TempPathFactory) -> TrainOnce:
    """Train a configuration at its first use in the session, wherever its outputs lie. Only read what the run left."""
    from simpletune.config.load import validate
    from simpletune.training import train as verb

    folder, known = tmp_path_factory.mktemp("once"), {}

    def run(data: dict) -> Path:
        value = copy.deepcopy(data)
        output = {name: place for name, place in value["output"].items() if name not in ("runs", "profiles")}
        value["output"] = output
        key = json.dumps(value, sort_keys=True)
        if key not in known:
            places = {name: str(folder / str(len(known)) / name) for name in ("runs", "profiles")}
            value["output"] = output | places
            known[key] = verb.train(validate(value, "once"))
        return known[key]

    return run


@pytest.fixture(scope="session")
def copy_run(train_once: TrainOnce) -> TrainOnce:
    """A run as if trained under its own name and folder: a copy of the one that is trained once, to be changed."""

    def run(data: dict) -> Path:
        folder = Path(data["output"]["runs"]) / data["name"]
        shutil.copytree(train_once(data), folder)
        return folder

    return run


@pytest.fixture(scope="session")
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """A launcher of processes that have torch and its libraries imported, which saves 4 s each."""
    started = request.config.stash[LAUNCHER]
    started.folder = tmp_path_factory.mktemp("jobs")
    return started


@pytest.fixture(scope="session")
def simulate_once() -> Callable[..., StepReport]:
    """``simulate`` with a memory for the session, because searches ask for the same steps again and again."""
    from simpletune.estimate.simulate.simulate import simulate

    known: dict[str, StepReport] = {}

    def remembered(config: TrainConfig, *more: object) -> StepReport:
        read = config.model_dump_json(exclude={"name": True, "output": True, "data": {"path"}})
        key = f"{read} {more}"
        if key not in known:
            known[key] = simulate(config, *more)  # type: ignore[arg-type]
        return known[key]

    return remembered


@pytest.fixture
def write_config(tmp_path: Path):
    """A function that writes a JSON value as a configuration file and returns its path."""

    def write(value: object, name: str = "config.json") -> Path:
        file = tmp_path / name
        file.write_text(value if isinstance(value, str) else json.dumps(value))
        return file

    return write


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real inputs, for tests marked ``data``."""
    folder = Path(os.environ.get("SIMPLETUNE_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real inputs at {folder}: set SIMPLETUNE_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def three_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pipeline with three blocks."""
    from dataclasses import replace

    from benchmarks.tiny_models import tiny_sd3

    folder = tmp_path_factory.mktemp("three") / "pipeline"
    sizes = replace(tiny_sd3.MINIMAL, layers=3, heads=3)
    tiny_sd3.build(folder, sizes, seed=1, dtype="fp32")
    return folder


@pytest.fixture(scope="session")
def small_unet(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """The option ``model`` of a U-Net of two levels, by version."""
    from blocks import write_unet

    return functools.cache(lambda version: write_unet(tmp_path_factory.mktemp(version), version=version))


@pytest.fixture(scope="session")
def unet_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny pipeline by version, only to be read: ``sd15``, ``sd2``, ``sdxl``, or ``v``, an SDXL that predicts v; with
    ``inpainting-`` before it, of nine channels. ``whole`` ones have all levels of the real U-Nets, others two."""
    from nine_channels import to_nine_channels
    from tiny_unets import build_pipeline

    @functools.cache
    def build(version: str, whole: bool = False) -> Path:
        folder = tmp_path_factory.mktemp(version) / version
        if version.startswith("inpainting-"):
            source = build(version.removeprefix("inpainting-"), whole)
            return to_nine_channels(Path(shutil.copytree(source, folder)))
        return build_pipeline(folder, version, whole)

    return build


@pytest.fixture(scope="session")
def served_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that tests of ``simpletune serve`` serve; another LoRA, ``second``, lies beside it. Only read it."""
    from serving import make_run

    return make_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """The pixels that ``simpletune generate`` draws of a run with these words, drawn once in the session."""
    from serving import generate

    folder = tmp_path_factory.mktemp("generated")
    return functools.cache(lambda run, *words: generate(folder / "drawn.png", run, *words))
