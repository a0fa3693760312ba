"""Describe the machine, library versions and variables that change what is computed, to accompany measurements."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from simpletune.system.options import UserError, plural

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes", "optimum-quanto")

OF_ACCELERATE, TAKEN_TOO = "ACCELERATE_", ("FORK_LAUNCHED", "DIFFUSERS_ATTN_BACKEND")
MEANS_YES = ("y", "yes", "t", "true", "on", "1")  # accelerate's own list
MEANS_NOTHING = ("", "n", "no", "f", "false", "off", "0", "none", "default", "auto")
DECIDES = {  # what accelerate would take from a variable, and what decides it here
    "ACCELERATE_MIXED_PRECISION": "precision.compute",
    "ACCELERATE_DOWNCAST_BF16": "precision.compute",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "train.gradient_accumulation",
    "ACCELERATE_GRADIENT_CLIPPING": "train.clip_norm",
    "ACCELERATE_DYNAMO_BACKEND": "speed.compile",
    "ACCELERATE_TORCH_DEVICE": "device",
    "DIFFUSERS_ATTN_BACKEND": "speed.attention",
}
REFUSED = {  # other ways to divide a run, which have no setting here
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_FSDP": "accelerate's FSDP",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "accelerate's parallelism",
    "ACCELERATE_USE_SAGEMAKER": "SageMaker's data parallelism",
}
USE_CPU = "ACCELERATE_USE_CPU"
DEFAULTS = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_LOG_LEVEL": "INFO"}
CHANGES = {  # variables that change numbers or memory, and where: on a device, or in compiled code
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "cuda",
    "NVIDIA_TF32_OVERRIDE": "cuda",
    "CUBLAS_EMULATE_SINGLE_PRECISION": "cuda",
    "CUBLAS_EMULATION_STRATEGY": "cuda",
    "PYTORCH_TUNABLEOP_ENABLED": "cuda",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "cuda",
    "TRITON_F32_DEFAULT": "cuda",
    "TRITON_INTERPRET": "cuda",
    "ONEDNN_DEFAULT_FPMATH_MODE": "cpu",
    "DNNL_DEFAULT_FPMATH_MODE": "cpu",
    "TORCH_COMPILE_DISABLE": "compiled",
    "TORCHDYNAMO_DISABLE": "compiled",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "compiled",
    "TORCH_COMPILE_OVERRIDE_BACKENDS": "compiled",
}
CHANGE_LAST_BITS = (  # by other kernels or another order of sums: recorded only
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DISABLE_FAST_MM", "TORCH_LINEAR_FLATTEN_3D", "TORCH_MKLDNN_MATMUL_MIN_DIM", "TORCH_MKLDNN_MATMUL_MIN_SIZE",
    "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_LINALG_PREFER_CUSOLVER", "TORCH_CUDNN_USE_HEURISTIC_MODE_B",
    "TORCH_CUDNN_V8_API_DISABLED", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NCCL_ALGO", "NCCL_PROTO",
)  # fmt: skip
ZERO_CHANGES = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_EMULATE_SINGLE_PRECISION")  # their 0 is not the default


def take_from_accelerate() -> dict[str, str]:
    """Remove the variables from which accelerate and diffusers take settings, and return those removed so far."""
    # ``accelerate launch`` sets them from its arguments and its default_config.yaml, shells and images from older work.
    # They are read on import, when an Accelerator is made, and in between.
    for name in [each for each in os.environ if each.startswith(OF_ACCELERATE) or each in TAKEN_TOO]:
        _taken[name] = os.environ.pop(name)
    return _taken


_taken: dict[str, str] = {}


def settle_variables(device: str, compiles: bool) -> list[str]:
    """Check the variables by which accelerate or torch would compute something else than the configuration says.

    Args:
        device: type of the device that the configuration chose.
        compiles: the configuration asks for compiled code.

    Returns:
        A line for each that is not used, or that changes what torch computes.

    Raises:
        UserError: one asks for what the configuration cannot say.
    """
    taken, lines = dict(take_from_accelerate()), []
    _taken.clear()
    for name, value in sorted(taken.items()):
        asks = value.strip().lower() in MEANS_YES
        if asks and (name in REFUSED or (name == USE_CPU and device != "cpu")):
            os.environ |= taken  # as it was for the next run of this process
            raise UserError(
                f"{name}={value}: {REFUSED[name]} is not used here; the configuration decides what is trained. Unset "
                f"{name} (train.fsdp divides weights between cards)"
                if name in REFUSED
                else f"device: the run was to use {device}, but {name}={value} asks for the cpu. Unset {name}, or set "
                "device=cpu"
            )
        if value.strip().lower() not in MEANS_NOTHING and DEFAULTS.get(name) != value and name != USE_CPU:
            lines.append(f"{name}={value} is not used: {DECIDES.get(name, 'the configuration')} decides")
    here = (device, "compiled") if compiles else (device,)
    for name, value in variables().items():
        means = value.strip().lower() not in MEANS_NOTHING or (name in ZERO_CHANGES and value.strip())
        if CHANGES.get(name) in here and means:
            what = "how memory is kept" if "MEMORY" in name else "what is computed"
            lines.append(
                f"{name}={value} changes {what}, whatever the configuration says. Unset it unless that is meant"
            )
    return lines


def variables() -> dict[str, str]:
    """Return the variables that change what torch computes, as they are set."""
    return {name: os.environ[name] for name in (*CHANGES, *CHANGE_LAST_BITS) if name in os.environ}


NUMERIC = {"torch": "torch", "cuda": "CUDA", "cudnn": "cuDNN"}  # what computes, and how it is written


def numeric_versions() -> dict[str, str | None]:
    """Return the versions of what computes, another of which may give other last bits; None if this torch has no
    CUDA."""
    import torch

    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": None if cudnn is None else str(cudnn)}


def describe_machine() -> dict[str, str]:
    """Return the device, versions, and variables that change what torch computes (left out if none is set)."""
    import torch

    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"
    else:
        threads = torch.get_num_threads()
        device = f"{plural(threads, 'CPU thread')} ({cpu_name()})"
    found = {
        "device": device,
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {version_or_none(name)}" for name in LIBRARIES),
    }
    found |= {name: text for name, text in numeric_versions().items() if name != "torch" and text is not None}
    if given := variables():
        found["variables"] = ", ".join(f"{name}={value}" for name, value in given.items())
    return found


def version_or_none(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:  # only int8-quanto needs optimum-quanto
        return None


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
