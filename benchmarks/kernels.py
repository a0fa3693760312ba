"""``kernels``: compile the int8 kernels for several architectures, and check the machine code.

Needs Triton, but no GPU and no CUDA build of torch: Triton brings NVIDIA's assembler and disassembler. Each row is one
kernel, one tile, one kind of matrix and one architecture. A figure that breaks a rule ends the command with an error,
unless an ``ACCEPTED`` table gives a reason. ``make kernels`` runs it with each supported version of Triton.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.int8_kernels import WORDS_SPILL, Row, gelu_rows, products_arguments, rotated_rows, rows_arguments
from benchmarks.table import Results, describe_machine, listed
from simpletune.system.console import say
from simpletune.system.options import Json, UserError

QUANT = Path(__file__).resolve().parent.parent / "simpletune" / "engine" / "quant"
SOURCE, WORDS, ROWS = (QUANT / f"{name}.py" for name in ("int8_kernel", "int8_gradient_kernel", "int8_rows_kernel"))
SOURCES = {"words": WORDS, "rows": ROWS, "rotated": ROWS, "gelu": ROWS}
"""Source files of kernels that are not in ``SOURCE``."""
COMMITTED = Path(__file__).resolve().parent / "results" / "kernels" / "kernels.json"
DECIDES = {
    SOURCE: ("_product", "_blocks", "TILES", "SAFE_TILE"),
    WORDS: ("_transposed", "_byte", "_times", "_gradient", "TILES"),
    ROWS: (
        "_magnitude",
        "_row_scale",
        "_levels",
        "_rows",
        "_turned",
        "_rotated_rows",
        "_activated",
        "_gelu_rows",
        "LONGEST_LOAD",
        "LONGEST_BLOCK",
        "WARPS",
    ),  # fmt: skip
}  # the compiled code follows from these
TOO_OLD = 75
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a block may use, by architecture (CUDA C++ Programming Guide, compute capabilities)."""
REGISTERS = 64 * 1024  # of a multiprocessor
SPILLED = 16  # bytes of a thread's stack that are not worth a smaller tile
TENSOR_CORES = re.compile(r"\b(wgmma|mma)\.(?:mma_async\.)?sync[\w.:]*?\.(m\d+n\d+k\d+)[\w.:]*?\.s32\.s8\.s8")
SPILLS_ACCEPTED = {"odd": "no layer of SD3 has such sizes, and the tuning times the tiles"}
"""The sizes whose rows may spill, and why."""
LEFT_OUT = ("3.8", "3.9")
"""The versions of Triton whose products may spill: the tuning times the tiles, and leaves out those that spill much."""
LARGE = 128 * 128  # numbers of a tile's result
FUSED_ACCEPTED = {("3.6", 120): "its assembler fuses scale and bias although the PTX forbids it: one rounding less"}
"""The versions of Triton and the cards for which products may fuse multiply-adds, and why."""
OPTIONS = {"enable_fp_fusion": False}  # as the kernels are launched
COLUMNS = {"what": "", "registers": "registers", "stack": "spilled, bytes", "shared": "shared memory, bytes"}


def rows_of_table() -> Iterator[Row]:
    """Yield all rows, the most important first."""
    from simpletune.engine.quant import int8_gradient_kernel
    from simpletune.engine.quant.int8_kernel import SAFE_TILE, TILES
    from simpletune.engine.quant.int8_rows_kernel import LONGEST_LOAD

    tiles, ways = (SAFE_TILE, *TILES), ("forward", "gradient")
    words = int8_gradient_kernel.TILES
    yield from (Row(card, "words", "gradient", tile, "even") for tile in words for card in SHARED)
    yield from (Row(card, "gelu", kind, tile, what) for kind, tile, what in gelu_rows() for card in SHARED)
    yield from (Row(card, "product", way, tile, "even") for tile in tiles for card in SHARED for way in ways)
    yield from (Row(TOO_OLD, "product", way, SAFE_TILE, "even") for way in ways)
    for card in SHARED:
        for block, warps in ((2048, 4), (LONGEST_LOAD, 8)):
            yield from (Row(card, "rows", kind, (block, warps), what) for kind in ("bf16", "fp32") for what in KINDS)
        yield from (Row(card, "rotated", kind, tile, what) for kind, tile, what in rotated_rows())
    for card in (89, 90):  # mma and wgmma
        yield from (Row(card, "product", way, t, s) for s in ("rows", "ragged", "odd") for t in tiles for way in ways)
        yield from (Row(card, "words", "gradient", tile, "ragged") for tile in words)


KINDS = ("plain", "columns")
DIVISIBLE = {  # the integers that are multiples of 16, which Triton compiles for
    "even": ("n", "k", "weight_n", "weight_k"), "rows": ("m", "n", "k", "weight_n", "weight_k"),
    "ragged": ("n", "k", "weight_n", "weight_k"), "odd": (),
}  # fmt: skip


def compile_row(row: Row) -> Any:
    """Compile one row to machine code; returns Triton's compiled kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    function, known, constants = (products_arguments if row.is_product else rows_arguments)(row)
    types = dict.fromkeys(function.arg_names, "i32") | known
    warps, stages = (row.tile[3], row.tile[4]) if row.is_product else (row.tile[1], 3)
    divisible = DIVISIBLE[row.sizes] if row.is_product else ("k", "x_outer", "x_row", "inner")
    place = {name: (number,) for number, name in enumerate(function.arg_names)}
    given = [name for name, kind in types.items() if name not in constants and (kind[0] == "*" or name in divisible)]
    source = ASTSource(
        function,
        types | dict.fromkeys(constants, "constexpr"),
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in given},
    )
    options = {"num_warps": warps, "num_stages": stages, **OPTIONS}
    return compile(source, target=GPUTarget("cuda", row.card, 32), options=options)


def measure(row: Row) -> dict[str, Any]:
    """Compile one row and count what matters in its code; ``fails`` holds the reason if it does not compile."""
    from triton.errors import TritonError

    try:
        with _silent() if row.card == TOO_OLD else contextlib.nullcontext():
            built = compile_row(row)
    except (RuntimeError, TritonError) as error:
        return {"fails": (str(error).strip().splitlines() or [type(error).__name__])[-1]}
    ptx = built.asm["ptx"]
    with binary_of(built.asm["cubin"]) as file:
        registers, stack = usage_of(file)
        code = _tool("nvdisasm", "-c", file) if row.is_product else ""
    return {
        **({"byte_loads": len(re.findall(r"\bLDS\.[US]8\b", code))} if row.kernel == "words" else {}),
        "registers": registers,
        "stack": stack,
        "shared": built.metadata.shared,
        "tensor_cores": sorted({" ".join(each) for each in TENSOR_CORES.findall(ptx)}),
        "fused": len(re.findall(r"\bfma\.", ptx)) + len(re.findall(r"\bFFMA\b", code)),
        "fusible": len(re.findall(r"\b(?:mul|add|sub)\.f32\b", ptx)),  # without .rn the assembler may fuse them
        "flushed": ptx.count(".ftz"),
    }


@contextlib.contextmanager
def binary_of(code: bytes) -> Iterator[str]:
    """A file with a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        yield file.name


def usage_of(file: str) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, of machine code in a file."""
    usage = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", "-res-usage", file))
    assert usage is not None
    return int(usage[1]), int(usage[2])


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop what the compiler writes to standard error, a page per failure."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _tool(name: str, *arguments: str) -> str:
    """Run one of NVIDIA's tools that come with Triton, and return its output."""
    from triton.backends import nvidia

    program = Path(str(nvidia.__file__)).parent / "bin" / name
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


def problems(row: Row, found: Mapping[str, Any], version: str) -> list[str]:
    """List the rules that a compiled row breaks, except accepted ones.

    Args:
        row: the row.
        found: the result of ``measure``.
        version: of Triton, such as 3.7.1.
    """
    if row.card == TOO_OLD:
        return [] if "fails" in found else [f"compiles for sm_{TOO_OLD}: lower OLDEST in int8_products.py"]
    if "fails" in found:
        return [f"does not compile: {found['fails']}"]
    broken = []
    warps = row.tile[3] if row.is_product else row.tile[1]
    if row.is_product and not found["tensor_cores"]:
        broken.append("no int8 tensor-core instruction")
    if row.kernel == "words" and found["byte_loads"]:
        broken.append(f"{found['byte_loads']} loads of single bytes from shared memory")
    if found["shared"] > SHARED[row.card]:
        broken.append(f"{found['shared']:,} bytes of shared memory, more than the card's {SHARED[row.card]:,}")
    if found["registers"] * 32 * warps > REGISTERS:
        broken.append(f"{found['registers']} registers in {warps} warps, more than the card's {REGISTERS:,}")
    minor = version.rpartition(".")[0]
    spills = minor in LEFT_OUT and row.is_product
    most = WORDS_SPILL[0] if row.kernel == "words" or spills else SPILLED
    left_out = spills and row.tile[0] * row.tile[1] >= LARGE
    if found["stack"] > most and row.sizes not in SPILLS_ACCEPTED and not left_out:
        broken.append(f"{found['stack']} bytes spilled, more than {most}")
    accepted = (minor, row.card) in FUSED_ACCEPTED and row.is_product
    if found["fusible"] or found["fused"] and not accepted:
        broken.append("fused multiply-add: sums differ from the CPU's")
    if found["flushed"] and row.kernel != "gelu":  # an exponential of less than 2^-126 does not count
        broken.append(".ftz: small numbers differ from the CPU's")
    return broken


def few_tiles(rows: Mapping[str, Row], found: Mapping[str, Json]) -> list[str]:
    """Name the products of which more than half of the tiles spill; ``rows`` are a version's, by name."""
    left: dict[str, list[bool]] = {}
    for name, row in rows.items():
        if row.is_product and row.card != TOO_OLD and row.sizes not in SPILLS_ACCEPTED and name in found:
            product = f"sm_{row.card} {row.kernel} {row.kind} {row.sizes}"
            left.setdefault(product, []).append(found[name].get("stack", 0) <= WORDS_SPILL[0])
    few = {product: tiles for product, tiles in left.items() if 2 * sum(tiles) < len(tiles)}
    return [f"{product}: only {sum(tiles)} of {len(tiles)} tiles do not spill" for product, tiles in few.items()]


def source_of(name: str) -> str:
    """The hash of the source of a row, given its name with Triton's version."""
    return source_hash(next((source for kernel, source in SOURCES.items() if f" {kernel} " in name), SOURCE))


def source_hash(source: Path = SOURCE, text: str | None = None) -> str:
    """Hash the source of the compiled code, without comments, docstrings and layout; needs no Triton."""
    parts = []
    for node in ast.parse(source.read_text(encoding="utf-8") if text is None else text).body:
        names: list[str] = []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.FunctionDef):
            names = [node.name]
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        if set(names) & set(DECIDES[source]):
            parts.append(ast.unparse(node))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def run(folder: Path, minutes: float, only: str = "") -> Path:
    """Compile the missing rows with the installed version of Triton, and write the table of all versions.

    Raises:
        UserError: a row breaks a rule, or Triton is not installed.
    """
    try:
        import triton
    except ImportError:
        raise UserError("kernels: Triton is not installed. Use: pip install triton") from None
    results = Results(folder / "kernels", COLUMNS)
    results.rows = {name: row for name, row in results.rows.items() if row["source"] == source_of(name)}
    rows = {f"Triton {triton.__version__}: {row.name}": row for row in rows_of_table()}
    broken = []
    for name, row in results.missing(rows, minutes, only):
        found = measure(row)
        results.add(name, found | {"source": source_of(name)})
        say(f"kernel  {name}: {found.get('fails') or _cell(found)}")
    for name, row in rows.items():
        if name in results.rows:
            broken += [f"  {name}: {problem}" for problem in problems(row, results.rows[name], triton.__version__)]
    broken += [f"  {problem}" for problem in few_tiles(rows, results.rows)]
    page = results.stem.with_suffix(".md")
    title, cards = "The int8 kernels, compiled for several architectures", (TOO_OLD, *SHARED)
    page.write_text(markdown(title, ABOUT, results.rows, cards, _cell), encoding="utf-8")
    if broken:
        raise UserError("\n".join(["kernels: the compiled code breaks a rule:", *broken]))
    return page


def markdown(
    title: str, about: str, rows: Mapping[str, Json], cards: Iterable[int], cell: Callable[[Json], str]
) -> str:
    """Write one table for each version of Triton: a line for each kernel and kind, a column for each card.

    Args:
        title: title of the page.
        about: what the cells are.
        rows: by name: version of Triton, card, and what was compiled.
        cards: their architectures: 89 for sm_89.
        cell: a row in words.
    """
    machine = {name: value for name, value in describe_machine().items() if name != "device"}
    lines = [f"# {title}", "", about, "", *listed("make kernels", machine)]
    tables: dict[str, dict[str, dict[str, Json]]] = {}
    for name, found in rows.items():
        version, _, rest = name.partition(": ")
        card, _, what = rest.partition(" ")
        tables.setdefault(version, {}).setdefault(what, {})[card] = found
    names = [f"sm_{card}" for card in cards]
    for version, table in tables.items():
        lines += ["", f"## {version}", "", f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for what, cells in sorted(table.items()):
            lines.append(f"| {what} | {' | '.join(cell(cells[c]) if c in cells else '' for c in names)} |")
    return "\n".join(lines) + "\n"


def _cell(found: Json) -> str:
    if "fails" in found:
        return "does not compile"
    units = sorted({unit.split()[0] for unit in found["tensor_cores"]})
    spilled = f", {found['stack']} B spilled" if found["stack"] else ""
    fused = ", fused" if found["fused"] else ""
    return (
        f"{found['registers']}, {found['shared'] / 1024:g} KiB{', ' + ' '.join(units) if units else ''}{spilled}{fused}"
    )


ABOUT = f"""\
Each cell: registers of a thread, shared memory of a block, the tensor-core instruction (`mma`, or Hopper's `wgmma`; s8
operands, s32 sums), and bytes of the stack where registers were spilled. Nothing ran: these are figures of the machine
code. Lines: kernel, kind, tile (rows, columns, length of the sum, warps, stages), sizes: *even*, as in SD3: n and k are
multiples of 16, and k of the tile's; *rows*: m too; *ragged*: k is no multiple of the tile's; *odd*: nothing is a
multiple. `rows` quantises rows: the tile is elements and warps; `rotated` rotates them first: and the size of the
rotation's blocks; *long*: a row takes several loads. `words` is the gradient's kernel for SD3's layers, `product
gradient` the one that takes over where words cannot be read. `gelu` quantises rows of GELU, *back* of its gradient.

`make kernels` fails if one of these breaks a rule: an int8 tensor-core instruction in every product; no load of a
single byte from shared memory in `words`; shared memory within the card's
{", ".join(f"{size // 1024} KiB (sm_{card})" for card, size in SHARED.items())};
registers within 64 Ki of a multiprocessor; at most {SPILLED} bytes spilled, except for *odd* sizes
({SPILLS_ACCEPTED["odd"]}) and {WORDS_SPILL[0]} of `words`
({WORDS_SPILL[1]}),
and of all products with Triton {" and ".join(LEFT_OUT)}, where the large tiles may spill more, because the
tuning leaves them out: at least half of each product's must be left; no fused multiply-add, none that the assembler
may fuse, and no `.ftz` but in `gelu`, because the results should equal the CPU's bit for bit; and for sm_{TOO_OLD} no
code: a Triton that compiles for it would let the tool support it. Exception: 3.6 on sm_120, marked *fused*:
{FUSED_ACCEPTED["3.6", 120]}."""
