"""``quality``: measure the effect of levers, precisions and adapters on quality, on the tiny SD3 with its checker.

Prompt accuracy is the mean share of shape, colour, background, size and position recognised correctly; the style score
is the share of pictures recognised as striped, the demo's style, when the prompt has the trigger word.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.quiet import quiet_config
from benchmarks.table import Results, describe_machine, prompted
from benchmarks.tiny_models import checker
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import demo_scenes
from simpletune.runs.folder import SUMMARY, read_json_or_none
from simpletune.runs.weights import BASE, Weights, load_weights, run_result
from simpletune.stages.sample import ImageRequest, Sampler, generate_images
from simpletune.stages.text_cache import TextCache
from simpletune.system.devices import choose_device
from simpletune.system.options import Json
from simpletune.system.sheets import grid
from simpletune.training.train import train

CONFIG = Path("benchmarks/style.json")
GUIDANCE, STEPS, SIZE = 3.0, 12, (64, 64)
CONTENT = ("shape", "colour", "background", "size", "position")
STYLE = "striped"
PRECISIONS: dict[str, list[str]] = {
    "fp32": ["precision.weights=fp32", "precision.compute=fp32"],
    "bf16": ["precision.weights=bf16", "precision.compute=bf16"],
    "int8": ["precision.weights=int8", "precision.compute=fp32"],
    "int8-quanto": ["precision.weights=int8-quanto", "precision.compute=fp32"],
    "nf4": ["precision.weights=nf4", "precision.compute=fp32"],
}
ATTENTION = "adapter.targets=attention"
TUNED: dict[str, list[str]] = {
    **{f"LoRA r8, {name}": options for name, options in PRECISIONS.items()},
    "LoRA r4, int8, 20 steps": ["adapter.rank=4", "train.steps=20"],
    "LoRA r1, int8": ["adapter.rank=1"],
    "LoRA r32, int8": ["adapter.rank=32"],
    "LoRA r8, int8, adamw8bit": ["optimizer.name=adamw8bit"],
    "LoRA r8, int8, bf16 adapter": ["adapter.dtype=bf16"],
    "LoRA r8, int8, attention only": [ATTENTION],
    "LoRA r8, int8, attention only, modulation plan": [ATTENTION, "memory.modulation=plan"],
    "LoRA r8, int8, attention only, plan, streamed": [
        ATTENTION, "memory.modulation=plan", "memory.checkpointing=all", "memory.resident_blocks=0",
    ],
    "full, fp32": ["adapter.method=full", *PRECISIONS["fp32"], "optimizer.lr=0.0005"],
    "full, bf16, stochastic rounding": ["adapter.method=full", *PRECISIONS["bf16"], "optimizer.lr=0.0005"],
    "full, bf16, nearest rounding": [
        "adapter.method=full", *PRECISIONS["bf16"], "optimizer.lr=0.0005", "optimizer.rounding=nearest",
    ],
    "full, bf16, adamw_bf16": [
        "adapter.method=full", *PRECISIONS["bf16"], "optimizer.lr=0.0005", "optimizer.name=adamw_bf16",
    ],
    "full, bf16, in backward": [
        "adapter.method=full", *PRECISIONS["bf16"], "optimizer.lr=0.0005", "memory.optimizer_in_backward=true",
        "train.clip=per_parameter",
    ],
    "partial (attention), fp32": ["adapter.method=partial", *PRECISIONS["fp32"], "optimizer.lr=0.0005"],
}  # fmt: skip
COLUMNS = {
    "what": "", "prompt": "prompt accuracy", "style": "style score", "shape": "shape", "colour": "colour",
    "position": "position", "kept": "prompt accuracy without the trigger", "drift": "drift without the trigger",
    "eval_loss_before": "loss before", "eval_loss_after": "loss after", "seconds": "seconds", "bytes": "result, bytes",
}  # fmt: skip
ABOUT = f"""\
Held-out triples of shape, colour and background, one seed per prompt, {STEPS} steps, guidance {GUIDANCE:g}. *Prompt
accuracy*: mean share of {", ".join(CONTENT)} that the demo's checker recognises correctly. *Style score*: for a base,
the share drawn in the style that the prompt names; for a tuned model, the share that is {STYLE} when the prompt has the
trigger word. *Without the trigger*: prompts for flat and painted pictures; drift is the mean absolute difference, 0 to
1, from the base's picture from the same noise. *Seconds*: of a fine-tuning run, or for a base of one picture."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and the scene that its picture should show."""

    text: str
    scene: demo_scenes.Scene
    seed: int


def prompts_of(count: int, style: str | None, trigger: str | None) -> list[Prompt]:
    """Create prompts of scenes that were held out of training.

    Args:
        count: number of prompts.
        style: of all prompts, or None for all styles evenly.
        trigger: word for the style.
    """
    scenes = demo_scenes.sample_scenes(count, seed=9, held_out=True, style=style)
    return [Prompt(demo_scenes.caption(s, number, trigger), s, 1000 + number) for number, s in enumerate(scenes)]


def unrelated(count: int) -> list[Prompt]:
    """Create prompts that fine-tuning should not affect: half of them flat, half painted."""
    flat, painted = (prompts_of(count, style, None) for style in ("flat", "painted"))
    return [*flat[: count // 2], *painted[count // 2 :]]


class Easel:
    """Draw prompts with one model.

    Args:
        config: with folders resolved.
        weights: of the model.
        device: to draw on.
    """

    def __init__(self, config: TrainConfig, weights: Weights, device: torch.device):
        self.config, self.device = config, device
        self.transformer, self.modulation = load_weights(config, weights, device, [SIZE])
        dtype = config.precision.encoder_dtype()
        self.text = TextCache(config.model, dtype, config.output.place)
        self.vae = config.model.autoencoder.load(device, dtype)

    @classmethod
    def of(cls, config: TrainConfig, weights: Weights = BASE) -> Easel:
        """An easel of the model, on the device that a run of this configuration would use."""
        device, _ = choose_device(config.device, config.precision.compute, config.is_demo)
        return cls(resolve_folders(config), weights, device)

    def draw(self, prompts: Sequence[Prompt], size: tuple[int, int] = SIZE) -> list[Image.Image]:
        """Draw one picture per prompt, of a width and height."""
        self.text.fill([prompt.text for prompt in prompts] + [""], self.device)
        requests = [ImageRequest(p.text, p.seed, "", *size, STEPS, GUIDANCE) for p in prompts]
        config = self.config
        sampler = Sampler(self.transformer, config.model, config.precision, self.modulation, objective=config.objective)
        return generate_images(sampler, self.vae, config.model, requests, self.text.load)


def accuracies(generated: list[Image.Image], prompts: list[Prompt]) -> dict[str, float]:
    """Compute the shares recognised correctly: each of the checker's attributes, ``prompt`` and ``style``."""
    scores = checker.score(generated, [prompt.scene for prompt in prompts])
    return {**scores, "prompt": float(np.mean([scores[name] for name in CONTENT]))}


def file_name(row: str) -> str:
    """Turn a row's name into a file name."""
    return re.sub(r"[^a-z0-9]+", "-", row.lower()).strip("-")


def drift(generated: list[Image.Image], base: list[Image.Image]) -> float:
    """Return the mean absolute difference of values, 0 to 1."""
    pairs = zip(generated, base, strict=True)
    return float(np.mean([np.abs(np.asarray(a, float) - np.asarray(b, float)).mean() / 255 for a, b in pairs]))


def write_strip(generated: Sequence[Image.Image], file: Path) -> None:
    """Write pictures side by side."""
    strip = Image.new("RGB", (SIZE[0] * len(generated), SIZE[1]))
    for number, image in enumerate(generated):
        strip.paste(image, (SIZE[0] * number, 0))
    file.parent.mkdir(parents=True, exist_ok=True)
    strip.save(file)


def write_sheet(rows: Iterable[str], folder: Path, title: str) -> None:
    """Write a contact sheet of the rows that have a strip in a folder; it gets the folder's name."""
    strips = {name: folder / f"{file_name(name)}.png" for name in rows}
    shown: list[tuple[str, list[Image.Image]]] = [(n, [Image.open(f)]) for n, f in strips.items() if f.exists()]
    if shown:
        grid(shown, [title]).save(folder.with_suffix(".png"))


class Quality:
    """The grid and the data that its rows share.

    Args:
        folder: for the results.
        count: prompts per score.
        overrides: for the demo's configuration, for all rows.
    """

    def __init__(self, folder: Path, count: int, overrides: list[str]):
        self.count, self.overrides = count, overrides
        self.results = Results(folder / "quality", COLUMNS, prompted("quality", count))
        self.scratch = Path(tempfile.mkdtemp(prefix="simpletune-quality-"))
        self.drawn: dict[tuple[Prompt, ...], list[Image.Image]] = {}
        self.folder = folder / "quality"

    def config(self, options: list[str], name: str = "quality") -> TrainConfig:
        """Return the demo's configuration with changes; runs and traces go to a scratch folder."""
        return quiet_config(CONFIG, self.scratch, name, [*options, *self.overrides])

    def easel(self, options: list[str], weights: Weights = BASE) -> Easel:
        """Load weights for drawing, on the device that a run would use."""
        return Easel.of(self.config(options), weights)

    def base_row(self, name: str, options: list[str]) -> Json:
        """Score the base model in one precision, in all styles."""
        easel = self.easel(options)
        prompts = prompts_of(2 * self.count, None, None)
        easel.text.fill([prompt.text for prompt in prompts] + [""], easel.device)
        clock = time.perf_counter()
        generated = easel.draw(prompts)
        seconds = (time.perf_counter() - clock) / len(prompts)
        self.keep_images(name, easel)
        scores = accuracies(generated, prompts)
        without = unrelated(self.count)
        base = self.base_images(without)
        return {**scores, "drift": drift(easel.draw(without), base), "seconds": round(seconds, 3), "of": len(prompts)}

    def base_images(self, prompts: list[Prompt]) -> list[Image.Image]:
        """Draw with the base in fp32, the reference for drift."""
        key = tuple(prompts)
        if key not in self.drawn:
            self.drawn[key] = self.easel(PRECISIONS["fp32"]).draw(prompts)
        return self.drawn[key]

    def keep_images(self, name: str, easel: Easel) -> None:
        """Draw three prompts with the trigger word and one without with a row's model."""
        generated = easel.draw([*prompts_of(3, STYLE, demo_scenes.STYLE_TRIGGER), *unrelated(2)[1:]])
        write_strip(generated, self.folder / f"{file_name(name)}.png")

    def tuned_row(self, name: str, options: list[str]) -> Json:
        """Fine-tune once, and score the result."""
        config = self.config(options)
        clock = time.perf_counter()
        run = train(config)
        seconds = time.perf_counter() - clock
        summary = read_json_or_none(run / SUMMARY) or {}
        easel = self.easel(options, run_result(run))
        self.keep_images(name, easel)
        with_trigger = prompts_of(self.count, STYLE, demo_scenes.STYLE_TRIGGER)
        without = unrelated(self.count)
        drawn = easel.draw(without)
        output = Path(summary["output"])
        files = [output] if output.is_file() else list(output.rglob("*.safetensors"))
        return {
            **accuracies(easel.draw(with_trigger), with_trigger),
            "kept": accuracies(drawn, without)["prompt"],
            "drift": drift(drawn, self.base_images(without)),
            "seconds": round(seconds, 1),
            "bytes": sum(file.stat().st_size for file in files),
            **{key: round(summary[key], 4) for key in ("eval_loss_before", "eval_loss_after")},
            "of": len(with_trigger),
        }

    def trigger_row(self) -> Json:
        """Score the base on prompts with the trigger word, before fine-tuning."""
        prompts = prompts_of(self.count, STYLE, demo_scenes.STYLE_TRIGGER)
        return {**accuracies(self.base_images(prompts), prompts), "of": self.count}

    def rows(self) -> dict[str, Callable[[], Json]]:
        """Return every row's name and the function that measures it."""
        rows: dict[str, Callable[[], Json]] = {
            f"base, {name}": partial(self.base_row, f"base, {name}", options) for name, options in PRECISIONS.items()
        }
        rows["base, fp32, the trigger word"] = self.trigger_row
        return rows | {name: partial(self.tuned_row, name, options) for name, options in TUNED.items()}


def run(folder: Path, count: int, minutes: float, only: str, overrides: list[str]) -> Path:
    """Measure missing rows with ``count`` prompts per score; write their table and a contact sheet."""
    quality = Quality(folder, count, overrides)
    quality.results.measure(
        quality.rows(), minutes, only, lambda row: f"prompt {row['prompt']:.2f}, style {row['style']:.2f}"
    )
    write_sheet(quality.rows(), quality.folder, "three prompts with the trigger word, one without")
    return quality.results.write_table("Quality on the tiny SD3", ABOUT, describe_machine())
