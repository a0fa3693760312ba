"""Find settings for each of several cards, and the card on which the job is cheapest or finishes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from simpletune.config.schema import TrainConfig
from simpletune.engine.memory import Memory
from simpletune.estimate.job_time import JobTime, job_time
from simpletune.estimate.levers import changes_of_quality
from simpletune.estimate.planning import PlanResult, Search
from simpletune.system.gpus import Card
from simpletune.system.options import UserError, plural
from simpletune.system.prices import Price

Count = Callable[[str], object]


@dataclass(frozen=True)
class CardPlan:
    """Settings of a job on one card.

    Args:
        card: the card.
        result: the fastest settings that fit; None if none do.
        time: time of the job with these settings.
        samples: factor on the samples that the job would see if its number of steps stayed the same.
        price: price per hour; None if unknown.
        why_not: why the card cannot run the job; empty if it can.
    """

    card: Card
    result: PlanResult | None = None
    time: JobTime | None = None
    samples: float = 1.0
    price: Price | None = None
    why_not: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of the job for as many samples as the configuration asks for; infinite if the card cannot run it."""
        if self.time is None:
            return float("inf")
        return self.time.seconds + (1 / self.samples - 1) * self.time.stages["train"]

    @property
    def cost(self) -> float | None:
        """Price of these seconds; None without a price or if the card cannot run the job."""
        if self.time is None or self.price is None:
            return None
        return self.seconds / 3600 * self.price.per_hour

    def as_json(self) -> dict[str, object]:
        """Return plain values for JSON."""
        found: dict[str, object] = {"device": self.card.name, "why_not": self.why_not or None}
        if self.result is None or self.time is None:
            return found
        return found | {
            "settings": list(self.result.choice.overrides),
            "about": self.result.choice.about,
            "needed_bytes": self.result.estimate.needed(),
            "seconds_per_step": self.result.step_time.seconds,
            "seconds": self.seconds,
            "cost": self.cost,
            "price": None if self.price is None else self.price.model_dump(),
        }


def plan_on(
    config: TrainConfig, card: Card, price: Price | None, reserved: int = 0, count: Count = lambda last: None
) -> CardPlan:
    """Find the fastest settings on one card, and the time and price of the job with them.

    Args:
        config: configuration with demo names resolved.
        card: the card that the settings must fit on.
        price: price per hour of the card.
        reserved: bytes of the card that other programs use.
        count: called with a description after every prediction.
    """
    try:
        result = Search(config, card, reserved, count).fastest()[0]
    except UserError as error:
        return CardPlan(card, price=price, why_not=str(error))
    chosen, estimate = result.choice.config, result.estimate
    assert estimate.job is not None, "estimate() gives one"
    before, time = (job_time(each, estimate.job, card, estimate.needs.counts) for each in (config, chosen))
    samples = time.steps * samples_of_step(chosen) / (before.steps * samples_of_step(config))
    return CardPlan(card, result, time, samples, price)


def samples_of_step(config: TrainConfig) -> int:
    """Return the number of samples of an optimizer step."""
    return config.train.micro_batch * config.train.accumulation


def cheapest(plans: Sequence[CardPlan]) -> CardPlan:
    """Return the plan that costs least.

    Raises:
        UserError: the job fits on no card, or no price is known for those where it does.
    """
    able = [each for each in plans if each.result is not None]
    if able and not any(each.cost is not None for each in able):
        names = ", ".join(each.card.name for each in able)
        raise UserError(f'--goal cheapest: no price is known for {names}. Give one with --prices: {{"CARD": {{...}}}}')
    return min(_able(plans), key=lambda each: (each.cost is None, each.cost or 0.0, each.seconds))


def fastest(plans: Sequence[CardPlan]) -> CardPlan:
    """Return the plan that finishes first.

    Raises:
        UserError: the job fits on no card.
    """
    return min(_able(plans), key=lambda each: each.seconds)


def _able(plans: Sequence[CardPlan]) -> list[CardPlan]:
    able = [each for each in plans if each.result is not None]
    if not able:
        raise UserError("\n".join(f"{each.card.name}: {each.why_not}" for each in plans))
    return able


GOALS: Mapping[str, Callable[[Sequence[CardPlan]], CardPlan]] = {"cheapest": cheapest, "fastest": fastest}


def table(name: str, plans: Sequence[CardPlan], best: CardPlan) -> Iterator[str]:
    """Tabulate time and price of the job on each card with its fastest settings."""
    done_first = fastest(plans)
    yield f"{name}: predicted, with the fastest settings on each card"
    yield f"  {'card':<14}{'s/step':>9}{'hours':>8}{'price':>12}  settings"
    for each in plans:
        if each.result is None:
            yield f"  {each.card.name:<14}{'':>29}  nothing fits"
            continue
        money = "unknown" if each.cost is None else f"{each.cost:.2f} {each.price.currency or ''}".rstrip()  # type: ignore[union-attr]
        marks = [word for word, is_it in (("fastest", each is done_first), ("chosen", each is best)) if is_it]
        note = f" ({', '.join(marks)})" if marks else ""
        yield (
            f"  {each.card.name:<14}{each.result.step_time.seconds:>9.3f}{each.seconds / 3600:>8.2f}{money:>12}"
            f"  {each.result.choice.about}{note}"
        )
    scaled = [each for each in plans if each.result is not None and abs(each.samples - 1) > 1e-6]
    if scaled:
        yield "  hours and prices are for as many samples as the configuration asks for"
    for each in plans:
        if each.time is not None:
            price = "; no price is known: give one with --prices" if each.price is None else f"; {each.price.words}"
            yield f"  {each.card.name}: speeds {each.time.source}{price}"


def describe_settings(config: TrainConfig, result: PlanResult) -> Iterator[str]:
    """Describe what settings cost in time and quality.

    Args:
        config: configuration before the changes.
        result: the settings.
    """
    step, memory = result.step_time, result.choice.config.memory
    blocks = config.model.blocks()
    again = step.phases.get("recompute", 0.0)
    parts = [
        (again, f"{_checkpointed(memory, blocks)} computed a second time in the backward pass"),
        (step.device.get("copies", 0.0) + step.waits, "waiting for copies from and to host memory"),
        (step.device.get("unpacking", 0.0), f"unpacking {result.choice.config.precision.weights} weights"),
    ]
    costly = [(seconds, what) for seconds, what in parts if seconds > 0.01 * step.seconds]
    if not costly:
        yield "time: nothing is computed twice, copied or unpacked to save memory"
    for seconds, what in costly:
        yield f"time: {seconds / step.seconds:.0%} of a step for {what}"
    for change in changes_of_quality(config, result.choice.config):
        yield f"quality: {change}"


def _checkpointed(memory: Memory, blocks: int) -> str:
    """Describe what is recomputed."""
    if memory.checkpointing == "feed_forward":
        return "feed-forward networks"
    option, keeping = memory.checkpointing, memory.keeping_attention(blocks)
    kept = (
        "" if not keeping else " but for attention" + f" in {keeping} of them" * (keeping < memory.checkpointed(blocks))
    )
    return (plural(option, "block") if isinstance(option, int) else f"all {blocks} blocks") + kept
