"""Values of CUDA operators: each runs for its outputs and allocations, then the CPU's runs at the same addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from softgpu import attention, queues
from softgpu.aliases import alias, on_cpu
from softgpu.draws import Draw

aten = torch.ops.aten
Kwargs = dict[str, Any]
_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

NO_VALUES = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "detach_", "alias", "set_",
    "record_stream", "is_same_size", "_reshape_alias", "resize_", "_fused_sdp_choice", "is_pinned", "lift_fresh",
    "_has_compatible_shallow_copy_type", "_unsafe_view", "as_strided_", "t_", "transpose_", "squeeze_", "unsqueeze_",
}  # fmt: skip
"""Operators of aten that make tensors without values, or views."""
READ_BY_HOST = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "repeat_interleave", "multinomial", "bernoulli", "bincount", "is_nonzero", "histc", "_linalg_check_errors",
}  # fmt: skip
"""Operators whose results, or the shapes of these, the host reads from the device: they wait for it."""
GENERATED = {
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "randn",
    "rand", "randint", "randperm", "randn_like", "rand_like", "randint_like", "normal",
}  # fmt: skip
MIXED = {
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_batch_norm", "native_batch_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "addcmul",
}  # fmt: skip
"""Operators that accept 16-bit inputs with fp32 parameters on a card."""
STREAMLESS = {"bitsandbytes::quantize_4bit", "bitsandbytes::quantize_blockwise", "bitsandbytes::optimizer_update_32bit",
              "bitsandbytes::optimizer_update_8bit_blockwise"}  # fmt: skip
"""Operators whose kernels are launched on the default stream, whatever the current one is."""
SAME_ON_CPU = {"aten", "prims", "bitsandbytes"}
"""Libraries whose operators have a CPU kernel of the same meaning. Other libraries' kernels run as Python."""


class Values(TorchDispatchMode):
    """Computes what CUDA operators compute. Enter it before every other mode; autograd hands it to its threads."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped against the compiler, which takes 20 us a call."""
        return False

    def __torch_dispatch__(
        self, function: OpOverload, types: tuple, args: tuple = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if kind is not Tensor and kind is not torch.nn.Parameter:
                if kind.__name__ in ("FakeTensor", "FunctionalTensor"):
                    return function(*args, **kwargs)
                if issubclass(kind, Tensor):
                    return NotImplemented  # a wrapper's own rule comes first
        rule = _rules.get(function) or _learn(function)
        if rule is _as_it_is:
            return function(*args, **kwargs)
        index = _device_in(args)
        if index is None and kwargs:
            index = _device_in(tuple(kwargs.values()))
        if index is None:
            return function(*args, **kwargs)
        return rule(self, function, args, kwargs, index)


def _device_in(values: Any) -> int | None:
    """The index of the CUDA device that the arguments name; None if they name none."""
    for value in values:
        if isinstance(value, Tensor):
            device = value.device
        elif isinstance(value, torch.device):
            device = value
        elif isinstance(value, (list, tuple)):
            found = _device_in(value)
            if found is not None:
                return found
            continue
        else:
            continue
        if device.type == "cuda":
            return torch.cuda.current_device() if device.index is None else device.index
    return None


def _outputs(function: OpOverload, args: tuple, kwargs: Kwargs) -> Any:
    """Run an operator of the device for its outputs; its launches and copies do nothing."""
    with queues.muted():
        out = function(*args, **kwargs)
        read_back = queues.read_back()
    if read_back:
        raise NotImplementedError(f"softgpu: {function} reads values of the device on the host, and has no rule here")
    return out


def _as_it_is(*_: Any) -> Any:
    raise AssertionError("called by its identity only")


def _same_on_cpu(mode: Values, function: OpOverload, args: tuple, kwargs: Kwargs, device: int) -> Any:
    out = _outputs(function, args, kwargs)
    values, named = on_cpu(args), {name: on_cpu(value) for name, value in kwargs.items()}
    name = function._schema.name
    stream = 0 if name in STREAMLESS else queues.current_stream(device)
    if name in attention.RULES:
        queues.push(stream, attention.RULES[name](function, on_cpu(out), values, named))
        return out
    fresh = [(target, place) for target, place in _fresh(function, out)]
    run = _mixed if name.removeprefix("aten::") in MIXED else OpOverload.__call__

    def work() -> None:
        result = run(function, *values, **named)
        for target, place in fresh:
            _write(target, result if place is None else result[place])

    queues.push(stream, work)
    return out


def _mixed(function: OpOverload, *values: Any, **named: Any) -> Any:
    """An operator that widens 16-bit inputs if others are fp32."""
    types = {value.dtype for value in values if isinstance(value, Tensor)}
    if len(types) > 1 and torch.float32 in types:
        values = tuple(v.float() if isinstance(v, Tensor) and v.dtype.itemsize == 2 else v for v in values)
    return function(*values, **named)


def _fresh(function: OpOverload, out: Any) -> list[tuple[Any, int | None]]:
    """Aliases of the outputs that are no input, each with its place in the result."""
    returns = function._schema.returns
    if len(returns) == 1:
        return [] if returns[0].alias_info is not None else [(on_cpu(out), None)]
    return [(on_cpu(value), place) for place, value in enumerate(out or ()) if returns[place].alias_info is None]


def _write(target: Any, value: Any) -> None:
    if isinstance(target, Tensor):
        target.copy_(value)
    elif isinstance(target, (list, tuple)):
        for inner, own in zip(target, value, strict=True):
            _write(inner, own)


def _as_python(mode: Values, function: OpOverload, args: tuple, kwargs: Kwargs, device: int) -> Any:
    """The kernel itself, whose own operators have values."""
    with mode:
        return function.redispatch(_CUDA, *args, **kwargs)


def _decomposed(mode: Values, function: OpOverload, args: tuple, kwargs: Kwargs, device: int) -> Any:
    """An operator that is made of others. Below autograd it comes here whole."""
    with mode:
        return function.decompose(*args, **kwargs)


def _to_copy(mode: Values, function: OpOverload, args: tuple, kwargs: Kwargs, device: int) -> Any:
    """An allocation and a copy."""
    source, non_blocking = args[0], kwargs.get("non_blocking", False)
    options = {name: value for name, value in kwargs.items() if name != "non_blocking"}
    target = torch.device(options.get("device") or source.device)
    if target.type == "meta":
        return function(*args, **kwargs)
    if non_blocking and source.device.type == "cuda" and target.type == "cpu":
        options["pin_memory"] = True
    out = torch.empty_like(source, **options)
    _copy(mode, aten.copy_.default, (out, source, non_blocking), {}, device)
    return out


def _copy(mode: Values, function: OpOverload, args: tuple, kwargs: Kwargs, device: int) -> Any:
    """Queued before the operator runs, which waits for the stream where a copy waits."""
    target, source = args[:2]
    stream = queues.current_stream(device)
    to_host, from_host = target.device.type == "cpu", source.device.type == "cpu"
    given = alias(source)
    if from_host and queues.is_queued() and queues.place(source.data_ptr()) == queues.PAGEABLE:
        given = source.detach().clone()  # staged before the call returns
    written = alias(target)
    queues.push(stream, lambda: written.copy_(given))
    with queues.muted():
        out = function(*args, **kwargs)
    if to_host and queues.place(target.data_ptr()) == queues.PAGEABLE:
        queues.finish(stream)
    queues.raise_failures()
    return out


def _read(mode: Values, function: OpOverload, args: tuple, kwargs: Kwargs, device: int) -> Any:
    """Waits for the stream, computes on the CPU, and gives tensors of that shape."""
    if function._schema.name in ("aten::_local_scalar_dense", "aten::equal"):
        with queues.muted():
            function(*args, **kwargs)  # PyTorch's own complaint about a wait (torch.cuda.set_sync_debug_mode)
    stream = queues.current_stream(device)
    queues.finish(stream)
    generator = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None)
    if "generator" not in [argument.name for argument in function._schema.arguments]:
        result = function(*on_cpu(args), **{name: on_cpu(value) for name, value in kwargs.items()})
    else:
        kwargs = {name: on_cpu(value) for name, value in kwargs.items() if name != "generator"}
        values = [on_cpu(value) for value in args if not isinstance(value, torch.Generator)]
        advance = torch.empty(1, device=torch.device("cuda", device))
        with Draw(generator, device) as own:
            result = function(*values, **kwargs, generator=own)
            with queues.muted():
                advance.uniform_(generator=generator)
    return _moved(result, torch.device("cuda", device))


def _moved(value: Any, device: torch.device) -> Any:
    """A result with its tensors on the device."""
    if isinstance(value, Tensor):
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        alias(out).copy_(value)
        return out
    return type(value)(_moved(inner, device) for inner in value) if isinstance(value, (list, tuple)) else value


def _index(mode: Values, function: OpOverload, args: tuple, kwargs: Kwargs, device: int) -> Any:
    """Indices that are masks have as many entries as are true, which the host reads."""
    masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return _same_on_cpu(mode, function, args, kwargs, device)
    if function._schema.name == "aten::index":
        return _read(mode, function, args, kwargs, device)
    queues.finish(queues.current_stream(device))
    function(*on_cpu(args), **kwargs)
    return args[0]


def _drawn(mode: Values, function: OpOverload, args: tuple, kwargs: Kwargs, device: int) -> Any:
    """Numbers are drawn when they are asked for, in the program's order, and written in the stream's."""
    generator = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None)
    in_place = function._schema.name.endswith("_")
    if any(isinstance(a, Tensor) for a in args[1:]):
        raise NotImplementedError(f"softgpu: {function} with tensors as parameters has no values here")
    with Draw(generator, device) as own:
        out = _outputs(function, args, kwargs)
        named = {name: on_cpu(value) for name, value in kwargs.items() if name != "generator"}
        values = [on_cpu(value) for value in args if not isinstance(value, torch.Generator)]
        if in_place:
            values[0] = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype)
        takes = any(argument.name == "generator" for argument in function._schema.arguments)
        if takes:
            result = function(*values, **named, generator=own)
        else:
            with _as_default(own):
                result = function(*values, **named)
    target = alias(out)
    queues.push(queues.current_stream(device), lambda: target.copy_(result))
    return out


class _as_default:
    """The CPU's own generator stands where another one stands."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator

    def __enter__(self) -> None:
        self._before = torch.get_rng_state()
        torch.set_rng_state(self._generator.get_state())

    def __exit__(self, *_: object) -> None:
        self._generator.set_state(torch.get_rng_state())
        torch.set_rng_state(self._before)


def _dropout(mode: Values, function: OpOverload, args: tuple, kwargs: Kwargs, device: int) -> Any:
    """As the CPU's dropout draws: a mask of Bernoulli's numbers in the input's type."""
    x, p = args[0], args[1]
    with Draw(None, device) as own:
        out, mask = _outputs(function, args, kwargs)
        kept = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).bernoulli_(1 - p, generator=own)
    given, y, m = alias(x), alias(out), alias(mask)

    def work() -> None:
        m.copy_(kept)
        y.copy_(given * (kept / (1 - p)))

    queues.push(queues.current_stream(device), work)
    return out, mask


Rule = Callable[..., Any]
_rules: dict[OpOverload, Rule] = {}
_SPECIAL: dict[str, Rule] = {
    "copy_": _copy, "_to_copy": _to_copy, "native_dropout": _dropout, "index": _index, "index_put_": _index,
    "_index_put_impl_": _index,
}  # fmt: skip


def _learn(function: OpOverload) -> Rule:
    """Choose an operator's rule, once."""
    rule: Rule
    library, name = function._schema.name.split("::")
    made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    if made_of_others and not torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CUDA"):
        rule = _decomposed
    elif library not in SAME_ON_CPU:
        rule = _as_it_is if function.is_view else _as_python
    elif library == "aten" and (function.is_view or name in NO_VALUES):
        rule = _as_it_is
    elif library == "aten" and name in READ_BY_HOST and function is not aten.bernoulli.p:
        rule = _read
    elif library == "aten" and name in GENERATED:
        rule = _drawn
    else:
        rule = _SPECIAL.get(name, _same_on_cpu)
    _rules[function] = rule
    return rule
