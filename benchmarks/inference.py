"""``inference``: measure seconds, memory and cost of a picture for each lever and for all, against plain diffusers.

All rows come from one process with the same model, prompts, seeds, steps and sampler. Every row is warmed up once, then
timed for a few rounds; the fastest counts, because other work on the machine can only add time.
"""

from __future__ import annotations

import datetime
import gc
import io
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from benchmarks.diffusers_pipeline import Plain
from benchmarks.inference_rows import ABOUT, BASELINE, BASELINE_LORA, COLUMNS, IMAGES, ROWS, Way
from benchmarks.table import Results, describe_machine, no_such_row, table
from simpletune.adapters.methods.lora import Lora
from simpletune.commands.generate.compare import latent_distance
from simpletune.commands.generate.session import SharedBase
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.folder import Folder
from simpletune.engine.memory import Memory
from simpletune.engine.quant import Precision
from simpletune.models.sd3.sd3_option import SD3
from simpletune.runs.weights import BASE, Weights, precision_of
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.sample import ImageRequest, Sampler, decode
from simpletune.stages.text_cache import TextCache
from simpletune.system.console import say
from simpletune.system.devices import choose_device
from simpletune.system.prices import Price, Prices, cost_of_image, read_prices
from simpletune.system.stage_timer import StageTimer

SEEDS = range(IMAGES)
DEMO = "demo:tiny-sd3"


@dataclass(frozen=True)
class Job:
    """Common setup of all rows.

    Args:
        config: with folders resolved, in the precision of diffusers' weights.
        device: to run on.
        requests: to draw.
        lora: folder of a LoRA.
        text: prompt embeddings.
        rounds: number of timed rounds.
    """

    config: TrainConfig
    device: torch.device
    requests: list[ImageRequest]
    lora: Path
    text: TextCache
    rounds: int


@dataclass
class Round:
    """Seconds of the parts of one round, and the latents."""

    encode: float
    denoise: float
    decode: float
    latents: list[Tensor]

    @property
    def seconds(self) -> float:
        """All."""
        return self.encode + self.denoise + self.decode


@dataclass(frozen=True)
class Workload:
    """The pictures that every row draws, and the device.

    Args:
        model: the base model.
        size: (width, height) in pixels; None: 64 px for the demo model, else 1024.
        steps: sampling steps; None: 12 for the demo model, else 28.
        rounds: number of timed rounds.
        device: auto, cuda or cpu.
    """

    model: str = DEMO
    size: tuple[int, int] | None = None
    steps: int | None = None
    rounds: int = 5
    device: str = "auto"

    @property
    def is_demo(self) -> bool:
        """Whether the model is the tiny one."""
        return self.model == DEMO


def run(
    folder: Path,
    minutes: float = 8.0,
    only: str = "",
    price: Iterable[tuple[str, float]] = (),
    prices: Path | None = None,
    **workload: Any,
) -> Path:
    """Measure all rows in one process, diffusers always, and write their table.

    Args:
        price: of this machine, by name, for the cost table.
        prices: file of more prices.
        workload: fields of `Workload`; None: the default.
    """
    work = Workload(**{name: value for name, value in workload.items() if value is not None})
    known = merge_prices(price, prices)
    asked = {name for name in ROWS if only in name}
    if not asked:
        raise no_such_row(ROWS, only)
    asked |= {BASELINE, BASELINE_LORA, *(ROWS[name].more_steps for name in asked)}
    results = Results(folder / "inference", COLUMNS, words_of(work, price))
    results.rows.clear()  # compare every row with diffusers in the same process
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        job = prepare(work, Path(place))
        baselines: dict[bool, Round] = {}
        beside = Beside(job)
        for name, way in ROWS.items():
            if name not in asked or time.monotonic() - started > 60 * minutes:
                say(f"bench   {name}: skipped")
                continue
            row, best = measure(job, way, beside)
            baseline = baselines.setdefault(bool(way.lora), best)
            away = max(latent_distance(a, b) for a, b in zip(best.latents, baseline.latents, strict=True))
            results.add(name, {**row, "differs": f"{away:.1e}" if away else "0", "lora": bool(way.lora)})
            say(f"bench   {name}: {row['seconds_per_picture']:.4f} s per picture")
    finish(results, known)
    return write_page(results, job, work.model, known)


def words_of(work: Workload, price: Iterable[tuple[str, float]]) -> str:
    """The grid's word and the arguments that its figures depend on."""
    words = {"model": work.model, "size": work.size and f"{work.size[0]}x{work.size[1]}", "steps": work.steps,
             "rounds": work.rounds}  # fmt: skip
    given = [f"--{name} {value}" for name, value in words.items() if value != getattr(Workload, name)]
    return " ".join(["inference", *given, *(f"--price {name}={per_hour:g}" for name, per_hour in price)])


def write_page(results: Results, job: Job, model: str, prices: Prices) -> Path:
    """Write the Markdown table, and a table of costs if prices are given."""
    first = job.requests[0]
    about = ABOUT.format(
        model=model, size=f"{first.width} x {first.height}", steps=first.steps, guidance=first.guidance,
        pictures=IMAGES, rounds=job.rounds, compute=job.config.precision.compute, peak=peak_words(job.device),
    )  # fmt: skip
    page = results.write_table("Inference", about, describe_machine())
    if prices:
        columns = {"what": "", **{name: name for name in prices}}
        costs = {name: {key: 1000 * cost for key, cost in row["cost"].items()} for name, row in results.rows.items()}
        known = [f"- {name}: {price.words}" for name, price in prices.items()]
        title = "## Cost of 1000 pictures, in the currency of the prices"
        text = "\n".join(["", title, "", *known, "", *table(columns, costs), ""])
        page.write_text(page.read_text(encoding="utf-8") + text, encoding="utf-8")
    return page


def own_prices(prices: Iterable[tuple[str, float]]) -> Prices:
    """Build the user's own prices, dated today, from names and prices per hour."""
    today = datetime.date.today().isoformat()
    return {name: Price(per_hour=price, as_of=today, source="given with --price") for name, price in prices}


def merge_prices(given: Iterable[tuple[str, float]], file: Path | None) -> Prices:
    """Return the user's own prices, then those prices in a file whose names differ.

    Raises:
        UserError: the file cannot be used.
    """
    mine = own_prices(given)
    return mine | {name: price for name, price in (read_prices(file) if file else {}).items() if name not in mine}


def finish(results: Results, prices: Prices) -> None:
    """Add to every row its speed relative to diffusers at equal steps, what fewer steps add to that, and its cost."""
    rows = results.rows
    fastest = {
        lora: min(r["seconds_per_picture"] for n, r in rows.items() if n.startswith("diffusers") and r["lora"] == lora)
        for lora in {row["lora"] for row in rows.values()}
    }
    for name, row in list(rows.items()):
        seconds = row["seconds_per_picture"]
        faster, fewer = (row["beside"] or fastest[row["lora"]]) / seconds, None
        if ROWS[name].more_steps:
            faster, fewer = rows[ROWS[name].more_steps]["faster"], faster / rows[ROWS[name].more_steps]["faster"]
        cost = {key: cost_of_image(seconds, price.per_hour) for key, price in prices.items()}
        results.add(name, {**row, "faster": faster, "fewer_steps": fewer, "cost": cost})


def peak_words(device: torch.device) -> str:
    """Describe the memory column."""
    if device.type == "cuda":
        return "`torch.cuda.max_memory_allocated` of the row"
    return (
        "resident memory of the whole process, including libraries and memory that the allocator kept from other rows"
    )


def prepare(workload: Workload, folder: Path) -> Job:
    """Prepare the model, the prompts, and a LoRA of rank 16 on attention with small random values."""
    width, height = workload.size or ((64, 64) if workload.is_demo else (1024, 1024))
    steps = workload.steps or (12 if workload.is_demo else 28)
    config = TrainConfig(
        name="bench",
        data=Folder(path="demo:pictures"),
        model=SD3(pretrained=workload.model),
        device=workload.device,  # type: ignore[arg-type]
    )
    chosen, reason = choose_device(config.device, "fp32", config.is_demo)
    weights = "bf16" if chosen.type == "cuda" else "fp32"
    config = config.model_copy(update={"precision": precision(weights, weights)})
    config = resolve_folders(config)
    say(f"bench   {workload.model}, {weights} on {reason}")
    text = TextCache(config.model, config.precision.encoder_dtype(), folder / "cache")
    guidance = 3.0 if config.model.architecture.blocks() < 12 else 4.5
    prompt = "a flat picture of a large blue heart in the middle, on a cream background"
    requests = [ImageRequest(prompt, seed, "", width, height, steps, guidance) for seed in SEEDS]
    text.fill([prompt, ""], chosen)
    return Job(config, chosen, requests, random_lora(config, folder / "lora"), text, workload.rounds)


def precision(weights: str, compute: str) -> Any:
    """Look up a precision by its tag."""
    return TypeAdapter(Precision).validate_python({"weights": weights, "compute": compute})


def random_lora(config: TrainConfig, folder: Path) -> Path:
    """Create a LoRA file of rank 16 on the CPU."""
    folder.mkdir(parents=True)
    adapter = Lora(rank=16)
    base = config.model.load_denoiser(config.precision, torch.device("cpu"))
    adapter.attach(base, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in base.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    adapter.export(base, folder, {})
    return folder


class Beside:
    """On the CPU, interleave rounds of diffusers with those of a row, so that other work slows both.

    On a GPU, diffusers' weights would add to the row's memory, so rows are compared with the table's diffusers rows.
    """

    def __init__(self, job: Job):
        self.job, self._rounds = job, dict[bool, Callable[[], Round]]()

    def round(self, lora: bool) -> float | None:
        """Time one round."""
        if self.job.device.type == "cuda":
            return None
        if lora not in self._rounds:
            self._rounds[lora] = diffusers_round(self.job, Way(diffusers=True, lora="live" if lora else ""))
            self._rounds[lora]()
        return self._rounds[lora]().seconds


def measure(job: Job, way: Way, beside: Beside) -> tuple[dict[str, Any], Round]:
    """Measure one row: memory, and the fastest round."""
    gc.collect()
    stages = StageTimer(cuda=job.device.type == "cuda")
    clock = time.perf_counter()
    with stages.stage("row"):
        one_round = (diffusers_round if way.diffusers else own_round)(job, way)
        one_round()
        first = time.perf_counter() - clock
        rounds = [(beside.round(bool(way.lora)), one_round()) for _ in range(job.rounds)]
    best = min((own for _, own in rounds), key=lambda done: done.seconds)
    theirs = min((other for other, _ in rounds if other is not None), default=None)
    del one_round
    free_memory(job.device)
    peak = stages.peak("peak_allocated_gib") or stages.peak("peak_rss_gib") or 0.0
    parts = {name: getattr(best, name) / IMAGES for name in ("encode", "denoise", "decode")}
    seconds = best.seconds / IMAGES
    figures = {"seconds_per_picture": seconds, "pictures_per_second": 1 / seconds, **parts}
    return {
        **figures,
        "beside": None if theirs is None else theirs / IMAGES,
        "peak_mib": round(peak * 1024),
        "first": first,
    }, best


def diffusers_round(job: Job, way: Way) -> Callable[[], Round]:
    """Rounds with diffusers' own pipeline."""
    config = job.config
    assert isinstance(config.model, SD3)  # the baseline is its pipeline
    plain = Plain(config.model, config.precision.compute_dtype(), job.device, job.lora if way.lora else None)

    def one_round() -> Round:
        done = Round(0.0, 0.0, 0.0, [])
        for request in job.requests:
            encode, denoise, decoding, z = plain.draw(request)
            done.encode, done.denoise, done.decode = (
                done.encode + encode,
                done.denoise + denoise,
                done.decode + decoding,
            )
            done.latents.append(z)
        return done

    return one_round


def own_round(job: Job, way: Way) -> Callable[[], Round]:
    """Rounds with simpletune."""
    base = job.config
    held = precision(way.weights, base.precision.compute) if way.weights else base.precision
    memory = Memory(cache_quantised=False).model_copy(update=dict(way.memory))
    config = base.model_copy(update={"precision": held, "memory": memory})
    first = job.requests[0]
    shared = SharedBase(config, job.device, {(first.width, first.height)}, way.compiled)
    weights = BASE if not way.lora else Weights("LoRA", lora=next(job.lora.iterdir()), merged=way.lora == "fused")
    transformer, modulation = shared.use(weights)
    vae = config.model.autoencoder.load(job.device, config.precision.encoder_dtype())
    requests = job.requests if way.guided else unguided(job.requests)
    requests = [replace(request, steps=max(1, round(way.steps * request.steps))) for request in requests]

    def one_round() -> Round:
        clock = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            text = job.text if way.cached else TextCache(config.model, held.encoder_dtype(), Path(folder))
            with redirect_stdout(io.StringIO()):  # hide its progress lines
                text.fill(first.texts, job.device)
            embeddings = {prompt: text.load(prompt) for prompt in first.texts}
        encoded = time.perf_counter()
        sampler = Sampler(
            transformer, config.model, precision_of(config, weights), modulation, way.batch, way.reuse,
            objective=config.objective,
        )  # fmt: skip
        z = sampler.latents(requests, embeddings.__getitem__)
        denoised = time.perf_counter()
        decode(vae, config.model, z)
        return Round(encoded - clock, denoised - encoded, time.perf_counter() - denoised, z)

    return one_round


def unguided(requests: Sequence[ImageRequest]) -> list[ImageRequest]:
    """Turn off classifier-free guidance."""
    return [replace(request, guidance=1.0) for request in requests]
