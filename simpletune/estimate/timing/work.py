"""The device's work for each operation of a simulated step: products with their shapes, attention, bytes moved.

Shapes: m rows, n outputs, k the length of a product's sum. Bytes count each element read or written once; an expanded
dimension is read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor
from torch._ops import OpOverload

from simpletune.engine.kernels.sizes import partial_bytes
from simpletune.estimate.timing.sections import KernelWork

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
RANDOM = torch.Tag.nondeterministic_seeded
SMALL = 4096  # elements; the layout of smaller tensors does not matter


KINDS = {
    "rows": "int8_rows", "group_norm": "group_norm", "layer_norm": "norm", "rms_norm": "norm", "modulate": "norm",
    "gelu": "gelu", "softmax": "softmax", "dequantize_4bit": "unpack_nf4", "optimizer_update_8bit": "adam8bit",
}  # fmt: skip
"""Grids by a part of the operation's name; gradients of norms and GELU have their own, with ``_backward``."""


@cache
def moves_data(op: OpOverload) -> bool:
    """Return whether an operation reads or writes elements."""
    name, schema = op._schema.name, op._schema
    if op.is_view or torch.Tag.inplace_view in op.tags or "empty" in name or name == "aten::_unsafe_view":
        return False
    return schema.is_mutable or any("Tensor" in str(result.type) for result in schema.returns)


@cache
def only_writes(op: OpOverload) -> bool:
    """Return whether an operation reads no operand: it makes a tensor, perhaps like another, or fills one."""
    name, schema = op._schema.name, op._schema
    makes = name != "aten::_to_copy" and any(argument.name == "pin_memory" for argument in schema.arguments)
    return makes or name in ("aten::fill_", "aten::zero_") or (RANDOM in op.tags and schema.is_mutable)


def works_of(op: OpOverload, args: Sequence[object], kwargs: dict[str, object], output: object) -> Iterator[KernelWork]:
    """Yield the work of one dispatched operation and what it returned; nothing for an operation that moves no data."""
    if op.namespace in ("profiler", "prim") or not moves_data(op):
        return
    name, given, results = op._schema.name.partition("::")[2], tensors_in(args), tensors_in(output)
    match name:
        case "mm" | "addmm" | "addmm_" | "bmm" | "baddbmm" | "baddbmm_":
            *bias, a, b = given
            if b.stride(-2) == 1 and b.shape[-1] > 1 and b.shape[-2] > 1:
                layout = "tn"  # n as in memory, t transposed; see probes.py
            else:
                layout = "nt" if a.stride(-2) == 1 and a.shape[-1] > 1 and a.shape[-2] > 1 else "nn"
            rows = math.prod(a.shape[:-2]) * a.shape[-2]
            yield KernelWork(f"product_{layout}", _dtype([a]), (rows, b.shape[-1], a.shape[-1]))
            if bias:
                yield KernelWork("bias", _dtype([a]), (2 * tensor_bytes(a[..., :1]) * b.shape[-1],))
        case "_int_mm":
            a, b = given[:2]
            yield KernelWork("int8_product", "bf16", (a.shape[0], b.shape[1], a.shape[1]))
        case "int8_product":
            x, _, weight = given[:3]
            kind = "int8_product" if weight.is_contiguous() else "int8_gradient"
            yield KernelWork(kind, "bf16", (x.shape[0], weight.shape[0], x.shape[1]))
        case "rotated":
            (x,), block = given, args[1]
            assert isinstance(block, int)
            yield KernelWork("product_nn", _dtype([x]), (x.numel() // block, block, block))
        case "qbytes_mm":  # optimum-quanto's: unpacks the weight first
            x, weight, scales = given[:3]
            yield KernelWork("unpack_int8", _dtype([x]), (weight.numel() * (1 + scales.element_size()),))
            yield KernelWork("product_tn", _dtype([x]), (x.numel() // x.shape[-1], weight.shape[0], weight.shape[1]))
        case "convolution":
            yield _convolution("convolution", results[0], *given[:2])
        case "convolution_backward":
            mask = args[-1]
            assert isinstance(mask, (list, tuple))
            for wanted, kind in zip(mask, ("convolution_input", "convolution_weight"), strict=False):
                if wanted:
                    yield _convolution(kind, *given[:3])
        case "round_into":  # its first argument, the result, is only written
            yield KernelWork("add", "bf16", (sum(map(tensor_bytes, given)),))
        case "swiglu" | "swiglu_backward":  # reads halves of rows, which costs no more than whole ones
            yield KernelWork("add", _dtype(results), (sum(map(tensor_bytes, (*given, *results))),))
        case "modulate_backward" | "gate_backward":
            moved = sum(map(tensor_bytes, (*given, *results)))
            if results[-1].shape != results[0].shape:  # [count, b, d]: partial sums, written and read
                moved += 2 * partial_bytes(results[0], len(results[-1]))
            yield KernelWork("norm_backward" if name == "modulate_backward" else "add", _dtype(results), (moved,))
        case _ if "scaled_dot_product" in name:
            backward = name.endswith("_backward")
            q, k = given[1:3] if backward else given[:2]
            extents = q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3]
            masked = kwargs.get("attn_mask") is not None  # by another kernel on a GPU
            kind = f"attention{'_masked' * masked}{'_backward' * backward}"
            yield KernelWork(kind, _dtype([q]), extents)
        case _ if name.startswith(("_foreach", "_fused_adam")):
            yield _of_group(args, kwargs, results)
        case _:
            yield from _of_bytes(op, args, kwargs, results)


def _of_group(args: Sequence[object], kwargs: dict[str, object], outputs: Sequence[Tensor]) -> KernelWork:
    """Describe the work of an operation on a group of tensors."""
    inputs = tensors_in((args, kwargs))
    first = args[0] if isinstance(args[0], (list, tuple)) else []
    if not outputs:  # in place: the outputs are among the inputs; a fused update writes all but the gradients
        outputs = inputs[len(first) :] if len(inputs) > 2 * len(first) else tensors_in(first)
    moved = sum(map(tensor_bytes, inputs)) + sum(map(tensor_bytes, outputs))
    return KernelWork("each", _dtype(inputs), (max(1, len(first)), moved))


def _of_bytes(
    op: OpOverload, args: Sequence[object], kwargs: dict[str, object], outputs: Sequence[Tensor]
) -> Iterator[KernelWork]:
    """Describe the work of an operation that only its bytes bound."""
    written = {argument.name for argument in op._schema.arguments if argument.is_out} if kwargs else set()
    inputs = tensors_in((args, {argument: value for argument, value in kwargs.items() if argument not in written}))
    if not outputs and op.namespace == "simpletune":
        # Our operations without a result name in their schema what they write to. For others, such as bitsandbytes'
        # updates, only what they read counts, as in their probes (probes.py).
        declared = zip(op._schema.arguments, args, strict=False)
        outputs = tensors_in([value for each, value in declared if each.alias_info and each.alias_info.is_write])
    moved = sum(map(tensor_bytes, outputs)) + (0 if only_writes(op) else sum(map(tensor_bytes, inputs)))
    if moved:
        yield KernelWork(_grid_kind(op, inputs, outputs), _dtype(outputs, inputs), (moved,))


def _grid_kind(op: OpOverload, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    """Name the grid of an element-wise or row-wise operation."""
    if RANDOM in op.tags:
        return "normal"
    for part, kind in KINDS.items():
        if part in op._schema.name:
            return f"{kind}_backward" if op._schema.name.endswith("_backward") else kind
    if not inputs or not outputs:
        return "add"
    if outputs[0].dtype in NAMES and any(t.dtype == torch.int8 and t.numel() >= SMALL for t in inputs):
        return "unpack_int8"
    if op._schema.name != "aten::cat" and any(not is_dense(tensor) for tensor in (*inputs, *outputs)):
        return "strided"
    return "add"


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous, apart from expanded dimensions; true for small tensors."""
    if tensor.numel() < SMALL or tensor.is_contiguous():
        return True
    kept = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride and size > 1]
    expected = 1
    for size, stride in reversed(kept):
        if stride != expected:
            return False
        expected *= size
    return True


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's own elements."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    own = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(own) * tensor.element_size() if tensor.numel() else 0


def tensors_in(values: object) -> list[Tensor]:
    """Return the tensors of nested arguments."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def _dtype(*groups: Sequence[Tensor]) -> str:
    """Return the floating type of the first tensors that have one."""
    return next((NAMES[t.dtype] for tensors in groups for t in tensors if t.dtype in NAMES), "fp32")


def _convolution(kind: str, y: Tensor, x: Tensor, weight: Tensor) -> KernelWork:
    """Convert a convolution to one with 3 x 3 kernels: scale others by their area; kernels of one element are
    products."""
    pixels, area = y.numel() // y.shape[1], math.prod(weight.shape[2:])
    outputs, inputs = weight.shape[:2]
    if area == 1:
        return KernelWork("product_tn", _dtype([x]), (pixels, outputs, inputs))
    return KernelWork(kind, _dtype([x]), (pixels, max(1, round(inputs * area / 9)), outputs))
