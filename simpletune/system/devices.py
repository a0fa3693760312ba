"""Choose the device of a run, and never fall back to the CPU silently."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from simpletune.system.console import say
from simpletune.system.environment import take_from_accelerate
from simpletune.system.options import UserError
from simpletune.system.threads import prepare_threads

if TYPE_CHECKING:
    import torch

ALLOCATOR = "PYTORCH_ALLOC_CONF"
EXPANDABLE, FIXED = "expandable_segments:True", "expandable_segments:False"
BF16_FROM = (8, 0)  # the lowest CUDA compute capability whose tensor cores multiply bf16
CUDA_13_FROM = (7, 5)  # the lowest that torch's CUDA 13 builds support
CUDA_12_6 = "SIMPLETUNE_TORCH_INDEX=https://download.pytorch.org/whl/cu126"  # the builds for older cards


def prepare_environment() -> None:
    """Set environment variables that torch and CUDA read at start: threads and expandable memory segments; remove those
    that accelerate reads when it is imported.

    Segments of fixed size fragment when image shapes alternate. The user's own settings are respected.
    """
    prepare_threads()
    take_from_accelerate()
    if ALLOCATOR not in os.environ and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ[ALLOCATOR] = EXPANDABLE
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # suppresses the profiler's messages
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its import warns about hub kernels
    # Pillow warns of large images and odd tags without their names; what it refuses is reported with the name.
    warnings.filterwarnings("ignore", module=r"PIL\b|pillow_heif\b")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)


def is_under_wsl(release: str | None = None) -> bool:
    """Return whether a Linux of this kernel release (None: this one) runs inside Windows."""
    return "microsoft" in (platform.release() if release is None else release).lower()


def give_up_expandable_segments() -> None:
    """Allocate fixed segments in this process and its children, if torch's first allocation in expandable ones fails.

    Only tried under WSL, where some drivers refuse it (pytorch issue 192330), and in a child process, because the
    failure may leave the device unusable.
    """
    import torch

    given = os.environ.get(ALLOCATOR, "")
    if EXPANDABLE not in given or not is_under_wsl():
        return
    trial = [sys.executable, "-c", "import torch; torch.empty(2**21, dtype=torch.uint8, device='cuda')"]
    try:
        subprocess.run(trial, check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        os.environ[ALLOCATOR] = given.replace(EXPANDABLE, FIXED)
        torch.cuda.memory._set_allocator_settings(os.environ[ALLOCATOR])
        say("memory  expandable segments fail here (WSL): fixed ones, which fragment when picture shapes alternate")


def driver_version() -> str | None:
    """Ask nvidia-smi for the NVIDIA driver's version; None if it does not answer."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None


def choose_device(asked: str, compute: str, is_demo: bool) -> tuple[torch.device, str]:
    """Choose the device and describe the reason.

    Args:
        asked: auto, cuda or cpu.
        compute: data type of matmuls: bf16, fp16, fp32, or auto for what the device can do.
        is_demo: the model is the bundled demo model, which the CPU may train unasked.

    Raises:
        UserError: says why no GPU is usable.
    """
    import torch

    if asked == "cpu":
        return torch.device("cpu"), "cpu (device: cpu)"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        _require_known_card(
            (major, minor), torch.cuda.get_arch_list(), f"{torch.__version__}, CUDA {torch.version.cuda}"
        )
        if compute == "bf16" and (major, minor) < BF16_FROM:  # torch would emulate it many times slower
            raise UserError(
                f"precision.compute: bf16 needs a card of sm_80 or newer, but {torch.cuda.get_device_name()} is "
                f"{sm((major, minor))}. Use precision.compute=auto or fp16"
            )
        # torch would prefer cuDNN's attention on Hopper and datacenter Blackwell. Its backward pass has given NaN and
        # wrong gradients (pytorch issue 196678, cudnn-frontend issue 160), so it runs only if asked for by name.
        torch.backends.cuda.enable_cudnn_sdp(False)
        give_up_expandable_segments()
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        return torch.device("cuda", torch.cuda.current_device()), (
            f"{torch.cuda.get_device_name()} ({sm((major, minor))}, {gib:.1f} GiB)"
        )
    driver = driver_version()
    if driver is not None:
        raise UserError(
            f"device: nvidia-smi works (driver {driver}), but torch {torch.__version__} (CUDA {torch.version.cuda}) "
            "finds no GPU: the driver is too old for this build, or the build is for the CPU. CUDA 13 builds need "
            "driver 580 or newer. Update the driver, or install a matching build (SIMPLETUNE_TORCH_INDEX, "
            "docs/how-to/install.md)"
        )
    if is_demo and asked == "auto":
        return torch.device("cpu"), "cpu (no GPU; the demo model is small)"
    if is_demo:
        raise UserError("device: no NVIDIA GPU was found. Use a machine with a GPU, or device=auto")
    raise UserError(
        "device: no NVIDIA GPU was found, and this is not the demo model. "
        "Use a machine with a GPU, or set device=cpu and accept seconds to minutes per step"
    )


def use_deterministic(on: bool) -> None:
    """Make torch use only algorithms that sum in a fixed order, or any; a RuntimeError then names an operation that has
    none. Not only warned of, because attention would then stay as it is."""
    import torch

    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses products without it
        # Filled, unread memory would show errors, at the price of time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.deterministic = on


def sm(capability: Sequence[int]) -> str:
    """Name a CUDA compute capability: (8, 9) is sm_89."""
    return "sm_" + "".join(map(str, capability))


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the CUDA compute capability of a device; None for the CPU."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _require_known_card(capability: tuple[int, int], built_for: list[str], build: str) -> None:
    """Check that torch was built for the card: for its major version, but not a newer one, or with usable PTX.

    ``built_for`` is ``torch.cuda.get_arch_list()``: ``sm_80``, ``sm_90a``, ``compute_90``, ...; empty if unknown.
    """
    known = []
    for entry in built_for:
        kind, _, digits = entry.partition("_")
        digits = digits.rstrip("af")
        if digits.isdigit():
            known.append((kind, (int(digits[:-1]), int(digits[-1]))))
    fits = [of <= capability and (kind == "compute" or of[0] == capability[0]) for kind, of in known]
    if not known or any(fits):
        return
    older = capability < min(of for _, of in known)
    remedy = (
        f"CUDA 13 builds support {sm(CUDA_13_FROM)} (T4) and newer. Install a CUDA 12.6 build for older cards: "
        f"{CUDA_12_6} (docs/how-to/install.md)"
        if older
        else "Install a newer torch for this card (SIMPLETUNE_TORCH_INDEX, docs/how-to/install.md)"
    )
    raise UserError(
        f"device: this GPU is {sm(capability)}, but torch {build} is built for {', '.join(built_for)}. {remedy}"
    )
