"""``memory``: peak memory of SD3 Medium's training step at its real size: a baseline and one change at a time.

It needs no weights, because memory does not depend on their values. Each row is predicted by running the step on fake
tensors and, if there is a GPU, measured in its own process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.table import Results, describe_machine
from simpletune.config.compute import settle_compute
from simpletune.config.load import read_config
from simpletune.config.schema import TrainConfig
from simpletune.system.options import Json

CONFIG = Path("configs/more/sd3_medium_lora_r16_int8.json")
ENOUGH = ("schedule.warmup_steps=0", "device=auto", "memory.modulation=resident")  # rows name the plan
PLAN = ("memory.modulation=plan",)
FULL = (
    "adapter.method=full", "precision.weights=bf16", "optimizer.name=adamw8bit", "memory.optimizer_in_backward=true",
    "train.clip=per_parameter", "train.gradient_accumulation=1",
)  # fmt: skip
STREAMED = ("memory.resident_blocks=0",)
HOST = ("memory.offload_checkpoint_inputs=true",)
KEPT = ("memory.keep_attention=all",)
ALONE = ("memory.feed_forward=alone",)
TILED = ("memory.feed_forward=1024",)
SMALL = ("adapter.dtype=bf16", "optimizer.name=adamw8bit")
TILES = ("memory.vae_tile=512",)
PX512 = ("data.resolution=512",)
BATCH4 = ("train.batch_size=4",)


@dataclass(frozen=True)
class Row:
    """One configuration of the grid.

    Args:
        overrides: of the baseline's file.
        target_mib: limit that the peak should not exceed, or None.
        whole: predict the whole job by stage instead of the training step.
    """

    overrides: tuple[str, ...]
    target_mib: int | None = None
    whole: bool = False


NF4 = ("precision.weights=nf4",)
BF16 = ("precision.weights=bf16",)
ROWS: dict[str, Row] = {
    "LoRA r16 int8, plan, small states": Row((*PLAN, *SMALL), 1950),
    "LoRA r16 nf4, plan, small states": Row((*PLAN, *SMALL, *NF4), 1350),
    "LoRA r16 int8, plan, small states, streamed": Row((*PLAN, *SMALL, *STREAMED, *HOST), 800),
    "LoRA r16 nf4, plan, small states, streamed, feed-forward in tiles": Row(
        (*PLAN, *SMALL, *NF4, *STREAMED, *HOST, *TILED), 400
    ),
    "full bf16, adamw8bit in backward": Row(FULL, 8600),
    "full bf16, adamw8bit in backward, streamed": Row((*FULL, *STREAMED), 2000),
    # One change at a time, from LoRA r16 int8 with the plan, fp32 adapter and adamw, at 1024 px.
    "LoRA r16 int8, plan": Row(PLAN),
    "LoRA r16 nf4, plan": Row((*PLAN, *NF4)),
    "LoRA r16 int8, plan, streamed": Row((*PLAN, *STREAMED)),
    "LoRA r16 int8, resident modulation": Row(()),
    "LoRA r16 int8, whole position table": Row((*PLAN, "memory.crop_positions=false")),
    "LoRA r16 int8, plan, no checkpointing": Row((*PLAN, "memory.checkpointing=none")),
    "LoRA r16 int8, plan, 12 blocks checkpointed": Row((*PLAN, "memory.checkpointing=12")),
    "LoRA r16 int8, plan, attention kept": Row((*PLAN, *KEPT)),
    "LoRA r16 int8, plan, feed-forward alone": Row((*PLAN, *ALONE)),
    "LoRA r16 int8, plan, only feed-forward recomputed": Row((*PLAN, "memory.checkpointing=feed_forward")),
    "LoRA r16 int8, plan, checkpoint inputs on the host": Row((*PLAN, *HOST)),
    "LoRA r16 int8, plan, checkpoint inputs and attention on the host, feed-forward alone": Row(
        (*PLAN, *HOST, *KEPT, *ALONE)
    ),
    "LoRA r16 int8, plan, 12 blocks resident": Row((*PLAN, "memory.resident_blocks=12")),
    "LoRA r16 int8, plan, streamed, checkpoint inputs on the host": Row((*PLAN, *STREAMED, *HOST)),
    "LoRA r16 int8, plan, small states, streamed, feed-forward in tiles": Row(
        (*PLAN, *SMALL, *STREAMED, *HOST, *TILED)
    ),
    "LoRA r16 int8, plan, bf16 adapter": Row((*PLAN, "adapter.dtype=bf16")),
    "LoRA r16 int8, plan, adamw8bit": Row((*PLAN, "optimizer.name=adamw8bit")),
    "LoRA r64 int8, plan": Row((*PLAN, "adapter.rank=64")),
    "LoRA r16 bf16, plan": Row((*PLAN, *BF16)),
    "LoRA r16 int8-quanto, plan": Row((*PLAN, "precision.weights=int8-quanto")),
    "LoRA r16 nf4 without double quantisation, plan": Row((*PLAN, *NF4, "precision.double_quantisation=false")),
    "LoRA r16 nf4, plan, streamed, checkpoint inputs on the host": Row((*PLAN, *NF4, *STREAMED, *HOST)),
    "LoRA r16 int8, plan, batch 4": Row((*PLAN, *BATCH4)),
    "LoRA r16 int8, plan, 512 px": Row((*PLAN, *PX512)),
    "LoRA r16 int8, plan, 512 px, batch 4": Row((*PLAN, *PX512, *BATCH4)),
    "LoRA r16 nf4, plan, 512 px": Row((*PLAN, *NF4, *PX512)),
    "LoRA r16 int8, plan, streamed, 512 px": Row((*PLAN, *STREAMED, *PX512)),
    "LoRA r16 bf16, resident modulation": Row(BF16),
    "LoRA r16 int8-quanto, resident modulation": Row(("precision.weights=int8-quanto",)),
    # Full fine-tuning, one change at a time.
    "full bf16, adamw8bit after backward": Row(("adapter.method=full", *BF16, "optimizer.name=adamw8bit")),
    "full bf16, adamw after backward": Row(("adapter.method=full", *BF16, "optimizer.name=adamw")),
    "full bf16, adamw_bf16 after backward": Row(("adapter.method=full", *BF16, "optimizer.name=adamw_bf16")),
    "full bf16, adafactor in backward": Row((*FULL, "optimizer.name=adafactor")),
    "full bf16, adamw8bit in backward, 512 px": Row((*FULL, *PX512)),
    "full bf16, adamw8bit in backward, batch 4": Row((*FULL, *BATCH4)),
    "full bf16, adamw8bit in backward, streamed, 512 px": Row((*FULL, *STREAMED, *PX512)),
    "full bf16, adamw8bit in backward, streamed, checkpoint inputs on the host": Row(
        (*FULL, *STREAMED, *HOST),
    ),
    "whole job: LoRA r16 int8, plan, small states": Row((*PLAN, *SMALL), whole=True),
    "whole job: LoRA r16 int8, plan, small states, tiles of 512 px": Row((*PLAN, *SMALL, *TILES), 3072, whole=True),
    "whole job: full bf16, adamw8bit in backward, tiles of 512 px": Row((*FULL, *TILES), whole=True),
}  # fmt: skip
COLUMNS = {
    "what": "", "predicted_mib": "predicted peak, MiB", "target_mib": "target, MiB", "measured_mib": "measured, MiB",
    "error": "error", "reserved_mib": "reserved, MiB", "host_mib": "host memory for levers, MiB",
    "rss_mib": "process's peak RSS, MiB", "at": "peak at",
}  # fmt: skip
WHOLE_JOB = "The whole job, by stage"
STAGES = {
    "what": "", "text": "text, MiB", "latents": "latents, MiB", "train": "train, MiB", "validate": "validate, MiB",
    "predicted_mib": "the job's predicted peak, MiB", "target_mib": "target, MiB", "at": "peak at",
}  # fmt: skip
ABOUT = """\
SD3 Medium's transformer at its real size with uninitialised weights; 1024 px, batch 1, 333 text tokens, LoRA on
attention, gradient checkpointing of all blocks, unless a row says otherwise. *Small states*: LoRA weights in bf16 with
8-bit AdamW; the streamed LoRA row with a target also keeps the checkpoint inputs on the host. *Predicted*: peak bytes
of the training step on fake tensors, with the workspaces of an sm_89 card (L4), without the CUDA context. *Measured*:
`torch.cuda.max_memory_allocated` of four steps; empty: not yet measured. The first six rows have targets. The second
table also predicts the other stages, with an allowance for cuDNN's workspaces for convolutions."""
SM_89 = (8, 9)


def config_of(overrides: tuple[str, ...], capability: tuple[int, int] | None = None) -> TrainConfig:
    """Return a row's configuration; on a card, with the type that it computes in.

    Raises:
        ConfigError: the card lacks what the row needs.
    """
    alone = any(override.startswith("concept=") for override in overrides)
    trained_on = "data=null" if alone else "data.path=demo:pictures"
    config, _ = read_config(CONFIG, [*ENOUGH, *overrides, trained_on])
    return config if capability is None else settle_compute(config, capability)


def predict(overrides: tuple[str, ...]) -> Json:
    """Predict one row on fake tensors."""
    from simpletune.estimate.simulate.simulate import simulate

    report = simulate(config_of(overrides), capability=SM_89)
    return {
        "predicted_mib": round(report.peak.bytes / 2**20),
        "by_kind_mib": {kind: round(size / 2**20, 1) for kind, size in report.peak.by_kind.items()},
        "host_mib": round(report.host_bytes / 2**20),
        "at": f"{report.peak.phase} {report.peak.module}".strip(),
        "seconds_of_prediction": round(report.seconds, 1),
    }


def predict_job(overrides: tuple[str, ...]) -> Json:
    """Predict one row of the whole job on fake tensors."""
    from simpletune.estimate.simulate.reports import with_workspaces
    from simpletune.estimate.simulate.simulate_stages import simulate_parts

    snapshots = with_workspaces(simulate_parts(config_of(overrides), capability=SM_89), SM_89).stages
    stage, peak = max(snapshots.items(), key=lambda item: item[1].bytes)
    return {
        "table": WHOLE_JOB,
        **{name: round(snapshot.bytes / 2**20) for name, snapshot in snapshots.items()},
        "predicted_mib": round(peak.bytes / 2**20),
        "by_kind_mib": {kind: round(size / 2**20, 1) for kind, size in peak.by_kind.items()},
        "at": f"{stage}: {peak.phase} {peak.module}".strip(),
    }


def run(folder: Path, minutes: float, only: str = "") -> Path:
    """Measure the missing rows, each in its own process, and write their table."""
    results = Results(folder / "memory", COLUMNS)

    def told(row: Json) -> str:
        measured = f", measured {row['measured_mib']}" if "measured_mib" in row else ""
        return f"predicted {row['predicted_mib']:,} MiB{measured}"

    results.measure({name: partial(_in_process, row) for name, row in ROWS.items()}, minutes, only, told)
    return results.write_table("Memory of SD3 Medium's training step", ABOUT, describe_machine(), {WHOLE_JOB: STAGES})


def _in_process(row: Row) -> Json:
    """Measure a row in its own process.

    Raises:
        CalledProcessError: the process failed; its standard error is shown.
    """
    command = [sys.executable, "-m", "benchmarks.memory_row", json.dumps(row.overrides), *["whole"] * row.whole]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {**json.loads(done.stdout.splitlines()[-1]), "target_mib": row.target_mib}
