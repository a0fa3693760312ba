"""What is said of adapters, memory levers and checkpoints before a run, and of arguments that the parser refuses."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from simpletune.adapters.methods.adapter import NoAdapter
from simpletune.adapters.methods.full import Full
from simpletune.adapters.methods.hypernetwork import Hypernetwork
from simpletune.adapters.methods.loha import Loha
from simpletune.adapters.methods.oft import Oft
from simpletune.adapters.methods.partial import Partial
from simpletune.apps.cli.arguments import strength, tile
from simpletune.apps.cli.main import main
from simpletune.config.checkpoint import Checkpoint
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.models.sd15.sd15_config import HUB_NAMES, SD15_NAME
from simpletune.models.sd15.sd15_option import SD15
from simpletune.runs.folder import SCORES
from simpletune.runs.report.evaluations import fidelity_sections
from simpletune.runs.report.single_run import image_section

NAMES = [f"transformer_blocks.{block}.attn.{part}" for block in range(2) for part in ("to_q", "to_k", "to_v")]
SHAPES = {f"{name}.weight": (64, 64) for name in NAMES} | {f"{name}.bias": (64,) for name in NAMES}


def test_an_adapter_says_what_it_trains() -> None:
    keys = {"a.attn2.to_k.weight": (320, 768), "a.attn1.to_k.weight": (320, 320), "b.attn1.to_k.weight": (640, 640)}
    hypernetwork = Hypernetwork(layer_structure=[1, 2, 1], activation="relu", widths=[640, 320])
    for adapter, shapes, words in (
        (Loha(rank=4), SHAPES, "LoHa of rank 4.* 6 linear layers"),
        (Oft(block_size=16), SHAPES, "OFT in blocks of 16.* 6 linear layers"),
        (Partial(layers=["*.to_q.*"]), SHAPES, r"4 of the model's 12 tensors.*\*\.to_q\.\*"),
        (NoAdapter(), SHAPES, "nothing of the denoiser"),
        (hypernetwork, keys, "structure 1, 2, 1, relu.*width 320, 640"),
    ):
        assert re.search(words, adapter.describe(shapes)), adapter.describe(shapes)


def test_a_pattern_that_matches_nothing_is_named() -> None:
    (problem,) = Partial(layers=["*.to_q.*", "*.to_x.*"]).problems(SHAPES)
    assert problem.path == "adapter.layers" and "'*.to_x.*'" in problem.message


def test_what_changes_base_weights_cannot_be_disabled() -> None:
    for adapter in (Full(), Partial(layers=["*"])):
        with pytest.raises(TypeError, match="load the base again"):
            adapter.disabled(None)  # type: ignore[arg-type]


def test_checkpoints_say_which_are_kept() -> None:
    for option, words, most in (
        (Checkpoint(keep_last="all"), "keeps all", 4),
        (Checkpoint(keep_last=1), "the last 1", 2),
        (Checkpoint(keep_last=2, every=10, keep_every=20), "the last 2 and one every 20 steps", 3),
    ):
        assert words in option.describe()
        assert option.most_on_disk([10, 20, 30, 40]) == most and option.most_on_disk([]) == 0


def test_memory_levers_are_explained(tiny_config: dict) -> None:
    for levers, words in (
        ({"keep_attention": "all"}, "keeps attention's output"),
        ({"keep_attention": 1}, "keeps attention's output of 1 of them"),
        ({"feed_forward": "alone"}, "recomputes feed-forward networks alone"),
        ({"feed_forward": 256}, "in tiles of 256 tokens"),
    ):
        assert words in explain(validate({**tiny_config, "memory": {"checkpointing": "all", **levers}}, "x"))


def test_a_side_of_tiles_is_read_and_a_value_that_is_none_is_refused() -> None:
    assert tile("512") == 512
    for kind, texts in ((tile, ("a", "100", "130")), (strength, ("nan", "x", "1e999", "1e7"))):
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError):
                kind(text)


def test_estimates_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ("--compare demo demo --device L4,T4", "--compare: takes one card"),
        ("demo --processes 2 --device L4,T4", "predicted for one process only"),
    ):
        assert main(["estimate", *words.split()]) == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main("estimate demo --processes 0".split())
    assert "--processes: 0 is not a whole number of at least 1" in capsys.readouterr().err


def test_licences_of_the_models_on_the_hub() -> None:
    option = SD15(pretrained=SD15_NAME)
    found = {name: option.words.licence(name) for name in [*HUB_NAMES, "someone/else"]}
    assert found.pop("someone/else") is None and found[SD15_NAME] == {"license": "creativeml-openrail-m"}
    expected = dict.fromkeys(("sd15", "sd15_inpainting"), "creativeml-openrail-m")
    assert all(found[name] == {"license": expected.get(kind, "openrail++")} for name, kind in HUB_NAMES.items())


def test_a_report_says_that_scores_cannot_be_read_and_that_only_the_base_was_drawn(tmp_path: Path) -> None:
    (tmp_path / SCORES).write_text("{")
    (section,) = fidelity_sections([SimpleNamespace(folder=tmp_path)])  # type: ignore[list-item]
    assert SCORES in section.notes[0] and "damaged" in section.notes[0]
    section, shown = image_section(SimpleNamespace(), [SimpleNamespace(step=0)])  # type: ignore[arg-type,list-item]
    assert not shown and section.block == "" and "Only the base" in section.notes[0]
