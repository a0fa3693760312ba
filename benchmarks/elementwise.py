"""``elementwise``: compile the kernels for norms, gates, residuals and activations for several architectures.

It works like kernels.py for int8. But results need not equal the CPU's bit for bit, so multiply-adds may be fused, and
Turing is included.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from benchmarks import kernels
from benchmarks.kernels import REGISTERS, SHARED, SPILLED
from benchmarks.table import Results
from simpletune.system.console import say
from simpletune.system.options import Json, UserError

FOLDER = Path(__file__).resolve().parent.parent / "simpletune" / "engine" / "kernels"
MODULES = {"norm_rotary": "rotary_kernels", "norm": "rms_kernels", "swiglu": "swiglu_kernels"}
"""Modules by the beginning of their kernels' names, first match; the others are in ``adaln_kernels``."""
DECIDES = ("block_of", "rows_of")
"""Functions besides the kernels on which the compiled code depends."""
COMMITTED = kernels.COMMITTED.with_name("elementwise.json")
SHARED_BYTES = {75: 64 * 1024, **SHARED}
COLUMNS = {"what": "", "registers": "registers", "stack": "spilled, bytes", "shared": "shared memory, bytes"}
PLAIN = (
    "x", "y", "gate", "value", "scale", "shift", "total", "out", "grad", "grad_total", "grad_x", "grad_y", "grad_gate",
    "grad_value", "weight",
)  # fmt: skip
TWO = ("scale_2", "shift_2", "out_2", "grad_2")
SUMS = ("mean", "rstd", "sums", "cos", "sin")
WIDE = {"bf16": 2, "fp16": 2, "fp32": 4}
WIDTHS = {"Medium": 1536, "Large": 2432}
RMS_WIDTHS = {"Medium": 64, "Z-Image": 3840}
"""The width of norms without a mean: of a head's queries, and of Z-Image's tokens."""
ADDED = ("y", "gate", "grad_y")
USES: dict[str, dict[str, tuple[str, ...]]] = {
    "modulate": {"first": ("y", "gate", "total", *TWO), "added": TWO, "two": ("y", "gate", "total")},
    "modulate_backward": {
        "first": (*ADDED, "grad_2", "scale_2", "sums"),
        "added": ("y", "grad_2", "scale_2", "sums"),
        "two": (*ADDED, "sums"),
        "trained": ("grad_2", "scale_2"),
        "two trained": ADDED,
    },
    "add": {"plain": ()},
    "gate_backward": {"plain": ("y", "sums"), "trained": ()},
    "norm": {"plain": ()},
    "norm_backward": {"plain": ("sums",), "trained": ()},
    "norm_rotary": {"plain": ()},
    "norm_rotary_backward": {"plain": ("sums",), "trained": ()},
    "swiglu": {"plain": ()},
    "swiglu_backward": {"plain": ()},
}
"""By kernel and use, the arguments that are None: *first*, before attention; *added*, after it; *two* modulations of
one norm (SD3.5); *trained*, with gradients of the modulation or of the norm's weight."""


@dataclass(frozen=True)
class Row:
    """One kernel to compile.

    Args:
        card: the architecture: 89 for sm_89.
        kernel: its name.
        use: of ``USES``.
        model: ``Medium``, ``Large`` or ``Z-Image``, whose width it takes; a norm of Medium's queries takes that of a
            head, 64 (with positions 128), and SwiGLU a part of any row.
        kind: the type of the numbers.
    """

    card: int
    kernel: str
    use: str
    model: str
    kind: str

    @property
    def name(self) -> str:
        """The name of the row, without the version of Triton."""
        return f"sm_{self.card} {self.kernel} {self.use} {self.model} {self.kind}"


def rows_of_table() -> Iterator[Row]:
    """Yield all rows: SD3 Medium in bf16 for each card, and norms of Z-Image; other types and widths for one."""
    every = [(kernel, use) for kernel, uses in USES.items() for use in uses]
    yield from (Row(card, *each, "Medium", "bf16") for card in SHARED_BYTES for each in every)
    yield from (Row(75, *each, "Medium", "fp16") for each in every)
    yield from (Row(89, *each, "Medium", "fp32") for each in every)
    yield from (Row(89, *each, "Large", "bf16") for each in every if _module_of(each[0]) == "adaln_kernels")
    norms = [each for each in every if each[0].startswith("norm") and "rotary" not in each[0]]
    yield from (Row(card, *each, "Z-Image", "bf16") for card in SHARED_BYTES for each in norms)


def measure(row: Row) -> Json:
    """Compile one row and count what matters in its code; ``fails`` holds the reason if it does not compile."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.errors import TritonError

    from simpletune.engine.kernels.sizes import ROWS, rows_of

    module = import_module(f"simpletune.engine.kernels.{_module_of(row.kernel)}")
    function, constants = getattr(module, f"_{row.kernel}"), dict[str, object]()
    if row.kernel.startswith("norm"):
        width = 128 if "rotary" in row.kernel else RMS_WIDTHS[row.model]
        constants, warps = {"ROWS": rows_of(width), "BLOCK": 1 << (width - 1).bit_length()}, module.WARPS
    elif row.kernel.startswith("swiglu"):
        constants, warps = {"BLOCK": module.COLUMNS}, module.WARPS
    else:
        block, warps = module.block_of(WIDTHS[row.model])
        constants = {"BLOCK": block, "TOKENS": ROWS if "trained" in row.use else 1}
    names = function.arg_names
    types = dict.fromkeys(names, "i32") | dict.fromkeys((*PLAIN, *TWO), f"*{row.kind}") | dict.fromkeys(SUMS, "*fp32")
    types["eps"] = "fp32"
    constants |= dict.fromkeys(USES[row.kernel][row.use])
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in constants else types[name] for name in names}
    place = {name: (number,) for number, name in enumerate(names)}
    aligned = [
        name for name, kind in types.items() if kind[0] == "*" or name in ("d", "step") or name.endswith("_step")
    ]
    source = ASTSource(
        function, types, {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    try:
        built = compile(source, target=GPUTarget("cuda", row.card, 32), options={"num_warps": warps})
    except (RuntimeError, TritonError) as error:
        return {"fails": (str(error).strip().splitlines() or [type(error).__name__])[-1]}
    ptx = built.asm["ptx"]
    loads = [line for line in ptx.splitlines() if "ld.global" in line]
    with kernels.binary_of(built.asm["cubin"]) as file:
        registers, stack = kernels.usage_of(file)
    return {
        "registers": registers,
        "stack": stack,
        "shared": built.metadata.shared,
        "warps": built.metadata.num_warps,
        "wide": sum(".v4.b32" in line or ".v2.b32" in line or ".v2.b64" in line for line in loads),
        "flushed": ptx.count(".ftz"),
    }


def _module_of(kernel: str) -> str:
    return next((module for start, module in MODULES.items() if kernel.startswith(start)), "adaln_kernels")


def kernel_of(name: str) -> str:
    """Return the kernel of a row of the table."""
    return name.partition(": ")[2].split()[1]


def problems(row: Row, found: Json) -> list[str]:
    """List the rules that a compiled row breaks."""
    if "fails" in found:
        return [f"does not compile: {found['fails']}"]
    broken = []
    if found["shared"] > SHARED_BYTES[row.card]:
        broken.append(f"{found['shared']:,} bytes of shared memory, more than the card's {SHARED_BYTES[row.card]:,}")
    if found["registers"] * 32 * found["warps"] > REGISTERS:
        broken.append(f"{found['registers']} registers in {found['warps']} warps, more than the card's {REGISTERS:,}")
    if found["stack"] > SPILLED:
        broken.append(f"{found['stack']} bytes spilled, more than {SPILLED}")
    if not found["wide"]:
        broken.append("loads are not vectors")
    if found["flushed"] and _module_of(row.kernel) != "swiglu_kernels":  # see kernels.py
        broken.append(".ftz: small numbers are lost")
    return broken


def source_hash(kernel: str) -> str:
    """Hash the source of a kernel's compiled code, without comments, docstrings and layout; needs no Triton."""
    parts = []
    for name in (_module_of(kernel), "sizes"):
        for node in ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8")).body:
            decides = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.Tuple)
            if isinstance(node, ast.FunctionDef) and (node.decorator_list or node.name in DECIDES):
                node.body = node.body[ast.get_docstring(node) is not None :]
                decides = True
            parts += [ast.unparse(node)] if decides else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def run(folder: Path, minutes: float, only: str = "") -> Path:
    """Compile the missing rows with the installed version of Triton, and write the table of all versions.

    Raises:
        UserError: a row breaks a rule, or Triton is not installed.
    """
    try:
        import triton
    except ImportError:
        raise UserError("elementwise: Triton is not installed. Use: pip install triton") from None
    results = Results(folder / "elementwise", COLUMNS)
    results.rows = {name: row for name, row in results.rows.items() if row["source"] == source_hash(kernel_of(name))}
    rows = {f"Triton {triton.__version__}: {row.name}": row for row in rows_of_table()}
    for name, row in results.missing(rows, minutes, only):
        found = measure(row)
        results.add(name, found | {"source": source_hash(row.kernel)})
        say(f"kernel  {name}: {found.get('fails') or _cell(found)}")
    found_in = ((name, row) for name, row in rows.items() if name in results.rows)
    broken = [f"  {name}: {problem}" for name, row in found_in for problem in problems(row, results.rows[name])]
    page = results.stem.with_suffix(".md")
    title = "Norms, gates and residuals, compiled for several architectures"
    page.write_text(kernels.markdown(title, ABOUT, results.rows, SHARED_BYTES, _cell), encoding="utf-8")
    if broken:
        raise UserError("\n".join(["elementwise: the compiled code breaks a rule:", *broken]))
    return page


def _cell(found: Json) -> str:
    if "fails" in found:
        return "does not compile"
    spilled = f", {found['stack']} B spilled" if found["stack"] else ""
    return f"{found['registers']} x {found['warps']} warps, {found['shared']} B{spilled}"


ABOUT = f"""\
Each cell: registers of a thread, warps of a program, shared memory, and bytes of the stack where registers were
spilled. Nothing ran: these are figures of the machine code. Lines: kernel of `simpletune/engine/kernels`, use, model
and type of the numbers. *first*: before attention; *added*: after it, with the gated sum; *two*: two modulations of one
norm, as in SD3.5 Medium; *trained*: with gradients of the modulation or of the norm's weight. `norm` is that of queries
and keys, and Z-Image's that of its tokens, 3840 wide; `norm_rotary` is that of queries and keys with the positions of
klein and Z-Image, heads of 128; `swiglu` takes 1024 numbers of a row, of whichever model.

`make kernels` fails if one of these breaks a rule: it compiles for each card, sm_75 too; registers within 64 Ki of a
multiprocessor, shared memory within the card's; at most {SPILLED} bytes spilled; vectors are loaded; no `.ftz`, but in
the exponential of `swiglu`, where the flushed numbers are lost beside 1."""
