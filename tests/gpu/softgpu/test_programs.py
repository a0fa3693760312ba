"""Small programs on the GPU in software: values, races, and what it refuses. Nothing but PyTorch is needed."""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = [
    pytest.mark.softgpu,
    pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "soft_push"), reason="needs tests/gpu/softgpu/run"),
]
SEEDS = range(40)
SIZE = 1 << 12


@pytest.fixture(autouse=True)
def no_adversary():
    from softgpu import queues

    queues.seed(queues.AT_ONCE)
    yield
    queues.seed(queues.AT_ONCE)


def outcomes(program) -> list[bool]:
    """Whether the program is right, for each seed."""
    from softgpu import queues

    found = []
    for seed in SEEDS:
        queues.seed(seed)
        found.append(bool(program()))
    return found


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_gradients_are_those_of_the_cpu(kernel: SDPBackend, causal: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16
    given = [torch.randn(2, 3, 37, 64).to(dtype) for _ in range(4)]
    results = []
    for device in ("cpu", "cuda"):
        q, k, v, grad = (tensor.to(device) for tensor in given)
        q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
        chosen = [kernel] if device == "cuda" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(chosen):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out.backward(grad)
        results.append([tensor.detach().cpu() for tensor in (out, q.grad, k.grad, v.grad)])
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)


def test_convolutions_norms_and_indices_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, 9, 9), torch.randn(6, 8, 3, 3)
    results = []
    for device in ("cpu", "cuda"):
        a, w = (tensor.to(device).clone().requires_grad_() for tensor in (x, weight))
        y = F.group_norm(F.conv2d(a, w, padding=1), 2)
        z = F.layer_norm(F.interpolate(y, scale_factor=2).flatten(1), [6 * 18 * 18])
        z.square().sum().backward()
        chosen = z[z > 1]
        results.append([t.detach().cpu() for t in (z, a.grad, w.grad, chosen, (z > 1).nonzero(), z.sort().values)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_draws_are_the_cpus_and_a_state_that_is_set_again_repeats_them() -> None:
    results = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator(device).manual_seed(3)
        first = torch.randn(50, device=device, generator=generator)
        state = generator.get_state()
        second = torch.empty(33, device=device).uniform_(generator=generator)
        third = torch.randint(0, 1000, (7,), device=device, generator=generator)
        generator.set_state(state)
        assert torch.equal(second, torch.empty(33, device=device).uniform_(generator=generator))
        torch.manual_seed(5)
        dropped = F.dropout(torch.ones(100, device=device), 0.3)
        results.append([t.cpu() for t in (first, second, third, dropped)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_what_has_no_values_is_refused_by_name() -> None:
    q = torch.randn(1, 1, 16, 64, device="cuda", dtype=torch.bfloat16)
    refused = pytest.raises(NotImplementedError, match="flash_attention.*dropout")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), refused:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


def test_garbage_is_not_collected_where_the_device_works() -> None:
    """A finaliser may wait for the device, which would wait for itself."""
    from softgpu import queues

    threads, before = set[str](), gc.get_threshold()
    note = lambda phase, about: threads.add(threading.current_thread().name)  # noqa: E731
    gc.callbacks.append(note)
    queues.seed(3)
    try:
        gc.set_threshold(1)
        for _ in range(10):
            torch.zeros(8, device="cuda").add_(1)
        torch.cuda.synchronize()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    own = {name for name in threads if not name.startswith("Dummy-")}  # pytest-xdist's, which hears of tests
    assert own == {threading.main_thread().name}


def copied_and_used(waits: bool) -> bool:
    """A copy on a side stream, used on the main one."""
    host = torch.arange(SIZE, dtype=torch.float32).pin_memory()
    device, side = torch.zeros(SIZE, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        device.copy_(host, non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    result = (device + 1).cpu()
    torch.cuda.synchronize()
    return torch.equal(result, host + 1)


def refilled_after_use(waits: bool) -> bool:
    """A buffer that the main stream reads and a side stream refills."""
    other = torch.full((SIZE,), 7.0).pin_memory()
    slot, side = torch.ones(SIZE, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    result = slot * 2
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        slot.copy_(other, non_blocking=True)
    torch.cuda.synchronize()
    return torch.equal(result.cpu(), torch.full((SIZE,), 2.0))


def freed_in_use(waits: bool) -> bool:
    """Memory of the main stream that a side stream still reads when the main one gets it again."""
    side, host = torch.cuda.Stream(), torch.empty(SIZE).pin_memory()
    source = torch.full((SIZE,), 3.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        host.copy_(source, non_blocking=True)
    if waits:
        source.record_stream(side)
    del source
    again = torch.full((SIZE,), 4.0, device="cuda")
    torch.cuda.synchronize()
    return torch.equal(host, torch.full((SIZE,), 3.0)) and bool(again[0] == 4)


def read_late(waits: bool) -> bool:
    """A figure that is copied to the host, and read there."""
    host = torch.zeros(1).pin_memory()
    host.copy_(torch.full((1,), 5.0, device="cuda"), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    if waits:
        event.synchronize()
    value = host.item()
    torch.cuda.synchronize()
    return value == 5


@pytest.mark.parametrize("program", [copied_and_used, refilled_after_use, freed_in_use, read_late])
def test_a_missing_wait_shows_as_a_wrong_value(program) -> None:
    assert all(outcomes(lambda: program(True)))
    assert not all(outcomes(lambda: program(False)))


def test_pinned_memory_is_reused_only_when_its_copy_is_done() -> None:
    """PyTorch's own events guard it: what it frees may not be handed out before."""

    def program() -> bool:
        found = []
        for number in range(6):
            host = torch.full((SIZE,), float(number)).pin_memory()
            found.append(host.to("cuda", non_blocking=True))
            del host
        torch.cuda.synchronize()
        return all(bool((tensor == number).all()) for number, tensor in enumerate(found))

    assert all(outcomes(program))


def test_backward_passes_on_a_side_stream_are_right() -> None:
    """Autograd waits between streams in C++."""
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    expected = weight.clone().requires_grad_()
    (expected @ expected).sin().sum().backward()

    def program() -> bool:
        w, side = weight.cuda().requires_grad_(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = (w @ w).sin().sum()
        torch.cuda.current_stream().wait_stream(side)
        y.backward()
        return torch.equal(w.grad.cpu(), expected.grad)

    assert all(outcomes(program))


def replayed(join: bool = True) -> bool:
    """Whether three replays of a graph of two branches give the values of their inputs."""
    origin, side, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x, out = torch.empty(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")
    origin.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(origin):
        graph.capture_begin(capture_error_mode="thread_local")
        square = x @ x
        side.wait_stream(origin)
        with torch.cuda.stream(side):
            branch = square.sin()
        if join:
            origin.wait_stream(side)
        out.copy_(square + branch)
        graph.capture_end()
    given, found = [torch.full((64, 64), 0.1 * number) for number in range(1, 4)], []
    for values in given:
        x.copy_(values.pin_memory(), non_blocking=True)
        graph.replay()
        found.append(out.clone())
    return all(torch.equal(y.cpu(), (v @ v) + (v @ v).sin()) for y, v in zip(found, given, strict=True))


def test_a_graph_s_replays_are_right_in_any_order_and_its_work_goes_with_it() -> None:
    from softgpu import queues

    assert all(outcomes(replayed))
    gc.collect()
    assert not queues._in_graphs


def test_a_missing_wait_between_a_graph_s_branches_is_noticed() -> None:
    """The stub, which would find it, sees no kernels here."""
    assert not all(outcomes(lambda: replayed(join=False)))


@pytest.mark.parametrize("work", [torch.Tensor.normal_, F.dropout])
def test_a_capture_draws_nothing(work) -> None:
    x, stream, graph = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        with pytest.raises(NotImplementedError, match="random numbers in a graph"):
            work(x)
        graph.capture_end()
    assert x.tolist() == [1] * 4
