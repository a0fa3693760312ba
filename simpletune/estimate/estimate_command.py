"""``simpletune estimate``: turn configurations into predictions as text, JSON or a chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from simpletune.config.batches import require_processes, share_of_process
from simpletune.config.compute import settle_compute
from simpletune.config.load import read_config
from simpletune.config.modulation import settle_modulation
from simpletune.config.resolve import require_model_rules, resolve_model_folder
from simpletune.config.schema import DEMO, TrainConfig
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.multi_source import field_of
from simpletune.estimate.job_estimate import MIB, Estimate, estimate, known_job, needs_of, shipped_job
from simpletune.estimate.job_time import JobTime, job_time
from simpletune.estimate.simulate.processes import simulated_process_count
from simpletune.estimate.simulate.reports import square_size, with_workspaces
from simpletune.estimate.stored import other_versions
from simpletune.estimate.terminal import card_table, comparison, comparison_chart, estimate_lines, time_lines
from simpletune.runs.report import charts
from simpletune.system.console import note, say, silence
from simpletune.system.devices import CUDA_12_6, CUDA_13_FROM, sm
from simpletune.system.gpus import Card, find_card
from simpletune.system.options import Json, UserError, join_names
from simpletune.system.prices import card_price
from simpletune.system.startup import ensure_libraries

REFERENCE = "L4"  # if no card is named, count the library workspaces of this one
GIB = 2**30


def read_for_estimate(file: Path, overrides: Sequence[str]) -> TrainConfig:
    """Read a configuration whose data may be missing; resolve the demo model and ``memory.modulation: auto``."""
    config, notices = read_config(file, list(overrides), needs_data=False)
    note(notices)
    return _settle_model(config)


def _settle_model(config: TrainConfig) -> TrainConfig:
    config = resolve_model_folder(config)
    require_model_rules(config)
    return settle_modulation(config, on_host=False)  # an estimate is for a card, also where there is none


def estimate_config(
    file: Path,
    overrides: Sequence[str],
    device: str | None,
    reserve: float = 0.0,
    as_json: bool = False,
    prices: Path | None = None,
) -> str:
    """Return what ``simpletune estimate CONFIG`` prints.

    Args:
        device: a card by name or memory, several with commas between, or None.
        reserve: GiB of the card that other programs use.
        prices: file of the user's prices.
    """
    cards = [find_card(name) for name in (device or "").split(",") if name.strip()]
    reserved, processes = int(reserve * GIB), simulated_process_count()
    if len(cards) > 1:
        return compare_cards(file, overrides, cards, reserved, as_json, prices)
    card = cards[0] if cards else None
    with silence() if as_json else nullcontext():
        config = settle_compute(read_for_estimate(file, overrides), card.capability if card else None)
        config = resolve_auto(config, card, reserved)
        say_what_is_known(config, card, reserved)
    prediction = estimate(config, (card or find_card(REFERENCE)).capability)
    time = None
    if card is not None and processes == 1:  # the time of communication between processes is not predicted
        time = time_of(config, prediction, card, prices, reserved)
    if as_json:
        about = {"name": config.name, "processes": processes}
        timed = None if time is None else time.as_json()
        return json.dumps({**about, **prediction.as_json(card, reserved), "time": timed}, indent=2)
    name = config.name if processes == 1 else f"{config.name}, each of {processes} processes"
    lines = [*estimate_lines(name, prediction, card, reserved), *describe_misfit(config, card)]
    if card is not None and card.capability < CUDA_13_FROM:
        lines.append(
            f"  {card.name} is {sm(card.capability)}, and torch's CUDA 13 builds start at {sm(CUDA_13_FROM)}: install "
            f"a CUDA 12.6 build ({CUDA_12_6})"
        )
    if time is not None:
        lines += ["", *time_lines(time)]
    if missing := _missing_folders(config):
        lines += ["", f"  to count the data set, too, add {' '.join(f'{field}=FOLDER' for field in missing)}"]
    return "\n".join(lines)


def _missing_folders(config: TrainConfig) -> list[str]:
    """List the fields that name folders of pictures which are not there."""
    return [
        field_of(config.pictures, index, "path")
        for index, source in enumerate(config.sources)
        if isinstance(source, Folder) and not source.path.startswith(DEMO) and not Path(source.path).exists()
    ]


def say_what_is_known(config: TrainConfig, card: Card | None, reserved: int) -> None:
    """If a prediction takes seconds, print first what does not: the one that ships, if it is for other libraries, or
    sizes."""
    if known_job(config, (card or find_card(REFERENCE)).capability, square_size(config)) is not None:
        return
    if (found := _shipped_estimate(config, card)) is not None:
        for line in estimate_lines(f"{config.name}, as stored for {_other_versions()}", found, card, reserved):
            say(line)
        say(f"predict {config.name} with the installed versions instead")
        return
    weights = config.model.architecture.parameter_count() * config.precision.bytes_per_weight / GIB
    trained = config.adapter.trainable(config.model.architecture.known_shapes())
    say(f"predict {config.name}: {weights:.1f} GiB of weights, {trained:,} trained values; a step on fake tensors")


def _shipped_estimate(config: TrainConfig, card: Card | None) -> Estimate | None:
    """Return the estimate by the simulation that ships, by whatever versions of the libraries; None if there is
    none."""
    capability, size = (card or find_card(REFERENCE)).capability, square_size(config)
    job = shipped_job(config, capability, size)
    if job is None:
        return None
    return needs_of(config, with_workspaces(job, capability, config.speed.deterministic), size)


def _other_versions() -> str:
    return join_names([f"{name} {version}" for name, version in other_versions().items()])


def shipped_json(config: TrainConfig, card: Card | None) -> Json | None:
    """Return what ``estimate --json`` prints, by the prediction that ships, with the versions ``stored_for`` which it
    is; None if none ships, or it is for the installed versions. Imports no torch."""
    if not other_versions():
        return None
    config = settle_compute(_settle_model(config), card.capability if card else None)
    if (found := _shipped_estimate(config, card)) is None:
        return None
    time = None if card is None else time_of(config, found, card, None).as_json()
    return {**found.as_json(card), "time": time, "stored_for": _other_versions()}


def resolve_auto(config: TrainConfig, card: Card | None, reserved: int) -> TrainConfig:
    """Resolve ``batch_size: auto`` and ``checkpointing: auto`` on a card, for one of the simulated processes. Raises
    ConfigError if there are too many processes for a step of this size."""
    size, processes = square_size(config), simulated_process_count()
    if config.train.batch_size == "auto" or config.memory.checkpointing == "auto":
        ensure_libraries()
        from simpletune.estimate.auto_settings import choose_batch, resolve_checkpointing

        config = choose_batch(config, size, processes, card, reserved)
        require_processes(config, processes)
        return resolve_checkpointing(share_of_process(config, processes), size, card, reserved)
    require_processes(config, processes)
    return share_of_process(config, processes)


def time_of(config: TrainConfig, prediction: Estimate, card: Card, prices: Path | None, reserved: int = 0) -> JobTime:
    """Predict the time and price of an estimated job on a card; ``prices``: file of the user's prices; ``reserved``:
    bytes of the card that other programs use."""
    price = card_price(card, config.output.prices, prices)
    return job_time(config, prediction.job, card, prediction.counts, price, reserved=reserved)


def compare_cards(
    file: Path, overrides: Sequence[str], cards: Sequence[Card], reserved: int, as_json: bool, prices: Path | None
) -> str:
    """Return what ``simpletune estimate CONFIG --device A,B,C`` prints: hours and price on each card."""
    rows: list[tuple[JobTime, str]] = []
    figures: list[dict[str, object]] = []
    with silence() if as_json else nullcontext():
        read = read_for_estimate(file, overrides)
        for card in cards:
            say(f"predict {read.name} on {card.name}")
            config = resolve_auto(settle_compute(read, card.capability), card, reserved)
            prediction = estimate(config, card.capability)
            why = "" if prediction.fits(card, reserved) else "does not fit"
            why = "has no bf16" if describe_misfit(config, card) else why
            time = time_of(config, prediction, card, prices, reserved)
            rows.append((time, why))
            figures.append(
                {**time.as_json(), "needed_mib": round(prediction.needed_bytes() / MIB), "why_not": why or None}
            )
    if as_json:
        return json.dumps({"name": read.name, "cards": figures}, indent=2)
    return "\n".join(card_table(read.name, rows))


def describe_misfit(config: TrainConfig, card: Card | None) -> list[str]:
    """Explain why a card cannot run a configuration, apart from its memory."""
    if card is None or card.has_bf16 or config.precision.compute != "bf16":
        return []
    return [f"  {card.name} has no bf16: use precision.compute=auto, which is fp16 there, or fp32"]


def compare_configs(
    files: Sequence[Path],
    overrides: Sequence[str],
    device: str | None,
    image: Path | None = None,
    as_json: bool = False,
) -> str:
    """Return what ``simpletune estimate --compare A B ...`` prints; write a chart of stacked bars to ``image``, an
    ``.svg`` or ``.png``."""
    if image is not None and image.suffix not in (".svg", ".png"):
        raise UserError(f"--picture: {image} has the suffix {image.suffix or '(none)'}. Use .svg or .png")
    card = find_card(device) if device else None
    predictions: dict[str, Estimate] = {}
    for file in files:
        with silence():  # the table's row has this information
            config = settle_compute(read_for_estimate(file, overrides), card.capability if card else None)
        name = config.name if config.name not in predictions else str(file)
        if name in predictions:
            raise UserError(f"--compare: {file} is given twice. Name each configuration once")
        with silence() if as_json else nullcontext():
            config = resolve_auto(config, card, 0)
        predictions[name] = estimate(config, (card or find_card(REFERENCE)).capability)
    lines = [comparison(predictions)]
    if image is not None:
        image.write_bytes(charts.image(comparison_chart(predictions, card), image.suffix))
        lines.append(str(image))
    if as_json:
        return json.dumps({name: each.as_json(card) for name, each in predictions.items()}, indent=2)
    return "\n".join(lines)
