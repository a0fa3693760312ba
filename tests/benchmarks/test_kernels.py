"""The machine code of the int8 kernels for several architectures: the rules, the committed table, and some tiles."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import kernels
from benchmarks.int8_kernels import Row
from benchmarks.kernels import problems, source_hash, source_of
from simpletune.system.options import UserError

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
TABLE = json.loads(kernels.COMMITTED.read_text())["rows"]
SOURCES = {kernel: source_of(f" {kernel} ") for kernel in ("", *kernels.SOURCES)}  # each file is read once
STALE = any(
    found["source"] != SOURCES[next((kernel for kernel in kernels.SOURCES if f" {kernel} " in name), "")]
    for name, found in TABLE.items()
)


SAFE, LARGE = (64, 64, 64, 4, 2), (128, 64, 128, 4, 3)
FEW = [
    Row(89, "product", "forward", LARGE, "even"),
    Row(90, "product", "gradient", SAFE, "even"),
    Row(89, "rows", "bf16", (2048, 4), "columns"),
    Row(89, "rotated", "bf16", (2048, 4, 256), "whole"),
    Row(89, "words", "gradient", (64, 64, 64, 4, 4), "even"),
    Row(89, "gelu", "fp32 back", (1024, 2, 0), "whole"),
]
GOOD = {
    "registers": 128, "stack": 8, "shared": 49152, "tensor_cores": ["mma m16n8k32"], "fused": 0, "fusible": 0,
    "flushed": 0,
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("row", [*kernels.rows_of_table()] if STALE else FEW, ids=lambda row: row.name)
def test_the_kernels_compile_for_cards_that_are_not_here(row: Row) -> None:
    """A few for two cards; all if the kernels have changed since the table was made."""
    found = kernels.measure(row)
    assert problems(row, found, importlib.metadata.version("triton")) == []
    if not STALE:
        kept = [TABLE[name] for name in TABLE if name.endswith(f": {row.name}")]
        assert {key: found[key] for key in GOOD} in [{key: each[key] for key in GOOD} for each in kept]


def test_the_committed_table_is_that_of_the_kernel() -> None:
    assert not STALE, "a kernel of simpletune/engine/quant has changed: run make kernels"
    versions = {name.partition(":")[0] for name in TABLE}
    minors = {version.rpartition(".")[0] for version in versions}
    assert minors == {"Triton 3.6", "Triton 3.7", "Triton 3.8", "Triton 3.9"}  # pyproject.toml's
    for version in versions:
        rows = {f"{version}: {row.name}": row for row in kernels.rows_of_table()}
        for name, row in rows.items():
            assert problems(row, TABLE[name], version.removeprefix("Triton ")) == [], name
        assert kernels.few_tiles(rows, TABLE) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_cores": []}, "no int8 tensor-core"),
        ({"shared": 101377}, "101,377 bytes of shared memory.*101,376"),
        ({"registers": 257}, "257 registers in 8 warps"),
        ({"stack": 24}, "24 bytes spilled"),
        ({"fused": 1}, "fused multiply-add"),
        ({"fusible": 1}, "fused multiply-add"),
        ({"flushed": 1}, "ftz"),
        ({"fails": "PassManager::run failed"}, "does not compile: PassManager"),
    ],
)
def test_a_broken_rule_is_named(change: dict, message: str) -> None:
    row = Row(89, "product", "forward", (128, 128, 128, 8, 3), "even")
    assert problems(row, GOOD, "3.7.1") == []
    (told,) = problems(row, GOOD | change, "3.7.1")
    assert re.search(message, told)


def test_what_only_some_rows_may() -> None:
    old = Row(kernels.TOO_OLD, "product", "forward", SAFE, "even")  # an old card must not compile
    assert problems(old, {"fails": "PassManager::run failed"}, "3.7.1") == []
    assert "lower OLDEST" in problems(old, GOOD, "3.7.1")[0]
    spilled, fused = GOOD | {"stack": 2000}, GOOD | {"fused": 8}
    row = Row(120, "product", "forward", SAFE, "odd")
    assert problems(row, spilled, "3.7.1") == problems(row, fused, "3.6.0") == []
    assert problems(row, fused, "3.7.1") and problems(replace(row, card=90), fused, "3.6.0")
    assert problems(replace(row, sizes="even"), spilled, "3.6.0")
    large = Row(120, "product", "forward", (128, 128, 64, 4, 4), "even")
    assert problems(large, spilled, "3.8.0") == [] and problems(large, spilled, "3.7.1")
    assert problems(replace(row, sizes="even"), spilled, "3.8.0") and problems(FEW[2], spilled, "3.9.0")
    few = GOOD | {"stack": 64}
    assert problems(replace(row, sizes="even"), few, "3.8.0") == [] and problems(FEW[2], few, "3.8.0")


@needs_triton
def test_products_of_which_few_tiles_do_not_spill_are_named() -> None:
    from simpletune.engine.quant.int8_kernel import MOST_SPILLED, TILES

    rows = {str(tile): Row(89, "product", "forward", tile, "even") for tile in TILES}
    stacks = {name: {"stack": MOST_SPILLED + 8 * (number >= 5)} for number, name in enumerate(rows)}
    assert kernels.few_tiles(rows, stacks) == []
    stacks[str(TILES[0])]["stack"] += 8
    assert kernels.few_tiles(rows, stacks) == ["sm_89 product forward even: only 4 of 10 tiles do not spill"]


def test_a_gradient_by_words_must_load_words_and_gelu_may_flush() -> None:
    words = Row(89, "words", "gradient", (128, 64, 64, 4, 4), "even")
    assert problems(words, GOOD | {"byte_loads": 0}, "3.7.1") == []
    assert problems(words, GOOD | {"byte_loads": 128}, "3.7.1") == ["128 loads of single bytes from shared memory"]
    assert problems(words, GOOD | {"byte_loads": 0, "stack": 64}, "3.7.1") == []
    assert problems(words, GOOD | {"byte_loads": 0, "stack": 72}, "3.7.1") == ["72 bytes spilled, more than 64"]
    gelu = Row(89, "gelu", "bf16", (8192, 16, 0), "whole")
    assert problems(gelu, GOOD | {"flushed": 1, "tensor_cores": []}, "3.7.1") == []
    assert problems(gelu, GOOD | {"fusible": 1}, "3.7.1") and problems(gelu, GOOD | {"stack": 24}, "3.7.1")


def test_permuting_bytes_transposes_them() -> None:
    """PTX's prmt by its manual: each digit of the selector, the lowest first, names one of eight bytes."""
    text = (kernels.WORDS).read_text()
    registers = {f"${4 + row}": [(row, column) for column in range(4)] for row in range(4)}
    for target, first, second, selector in re.findall(r"prmt\.b32 (\S+), (\S+), (\S+), 0x(\w{4});", text):
        both = registers[first] + registers[second]
        registers[target] = [both[int(digit)] for digit in reversed(selector)]
    assert [registers[f"${column}"] for column in range(4)] == [
        [(row, column) for row in range(4)] for column in range(4)
    ]


@needs_triton
def test_a_tile_that_does_not_fit_a_card_or_may_fuse_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for tile, message in {
        (16, 16, 16, 4, 2): "does not compile.*K >= 32",
        (128, 128, 64, 1, 8): "bytes of shared memory, more than the card's.*\\n.*bytes spilled",
    }.items():
        row = Row(89, "product", "forward", tile, "even")
        assert re.search(message, "\n".join(problems(row, kernels.measure(row), "3.7.1")))
    monkeypatch.setattr(kernels, "OPTIONS", {"enable_fp_fusion": True})
    for row in (replace(FEW[1], kind="forward"), FEW[2]):  # a gradient has no bias to add
        assert any("fused multiply-add" in problem for problem in problems(row, kernels.measure(row), "3.7.1"))


def test_comments_do_not_make_the_table_stale_but_tiles_do() -> None:
    text, rows = kernels.SOURCE.read_text(), kernels.ROWS.read_text()
    assert source_hash(text=text.replace('"""Compute a tile', '"""Make a tile') + "# more\n") == source_hash()
    assert source_hash(kernels.ROWS, rows + "# more\n") == source_hash(kernels.ROWS)
    of_source = {"(64, 64, 64, 4, 2)": "(64, 64, 64, 4, 3)", "tl.dot(left": "tl.dot(right", '"GROUP": 8': '"GROUP": 4'}
    of_rows = {"half - d, half - b": "half - d, half + b", "(2048, 4)": "(2048, 8)", "LOAD = 4096": "LOAD = 2048"}
    for file, before, changes in ((kernels.SOURCE, text, of_source), (kernels.ROWS, rows, of_rows)):
        for old, new in changes.items():
            assert old in before and source_hash(file, before.replace(old, new)) != source_hash(file)


@needs_triton
def test_the_grid_compiles_what_is_missing_and_fails_for_a_broken_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    found = GOOD | {"byte_loads": 0}
    monkeypatch.setattr(kernels, "rows_of_table", lambda: iter(FEW))
    monkeypatch.setattr(kernels, "measure", lambda row: compiled.append(row.name) or dict(found))
    page = kernels.run(tmp_path, 60).read_text()
    assert "sm_89" in page and "128, 48 KiB, mma, 8 B spilled" in page and len(compiled) == 6
    kernels.run(tmp_path, 60)
    assert len(compiled) == 6
    monkeypatch.setattr(kernels, "source_hash", lambda source: "another")
    found["flushed"] = 1
    with pytest.raises(UserError, match="sm_90 product gradient 64x64x64x4x2 even: .ftz"):
        kernels.run(tmp_path, 60)
    assert len(compiled) == 12
