"""``simpletune plan``: print and write the best settings for a card; list the largest batches by card."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from simpletune.config.compute import settle_compute
from simpletune.config.load import read_json
from simpletune.config.overrides import merge
from simpletune.config.schema import TrainConfig
from simpletune.estimate.best_card import GOALS, describe_settings, plan_on, table
from simpletune.estimate.estimate_command import GIB, read_for_estimate, unfit
from simpletune.estimate.job_estimate import MIB
from simpletune.estimate.levers import differing
from simpletune.estimate.planning import PlanResult, Search, batch_table
from simpletune.estimate.timing.timeline import StepSeconds
from simpletune.system.atomic import write_json
from simpletune.system.console import counting, say, silent
from simpletune.system.gpus import CARDS, Card, find_card
from simpletune.system.options import UserError
from simpletune.system.prices import of_cards

SHOWN_CARDS = ("RTX3060-6GB", "RTX3070", "RTX3060-12GB", "T4", "L4", "RTX4090", "A100-40GB", "H100")
RESOLUTIONS = (512, 768, 1024)


@dataclass(frozen=True)
class PlanArguments:
    """Arguments of ``plan``.

    Args:
        file: the configuration.
        overrides: ``key.path=value`` overrides.
        cards: cards to plan for.
        goal: ``fastest``, ``cheapest``, ``largest-batch`` or ``highest-resolution``.
        reserve: GiB of the card that other programs use.
        prices: file of the user's prices.
        out: file to write; None: beside the configuration, named after it and the card.
        as_json: return JSON instead of text.
    """

    file: Path
    overrides: Sequence[str]
    cards: Sequence[Card]
    goal: str = "fastest"
    reserve: float = 0.0
    prices: Path | None = None
    out: Path | None = None
    as_json: bool = False


def plan_config(asked: PlanArguments) -> str:
    """Write the best settings as a configuration; return what ``simpletune plan CONFIG --device CARD`` prints.

    Raises:
        UserError: nothing fits.
    """
    with silent() if asked.as_json else nullcontext():
        config = _read(asked.file, asked.overrides)
        names, goal = ", ".join(card.name for card in asked.cards), asked.goal.replace("-", " ")
        say(f"plan    searching settings for {config.name} on {names}, goal: {goal}")
        if len(asked.cards) > 1 or asked.goal == "cheapest":
            return _of_cards(asked, config)
        return _of_card(asked, config)


def _read(file: Path, overrides: Sequence[str]) -> TrainConfig:
    """Read a configuration, which must fix the micro-batch: ``plan`` compares settings with equal micro-batches.

    Raises:
        UserError: ``train.batch_size`` is auto.
    """
    config = read_for_estimate(file, overrides)
    if config.train.batch_size == "auto":
        raise UserError(
            "train.batch_size: plan searches settings for a given micro-batch, and it is auto. Add train.batch_size=N "
            "with a divisor of train.global_batch, or ask for --goal largest-batch without train.global_batch"
        )
    return config


def _of_card(asked: PlanArguments, config: TrainConfig) -> str:
    """Report the best settings on one card, and the second best."""
    (card,), clock = asked.cards, time.perf_counter()
    with counting("plan    search", "predictions") as count:
        search = Search(config, card, int(asked.reserve * GIB), count)
        ways = {
            "fastest": search.fastest,
            "largest-batch": search.largest_batch,
            "highest-resolution": search.highest_resolution,
        }
        results = ways[asked.goal]()
    seconds, best = time.perf_counter() - clock, results[0]
    out = _written(asked, config, card, best)
    if asked.as_json:
        plans = [plan_json(each, config) for each in results]
        return json.dumps({"device": card.name, "plans": plans, "written": str(out)}, indent=2)
    lines = [f"{card.name} has {card.bytes / MIB:,.0f} MiB; searched {seconds:.0f} s; step times are predicted"]
    for number, each in enumerate(results, 1):
        lines += ["", *_described(number, each, best, config)]
    return "\n".join([*lines, "", f"written: {out}    ./train.sh {out}"])


def _of_cards(asked: PlanArguments, config: TrainConfig) -> str:
    """Report the card on which the job is cheapest or finishes first; compares cards by their fastest settings."""
    if asked.goal not in GOALS:
        raise UserError(f"--goal {asked.goal}: takes one card. Name one with --device, or use fastest or cheapest")
    prices, plans = of_cards(asked.prices, config.output.prices), []
    with counting("plan    search", "predictions") as count:
        for card in asked.cards:
            settled = settle_compute(config, card.capability)
            here = partial(_with_card, count, card)
            plans.append(plan_on(settled, card, prices.get(card.name.lower()), int(asked.reserve * GIB), here))
    best = GOALS[asked.goal](plans)
    assert best.result is not None
    out = _written(asked, config, best.card, best.result)
    if asked.as_json:
        rows = [each.as_json() for each in plans]
        return json.dumps({"goal": asked.goal, "chosen": best.card.name, "cards": rows, "written": str(out)}, indent=2)
    lines = [*table(config.name, plans, best), "", *_described(1, best.result, best.result, config)]
    return "\n".join([*lines, "", f"written: {out}    ./train.sh {out}"])


def _with_card(count: Callable[[str], None], card: Card, last: str) -> None:
    count(f"{last} on {card.name}")


def _written(asked: PlanArguments, config: TrainConfig, card: Card, best: PlanResult) -> Path:
    """Write the best settings, and return the file."""
    changes = differing(config, best.choice.config, best.choice.overrides)
    named = f"{asked.file.stem}_{re.sub(r'[^a-z0-9]+', '', card.name.lower())}.json"
    out = asked.out or asked.file.with_name(named)
    merged, _, _ = merge(read_json(asked.file), [*asked.overrides, *changes, f"name={out.stem}"])
    write_json(out, merged)
    return out


def plan_json(result: PlanResult, config: TrainConfig) -> dict[str, object]:
    """Return one choice as plain values."""
    return {
        "about": result.choice.about,
        "settings": differing(config, result.choice.config, result.choice.overrides),
        "needed_mib": round(result.estimate.needed() / MIB, 1),
        "seconds_per_step": result.step_time.seconds,
        "costs": list(describe_settings(config, result)),
    }


def _described(number: int, result: PlanResult, best: PlanResult, config: TrainConfig) -> Iterator[str]:
    """Describe a choice in a few lines."""
    estimate, choice = result.estimate, result.choice
    yield f"{number}. {choice.about}"
    job = f"{estimate.peak.bytes / MIB:,.0f} ({estimate.peak_stage}), the card must have {estimate.needed() / MIB:,.0f}"
    yield f"   predicted MiB: training {estimate.stages['train'].bytes / MIB:,.0f}, whole job {job}"
    yield f"   host memory about {sum(estimate.needs.host.values()) / GIB:.1f} GiB"
    why = _why(result.step_time, best.step_time) if number > 1 else ""
    yield f"   expected: {result.step_time.seconds:.2f} s/step{why}"
    yield from (f"   {line}" for line in describe_settings(config, result))
    for text in differing(config, choice.config, choice.overrides):
        yield f"   {text}"


def _why(step_time: StepSeconds, best: StepSeconds) -> str:
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


def batches(file: Path, overrides: Sequence[str], devices: Sequence[str], as_json: bool = False) -> str:
    """Return what ``simpletune plan CONFIG --batches`` prints: the largest batch by card and resolution.

    Args:
        file: the configuration; its other settings are used as they are.
        overrides: ``key.path=value`` overrides.
        devices: cards by name or memory; empty: a list of common cards.
        as_json: return JSON instead of text.
    """
    with silent() if as_json else nullcontext():
        config = _read(file, overrides)
    cards = [find_card(name) for name in devices or SHOWN_CARDS]
    resolutions = [side for side in RESOLUTIONS if side <= config.model.largest_side] or [config.model.largest_side]
    table = batch_table(config, cards, resolutions)
    if as_json:
        return json.dumps({name: dict(zip(map(str, resolutions), row, strict=True)) for name, row in table.items()})
    head = f"| {config.name}: card | " + " | ".join(f"{resolution} px" for resolution in resolutions) + " |"
    lines = [head, "|---" * (1 + len(resolutions)) + "|"]
    for card in cards:
        why = "has no bf16" if unfit(config, card) else "does not fit"
        cells = (str(batch) if batch and not unfit(config, card) else why for batch in table[card.name])
        lines.append(f"| {_named(card)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Largest batch of the training step, predicted, allowances included."])


def _named(card: Card) -> str:
    return f"{card.name}, {card.gib:g} GiB" if card in CARDS else card.name
