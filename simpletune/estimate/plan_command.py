"""``simpletune plan``: print and write the best settings for a card; list the largest batches by card."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from simpletune.cards import CARDS, Card, card_of
from simpletune.config.load import read_json
from simpletune.config.overrides import merge
from simpletune.config.schema import TrainConfig
from simpletune.estimate.estimate_command import GIB, read_for_estimate, unfit
from simpletune.estimate.levers import differing, what_may_cost
from simpletune.estimate.planning import PlanResult, Search, batch_table
from simpletune.estimate.predict import MIB
from simpletune.system.atomic import write_json
from simpletune.system.console import counting, say, silent
from simpletune.timing.timeline import StepSeconds

SHOWN_CARDS = ("RTX3060-6GB", "RTX3070", "RTX3060-12GB", "T4", "L4", "RTX4090", "A100-40GB", "H100")
RESOLUTIONS = (512, 768, 1024)


def plan_config(file: Path, overrides: Sequence[str], device: str, reserve: float, goal: str, out: Path | None) -> str:
    """Write the best settings as a configuration; return what ``simpletune plan CONFIG --device CARD`` prints.

    Args:
        file: the configuration.
        overrides: of it.
        device: a card by name or memory.
        reserve: GiB of the card that other programs use.
        goal: ``fastest``, ``largest-batch`` or ``highest-resolution``.
        out: file to write; None: beside the configuration, named after it and the card.

    Raises:
        UserError: nothing fits.
    """
    card, config = card_of(device), read_for_estimate(file, overrides)
    say(f"plan    searching settings for {config.name} on {card.name}, goal: {goal.replace('-', ' ')}")
    clock = time.perf_counter()
    with counting("plan    search", "predictions") as count:
        search = Search(config, card, int(reserve * GIB), count)
        ways = {
            "fastest": search.fastest,
            "largest-batch": search.largest_batch,
            "highest-resolution": search.highest_resolution,
        }
        results = ways[goal]()
    seconds = time.perf_counter() - clock
    best = results[0]
    changes = differing(config, best.choice.config, best.choice.overrides)
    out = out or file.with_name(f"{file.stem}_{re.sub(r'[^a-z0-9]+', '', card.name.lower())}.json")
    merged, _, _ = merge(read_json(file), [*overrides, *changes, f"name={out.stem}"])
    write_json(out, merged)
    lines = [f"{card.name} has {card.bytes / MIB:,.0f} MiB; searched {seconds:.0f} s; step times are predicted"]
    for number, each in enumerate(results, 1):
        lines += ["", *_described(number, each, best, config)]
    lines += ["", f"written: {out}    ./train.sh {out}"]
    return "\n".join(lines)


def _described(number: int, result: PlanResult, best: PlanResult, config: TrainConfig) -> Iterator[str]:
    """Describe a choice in a few lines."""
    estimate, choice = result.estimate, result.choice
    yield f"{number}. {choice.about}"
    job = f"{estimate.peak.bytes / MIB:,.0f} ({estimate.peak_stage}), the card must have {estimate.needed() / MIB:,.0f}"
    yield f"   predicted MiB: training {estimate.stages['train'].bytes / MIB:,.0f}, whole job {job}"
    yield f"   host memory about {sum(estimate.needs.host.values()) / GIB:.1f} GiB"
    why = _why(result.step_time, best.step_time) if number > 1 else ""
    yield f"   expected: {result.step_time.seconds:.2f} s/step{why}"
    costs = what_may_cost(config, choice.config)
    if costs:
        yield f"   may cost quality: {', '.join(costs)}"
    for text in differing(config, choice.config, choice.overrides):
        yield f"   {text}"


def _why(step_time: StepSeconds, best: StepSeconds) -> str:
    """Say how a step time differs from the best one, and what causes most of the difference."""
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
        overrides: of it.
        devices: cards by name or memory; empty: a list of common cards.
        as_json: return JSON instead of text.
    """
    with silent() if as_json else nullcontext():
        config = read_for_estimate(file, overrides)
    cards = [card_of(name) for name in devices or SHOWN_CARDS]
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
