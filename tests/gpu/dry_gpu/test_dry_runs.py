"""Whole runs on `device=cuda` under the stub of CUDA: they end, leave what a run leaves, and say what is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import failpoints
import pytest
from blocks import write_pipeline
from dry import CAPABILITIES, printed, process
from nine_channels import to_nine_channels
from tiny_runs import run_on

from benchmarks.tiny_models import tiny_sd3
from simpletune.engine.memory.cuda_libraries import frees_workspaces
from simpletune.runs.folder import read_metrics, read_summary
from simpletune.system.options import UserError

pytestmark = pytest.mark.dry
GENERATED = {"prompts": ["a red disc"], "steps": 2, "loss_samples": 2}


@pytest.fixture
def three_blocks(tiny_config: dict, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The tiny run on a model of three blocks, for streaming."""
    folder = tmp_path_factory.mktemp("three") / "pipeline"
    write_pipeline(folder)
    return tiny_config | {"model": tiny_config["model"] | {"pretrained": str(folder)}}


def whole(run: Path) -> dict:
    """The summary of a run that has ended with everything, and without a warning but that its losses are 0: the stub
    computes no values."""
    summary = read_summary(run)
    assert summary is not None and summary["complete"]
    assert [warning for warning in summary["warnings"] if "trained nothing" not in warning] == []
    assert (run / "README.md").is_file() and Path(summary["output"]).exists()
    return summary


def program(
    config: dict, file: Path, before: str = "", words: tuple[str, ...] = ("--force",), **environment: object
) -> subprocess.CompletedProcess[str]:
    """`simpletune train` in a process of its own, whose device holds nothing else."""
    file.write_text(json.dumps(config))
    verb = ["train", str(file), *words]
    code = f"{before}\nfrom simpletune.apps.cli.main import main; raise SystemExit(main({verb!r}))"
    return process(code, **environment)


def test_a_second_start_finds_all_in_the_cache_and_ends_whole(tiny_config: dict, tmp_path: Path) -> None:
    """It encodes nothing: that stage's peak on the device is 0."""
    tiny_config["output"] |= {"cache": str(tmp_path / "cache"), "report": True}
    first = run_on(tiny_config, "cuda", name="first", validation=GENERATED)
    assert whole(first) and (first / "report.html").is_file()
    validation = tiny_config["validation"] | GENERATED
    done = program(tiny_config | {"device": "cuda", "validation": validation}, tmp_path / "second.json")
    assert done.returncode == 0, done.stderr
    run = Path(tiny_config["output"]["runs"]) / "tiny"
    summary = whole(run)
    assert (run / "report.html").is_file()
    peaks = {stage: figures["peak_allocated_gib"] for stage, figures in summary["stages"].items()}
    assert peaks["text"] == 0 and peaks["latents"] == 0 and peaks["train"] > 0 and peaks["validate"] > 0
    assert summary["predicted"]["stages"]["train"]["error"] == pytest.approx(0, abs=0.05)


def test_a_run_that_died_is_resumed(tiny_config: dict) -> None:
    parts = {"checkpoint": {"every": 2}, "train": {"steps": 6}}
    failpoints.arm("step.begun", "raise", 4)
    with pytest.raises(failpoints.InjectedError):
        run_on(tiny_config, "cuda", **parts)
    run = run_on(tiny_config, "cuda", "latest", **parts)
    assert whole(run)["attempts"] == 2
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kernel", ["auto", "flash", "efficient", "math"])
def test_every_attention_kernel_trains_and_draws(kernel: str, tiny_config: dict, tmp_path: Path) -> None:
    """The autoencoder's attention has one head, wider than the 256 that flash can do: it needs a kernel of its own."""
    tiny_sd3.build(tmp_path / "pipeline", replace(tiny_sd3.MINIMAL, vae_channels=(8, 8, 8, 264)), seed=1, dtype="fp32")
    tiny_config["model"] |= {"pretrained": str(tmp_path / "pipeline")}
    tiny_config["output"]["cache"] = str(tmp_path / "cache")
    precision = {"weights": "bf16"}
    run = run_on(tiny_config, "cuda", precision=precision, speed={"attention": kernel}, validation=GENERATED)
    assert whole(run)["attention"] == ("flash" if kernel == "auto" else kernel)
    assert len(list((run / "samples").rglob("*.png"))) >= 2


def test_a_kernel_that_is_not_there_is_refused_before_training(tiny_config: dict) -> None:
    with pytest.raises(UserError, match="speed.attention: cudnn cannot compute .*Use auto or math"):
        run_on(tiny_config, "cuda", precision={"weights": "bf16"}, speed={"attention": "cudnn"})


DETERMINISTIC = """
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from simpletune.engine.memory.cuda_libraries import cublas_workspaces, most_multiprocessors
from simpletune.engine.memory.kernel_workspace import flash_backward
from simpletune.system.devices import use_deterministic

capability = torch.cuda.get_device_capability()
live = lambda moment: torch.cuda.memory_stats()[f"requested_bytes.all.{moment}"]

def unexpected(on):
    use_deterministic(on)
    q, k, v = (torch.empty(1, 24, 4429, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    grad = torch.empty_like(out)
    before = live("current")
    torch.cuda.reset_peak_memory_stats()
    out.backward(grad)
    units = most_multiprocessors(capability) if on else None
    return live("peak") - before - flash_backward(grad, q, k, v, out, multiprocessors=units) - 3 * q.nbytes

print(unexpected(False), unexpected(True))
kept, within = cublas_workspaces(capability, 1, deterministic=True)
x, before = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16), live("current")
torch.cuda.reset_peak_memory_stats()
y = x @ x
print(live("peak") - live("current") - within, live("current") - before - y.nbytes - kept)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_deterministic_attention_and_products_take_what_is_predicted(capability: int) -> None:
    assert printed(DETERMINISTIC, DRY_CC=capability).split() == ["0"] * 4


def test_a_deterministic_run_ends_whole(tiny_config: dict, tmp_path: Path) -> None:
    """No operation of training, validation or drawing lacks an algorithm with a fixed order."""
    validation = tiny_config["validation"] | GENERATED
    options = {"precision": {"weights": "int8"}, "speed": {"deterministic": True}, "validation": validation}
    done = program(tiny_config | options | {"device": "cuda"}, tmp_path / "config.json")
    assert done.returncode == 0, done.stderr
    summary = whole(Path(tiny_config["output"]["runs"]) / "tiny")
    assert summary["predicted"]["stages"]["train"]["error"] == pytest.approx(0, abs=0.05)


CHOICE = """
import torch
from simpletune.system.devices import choose_device
choose_device("cuda", "auto", True)
names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
for heads, tokens, width in ((24, 4096 + 333, 64), (1, 4096, 512)):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q = torch.empty(1, heads, tokens, width, device="cuda", dtype=dtype)
        print(names[torch._fused_sdp_choice(q, q, q)])
"""
NEWER = ["flash", "flash", "efficient", "efficient", "efficient", "efficient"]
CHOSEN = {  # the transformer's attention in bf16, fp16 and fp32, then the autoencoder's, whose one head is 512 wide
    75: ["math", "efficient", "efficient", "math", "efficient", "efficient"],
    80: NEWER,
    86: NEWER,
    89: NEWER,
    90: NEWER,
    120: NEWER,
}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_which_attention_pytorch_chooses(capability: int) -> None:
    """By the compute capability, as the real build does; the memory that a run needs follows from it."""
    assert printed(CHOICE, DRY_CC=capability).split() == CHOSEN[capability]


def test_a_run_on_hopper_leaves_cudnn_out_of_attention(tiny_config: dict, tmp_path: Path) -> None:
    """Of the text encoders' and the autoencoder's, too: cuDNN's ends the process under the stub."""
    config = tiny_config | {"device": "cuda", "precision": {"weights": "bf16"}}
    config["validation"] = tiny_config["validation"] | GENERATED
    done = program(config, tmp_path / "config.json", DRY_CC=90)
    assert done.returncode == 0, done.stderr
    assert whole(Path(config["output"]["runs"]) / "tiny")["attention"] == "flash"


FULL = """
import os, torch
from simpletune.engine.kernels.rms_norm import FALLBACK
norm, empty_cache = torch.ops.simpletune.rms_norm, torch.cuda.empty_cache
given = torch.ones(2, 8, 64, device="cuda", dtype=torch.bfloat16), torch.ones(64, device="cuda"), 1e-6
os.environ["DRY_FAIL"] = "cuModuleLoadData=2"
try:
    norm(*given)
except torch.OutOfMemoryError as error:
    print(error)

def make_room():
    del os.environ["DRY_FAIL"]
    empty_cache()

torch.cuda.empty_cache = make_room
norm(*given)
assert not FALLBACK.failed
"""


def test_a_card_without_memory_for_a_kernel_is_full_and_the_kernel_is_not_broken() -> None:
    assert printed(FULL) == "Triton Error [CUDA]: out of memory\n"


UNDER_WSL = "import platform; platform.release = lambda: '5.15.1-microsoft-standard-WSL2'"
MEMORY = {"resident": {"modulation": "resident"}, "plan": {"modulation": "plan"},
          "streamed": {"checkpointing": "all", "resident_blocks": 1, "offload_checkpoint_inputs": True}}  # fmt: skip


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("weights", ["bf16", "int8", "nf4"])
def test_a_lora_trains_over_every_base(weights: str, memory: str, three_blocks: dict) -> None:
    run = run_on(three_blocks, "cuda", precision={"weights": weights}, memory=MEMORY[memory])
    assert whole(run)["stages"]["train"]["peak_allocated_gib"] > 0
    assert run.joinpath("pytorch_lora_weights.safetensors").is_file()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw_bf16", "adamw8bit"])
def test_all_weights_train_in_the_backward_pass(optimizer: str, streamed: bool, three_blocks: dict) -> None:
    memory = MEMORY["streamed"] if streamed else {"checkpointing": "all"}
    changes = {
        "adapter": {"method": "full"}, "precision": {"weights": "bf16"}, "optimizer": {"name": optimizer, "lr": 1e-4},
        "train": {"steps": 4, "clip": "per_parameter"}, "memory": memory | {"optimizer_in_backward": True},
    }  # fmt: skip
    whole(run_on(three_blocks | {"adapter": {}}, "cuda", **changes))


CONVOLUTIONS = {"method": "lora", "rank": 4, "targets": "all_linear", "conv_rank": 2}
XL: dict[str, dict] = {
    "LoRA int8": {"precision": {"weights": "int8"}},
    "LoRA nf4": {"precision": {"weights": "nf4"}, "memory": {"feed_forward": "alone"}},
    "LoRA int8, offloaded": {"precision": {"weights": "int8"}, "memory": MEMORY["streamed"]},
    "convolutions, LoRA int8": {"precision": {"weights": "int8"}, "adapter": CONVOLUTIONS},
    "convolutions, DoRA nf4, offloaded": {
        "precision": {"weights": "nf4"}, "memory": MEMORY["streamed"], "adapter": CONVOLUTIONS | {"method": "dora"}
    },
    "convolutions, LoKr bf16": {
        "precision": {"weights": "bf16"}, "adapter": {"method": "lokr", "factor": 4, "rank": 2, "conv_rank": 2}
    },
    "all in backward": {"precision": {"weights": "bf16"}, "memory": {"optimizer_in_backward": True}},
    "all in backward, offloaded": {
        "precision": {"weights": "bf16"}, "memory": MEMORY["streamed"] | {"optimizer_in_backward": True}
    },
}  # fmt: skip
# The whole is 18 MiB, and 10 where torch frees cuBLAS's workspace. There torch's own convolutions, which stand for
# cuDNN's here, take that workspace too, beside 0.13 MiB of columns.
LEAST, DORA = (-0.015, 0.05) if frees_workspaces() else (-0.01, 0.03)
OLD_XL = ("LoRA nf4", "LoRA int8, offloaded", "convolutions, LoRA int8")


@pytest.mark.parametrize(("how", "card"), [*((how, 89) for how in XL), *((how, 75) for how in OLD_XL)])
def test_sdxl_takes_what_is_predicted(
    how: str, card: int, tiny_config: dict, small_unet: Callable[[str], dict], tmp_path: Path
) -> None:
    """On a simulated L4, and on a T4, whose products are in fp16."""
    train = {"steps": 3, "clip": "per_parameter"}
    config = tiny_config | {"device": "cuda", "model": small_unet("sdxl"), "train": train} | XL[how]
    config |= {"data": config["data"] | {"resolution": 64}}
    if how.startswith("all"):
        config |= {"adapter": {"method": "full"}, "optimizer": {"name": "adamw8bit", "lr": 1e-4}}
    done = program(config, tmp_path / "config.json", DRY_CC=card)
    assert done.returncode == 0, done.stderr
    summary = whole(Path(config["output"]["runs"]) / "tiny")
    most = DORA if "DoRA" in how else 0.01  # half a MiB too much is predicted while gradients are clipped
    assert LEAST <= summary["predicted"]["stages"]["train"]["error"] <= most


# A hole in every sample, where its source says nothing of holes.
HOLES = """
from dataclasses import replace
import torch
from simpletune.stages.step.batch_loader import BatchLoader
honest = BatchLoader._read
def read(self, passes):
    for batch in honest(self, passes):
        b, c, h, w = batch.z_0.shape
        painted = batch.inpainting if batch.inpainting is not None else torch.ones(b, 1 + c, h, w).pin_memory()
        yield replace(batch, inpainting=painted)
BatchLoader._read = lambda self, passes: list(read(self, passes))
"""
NINE = {"LoRA int8": {}, "LoRA int8, offloaded": {}, "all in backward": {"inpainting": True}}


@pytest.mark.parametrize(("how", "card"), [*((how, 89) for how in NINE), ("LoRA int8", 75)])
def test_an_inpainting_unet_takes_what_is_predicted(
    how: str, card: int, tiny_config: dict, small_unet: Callable[[str], dict], tmp_path: Path
) -> None:
    """One that is stored with nine channels, also in fp16 products, and one that is widened."""
    model = small_unet("sdxl") | NINE[how]
    if "inpainting" not in model:
        shutil.copytree(model["unet"], tmp_path / "nine" / "unet")
        model |= {"unet": str(to_nine_channels(tmp_path / "nine") / "unet")}
    config = tiny_config | {"device": "cuda", "model": model, "train": {"steps": 3, "clip": "per_parameter"}} | XL[how]
    config |= {"data": config["data"] | {"resolution": 64}}
    if how.startswith("all"):
        config |= {"adapter": {"method": "full"}, "optimizer": {"name": "adamw8bit", "lr": 1e-4}}
    done = program(config, tmp_path / "config.json", HOLES, DRY_CC=card)
    assert done.returncode == 0, done.stderr
    summary = whole(Path(config["output"]["runs"]) / "tiny")
    assert LEAST <= summary["predicted"]["stages"]["train"]["error"] <= 0.01
    if how.startswith("all"):
        written = json.loads((Path(summary["output"]) / "config.json").read_text())
        assert written["in_channels"] == 9


def test_expandable_segments_that_fail_under_wsl_are_given_up(tiny_config: dict, tmp_path: Path) -> None:
    file, config = tmp_path / "config.json", tiny_config | {"device": "cuda"}
    done = program(config, file, UNDER_WSL, DRY_FAIL="cuMemSetAccess=999")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("expandable segments fail here (WSL)") == 1
    whole(Path(config["output"]["runs"]) / "tiny")


def test_memory_that_cannot_be_pinned_is_pageable(three_blocks: dict, tmp_path: Path) -> None:
    config = three_blocks | {"device": "cuda", "precision": {"weights": "bf16"}, "memory": MEMORY["streamed"]}
    done = program(config, tmp_path / "config.json", DRY_FAIL="cudaHostRegister=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("copies no longer overlap with the computation (out of memory") == 1
    whole(Path(config["output"]["runs"]) / "tiny")


TAKEN = """
import ctypes, sys, torch
sys.path.insert(0, "tests/support")
import failpoints

def take():  # as another program would
    torch.cuda.empty_cache()
    free = ctypes.c_size_t(torch.cuda.mem_get_info()[0])
    assert ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), free) == 0

failpoints.import_libraries_first()
failpoints.arm("step.begun", take)
"""


def test_memory_that_runs_out_is_explained(three_blocks: dict, tmp_path: Path) -> None:
    config = three_blocks | {"device": "cuda", "train": {"steps": 2}, "precision": {"weights": "bf16"}}
    done = program(config, tmp_path / "config.json", TAKEN, DRY_GIB=2)
    said = done.stdout + done.stderr
    assert done.returncode == 5, said
    assert "memory is full" in said and "Tried to allocate" in said and "2.00 GiB" in said
    assert "frozen weights" in said and "trained weights" in said and "start again" in said
    assert "Traceback" not in said


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(three_blocks: dict, tmp_path: Path) -> None:
    config = three_blocks | {"device": "cuda", "adapter": {"method": "full"}}
    config["output"] = config["output"] | {"cache": str(tmp_path / "cache")}
    done = program(config, tmp_path / "config.json", words=(), DRY_GIB=0.1)
    assert done.returncode == 2, done.stderr
    assert "needs" in done.stderr and "has 102" in done.stderr and "--force" in done.stderr
