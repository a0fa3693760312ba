"""``peaks``: peak memory of a training step that a peer measured, beside ours predicted for the same job.

diffusers' model with PEFT's LoRA, which that peer trains, runs the same job on a simulated card (tests/gpu/dry_gpu), so
that what the library costs and what a trainer adds are told apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.dry import LAUNCHER
from benchmarks.memory import FULL, SM_89
from benchmarks.published import PEER, PEER_SD3, PEER_SD15, PEER_SDXL, SD15, SD35, SDXL, SWEEP
from benchmarks.table import Results, describe_machine
from simpletune.config.load import read_config
from simpletune.config.schema import TrainConfig
from simpletune.estimate.simulate.simulate import simulate
from simpletune.system.options import Json, UserError

GIB = 2**30
KOHYA = "SD3.5 Large, LoRA r4, fp8 weights, checkpointed, batch 1"
KOHYA_LORA = "SDXL, LoRA r8 on all linear layers, bf16, checkpointed, 8-bit AdamW"
KOHYA_FULL = "SDXL, full, bf16, checkpointed, Adafactor in the backward pass"
STEPS = 3  # the optimizer's states exist after the first
COLUMNS = {
    "what": "", "published_gib": "published, GiB", "plain_gib": "diffusers + peft, GiB",
    "plain_fp32_gib": "the same, fp32 LoRA, GiB", "predicted_gib": "ours, predicted, GiB",
    "less": "less than published, %", "ours": "our setting",
}  # fmt: skip
ABOUT = f"""\
*Published*: peak memory on an L40S after warm-up, of {SWEEP}: LoRA r128 on to\\_q, to\\_k, to\\_v and to\\_out.0 of
SD3.5 Medium at batch 3, 1024 px, r16 of SD 1.x at batch 1, 512 px, and LoKr of factor 12 on SDXL's attention at batch
1, 1024 px; latents and prompts cached, no validation.
*diffusers + peft*: the allocator's peak of the same step under autocast, with AdamW, the LoRA in bf16 or in fp32, on a
simulated L40S: no hardware, torch's CUDA build over a stub of the CUDA runtime. *Predicted*: the training step's peak
by `simpletune estimate`, without the CUDA context. *Our setting*: the nearest where ours differs; we have no fp8, and
int8 takes as many bytes.

- *SD3.5 Large*: sd-scripts' README (before commit 884fc8c7) names no peak, but cards of 16 GB for its example.
- *SDXL, LoRA r8*: sd-scripts' docs/train_SDXL-en.md (commit 48d368fa) names no peak, but cards of 8 GB for rank 4 to 8.
- *SDXL, full*: the pull request that brought this to sd-scripts
  ([#1259](https://github.com/kohya-ss/sd-scripts/pull/1259)), "10GB"; a user there gives 10.3 for OneTrainer.
- *bf16, all checkpointed*: diffusers and PEFT with an fp32 LoRA take what was published. Autocast keeps inputs of
  products in both types; our layers keep one.
- *None checkpointed*: our blocks keep less than diffusers'. With theirs our step is predicted at 26.5 GiB for SD3.5
  Medium in bf16; autocast and PEFT are most of the rest.
- *int8, fp8*: what the peer's quantisers take beyond that was not taken apart."""


@dataclass(frozen=True)
class Row:
    """A published peak, and our job.

    Args:
        published: GiB.
        config: of the job.
        overrides: for the configuration.
        ours: in what our setting differs.
    """

    published: float
    config: Path
    overrides: tuple[str, ...]
    ours: str = ""

    def read(self) -> TrainConfig:
        """Read the configuration."""
        return read_config(self.config, ["data.path=demo:pictures", *self.overrides])[0]

    @property
    def has_plain(self) -> bool:
        """Whether diffusers' and PEFT's own code does the same: LoRA in bf16, all blocks checkpointed or none."""
        other = ("memory.checkpointing=12", "precision.weights=int8", "adapter.method=lokr", "adapter.method=full")
        return not self.ours and not set(other) & set(self.overrides)


def _rows() -> dict[str, Row]:
    every, none, half = (f"memory.checkpointing={blocks}" for blocks in ("all", "none", "12"))
    kept, int8, nearest = "memory.keep_attention=all", "precision.weights=int8", "int8"
    sd3: Mapping[str, tuple[float, tuple[str, ...], str]] = {
        "bf16, none checkpointed": (34.53, (none,), ""),
        "bf16, 12 of 24 checkpointed": (20.09, (half,), ""),
        "bf16, all checkpointed": (7.62, (every,), ""),
        "bf16, all, attention offloaded": (9.63, (every, kept), "attention kept, on the card"),
        "int8, none checkpointed": (33.61, (none, int8), ""),
        "int8, all checkpointed": (6.53, (every, int8), ""),
        "fp8 with dynamic activations, all checkpointed": (9.09, (every, int8), nearest),
        "fp8 weights, none checkpointed": (35.17, (none, int8), nearest),
        "fp8 weights, all checkpointed": (5.65, (every, int8), nearest),
    }
    sd15: Mapping[str, tuple[float, tuple[str, ...]]] = {
        "bf16, none checkpointed": (2.83, (none,)),
        "bf16, checkpointed": (1.93, (every,)),
        "int8, none checkpointed": (3.04, (none, int8)),
        "int8, checkpointed": (1.74, (every, int8)),
    }
    sdxl: Mapping[str, tuple[float, tuple[str, ...], str]] = {
        "bf16, none checkpointed": (12.98, (none,), ""),
        "bf16, checkpointed": (6.48, (every,), ""),
        "int8, none checkpointed": (13.68, (none, int8), ""),
        "int8, checkpointed": (4.59, (every, int8), ""),
        "fp8 weights, checkpointed": (5.04, (every, int8), nearest),
    }
    kohya = ("adapter.targets=all_linear", "adapter.rank=8", "optimizer.name=adamw8bit", every)
    fused = (*FULL, "optimizer.name=adafactor", every)
    large = (*PEER, "data.resolution=1024", "train.batch_size=1", "adapter.rank=4", every, int8)
    return {
        **{f"SD3.5 Medium, {name}": Row(gib, SD35, (*PEER_SD3, *own), ours) for name, (gib, own, ours) in sd3.items()},
        **{f"SD 1.x, {name}": Row(gib, SD15, (*PEER_SD15, *own)) for name, (gib, own) in sd15.items()},
        KOHYA: Row(14.9, Path("configs/sd35_large_lora_24gb.json"), large, "int8"),
        **{f"SDXL, {name}": Row(gib, SDXL, (*PEER_SDXL, *own), ours) for name, (gib, own, ours) in sdxl.items()},
        KOHYA_LORA: Row(7.45, SDXL, (*PEER, *kohya), "bf16 LoRA"),
        KOHYA_FULL: Row(10.0, SDXL, ("memory.profile=null", *fused)),
    }


ROWS = _rows()


def run(folder: Path, minutes: float, only: str = "") -> Path:
    """Predict the missing rows, and run diffusers' and PEFT's on a simulated card.

    Raises:
        UserError: the simulated card cannot be started, or measured nothing.
    """
    results = Results(folder / "peaks", COLUMNS)
    results.measure(
        {name: partial(measure, name) for name in ROWS}, minutes, only,
        lambda row: f"{row['predicted_gib']} GiB, published {row['published_gib']}",
    )  # fmt: skip
    return results.write_table("Published peaks of memory, and ours", ABOUT, describe_machine())


def measure(name: str) -> Json:
    """Predict a row, and run diffusers' and PEFT's."""
    row = ROWS[name]
    predicted = round(simulate(row.read(), capability=SM_89).peak.bytes / GIB, 2)
    less = round(100 * (1 - predicted / row.published))
    found: Json = {"published_gib": row.published, "predicted_gib": predicted, "ours": row.ours, "less": less}
    if row.has_plain:
        found |= {key: plain_peak(name, wide) for key, wide in (("plain_gib", False), ("plain_fp32_gib", True))}
    return found


def plain_peak(name: str, wide: bool) -> float:
    """Run a row with diffusers and PEFT in a process on a simulated card; return the allocator's peak in GiB."""
    command = [LAUNCHER, "python", "-m", "benchmarks.peaks", name, json.dumps(wide)]
    env = os.environ | {"DRY_GIB": "44.39", "DRY_CC": "89", "DRY_NAME": "NVIDIA L40S"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        raise UserError("peaks: the simulated card measured nothing. See its messages above; make dry prepares it")
    return round(float(json.loads(found[-1])["bytes"]) / GIB, 2)


def main(name: str, wide: str) -> None:
    """Print the peak of a row's step by diffusers and PEFT."""
    import torch

    from benchmarks.host_row import stand_in, theirs
    from simpletune.system.devices import prepare_environment

    prepare_environment()
    torch.backends.cudnn.enabled = False
    operators = torch.library.Library("aten", "IMPL")
    stand_in(operators)
    step = theirs(ROWS[name].read(), json.loads(wide))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        step()
    print(json.dumps({"bytes": torch.cuda.max_memory_allocated()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
