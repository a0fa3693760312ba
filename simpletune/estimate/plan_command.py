"""``simpletune plan``: print the best settings for a card, or for the card on which the job is cheapest or
finishes first; list the largest batches by card."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from simpletune.config.compute import settle_compute
from simpletune.config.load import read_json
from simpletune.config.overrides import merge
from simpletune.config.schema import TrainConfig
from simpletune.estimate.estimate_command import GIB, describe_misfit, read_for_estimate
from simpletune.estimate.job_estimate import MIB
from simpletune.estimate.job_time import job_time, larger_batch, speeds_of
from simpletune.estimate.levers import changes_of_quality, effective_overrides
from simpletune.estimate.planning import Count, PlanResult, Search, batch_table, possible_resolutions
from simpletune.estimate.timing.timeline import StepSeconds
from simpletune.stages.step.replay import why_not
from simpletune.system.atomic import write_json
from simpletune.system.console import counting, say, silence
from simpletune.system.gpus import CARDS, Card, find_card
from simpletune.system.options import UserError, plural
from simpletune.system.prices import Price, card_prices
from simpletune.system.shell import quote_command

SHOWN_CARDS = ("RTX3060-6GB", "RTX3070", "RTX3060-12GB", "T4", "L4", "RTX4090", "A100-40GB", "H100")
RESOLUTIONS = (512, 768, 1024)
LARGEST = {"largest-batch": "train.batch_size", "highest-resolution": "data.resolution"}  # settings by goal
GRAPHS_MAY = "speed.graphs=true may take less: the card waits for the host, which then queues a pass at once"
GRAPHS_COUNT = "speed.graphs=true should take less: these seconds are without it"
CardPlan = tuple[Card, PlanResult | str]  # the fastest settings on a card, or why none fit


def plan_config(
    file: Path,
    overrides: Sequence[str],
    cards: Sequence[Card],
    goal: str = "fastest",
    reserve: float = 0.0,
    prices: Path | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> str:
    """Find the best settings; return what ``simpletune plan CONFIG --device CARD`` prints.

    Args:
        cards: card that the settings must fit on, or several to choose from.
        goal: ``fastest``, ``cheapest``, ``largest-batch`` or ``highest-resolution``.
        reserve: GiB of the card that other programs use.
        prices: file of the user's prices.
        out: file to write them to as a configuration; None: write nothing.

    Raises:
        UserError: nothing fits.
    """
    reserved = int(reserve * GIB)
    with silence() if as_json else nullcontext():
        config = _read(file, overrides)
        names = ", ".join(card.name for card in cards)
        say(f"plan    searching settings for {config.name} on {names}, goal: {goal.replace('-', ' ')}")
        if len(cards) > 1 or goal == "cheapest":
            on_cards = _plan_cards(config, cards, goal, reserved, prices)
            card, best = choose_card(on_cards, goal)
            figures: dict[str, object] = {
                "goal": goal,
                "chosen": card.name,
                "cards": [plan_json(*each) for each in on_cards],
            }
            lines = [*table(config.name, on_cards, best), "", *describe_result(1, best, best, config)]
        else:
            (card,), clock = cards, time.perf_counter()
            with counting("plan    search", "predictions") as count:
                search = Search(config, card, reserved, count)
                results = search.find_fastest() if goal == "fastest" else search.find_largest(LARGEST[goal])
                in_int8 = search.int8_products(results[0])
            best, seconds = results[0], time.perf_counter() - clock
            plans = [
                {
                    "about": each.choice.about,
                    "settings": effective_overrides(config, each.choice.config, each.choice.overrides),
                    "needed_mib": round(each.estimate.needed_bytes() / MIB, 1),
                    "seconds_per_step": each.step_time.seconds,
                    "limited_by": each.step_time.limit,
                    "costs": list(describe_settings(config, each)),
                }
                for each in results
            ]
            gain = None if in_int8 is None else in_int8.step_time.seconds
            source = speeds_of(card, config.output.cache_folder)[2]
            figures = {"device": card.name, "speeds": source, "plans": plans, "int8_products_seconds": gain}
            lines = [
                f"{card.name} has {card.bytes / MIB:,.0f} MiB; searched {seconds:.0f} s; step times are predicted",
                f"speeds: {source}",
            ]
            for number, each in enumerate(results, 1):
                lines += ["", *describe_result(number, each, best, config)]
            lines += [] if in_int8 is None else ["", describe_int8(in_int8, best)]
        speeds = speeds_of(card, config.output.cache_folder)[0]
        larger = larger_batch(best.choice.config, best.estimate.job, card, speeds, best.estimate.counts, reserved)
        figures |= {"larger_batch": None if larger is None else larger.as_json()}
        lines += [] if larger is None else ["", larger.words]
        changes = effective_overrides(config, best.choice.config, best.choice.overrides)
        if out is not None:
            merged, _, _ = merge(read_json(file), [*overrides, *changes, f"name={out.stem}"])
            write_json(out, merged)
    if as_json:
        return json.dumps({**figures, "written": None if out is None else str(out)}, indent=2)
    if out is None:
        last = [
            f"train with them: {quote_command('simpletune', 'train', file, *overrides, *changes)}",
            "--out FILE writes them",
        ]
    else:
        last = [f"written: {out}    {quote_command('simpletune', 'train', out)}"]
    return "\n".join([*lines, "", *last])


def _read(file: Path, overrides: Sequence[str]) -> TrainConfig:
    """Read a configuration, which must fix the micro-batch: ``plan`` compares settings with equal micro-batches. Raises
    UserError if ``train.batch_size`` is auto."""
    config = read_for_estimate(file, overrides)
    if config.train.batch_size == "auto":
        raise UserError(
            "train.batch_size: plan searches settings for a given micro-batch, and it is auto. Add train.batch_size=N "
            "with a divisor of train.global_batch, or ask for --goal largest-batch without train.global_batch"
        )
    return config


def _plan_cards(
    config: TrainConfig, cards: Sequence[Card], goal: str, reserved: int, prices: Path | None
) -> list[CardPlan]:
    """Plan the job on each card with its fastest settings there, by which cards are compared."""
    if goal not in ("fastest", "cheapest"):
        raise UserError(f"--goal {goal}: takes one card. Name one with --device, or use fastest or cheapest")
    known, plans = card_prices(prices, config.output.prices), list[CardPlan]()
    with counting("plan    search", "predictions") as count:
        for number, card in enumerate(cards):
            settled, price = settle_compute(config, card.capability), known.get(card.name.lower())

            def here(last: str, share: float, card: Card = card, number: int = number) -> None:
                count(f"{last} on {card.name}", (number + share) / len(cards))

            try:
                plans.append((card, plan_for_card(settled, card, price, reserved, here)))
            except UserError as error:
                plans.append((card, str(error)))
    return plans


def plan_for_card(
    config: TrainConfig,
    card: Card,
    price: Price | None,
    reserved: int = 0,
    count: Count = lambda last, share: None,
) -> PlanResult:
    """Find the fastest settings on one card, and the time and price of the job with them; demo names must be resolved.
    Raises UserError if nothing fits."""
    result = Search(config, card, reserved, count).find_fastest()[0]
    chosen, estimate = result.choice.config, result.estimate
    before, time = (job_time(each, estimate.job, card, estimate.counts, price) for each in (config, chosen))
    seen, wanted = (each.train.micro_batch * each.train.accumulation for each in (chosen, config))  # samples of a step
    return replace(result, time=time, samples=time.steps * seen / (before.steps * wanted))


def choose_card(plans: Sequence[CardPlan], goal: str) -> tuple[Card, PlanResult]:
    """Return the card and the plan that finishes first (``fastest``) or costs least (``cheapest``). Raises UserError if
    the job fits on no card, or no price is known for those where it does."""
    able = [(card, plan) for card, plan in plans if isinstance(plan, PlanResult)]
    if not able:
        raise UserError("\n".join(f"{card.name}: {why}" for card, why in plans))
    if goal == "fastest":
        return min(able, key=lambda each: each[1].seconds)
    priced = [(card, plan) for card, plan in able if plan.cost is not None]
    if not priced:
        names = ", ".join(card.name for card, _ in able)
        raise UserError(f'--goal cheapest: no price is known for {names}. Give one with --prices: {{"CARD": {{...}}}}')
    return min(priced, key=lambda each: (each[1].cost, each[1].seconds))


def plan_json(card: Card, plan: PlanResult | str) -> dict[str, object]:
    """Return a card's plan as plain values."""
    if isinstance(plan, str):
        return {"device": card.name, "why_not": plan}
    price = plan.time.price if plan.time else None
    return {
        "device": card.name,
        "why_not": None,
        "settings": list(plan.choice.overrides),
        "about": plan.choice.about,
        "needed_bytes": plan.estimate.needed_bytes(),
        "seconds_per_step": plan.step_time.seconds,
        "limited_by": plan.step_time.limit,
        "seconds": plan.seconds,
        "cost": plan.cost,
        "price": None if price is None else price.model_dump(),
    }


def table(name: str, plans: Sequence[CardPlan], best: PlanResult) -> Iterator[str]:
    """Tabulate time and price of the job on each card with its fastest settings."""
    _, done_first = choose_card(plans, "fastest")
    yield f"{name}: predicted, with the fastest settings on each card"
    yield f"  {'card':<14}{'s/step':>9}{'hours':>8}{'price':>12}  settings"
    notes, scaled = [], False
    for card, plan in plans:
        if isinstance(plan, str):
            yield f"  {card.name:<14}{'':>29}  nothing fits"
            continue
        assert plan.time is not None
        price = plan.time.price
        money = "unknown" if price is None else f"{plan.cost:.2f} {price.currency or ''}".rstrip()
        marks = [word for word, is_it in (("fastest", plan is done_first), ("chosen", plan is best)) if is_it]
        note = f" ({', '.join(marks)})" if marks else ""
        yield (
            f"  {card.name:<14}{plan.step_time.seconds:>9.3f}{plan.seconds / 3600:>8.2f}{money:>12}"
            f"  {plan.choice.about}{note}"
        )
        words = "; no price is known: give one with --prices" if price is None else f"; {price.words}"
        notes.append(f"  {card.name}: speeds {plan.time.source}{words}")
        scaled |= abs(plan.samples - 1) > 1e-6
    if scaled:
        yield "  hours and prices are for as many samples as the configuration asks for"
    yield from notes


def describe_result(number: int, result: PlanResult, best: PlanResult, config: TrainConfig) -> Iterator[str]:
    """Describe a choice in a few lines."""
    estimate, choice = result.estimate, result.choice
    yield f"{number}. {choice.about}"
    whole = f"whole job {estimate.peak.bytes / MIB:,.0f} ({estimate.peak_stage})"
    needed = f"the card must have {estimate.needed_bytes() / MIB:,.0f}"
    yield f"   predicted MiB: training {estimate.stages['train'].bytes / MIB:,.0f}, {whole}, {needed}"
    yield f"   host memory about {sum(estimate.host.values()) / GIB:.1f} GiB"
    why = _describe_difference(result.step_time, best.step_time) if number > 1 else ""
    yield f"   expected: {result.step_time.seconds:.2f} s/step, limited by the {result.step_time.limit}{why}"
    if result.step_time.bound == "launches" and why_not(choice.config, torch.device("cuda")) is None:
        yield f"   {GRAPHS_COUNT if choice.config.speed.graphs is True else GRAPHS_MAY}"
    yield from (f"   {line}" for line in describe_settings(config, result))
    for text in effective_overrides(config, choice.config, choice.overrides):
        yield f"   {text}"


def describe_int8(in_int8: PlanResult, best: PlanResult) -> str:
    """Propose int8 products: what they should gain over the best settings, and what they may cost."""
    changes = effective_overrides(best.choice.config, in_int8.choice.config, in_int8.choice.overrides)
    seconds = in_int8.step_time.seconds
    return (
        f"int8 products: {seconds:.2f} s/step predicted, {1 - seconds / best.step_time.seconds:.0%} less, with "
        f"{' '.join(changes)}\n  They round activations and gradients, too: docs/explanation/measurements.md, "
        '"What int8 products cost in accuracy"'
    )


def describe_settings(config: TrainConfig, result: PlanResult) -> Iterator[str]:
    """Describe what settings cost in time and quality, compared with the configuration before the changes."""
    step, memory = result.step_time, result.choice.config.memory
    blocks = config.model.architecture.blocks()
    recomputed, keeping = memory.checkpointing, memory.keeping_count(blocks)
    if recomputed == "feed_forward":
        what = "feed-forward networks"
    else:
        what = plural(recomputed, "block") if isinstance(recomputed, int) else f"all {blocks} blocks"
        some = f" in {keeping} of them" if keeping < memory.checkpointed_count(blocks) else ""
        what += f" but for attention{some}" if keeping else ""
    parts = [
        (step.phases.get("recompute", 0.0), f"{what} computed a second time in the backward pass"),
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


def _describe_difference(step_time: StepSeconds, best: StepSeconds) -> str:
    """Describe how a step time differs from the best one, and what causes most of the difference."""
    change = step_time.seconds / best.seconds - 1
    if abs(change) < 0.005:
        return ", equal within half a percent"
    reasons = {
        "products": "multiplies more", "attention": "attends more", "traffic": "moves more in the card's memory",
        "unpacking": "unpacks weights in every pass", "copies": "waits for copies", "host": "queues more operations",
    }  # fmt: skip
    most = max(reasons, key=lambda use: step_time.by_use[use] - best.by_use[use])
    return f", {change:+.0%}" + (f": {reasons[most]}" if change > 0 else ", ranked lower because it may cost quality")


def describe_batches(file: Path, overrides: Sequence[str], devices: Sequence[str], as_json: bool = False) -> str:
    """Return what ``simpletune plan CONFIG --batches`` prints: the largest batch by card and resolution, for the named
    cards or else a list of common ones; the configuration's other settings are used as they are."""
    with silence() if as_json else nullcontext():
        config = _read(file, overrides)
    cards = [find_card(name) for name in devices or SHOWN_CARDS]
    resolutions = possible_resolutions(config, RESOLUTIONS)
    table = batch_table(config, cards, resolutions)
    if as_json:
        return json.dumps({name: dict(zip(map(str, resolutions), row, strict=True)) for name, row in table.items()})
    head = f"| {config.name}: card | " + " | ".join(f"{resolution} px" for resolution in resolutions) + " |"
    lines = [head, "|---" * (1 + len(resolutions)) + "|"]
    for card in cards:
        why = "has no bf16" if describe_misfit(config, card) else "does not fit"
        cells = (str(batch) if batch and not describe_misfit(config, card) else why for batch in table[card.name])
        named = f"{card.name}, {card.gib:g} GiB" if card in CARDS else card.name
        lines.append(f"| {named} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Largest batch of the training step, predicted, allowances included."])
