"""A row of the grid ``kernels``, what it compiles besides the products' own tiles, and with which arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from simpletune.system.options import Json

if TYPE_CHECKING:
    from simpletune.engine.quant.int8_kernel import Tile

Tensors = dict[str, str]
WORDS_SPILL = (64, "their largest tiles have no register left, and the tuning times the tiles")
"""Bytes that kernels of ``words`` may spill, and why."""


class Kernel(Protocol):
    """A function of Triton's."""

    arg_names: list[str]


@dataclass(frozen=True)
class Row:
    """One kernel to compile.

    Args:
        card: the architecture: 89 for sm_89.
        kernel: ``product``, ``words`` (a gradient that reads the weight in words), ``rows``, ``rotated`` rows or rows
            of ``gelu``.
        kind: of a product, ``forward`` or ``gradient``, which reads the weight transposed; of rows, their type, and
            ``back`` if they are of GELU's gradient.
        tile: of a product, as in ``TILES``; of rows, (elements that a program loads at once, warps), and of rotated
            rows and those of GELU the size of the rotation's blocks.
        sizes: of a product, ``even``: k is a multiple of the tile's, and n and k of 16, as in SD3; ``rows``: m of 16
            too; ``ragged``: k is no multiple of the tile's; ``odd``: nothing is a multiple. Of rows, ``columns`` if
            they are multiplied with a scale for each column, else ``plain``; of rotated rows, ``whole``, or ``long``
            if they take several loads.
    """

    card: int
    kernel: str
    kind: str
    tile: tuple[int, ...]
    sizes: str

    @property
    def is_product(self) -> bool:
        """Whether the kernel multiplies."""
        return self.kernel in ("product", "words")

    @property
    def name(self) -> str:
        """The name of the row, without the version of Triton."""
        return f"sm_{self.card} {self.kernel} {self.kind} {'x'.join(map(str, self.tile))} {self.sizes}"


def rotated_rows() -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield kind, tile and sizes of the rotated rows: SD3 Medium and Large, SD 1.5 and 2, and small models."""
    from simpletune.engine.quant.int8_rows_kernel import LONGEST_BLOCK, warps_of

    for length, block in ((2048, 256), (4096, 256), (LONGEST_BLOCK, 256), (2048, 64), (512, 64), (1024, 16)):
        yield "bf16", (length, warps_of(length), block), "whole"
    yield "bf16", (LONGEST_BLOCK, warps_of(LONGEST_BLOCK), 256), "long"
    yield "fp32", (2048, warps_of(2048), 256), "whole"


def gelu_rows() -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield kind, tile and sizes of the rows of GELU: SD3 Medium, rotated and not, Large, and fp32."""
    from simpletune.engine.quant.int8_rows_kernel import LONGEST_BLOCK, warps_of

    warps = warps_of(LONGEST_BLOCK)
    for kind, block, what in (("bf16", 0, "whole"), ("bf16", 256, "whole"), ("bf16 back", 0, "whole")):
        yield kind, (LONGEST_BLOCK, warps, block), what
    yield "bf16", (LONGEST_BLOCK, warps, 256), "long"
    yield "bf16 back", (LONGEST_BLOCK, warps, 0), "long"
    yield "fp32 back", (1024, warps_of(1024), 0), "whole"


def products_arguments(row: Row) -> tuple[Kernel, Tensors, Json]:
    """The kernel of a product, the types of its tensors, and its constants."""
    from simpletune.engine.quant import int8_gradient_kernel, int8_kernel

    tensors = {"x": "*i8", "x_scale": "*fp32", "weight": "*i8", "y": "*bf16"}
    constants = {**int8_kernel._blocks(cast("Tile", row.tile)), "EVEN_K": row.sizes in ("even", "rows")}
    if row.kernel == "words":
        return int8_gradient_kernel._gradient.fn, tensors, constants
    tensors |= {"scale": "*fp32", "bias": "*bf16"}
    fixed = {"weight_k": 1} if row.kind == "forward" else {"weight_n": 1, "scale": None, "bias": None}
    return int8_kernel._product.fn, tensors, {**constants, **fixed}


def rows_arguments(row: Row) -> tuple[Kernel, Tensors, Json]:
    """The kernel of rows, the types of its tensors, and its constants."""
    from simpletune.engine.quant import int8_products, int8_rows_kernel

    dtype, back = row.kind.partition(" ")[::2]
    tensors = {"x": f"*{dtype}", "q": "*i8", "scale": "*fp32"}
    constants: Json = {"LEAST": int8_products.LEAST, "BLOCK": row.tile[0]}
    if row.kernel == "rotated":
        return int8_rows_kernel._rotated_rows, tensors, constants | {
            "ROTATION": row.tile[2], "WHOLE": row.sizes == "whole"
        }  # fmt: skip
    if row.kernel == "gelu":
        tensors |= {"grad": f"*{dtype}", "columns": "*fp32"}
        constants |= {"TURN": row.tile[2], "WHOLE": row.sizes == "whole"}
        return int8_rows_kernel._gelu_rows, tensors, constants | ({} if back else {"grad": None, "columns": None})
    tensors["columns"] = "*fp32"
    return int8_rows_kernel._rows, tensors, constants | ({} if row.sizes == "columns" else {"columns": None})
