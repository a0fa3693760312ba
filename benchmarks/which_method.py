"""``which-method``: every training method at several sizes on the tiny SD3: what it learns, spoils and costs.

Each row trains the demo's style with one method, judged by the demo's checker as in ``quality``. Its step is timed
alternating with LoRA's, and the peak on SD3 Medium is predicted.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from PIL import Image

from benchmarks.quality import (
    GUIDANCE,
    PRECISIONS,
    SIZE,
    STEPS,
    STYLE,
    Prompt,
    accuracies,
    drift,
    file_name,
    prompts_of,
    unrelated,
    write_sheet,
    write_strip,
)
from benchmarks.quiet import QUIET, quiet_config
from benchmarks.table import Results, describe_machine, prompted
from simpletune.commands.generate.session import GenerationSession
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import demo_scenes
from simpletune.estimate.simulate.simulate import simulate
from simpletune.runs.folder import read_summary
from simpletune.runs.weights import BASE, Weights, run_result
from simpletune.stages.sample import ImageRequest
from simpletune.stages.step.synthetic import CPU, SingleProcess, SyntheticBatches
from simpletune.stages.step.train_step import assemble
from simpletune.stages.text_cache import TextCache
from simpletune.stages.text_side import load_text_side
from simpletune.system.devices import choose_device
from simpletune.system.options import Json
from simpletune.system.stage_timer import StageTimer
from simpletune.training.train import train

DEMO, MIB = Path("benchmarks/style.json"), 2**20
LORA_8GB, FULL_8GB = "sd3_medium_lora_8gb", "sd3_medium_full_8gb"
TARGETS = ("text_embedder.linear_1", "text_embedder.linear_2", "attn.add_k_proj", "attn.add_v_proj", "norm1.linear")
ROUNDS, WARM_UP = 15, 3


@dataclass(frozen=True)
class Method:
    """One row's method at one size.

    Args:
        options: of the configuration, for both models.
        rate: learning rate on the tiny model.
        shipped: the configuration of SD3 Medium whose peak is predicted with these options.
        tiny: options for the tiny model alone.
        real: options for SD3 Medium alone.
        targeted: whether the tiny model gets the demo's targets; SD3 Medium gets the attention, the default.
    """

    options: tuple[str, ...]
    rate: float
    shipped: str = LORA_8GB
    tiny: tuple[str, ...] = ()
    real: tuple[str, ...] = ()
    targeted: bool = True

    def for_tiny(self) -> list[str]:
        """All options of the tiny model's run."""
        targets = [f"adapter.targets={json.dumps(TARGETS)}"] if self.targeted else []
        return [*PRECISIONS["fp32"], *self.options, *targets, *self.tiny, f"optimizer.lr={self.rate}"]


def adapter(method: str, rate: float, **fields: object) -> Method:
    """A method that updates a frozen base."""
    named = (f"adapter.{name}={json.dumps(value)}" for name, value in fields.items())
    return Method((f"adapter.method={method}", *named), rate)


def partly(pattern: str) -> Method:
    """Partial fine-tuning of the parameters that match a pattern."""
    options = ("adapter.method=partial", f"adapter.layers={json.dumps([pattern])}")
    return Method(options, 5e-4, FULL_8GB, targeted=False)


def embeddings(place: str, vectors: int, with_lora: bool = False) -> Method:
    """Embeddings of the style's word, which start from another style's; alone, or until half of a LoRA's run."""
    token = (f"text.embeddings.token={demo_scenes.STYLE_TRIGGER}", "text.embeddings.initial=flat")
    options = (*token, f"text.embeddings.place={place}", f"text.embeddings.vectors={vectors}")
    tiny = ("text.embeddings.learning_rate=0.02",)
    real = ("memory.modulation=resident",) if place == "input" else ()  # the pooled prompt changes in every step
    if with_lora:
        return Method(("adapter.rank=16", *options, "text.embeddings.stop_at=0.5"), 0.004, tiny=tiny, real=real)
    return Method(("adapter.method=none", *options), 0.02, tiny=tiny, real=real, targeted=False)


PRIOR = ("prior.method=base_prediction", "prior.trigger=glim picture", "prior.prompt=flat picture")
METHODS: dict[str, Method] = {
    **{f"LoRA, rank {rank}": adapter("lora", 0.004, rank=rank) for rank in (4, 16, 64)},
    "LoRA, rank 16, base's prediction kept": Method(("adapter.rank=16",), 0.004, tiny=PRIOR),
    **{f"DoRA, rank {rank}": adapter("dora", 0.004, rank=rank) for rank in (4, 16, 64)},
    "LoKr, factor 16, rank 4": adapter("lokr", 0.01, factor=16, rank=4),
    "LoKr, factor 8, whole": adapter("lokr", 0.01, factor=8, rank=None),
    "LoKr, factor 4, whole": adapter("lokr", 0.004, factor=4, rank=None),
    **{f"LoHa, rank {rank}": adapter("loha", 0.004, rank=rank) for rank in (2, 4, 8)},
    **{f"OFT, blocks of {side}": adapter("oft", 0.004, block_size=side) for side in (8, 16, 32)},
    "partial, keys and values of the text": partly("*.attn.add_[kv]_proj.*"),
    "partial, attention": partly("*.attn*"),
    "partial, blocks": partly("transformer_blocks.*"),
    "full": Method(("adapter.method=full",), 5e-4, FULL_8GB, targeted=False),
    **{f"output embeddings, {count}": embeddings("output", count) for count in (1, 2, 4)},
    **{f"input embeddings, {count}": embeddings("input", count) for count in (1, 2, 4)},
    **{f"LoRA, rank 16, with input embeddings, {count}": embeddings("input", count, True) for count in (1, 2, 4)},
}
COLUMNS = {
    "what": "", "style": "style score", "prompt": "prompt accuracy", "kept": "prompt accuracy without the word",
    "drift": "picture drift", "parameters": "trained parameters", "bytes": "result, bytes",
    "step": "step, times LoRA's", "least": "least", "most": "most", "peak": "SD3 Medium: peak, predicted MiB",
}  # fmt: skip
ABOUT = f"""\
The demo's 32 pictures teach the tiny SD3 a style by one method a row: {DEMO}'s 200 steps of 8 pictures, fp32, its
targets, one seed of training; learning rates are those of `benchmarks/which_method.py`, not searched for. Pictures of
held-out prompts, {STEPS} steps, guidance {GUIDANCE:g}, judged by the demo's checker. *Style score*: the share that is
{STYLE} where the prompt has the style's word. *Prompt accuracy*: the mean share of shape, colour, background, size and
position drawn as asked, with the word and, in prompts of other styles, without. *Picture drift*: the mean absolute
difference, 0 to 1, from the base's picture from the same noise, without the word. *Step*: of the tiny model, relative
to LoRA r16, alternating in one process; the median of {ROUNDS} rounds, and their least and most. *Peak*: of SD3
Medium's training step at 1024 px by the same method and size on its default targets with `{LORA_8GB}`, or
`{FULL_8GB}` for full and partial, with `memory.checkpointing=all`, predicted by running the step on fake tensors."""


class Bench:
    """What the rows share.

    Args:
        folder: for the results.
        count: prompts per score.
        overrides: for the demo's configuration, for all rows.
    """

    def __init__(self, folder: Path, count: int, overrides: list[str]):
        self.folder, self.overrides = folder / "which_method", overrides
        self.scratch = Path(tempfile.mkdtemp(prefix="simpletune-methods-"))
        self.styled, self.others = prompts_of(count, STYLE, demo_scenes.STYLE_TRIGGER), unrelated(count)
        self.of_base: list[Image.Image] = []

    def config(self, options: list[str], name: str) -> TrainConfig:
        """Return the configuration of one run on the tiny model."""
        more = (*QUIET, "validation.loss_samples=0", "checkpoint.every=null", "output.report=false")
        return quiet_config(DEMO, self.scratch, name, [*options, *self.overrides], more)

    def drawn(self, config: TrainConfig, weights: Weights, run: Path | None = None) -> list[Image.Image]:
        """Draw the prompts with the style's word, then the others, as ``simpletune generate`` does."""
        device, reason = choose_device(config.device, config.precision.compute, config.is_demo)
        session = GenerationSession(
            resolve_folders(config), run, device, reason, StageTimer(cuda=device.type == "cuda")
        )
        requests = [request_of(prompt) for prompt in (*self.styled, *self.others)]
        return session.generate_all([weights], requests)[0].images

    def scores(self, images: list[Image.Image], name: str) -> Json:
        """Judge what ``drawn`` drew, and keep some of it."""
        count = len(self.styled)
        if not self.of_base:
            config = self.config([*PRECISIONS["fp32"]], "base")
            self.of_base = images if name == "base" else self.drawn(config, BASE)
        found = accuracies(images[:count], self.styled)
        write_strip([*images[:3], images[count], images[-1]], self.folder / f"{file_name(name)}.png")
        return {
            "style": found["style"],
            "prompt": found["prompt"],
            "kept": accuracies(images[count:], self.others)["prompt"],
            "drift": drift(images[count:], self.of_base[count:]),
            "of": count,
        }

    def base_row(self) -> Json:
        """Score the base."""
        return self.scores(self.drawn(self.config([*PRECISIONS["fp32"]], "base"), BASE), "base")

    def row(self, name: str, method: Method) -> Json:
        """Train with one method, judge the result, time a step and predict the real model's peak."""
        config = self.config(method.for_tiny(), file_name(name))
        run = train(config)
        summary = read_summary(run)
        assert summary is not None
        results = [*run.glob("*.safetensors"), *run.glob("*/diffusion_pytorch_model*.safetensors")]
        return {
            **self.scores(self.drawn(config, run_result(run), run), name),
            "parameters": summary["trainable_parameters"],
            "bytes": sum(file.stat().st_size for file in results),
            **self.timed(config),
            "peak": simulate(on_sd3_medium(method)).peak.bytes / MIB,
        }

    def timed(self, config: TrainConfig) -> Json:
        """Time a step beside LoRA's of rank 16, in turns."""
        lora = self.config(METHODS["LoRA, rank 16"].for_tiny(), "lora")
        steps = [stepper(lora), stepper(config)]
        seconds: list[list[float]] = [[], []]
        for number in range(WARM_UP + ROUNDS):
            for which in (0, 1) if number % 2 else (1, 0):
                clock = perf_counter()
                steps[which]()
                seconds[which].append(perf_counter() - clock)
        ratios = [own / one for one, own in zip(*(each[WARM_UP:] for each in seconds), strict=True)]
        return {"step": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}

    def rows(self) -> Mapping[str, Callable[[], Json]]:
        """Name every row and what measures it."""
        found: dict[str, Callable[[], Json]] = {"base": self.base_row}
        return found | {name: partial(self.row, name, method) for name, method in METHODS.items()}


def request_of(prompt: Prompt) -> ImageRequest:
    """What draws a prompt."""
    return ImageRequest(prompt.text, prompt.seed, "", *SIZE, STEPS, GUIDANCE)


def stepper(config: TrainConfig) -> Callable[[], object]:
    """Load the tiny model with its adapter; return what takes a training step on noise."""
    config = resolve_folders(config)
    config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"warmup_steps": 0})})
    text = TextCache(config.model, config.precision.encoder_dtype(), config.output.place, config.text)
    caption = "" if config.text.embeddings is None else f"a {config.text.embeddings.token} picture"
    text.fill([caption], CPU)
    side = load_text_side(config, text, [caption], CPU)
    core = assemble(config, config.model.load_denoiser(config.precision, CPU), SingleProcess(CPU), text=side)
    core.model.train()
    batches = SyntheticBatches(config, core, SIZE).step(0)
    return lambda: core.step(batches)


def on_sd3_medium(method: Method) -> TrainConfig:
    """A shipped configuration of SD3 Medium with this method and size."""
    options = ["memory.checkpointing=all", *method.options, *method.real]
    return read_config(Path(method.shipped), options, needs_data=False, needs_model=False)[0]


def run(folder: Path, count: int, minutes: float, only: str, overrides: list[str]) -> Path:
    """Measure missing rows with ``count`` prompts per score; write their table and a contact sheet."""
    results = Results(folder / "which_method", COLUMNS, prompted("which-method", count))
    bench = Bench(folder, count, overrides)
    results.measure(
        bench.rows(), minutes, only,
        lambda row: f"style {row['style']:.2f}, prompt {row['prompt']:.2f}, drift {row['drift']:.3f}",
    )  # fmt: skip
    write_sheet(bench.rows(), bench.folder, "three with the style's word, two without")
    return results.write_table("Which method? All of them on the tiny SD3", ABOUT, describe_machine())
