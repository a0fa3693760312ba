"""``simpletune plan``: find the combination of memory levers that fits a card and should be fastest.

Peaks are predicted by running the training step on fake tensors; step times follow from the operations of the same
simulated step (timing/). In a list of candidates each takes less memory and more time than the one before, so bisection
finds the fastest that fits with few predictions. The simulation of a step that does not fit stops where it runs out of
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from simpletune.config.check import can_recompute_feed_forward
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.cuda_libraries import cublas_workspace
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.memory.snapshot import OutOfMemory
from simpletune.engine.quant.int8_products import OLDEST as OLDEST_INT8
from simpletune.estimate.job_estimate import (
    MIB,
    Estimate,
    attention_of,
    cached_step,
    estimate,
    largest_peak,
    needed_bytes,
)
from simpletune.estimate.job_time import JobTime, speeds_of
from simpletune.estimate.levers import with_changes
from simpletune.estimate.simulate.reports import L4, StepReport
from simpletune.estimate.simulate.simulate import SimulatedTraining, simulate, train
from simpletune.estimate.timing.recorder import Recorder
from simpletune.estimate.timing.timeline import StepSeconds, step_seconds
from simpletune.system.gpus import Card
from simpletune.system.options import UserError, plural
from simpletune.system.startup import pause_collection

Count = Callable[[str, float], object]
LISTS = 0.7  # of a search's time, about: the rest predicts whole jobs
WORTH = 1.05  # a setting that may cost quality must be faster by this factor
TILES = (512, 256)  # pixels
FEED_FORWARD_TILE = 1024  # tokens
INT8_PRODUCTS = (
    "precision.weights=int8",
    "precision.products=int8",
    "precision.input_gradient=int8",
    "precision.rotation=hadamard",  # so that large activations do not decide the scales
)
ADA = (8, 9)
SHOWN = 2
RESOLUTIONS = tuple(range(512, 2049, 128))
MOST = 64  # samples in a batch
GRADIENT = 2  # bytes per trained weight: bf16, if gradients outlive the backward pass
ACTIVATIONS = 1.05  # factor on what stays in memory: the least that a step adds; only to begin the search with


@dataclass(frozen=True)
class SettingChanges:
    """Settings as changes to a configuration."""

    overrides: tuple[str, ...]
    """As on the command line."""
    config: TrainConfig
    """With the overrides applied."""
    about: str
    lossy: int
    """Number of settings that may cost quality."""
    last_resort: bool = False
    """Whether to try these only if nothing else fits."""


@dataclass(frozen=True)
class PlanResult:
    """Settings that fit a card, and what the job needs with them."""

    choice: SettingChanges
    estimate: Estimate
    step_time: StepSeconds
    time: JobTime | None = None
    """Time and price of the whole job, where cards are compared by them."""
    samples: float = 1.0
    """Factor on the samples that the job would see if its number of steps stayed the same."""

    @property
    def seconds(self) -> float:
        """Seconds of the job for as many samples as the configuration asks for."""
        assert self.time is not None
        return self.time.seconds + (1 / self.samples - 1) * self.time.stages["train"]

    @property
    def cost(self) -> float | None:
        """Price of these seconds; None without a price."""
        assert self.time is not None
        return None if self.time.price is None else self.seconds / 3600 * self.time.price.per_hour


class Search:
    """Finds settings for a card.

    Args:
        config: configuration with the model's demo name resolved.
        card: card that the settings must fit on.
        reserved: bytes of the card that other programs use.
        count: called after every prediction, with its description and the share of the search that is done, about.
    """

    def __init__(self, config: TrainConfig, card: Card, reserved: int = 0, count: Count = lambda last, share: None):
        self.config = config
        self.card = card
        self.reserved = reserved
        self.count = count
        self._share = 0.0
        self.speeds = speeds_of(card, config.output.cache_folder)[0]
        self._workspace = cublas_workspace(card.capability, deterministic=config.speed.deterministic)
        self._limit = largest_peak(card, reserved) - self._workspace + MIB  # nothing above it fits
        self._known: dict[str, StepReport] = {}
        self._too_large: set[str] = set()
        self._trained: dict[str, SimulatedTraining] = {}  # stages that fit, for predictions of the whole job

    def find_fastest(self) -> list[PlanResult]:
        """Return the settings that fit and should be fastest, and the second best. Raises UserError if nothing fits."""
        chosen: list[SettingChanges] = []
        spare: list[SettingChanges] = []  # the next candidates: they fit but are slower
        bound: int | None = None  # the first list takes the most memory, so an index that fits there fits in every list
        lists = list(candidate_lists(self.config, self.card))
        for number, candidates in enumerate(lists):
            self._share = LISTS * number / len(lists)
            if chosen and candidates[0].last_resort:
                continue
            configs = [each.config for each in candidates]
            index = find_first_fit(configs, self.fits, guess_first_fit(configs, self._limit), bound)
            if index is None:
                continue
            bound = index if number == 0 else bound
            chosen.append(candidates[index])
            spare += candidates[index + 1 : index + 2]
            if index == 0 and not candidates[0].lossy:
                break  # all activations kept and nothing lossy: everything else is slower
        ranked = sorted(chosen, key=self._cost)
        if len(ranked) < SHOWN:
            ranked += sorted(spare, key=self._cost)
        results: list[PlanResult] = []
        for choice in ranked:
            self._share = LISTS + (1 - LISTS) * len(results) / SHOWN
            results += self._fit_whole_job(choice)
            if len(results) == SHOWN:
                break
        if not results:
            raise UserError(
                f"no settings fit on {self.card.name}, even with every lever. Use smaller pictures "
                "(data.resolution=512), one at a time (train.batch_size=1), or a larger card"
            )
        return results

    def _count(self, last: str) -> None:
        self.count(last, self._share)

    def _cost(self, choice: SettingChanges) -> float:
        """Compute seconds per sample, with a surcharge for settings that may cost quality."""
        train = choice.config.train
        seconds = self.step_time(choice.config).seconds
        return seconds / train.micro_batch / train.accumulation * WORTH**choice.lossy

    def find_largest(self, setting: str) -> list[PlanResult]:
        """Search like ``find_fastest``, with the largest ``train.batch_size`` or ``data.resolution`` that fits at this
        precision.

        Bisects with the lossless candidate that saves most, and searches with what it finds. Raises UserError if not
        even the smallest value fits.
        """
        values: Sequence[int] = range(1, MOST + 1)
        if setting == "data.resolution":
            values = possible_resolutions(self.config, RESOLUTIONS)
        choice = next(each for each in candidate_lists(self.config, self.card) if not each[0].lossy)[-1]

        def fits(value: int) -> bool:
            new = with_changes(choice.config, [f"{setting}={value}"])
            return new is not None and self.fits(new)

        if not fits(values[0]):
            raise UserError(f"{setting}: not even {values[0]} fits on {self.card.name} with {choice.about}")
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(values[middle]) else (low, middle - 1)
        override = f"{setting}={values[low]}"
        config = with_changes(self.config, [override])
        assert config is not None
        results = Search(config, self.card, self.reserved, self.count).find_fastest()
        more = [replace(each.choice, overrides=(override, *each.choice.overrides)) for each in results]
        return [replace(each, choice=choice) for each, choice in zip(results, more, strict=True)]

    def _fit_whole_job(self, choice: SettingChanges) -> list[PlanResult]:
        """Add the largest autoencoder tiles with which the other stages fit, if tiles are needed; empty if none do."""
        for tile in (None, *TILES):
            more = () if tile is None else (f"memory.vae_tile={tile}",)
            config = with_changes(choice.config, more)
            assert config is not None
            trained = self._trained.pop(config.model_dump_json(), None)
            whole = estimate(config, self.card.capability, trained=trained)
            self._count(f"a whole job of {whole.peak.bytes / MIB:,.0f} MiB")
            if whole.fits(self.card, self.reserved):
                words = choice.about + (f", tiles of {tile} px" if tile else "")
                chosen = SettingChanges((*choice.overrides, *more), config, words, choice.lossy, choice.last_resort)
                return [PlanResult(chosen, whole, self.step_time(choice.config))]
        return []

    def int8_products(self, result: PlanResult) -> PlanResult | None:
        """Predict a result with products and input gradients in int8; None if they are not off, not possible, do not
        fit or seem no faster, or if the card is none that they are proposed for."""
        # No run on a card of ours has shown them to be faster yet, so that ``find_fastest`` leaves them off.
        choice = result.choice
        config = with_changes(choice.config, INT8_PRODUCTS)
        if config is None or config == choice.config or not gains_by_int8(self.card) or not self.fits(config):
            return None
        if self.step_time(config).seconds >= result.step_time.seconds:
            return None
        others = [each for each in choice.overrides if not each.startswith("precision.weights=")]
        changed = replace(choice, overrides=(*others, *INT8_PRODUCTS), config=config)
        return next(iter(self._fit_whole_job(changed)), None)

    def fits(self, config: TrainConfig) -> bool:
        """Return whether the training stage fits. If not, its simulation stops where it runs out of memory."""
        key = config.model_dump_json()
        if key in self._too_large:
            return False
        try:
            return self._has_room(self.report(config, self._limit))
        except OutOfMemory as error:
            self._too_large.add(key)
            self._count(f"a step of more than {error.bytes / MIB:,.0f} MiB")
            return False

    def _has_room(self, report: StepReport) -> bool:
        peak = report.peak.bytes + self._workspace
        return needed_bytes(peak) + self.reserved <= self.card.bytes

    def step_time(self, config: TrainConfig) -> StepSeconds:
        """Predict the time of a step."""
        return step_seconds(self.report(config).sections, self.speeds)

    def report(self, config: TrainConfig, limit: int | None = None) -> StepReport:
        """Predict the training stage as on an L4, once per configuration. Raises OutOfMemory if the stage takes more
        live bytes than the limit."""
        key = config.model_dump_json()

        def simulated() -> StepReport:
            with fake_tensors(), pause_collection():
                trained = train(config, recorder=Recorder(cuda=True), limit=limit)
            alike = attention_of(config, self.card.capability) == attention_of(config, L4)
            if alike and self._has_room(trained.report):
                self._trained[key] = trained  # the simulation of a whole job on this card can continue from it
            return trained.report

        if key not in self._known:
            self._known[key] = cached_step(config, simulated, limit)
            self._count(f"a step of {self._known[key].peak.bytes / MIB:,.0f} MiB")
        return self._known[key]


def gains_by_int8(card: Card) -> bool:
    """Return whether int8 products are proposed for a card: GeForce from sm_80 on, whose products in 16 bits run at a
    quarter of int8's rate, and Ada. An RTX 3090 was measured to gain a quarter (kohya-ss/musubi-tuner#1008); on Hopper,
    where the host limits, they lost (benchmarks/results/gpu-h100, OneTrainer's commit 6515b393)."""
    return card.capability >= OLDEST_INT8 and (card.half_rate or card.capability == ADA)


def possible_resolutions(config: TrainConfig, sides: Sequence[int]) -> list[int]:
    """Return those of some resolutions that the model takes; if it takes none of them, its largest."""
    # Simulating an image beyond the model's position embeddings fails within diffusers.
    most = config.model.architecture.largest_side
    return [side for side in sides if side <= most] or [most]


def candidate_lists(config: TrainConfig, card: Card) -> Iterator[list[SettingChanges]]:
    """Yield a list of ``block_options`` for each combination of weight precision, optimizer and time of the update."""
    own = config.precision
    compute = "bf16" if card.has_bf16 else "fp16"
    precisions = ["bf16"] if config.adapter.trains_base else ["bf16", "int8", "nf4"]
    if config.adapter.trains_base and not card.has_bf16:
        precisions = ["fp32"]  # fp16 cannot hold small updates
    always = ["memory.profile=null", "memory.crop_positions=true", "memory.budget_gib=null"]
    ways = block_options(
        config.model.architecture.blocks(), can_recompute_feed_forward(config), may_keep_attention(config)
    )
    for weights in precisions:
        plain = with_changes(config, [f"precision.weights={weights}", "precision.compute=fp32"])
        fewer_bits = int(plain is not None and own.bytes_per_weight > plain.precision.bytes_per_weight)
        precision = [f"precision.weights={weights}", f"precision.compute={compute}"]
        for about, small, lossy in (("", [], 0), *_smaller_states(config)):
            candidates = []
            for where, changes in ways:
                overrides = (*always, *precision, *small, *changes, "memory.modulation=plan")
                new = with_changes(config, overrides)
                if new is None:  # trained modulation weights must stay on the device
                    overrides = overrides[:-1]
                    new = with_changes(config, overrides)
                if new is not None:
                    words = ", ".join(word for word in (f"{weights} weights", about, where) if word)
                    last_resort = bool(lossy) and not config.adapter.trains_base
                    candidates.append(SettingChanges(overrides, new, words, fewer_bits + lossy, last_resort))
            if candidates:
                yield candidates


def _smaller_states(config: TrainConfig) -> Iterator[tuple[str, list[str], int]]:
    """Yield ways to shrink adapter, gradients and states: (description, overrides, number that may cost quality)."""
    eight = "optimizer.name=adamw8bit"
    in_backward = ["memory.optimizer_in_backward=true", "train.clip=per_parameter", "train.gradient_accumulation=1"]
    if not config.adapter.trains_base:
        yield "bf16 adapter with 8-bit states", ["adapter.dtype=bf16", eight], 2
        return
    other = config.optimizer.name != "adamw8bit"
    yield "updates in the backward pass", in_backward, 1
    if other:
        yield "8-bit states", [eight], 1
        yield "8-bit states, updates in the backward pass", [eight, *in_backward], 2


def block_options(blocks: int, alone: bool = True, keeps: bool = True) -> list[tuple[str, tuple[str, ...]]]:
    """List the ways to checkpoint and offload blocks, as (description, overrides), by decreasing memory.

    Args:
        blocks: number of blocks.
        alone: whether recomputing feed-forward networks separately saves time.
        keeps: whether checkpointed blocks may keep attention's output.
    """
    half = max(1, blocks // 2)
    some, every = f"{half} of {plural(blocks, 'block')} checkpointed", "every block checkpointed"
    some_offloaded, every_offloaded = f"{blocks - half} of {plural(blocks, 'block')} offloaded", "every block offloaded"
    network = "alone" if alone else "auto"

    def option(
        about: str, checkpointing: str | int, resident: str | int = "null", host: bool = False, keep: bool = keeps
    ) -> tuple[str, tuple[str, ...]]:
        return about, (
            f"memory.checkpointing={checkpointing}",
            f"memory.keep_attention={'all' if keep else 'auto'}",
            f"memory.feed_forward={'auto' if checkpointing == 'none' else network}",
            f"memory.resident_blocks={resident}",
            f"memory.offload_checkpoint_inputs={str(host).lower()}",
        )

    kept = option("all activations kept", "none", keep=False)
    if not keeps:
        return [
            kept,
            option(some, half),
            option(every, "all"),
            option(f"{every}, their inputs on the host", "all", host=True),
            option(some_offloaded, "all", half),
            option(every_offloaded, "all", 0),
            option(f"{every_offloaded}, checkpoint inputs on the host", "all", 0, host=True),
        ]
    # Keeping attention's output in host memory costs less time than recomputing it: only the last way recomputes it.
    with_host = "inputs and attention's outputs on the host"
    about, tiled = option(f"{every_offloaded}, inputs on the host", "all", 0, host=True, keep=False)
    if alone:
        about += ", feed-forward in tiles"
        tiled = tuple(each.replace("feed_forward=alone", f"feed_forward={FEED_FORWARD_TILE}") for each in tiled)
    return [
        kept,
        option(f"{some}, attention kept", half),
        option(f"{every}, attention kept", "all"),
        option(f"{every}, {with_host}", "all", host=True),
        option(f"{some_offloaded}, {with_host}", "all", half, host=True),
        option(f"{every_offloaded}, {with_host}", "all", 0, host=True),
        (about, tiled),
    ]


def may_keep_attention(config: TrainConfig) -> bool:
    """Return whether checkpointed blocks may keep the output of attention."""
    return config.speed.attention != "math" and not config.speed.compile


def find_first_fit(
    configs: Sequence[TrainConfig], fits: Callable[[TrainConfig], bool], likely: int = 0, known: int | None = None
) -> int | None:
    """Bisect for the index of the first configuration that fits; None if none does.

    Args:
        configs: by decreasing memory.
        fits: predicts whether a configuration fits; called at most once for each.
        likely: the likely answer; their number or more: probably none fits.
        known: an index that is known to fit, if any.
    """
    # Predicting a step that almost fits takes as long as one that fits, so the search begins at the likely answer.
    count = len(configs)
    low, high = 0, count if known is None else known  # none below low fits; high does, or equals count
    asked = min(likely, high - 1)
    while low < high:
        if fits(configs[asked]):
            high = asked
            asked = asked - 1 if asked == likely else (low + high) // 2
        else:
            low = asked + 1
            asked = count - 1 if high == count else (low + high) // 2
    return low if low < count else None


def guess_first_fit(configs: Sequence[TrainConfig], room: int) -> int:
    """Guess the index for ``find_first_fit``; the number of configurations if what lasts leaves no room."""
    return next((n for n, config in enumerate(configs) if ACTIVATIONS * lasting_bytes(config) <= room), len(configs))


def lasting_bytes(config: TrainConfig) -> float:
    """Estimate the device bytes that weights, their optimizer states and gradients take throughout a step."""
    model, trains = config.model, config.adapter.trains_base
    on_host, found = config.memory.host_filter(model.architecture.units()), 0.0
    for name, shape in model.architecture.known_shapes().items():
        if not on_host(name):
            found += math.prod(shape) * config.precision.bytes_per_weight
            found += math.prod(shape) * config.optimizer.bytes_per_parameter * trains
            found += math.prod(shape) * GRADIENT * (trains and not config.memory.optimizer_in_backward)
    return found


def batch_table(config: TrainConfig, cards: Sequence[Card], resolutions: Sequence[int]) -> dict[str, list[int]]:
    """Return the largest batch of the training step by card and resolution; 0: not even one sample fits.

    The peak is assumed linear in the batch; its slope comes from predictions for one and two samples.
    """
    auto = config.memory.checkpointing == "auto"
    every = ["memory.checkpointing=all", "memory.budget_gib=null"] if auto else []  # auto ends at all
    table: dict[str, list[int]] = {card.name: [] for card in cards}
    for resolution in resolutions:
        peaks = []
        for batch in (1, 2):
            new = with_changes(config, [f"data.resolution={resolution}", f"train.batch_size={batch}", *every])
            assert new is not None
            peaks.append(simulate(new).peak.bytes)
        each = peaks[1] - peaks[0]
        for card in cards:
            room = largest_peak(card) - cublas_workspace(card.capability, deterministic=config.speed.deterministic)
            table[card.name].append(max(0, 1 + (room - peaks[0]) // each) if room >= peaks[0] else 0)
    return table
