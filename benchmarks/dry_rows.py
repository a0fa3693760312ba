"""The rows of ``dry``: configurations and stages whose memory is measured on a simulated card."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import memory
from benchmarks.memory import BATCH4, BF16, FULL, HOST, NF4, PLAN, PX512, SMALL, STREAMED, TILES
from simpletune.models.sd3.sd3_files import SD35_LARGE, SD35_MEDIUM

FP32 = ("precision.weights=fp32",)
AUTOCAST = (*FP32, "precision.compute=bf16")
NO_BF16 = ("precision.compute=fp32",)  # a card without bf16 computes so only when asked: auto is fp16 there
UNCHECKED = ("memory.checkpointing=none",)

LARGE = (f"model.pretrained={SD35_LARGE}",)
MEDIUM35 = (f"model.pretrained={SD35_MEDIUM}",)
UNET = ("model.family=sd15", "adapter.rank=8", *PX512)
FULL_UNET = ("model.family=sd15", *FULL, *PX512)
XL = ("model.family=sdxl",)
KLEIN = ("model.family=klein",)
GRAPHS = ("speed.graphs=true", "data.aspect=square")  # of one size
ZIMAGE = ("model.family=zimage",)
QWEN = ("model.family=qwen_image", "adapter.targets=attention")
# From prompts alone, at the side of the shipped sliders.
SLIDER = (
    'concept={"directions": [{"target": "a person", "positive": "a person, smiling", "negative": "a person, frowning", '
    '"preserved": ["a landscape"]}], "resolutions": [768]}',
    "adapter.rank=4", "validation.loss_samples=0",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One stage of one configuration.

    Args:
        overrides: of the memory grid's baseline.
        stage: ``text``, ``latents``, ``train`` or ``validate``.
    """

    overrides: tuple[str, ...] = ()
    stage: str = "train"


def px(side: int) -> tuple[str, ...]:
    """Overrides for square pictures."""
    return (f"data.resolution={side}",)


def batch(size: int) -> tuple[str, ...]:
    """Overrides for a batch."""
    return (f"train.batch_size={size}",)


def by(name: str) -> tuple[str, ...]:
    """Overrides for an optimizer."""
    return (f"optimizer.name={name}",)


# The memory grid's training steps, except three not yet measured, one too large for an L4, and two that take 12 GB of
# host memory again.
LEFT_OUT = (
    "LoRA r16 int8, plan, only feed-forward recomputed",
    "LoRA r16 int8, plan, checkpoint inputs and attention on the host, feed-forward alone",
    "LoRA r16 int8, plan, small states, streamed, feed-forward in tiles",
    "full bf16, adamw after backward", "full bf16, adamw8bit in backward, streamed, 512 px",
    "full bf16, adamw8bit in backward, streamed, checkpoint inputs on the host",
)  # fmt: skip
GRID = {name: Row(row.overrides) for name, row in memory.ROWS.items() if not row.whole and name not in LEFT_OUT}
MORE = {
    "LoRA r16 int8, plan, batch 2": Row((*PLAN, *batch(2))),
    "LoRA r16 int8, plan, batch 8": Row((*PLAN, *batch(8))),
    "LoRA r16 int8, plan, 512 px, batch 8": Row((*PLAN, *PX512, *batch(8))),
    "LoRA r16 int8, plan, 768 px": Row((*PLAN, *px(768))),
    "LoRA r16 int8, plan, 1536 px": Row((*PLAN, *px(1536))),
    "LoRA r16 int8, plan, 1536 px, batch 4": Row((*PLAN, *px(1536), *BATCH4)),
    "LoRA r16 nf4, plan, 1536 px, batch 2": Row((*PLAN, *NF4, *px(1536), *batch(2))),
    "LoRA r16 bf16, plan, batch 4, no checkpointing, 512 px": Row((*PLAN, *BF16, *PX512, *BATCH4, *UNCHECKED)),
    "LoRA r16 bf16, plan, no checkpointing": Row((*PLAN, *BF16, *UNCHECKED)),
    "LoRA r128 bf16, plan, batch 2": Row((*PLAN, *BF16, "adapter.rank=128", *batch(2))),
    "LoRA r16 int8, plan, 4 micro-batches": Row((*PLAN, "train.gradient_accumulation=4")),
    "LoRA r16 int8, plan, efficient attention": Row((*PLAN, "speed.attention=efficient")),
    "LoRA r16 int8, plan, lion8bit": Row((*PLAN, *by("lion8bit"))),
    "LoRA r16 int8, plan, adafactor": Row((*PLAN, *by("adafactor"))),
    "LoRA r16 int8, plan, adamw_bf16, bf16 adapter": Row((*PLAN, *by("adamw_bf16"), "adapter.dtype=bf16")),
    "LoRA r16 int8, all linear layers": Row(("adapter.targets=all_linear",)),
    "LoRA r16 fp32": Row(FP32),
    "LoRA r16 fp32, bf16 products": Row(AUTOCAST),
    "LoRA r16 fp32, bf16 products, plan, batch 2": Row((*AUTOCAST, *PLAN, *batch(2))),
    "LoRA r16 fp32, bf16 products, plan, no checkpointing": Row((*AUTOCAST, *PLAN, *UNCHECKED)),
    "LoRA r16 int8, fp32 products, plan": Row((*PLAN, *NO_BF16)),
    "full bf16, adamw8bit in backward, batch 2": Row((*FULL, *batch(2))),
    "full bf16, adamw8bit in backward, batch 8": Row((*FULL, *batch(8))),
    "full bf16, adamw8bit in backward, 1536 px": Row((*FULL, *px(1536))),
    "full bf16, lion8bit in backward": Row((*FULL, *by("lion8bit"))),
    "full bf16, adamw8bit after backward, no checkpointing": Row(
        ("adapter.method=full", *BF16, *by("adamw8bit"), *UNCHECKED)
    ),
    "SD3.5 Large: LoRA r16 int8, plan": Row((*LARGE, *PLAN)),
    "SD3.5 Large: LoRA r16 int8, plan, batch 4": Row((*LARGE, *PLAN, *BATCH4)),
    "SD3.5 Large: LoRA r16 nf4, plan, 512 px": Row((*LARGE, *PLAN, *NF4, *PX512)),
    "SD3.5 Large: LoRA r16 int8, plan, streamed, checkpoint inputs on the host": Row(
        (*LARGE, *PLAN, *STREAMED, *HOST)
    ),
    # What the shipped configurations of SD3.5 set.
    "SD3.5 Large: LoRA r16 int8, plan, 22 blocks resident": Row((*LARGE, *PLAN, "memory.resident_blocks=22")),
    "SD3.5 Large: LoRA r16 int8, plan, checkpoint inputs on the host": Row((*LARGE, *PLAN, *HOST)),
    "SD3.5 Large: LoRA r16 bf16, plan, 28 blocks resident": Row((*LARGE, *PLAN, *BF16, "memory.resident_blocks=28")),
    "SD3.5 Large: LoRA r16 bf16, plan, 18 blocks checkpointed": Row((*LARGE, *PLAN, *BF16, "memory.checkpointing=18")),
    "SD3.5 Large: full bf16, adafactor in backward": Row((*LARGE, *FULL, *by("adafactor"))),
    "SD3.5 Medium: LoRA r16 int8, plan": Row((*MEDIUM35, *PLAN)),
    "SD3.5 Medium: LoRA r16 bf16, plan": Row((*MEDIUM35, *PLAN, *BF16)),
    "SD3.5 Medium: LoRA r16 bf16, plan, 6 blocks checkpointed": Row(
        (*MEDIUM35, *PLAN, *BF16, "memory.checkpointing=6")
    ),
    "SD3.5 Medium: full bf16, adamw8bit in backward": Row((*MEDIUM35, *FULL)),
    "SD3.5 Medium: full bf16, adamw8bit in backward, 14 blocks resident": Row(
        (*MEDIUM35, *FULL, "memory.resident_blocks=14")
    ),
    "SD 1.5: LoRA r8 bf16, 512 px": Row((*UNET, *BF16)),
    "SD 1.5: LoRA r8 bf16, 512 px, batch 4, no checkpointing": Row((*UNET, *BF16, *BATCH4, *UNCHECKED)),
    "SD 1.5: LoRA r8 int8, 512 px": Row(UNET),
    "SD 1.5: LoRA r8 int8, 512 px, streamed": Row((*UNET, *STREAMED)),
    "SD 1.5: full bf16, adamw8bit in backward, 512 px": Row(FULL_UNET),
    "SDXL: LoRA r16 int8": Row(XL),
    "SDXL: LoRA r16 nf4": Row((*XL, *NF4)),
    "SDXL: LoRA r16 bf16": Row((*XL, *BF16)),
    "SDXL: LoRA r16 bf16, no checkpointing": Row((*XL, *BF16, *UNCHECKED)),
    "LoRA r16 int8, plan, graphs": Row((*PLAN, *GRAPHS)),
    "LoRA r16 bf16, graphs, no checkpointing": Row((*BF16, *UNCHECKED, *GRAPHS)),
    "SDXL: LoRA r16 bf16, graphs, no checkpointing": Row((*XL, *BF16, *UNCHECKED, *GRAPHS)),
    "SDXL: LoRA r16 int8, streamed": Row((*XL, *STREAMED)),
    "SDXL: LoRA r16 int8, small states, streamed, checkpoint inputs on the host": Row(
        (*XL, *SMALL, *STREAMED, *HOST)
    ),
    "SDXL: full bf16, adamw8bit in backward": Row((*XL, *FULL)),
    "SDXL: full bf16, adamw8bit in backward, checkpoint inputs on the host": Row((*XL, *FULL, *HOST)),
    "SDXL: full bf16, adafactor in backward": Row((*XL, *FULL, *by("adafactor"))),
    "SDXL: full bf16, adamw8bit in backward, streamed": Row((*XL, *FULL, *STREAMED)),
    "FLUX.2 klein: full bf16, adafactor in backward": Row((*KLEIN, *FULL, *by("adafactor"))),
    "FLUX.2 klein: full bf16, adafactor in backward, streamed": Row((*KLEIN, *FULL, *by("adafactor"), *STREAMED)),
    "FLUX.2 klein: LoRA r16 int8, plan": Row((*KLEIN, *PLAN)),
    "FLUX.2 klein: LoRA r16 nf4, plan": Row((*KLEIN, *PLAN, *NF4)),
    "FLUX.2 klein: LoRA r16 int8, plan, streamed, checkpoint inputs on the host": Row(
        (*KLEIN, *PLAN, *STREAMED, *HOST)
    ),
    "Z-Image: LoRA r16 int8": Row(ZIMAGE),
    "Z-Image: LoRA r16 int8, plan": Row((*ZIMAGE, *PLAN)),
    "Z-Image: LoRA r16 nf4, plan": Row((*ZIMAGE, *PLAN, *NF4)),
    "Z-Image: LoRA r16 int8, plan, streamed, checkpoint inputs on the host": Row((*ZIMAGE, *PLAN, *STREAMED, *HOST)),
    "Z-Image: full bf16, adafactor in backward": Row((*ZIMAGE, *FULL, *by("adafactor"))),
    "Qwen-Image: LoRA r16 int8, plan": Row((*QWEN, *PLAN)),
    "Qwen-Image: LoRA r16 nf4, plan": Row((*QWEN, *PLAN, *NF4)),
    "slider, LoRA r4 bf16, plan, 768 px": Row((*SLIDER, *PLAN, *BF16)),
    "SDXL: slider, LoRA r4 bf16, 768 px": Row((*XL, *SLIDER, *BF16)),
    "FLUX.2 klein: slider, LoRA r4 int8, 768 px": Row((*KLEIN, *SLIDER)),
    # The other stages. Both columns include the stated allowance for cuDNN's convolutions.
    "prompts": Row((), "text"),
    "pictures to latents, 512 px": Row(PX512, "latents"),
    "pictures to latents": Row((), "latents"),
    "pictures to latents, tiles of 512 px": Row(TILES, "latents"),
    "pictures to latents, 2048 px, tiles of 512 px": Row((*TILES, *px(2048)), "latents"),
    "validation, LoRA r16 int8, plan, small states": Row((*PLAN, *SMALL), "validate"),
    "validation, LoRA r16 int8, plan, small states, tiles of 512 px": Row((*PLAN, *SMALL, *TILES), "validate"),
    "validation, LoRA r16 int8, plan, small states, 512 px": Row((*PLAN, *SMALL, *PX512), "validate"),
    "validation, full bf16, adamw8bit in backward, tiles of 512 px": Row((*FULL, *TILES), "validate"),
    "SD3.5 Large: validation, LoRA r16 int8, plan, tiles of 512 px": Row((*LARGE, *PLAN, *TILES), "validate"),
    "SDXL: validation, LoRA r16 int8, tiles of 512 px": Row((*XL, *TILES), "validate"),
    "FLUX.2 klein: pictures to latents": Row(KLEIN, "latents"),
}  # fmt: skip
ROWS: dict[str, Row] = GRID | MORE
SAME = ("LoRA r16 int8, plan", "LoRA r16 int8, plan, no checkpointing", "prompts")
BIGGER = (
    *SAME, "LoRA r16 int8, plan, small states, streamed", "full bf16, adamw8bit in backward",
    "pictures to latents, tiles of 512 px",
)  # fmt: skip
OLD = {
    "LoRA r16 int8, fp32 products, plan": Row((*PLAN, *NO_BF16)),
    "LoRA r16 int8, fp32 products, plan, no checkpointing": Row((*PLAN, *NO_BF16, *UNCHECKED)),
    "LoRA r16 int8, fp32 products, plan, streamed, checkpoint inputs on the host": Row(
        (*PLAN, *NO_BF16, *STREAMED, *HOST)
    ),
    "LoRA r16 nf4, fp32 products, plan, batch 2": Row((*PLAN, *NF4, *NO_BF16, *batch(2))),
    "pictures to latents, fp32, 512 px": Row((*NO_BF16, *PX512), "latents"),
}


def rows_of(capability: tuple[int, int]) -> dict[str, Row]:
    """The rows to measure on a card: all for an L4's capability, for others those that can differ from it.

    Cards without bf16 have separate rows; Hopper and Blackwell have larger workspaces, Hopper another attention kernel.
    """
    if capability == (8, 9):
        return ROWS
    if capability < (8, 0):
        return OLD
    return {name: ROWS[name] for name in (SAME if capability < (9, 0) else BIGGER)}
