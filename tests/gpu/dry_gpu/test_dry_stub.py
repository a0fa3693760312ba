"""The stub of CUDA itself (tests/gpu/dry_gpu): its cards and memory, what it counts, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from dry import CAPABILITIES, ROOT, count, counted, printed, process, used

MIB = 2**20
LAUNCHER = ROOT / "tests" / "gpu" / "dry_gpu" / "run"


def launched(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LAUNCHER, *command], env={**os.environ, **environment}, capture_output=True, text=True)


def test_the_launcher_says_how_to_make_what_is_missing(tmp_path: Path) -> None:
    without = launched("true", DRY_VENV=str(tmp_path))
    assert without.returncode == 3 and "make dry" in without.stderr and str(tmp_path) in without.stderr
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/true")
    of_the_cpu = launched("true", DRY_VENV=str(tmp_path))
    assert of_the_cpu.returncode == 3 and "not the CUDA build" in of_the_cpu.stderr
    assert launched().returncode == 3


@pytest.mark.dry
def test_every_function_that_the_wheels_import_is_here() -> None:
    """Else it is that of the real library, which looks for a real driver."""
    site = Path(torch.__file__).parent.parent
    wheels = [*(site / "torch" / "lib").glob("lib*torch*.so"), site / "torch" / "lib" / "libc10_cuda.so"]
    wheels += [site / "torch" / "lib" / "libcaffe2_nvrtc.so", *site.glob("bitsandbytes/libbitsandbytes_cuda130.so")]
    assert len(wheels) > 6

    def names(option: str, library: str | Path) -> set[str]:
        told = subprocess.run(["nm", "-D", option, library], capture_output=True, text=True, check=True).stdout
        return {line.split()[-1].partition("@")[0] for line in told.splitlines()}

    def is_cuda(name: str) -> bool:
        return name.startswith(("__cuda", "cuda", "cublas")) or (name[:2] == "cu" and name[2:3].isupper())

    wanted = {name for wheel in wheels for name in names("--undefined-only", wheel)}
    for source in (site / "triton" / "backends" / "nvidia").glob("*.c"):  # which Triton compiles when it is first used
        wanted |= set(re.findall(r"\b(cu[A-Z]\w+)(?<!Handle)\(", source.read_text()))
    wanted = {name for name in wanted if is_cuda(name) and not name.startswith(("cuFile", "cuBLAS"))}
    stub = os.environ["LD_PRELOAD"].partition(":")[0]
    assert len(wanted) > 250 and sorted(wanted - names("--defined-only", stub)) == []


CARDS = {  # name, multiprocessors, shared memory of a block in bytes, L2 in MiB
    75: ("Tesla T4", 40, 65_536, 4),
    80: ("NVIDIA A100-SXM4-40GB", 108, 166_912, 40),
    86: ("NVIDIA GeForce RTX 3090", 82, 101_376, 6),
    89: ("NVIDIA L4", 58, 101_376, 48),
    90: ("NVIDIA H100 80GB HBM3", 132, 232_448, 50),
    120: ("NVIDIA GeForce RTX 5090", 170, 101_376, 96),
}
SHOW = """
import json, torch
p = torch.cuda.get_device_properties(0)
print(json.dumps([p.name, p.multi_processor_count, p.shared_memory_per_block_optin, p.L2_cache_size / 2**20,
                  list(torch.cuda.get_device_capability()), p.total_memory]))
"""


@pytest.mark.dry
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_card_is_what_its_row_says(capability: int) -> None:
    told = json.loads(printed(SHOW, DRY_CC=capability, DRY_GIB=1.5))
    assert told == [*CARDS[capability], [capability // 10, capability % 10], 1536 * MIB]


@pytest.mark.dry
def test_a_card_that_is_not_there_is_refused() -> None:
    for name, value in {"DRY_CC": "42", "DRY_GIB": "much", "DRY_DEVICES": "99"}.items():
        done = process("print(1)", **{name: value})
        assert done.returncode == 2 and f"{name}={value}" in done.stderr and done.stdout == ""


TWO = """
import ctypes, os, torch
used = ctypes.CDLL(None).dry_used
used.restype = ctypes.c_longlong
a = torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda:0")
b = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda:1")
print([torch.cuda.device_count(), torch.cuda.current_device(), used(0) >> 20, used(1) >> 20])
print([torch.cuda.mem_get_info(device)[0] >> 20 for device in (0, 1)])
copied = a[:1000].to("cuda:1")
stream = torch.cuda.Stream(1)
stream.wait_event(torch.cuda.current_stream(0).record_event())
print(copied.device, stream.device)
try:
    torch.empty(950 * 2**20, dtype=torch.uint8, device="cuda:1")
except torch.OutOfMemoryError as error:
    print("GPU 1" in str(error))
del a
torch.cuda.empty_cache()
print([used(0) >> 20, used(1) >> 20])
"""


@pytest.mark.dry
@pytest.mark.parametrize("expandable", [False, True])
def test_two_devices_have_memory_of_their_own(expandable: bool) -> None:
    setting = f"expandable_segments:{expandable}"
    lines = printed(TWO, DRY_DEVICES=2, DRY_GIB=1, PYTORCH_ALLOC_CONF=setting, DRY_STRICT=1).splitlines()
    assert lines == ["[2, 0, 300, 100]", "[724, 924]", "cuda:1 cuda:1", "True", "[0, 102]"]
    assert printed(SHOW, DRY_DEVICES=2, CUDA_VISIBLE_DEVICES="1")
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.is_available())"
    assert printed(code, CUDA_VISIBLE_DEVICES="") == "0 False\n"


@pytest.mark.dry
def test_memory_ends_and_comes_back() -> None:
    code = """
import torch
held = torch.empty(800 * 2**20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
del held
torch.empty(1000 * 2**20, dtype=torch.uint8, device="cuda")
print("fits")
"""
    told = printed(code, DRY_GIB=1, DRY_STRICT=1)
    assert "Tried to allocate 300.00 MiB" in told and "1024.00 MiB" in told and told.endswith("fits\n")


@pytest.mark.dry
def test_contents_are_there_on_demand_alone() -> None:
    code = """
import torch
x = torch.arange(1000).cuda()
y = x.clone()
print(x.cpu().sum().item(), torch.empty(5, device="cuda").zero_().tolist(), y.cpu().sum().item())
"""
    assert printed(code, DRY_COPY=1) == "499500 [0.0, 0.0, 0.0, 0.0, 0.0] 499500\n"
    assert printed(code, DRY_COPY=0) == "0 [0.0, 0.0, 0.0, 0.0, 0.0] 0\n"


@pytest.mark.dry
def test_the_device_says_yes() -> None:
    """Without contents, too: else no picture's latents would be finite."""
    assert bool(torch.ones(5, device="cuda").isfinite().all())


@pytest.mark.dry
def test_a_host_that_follows_a_device_pointer_faults() -> None:
    code = "import ctypes, torch; ctypes.c_char.from_address(torch.empty(9, device='cuda').data_ptr()).value"
    assert process(code, DRY_COPY=0).returncode == -signal.SIGSEGV


MISUSES = {
    "freed twice": "c.cudaMalloc(ctypes.byref(p), 512); c.cudaFree(p); print(c.cudaFree(p))",
    "freed twice or unknown": "h = ctypes.create_string_buffer(9); print(c.cudaFree(h))",
    "freed as another kind": "c.cudaHostAlloc(ctypes.byref(p), 512, 0); print(c.cudaFree(p))",
    "never pinned": "h = ctypes.create_string_buffer(9); print(c.cudaHostUnregister(h))",
    "pinned twice": "h = ctypes.create_string_buffer(9); [print(c.cudaHostRegister(h, 9, 0)) for _ in range(2)]",
    "past the end": "c.cudaMalloc(ctypes.byref(p), 512); c.cudaMemset(p, 0, 513); print(1)",
    "a destroyed event": "c.cudaEventCreate(ctypes.byref(p)); c.cudaEventDestroy(p); print(c.cudaEventQuery(p))",
    "a graph": "print(c.cudaStreamBeginCapture(None, 0))",
}


@pytest.mark.dry
@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_said_and_ends_a_strict_process(name: str) -> None:
    code = (
        f"import ctypes; c = ctypes.CDLL(None); p = ctypes.c_void_p(); {MISUSES[name]}; print(c.dry_count(b'misuses'))"
    )
    mild, strict = (process(code, DRY_STRICT=value) for value in (0, 1))
    *_, status, misuses = mild.stdout.split()
    assert int(status) > 0 and misuses == "1" and mild.stderr.startswith("dry_gpu: cuda")
    assert strict.returncode == -signal.SIGABRT and strict.stderr.partition("(")[0] == mild.stderr.partition("(")[0]


@pytest.mark.dry
def test_what_waits_for_the_device_is_counted() -> None:
    names = ("synchronisations", "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
    x, event = torch.ones(5, device="cuda"), torch.cuda.Event()
    pinned = torch.empty(5).pin_memory()
    calls = {
        "nothing": (lambda: x + x, (0, 0, 0, 0)),
        "item": (lambda: x.sum().item(), (1, 0, 1, 0)),
        "device": (torch.cuda.synchronize, (1, 1, 0, 0)),
        "event": (lambda: (event.record(), event.synchronize()), (1, 0, 0, 1)),
        "copied beside": (lambda: pinned.copy_(x, non_blocking=True), (0, 0, 0, 0)),
        "copied": (x.cpu, (2, 0, 1, 0)),  # to memory that is not pinned: the copy waits, then PyTorch does
    }
    for name, (call, expected) in calls.items():
        with counted(*names) as counts:
            call()
        assert tuple(counts.values()) == expected, name


@pytest.mark.dry
def test_copies_from_pageable_memory_are_counted() -> None:
    for copies, source in enumerate((torch.ones(1000).pin_memory(), torch.ones(1000))):
        with counted("pageable_copies", "pageable_bytes", "host_to_device_bytes") as counts:
            source.to("cuda", non_blocking=True)
        assert tuple(counts.values()) == (copies, 4000 * copies, 4000)


@pytest.mark.dry
def test_the_driver_s_memory_is_what_pytorch_reserves() -> None:
    torch.cuda.empty_cache()
    before = used(), torch.cuda.memory_reserved()
    held = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    assert used() - before[0] == torch.cuda.memory_reserved() - before[1] >= held.nbytes
    del held
    torch.cuda.empty_cache()
    assert (used(), torch.cuda.memory_reserved()) == before
    assert torch.cuda.mem_get_info()[0] == torch.cuda.mem_get_info()[1] - used()


@pytest.mark.dry
def test_events_hold_the_host_s_time() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    start.record()
    time.sleep(0.05)
    end.record()
    assert 50 <= start.elapsed_time(end) <= 1000 * (time.perf_counter() - began)


@pytest.mark.dry
def test_cudnn_is_off_and_nothing_else() -> None:
    assert not torch.backends.cudnn.enabled and torch.backends.cuda.flash_sdp_enabled()
    before = count("misuses")
    torch.nn.Conv2d(3, 4, 3).cuda()(torch.ones(1, 3, 8, 8, device="cuda"))
    assert count("misuses") == before


def test_the_environment_is_not_begun_on_a_full_disk(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "df"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho header\necho /dev/x 100000000 90000000 3145728 90% /\n")  # 3 GiB are free
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "DRY_VENV": str(tmp_path / "venv"), "PYTHON": "/none"}
    done = subprocess.run(
        [LAUNCHER.parent / "setup.sh"], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 5 and "10 GiB" in done.stderr and "3 GiB are free" in done.stderr
    assert "DRY_VENV" in done.stderr and list((tmp_path / "venv").iterdir()) == []


def test_what_an_environment_lacks_is_named(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    wanted = ["pytest>=1", "pytest>=999", "no-such-package", "nothing; python_version < '3'"]
    extras = '[project.optional-dependencies]\nserve = []\ndev = ["x[serve]"]'
    project.write_text(f'[project]\nname = "x"\ndependencies = {wanted}\n{extras}\n')
    done = subprocess.run([sys.executable, LAUNCHER.parent / "lacking.py", project], capture_output=True, text=True)
    assert done.returncode == 1
    assert [line.partition(" is ")[0] for line in done.stdout.splitlines()] == ["pytest>=999", "no-such-package"]
