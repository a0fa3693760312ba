"""What is said of adapters, memory levers and checkpoints before a run, and of arguments that the parser refuses."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from simpletune.adapters.methods.adapter import NoAdapter
from simpletune.adapters.methods.full import Full
from simpletune.adapters.methods.hypernetwork import Hypernetwork
from simpletune.adapters.methods.loha import Loha
from simpletune.adapters.methods.oft import Oft
from simpletune.adapters.methods.partial import Partial
from simpletune.apps.cli.arguments import finite, tile
from simpletune.apps.cli.main import main
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.config.schema import Checkpoint
from simpletune.models.sd15.config import HUB_NAMES, SD15_NAME
from simpletune.models.sd15.option import SD15
from simpletune.runs.folder import SCORES
from simpletune.runs.report.evaluations import fidelity_sections
from simpletune.runs.report.single_run import picture_section

NAMES = [f"transformer_blocks.{block}.attn.{part}" for block in range(2) for part in ("to_q", "to_k", "to_v")]
SHAPES = {f"{name}.weight": (64, 64) for name in NAMES} | {f"{name}.bias": (64,) for name in NAMES}


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (Loha(rank=4), ["LoHa of rank 4", "6 linear layers"]),
        (Oft(block_size=16), ["OFT in blocks of 16", "6 linear layers"]),
        (Partial(layers=["*.to_q.*"]), ["4 of the model's 12 tensors", "*.to_q.*"]),
        (NoAdapter(), ["nothing of the denoiser"]),
    ],
)
def test_an_adapter_says_what_it_trains(adapter: Loha | Oft | Partial | NoAdapter, words: list[str]) -> None:
    said = adapter.describe(SHAPES)
    assert all(word in said for word in words), said


def test_a_hypernetwork_says_its_widths() -> None:
    shapes = {"a.attn2.to_k.weight": (320, 768), "a.attn1.to_k.weight": (320, 320), "b.attn1.to_k.weight": (640, 640)}
    said = Hypernetwork(layer_structure=[1, 2, 1], activation="relu", widths=[640, 320]).describe(shapes)
    assert "structure 1, 2, 1, relu" in said and "width 320, 640" in said


def test_a_pattern_that_matches_nothing_is_named() -> None:
    (problem,) = Partial(layers=["*.to_q.*", "*.to_x.*"]).problems(SHAPES)
    assert problem.path == "adapter.layers" and "'*.to_x.*'" in problem.message


@pytest.mark.parametrize("adapter", [Full(), Partial(layers=["*"])])
def test_what_changes_base_weights_cannot_be_disabled(adapter: Full | Partial) -> None:
    with pytest.raises(TypeError, match="load the base again"):
        adapter.disabled(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "words", "most"),
    [
        (Checkpoint(keep_last="all"), "keeps all", 4),
        (Checkpoint(keep_last=1), "the last 1", 2),
        (Checkpoint(keep_last=2, every=10, keep_every=20), "the last 2 and one every 20 steps", 3),
    ],
)
def test_checkpoints_say_which_are_kept(option: Checkpoint, words: str, most: int) -> None:
    assert words in option.in_words()
    assert option.most_at_once([10, 20, 30, 40]) == most and option.most_at_once([]) == 0


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ({"checkpointing": "all", "keep_attention": "all"}, "keeps attention's output"),
        ({"checkpointing": "all", "keep_attention": 1}, "keeps attention's output of 1 of them"),
        ({"checkpointing": "all", "feed_forward": "alone"}, "recomputes feed-forward networks alone"),
        ({"checkpointing": "all", "feed_forward": 256}, "in tiles of 256 tokens"),
    ],
)
def test_memory_levers_are_explained(memory: dict, words: str, tiny_config: dict) -> None:
    assert words in explain(validate({**tiny_config, "memory": memory}, "x"))


def test_a_side_of_tiles() -> None:
    assert tile("512") == 512


@pytest.mark.parametrize(
    ("kind", "text"), [(tile, "a"), (tile, "100"), (tile, "130"), (finite, "nan"), (finite, "x"), (finite, "1e999")]
)
def test_a_value_that_is_none_is_refused(kind: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        kind(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["estmate", "x"], "unknown verb estmate. Did you mean estimate?"),
        (["export", "x", "--format", "kohia"], "--format: unknown value kohia. Did you mean kohya?"),
        (["evaluate", "runs/x", "--seed", "1.5"], "1.5 is not a whole number"),
        (["evaluate"], "missing"),
    ],
)
def test_wrong_arguments_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "demo", "demo", "--device", "L4,T4"], "--compare: takes one card"),
        (["demo", "--processes", "0"], "--processes: use a number of at least 1"),
        (["demo", "--processes", "2", "--device", "L4,T4"], "predicted for one process only"),
    ],
)
def test_estimates_that_cannot_be_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *words]) == 2 and message in capsys.readouterr().err


def test_licences_of_the_models_on_the_hub() -> None:
    option = SD15(pretrained=SD15_NAME)
    found = {name: option.licence_of(name) for name in [*HUB_NAMES, "someone/else"]}
    assert found.pop("someone/else") is None and found[SD15_NAME] == {"license": "creativeml-openrail-m"}
    expected = {"sd15": "creativeml-openrail-m"}
    assert all(found[name] == {"license": expected.get(kind, "openrail++")} for name, kind in HUB_NAMES.items())


def test_a_report_that_cannot_read_scores_says_so(tmp_path: Path) -> None:
    (tmp_path / SCORES).write_text("{")
    (section,) = fidelity_sections([SimpleNamespace(folder=tmp_path)])  # type: ignore[list-item]
    assert SCORES in section.notes[0] and "damaged" in section.notes[0]


def test_a_report_of_a_run_that_has_drawn_only_its_base() -> None:
    section, shown = picture_section(SimpleNamespace(), [SimpleNamespace(step=0)])  # type: ignore[arg-type,list-item]
    assert not shown and section.block == "" and "Only the base" in section.notes[0]
