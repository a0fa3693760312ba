"""The first stage: scan the data, skip unusable entries, and plan the run, without encoding anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simpletune.adapters.text.placeholders import occurs
from simpletune.config.schema import ResolvedConfig, TrainConfig
from simpletune.data.concept_plan import ConceptPlan
from simpletune.data.plan import GlobalBatch, Plan
from simpletune.data.samples import drop_rejected, make_samples
from simpletune.data.sources.accounts import sentences
from simpletune.data.sources.multi_source import (
    Data,
    field_of,
    find_too_small,
    scan_sources,
    source_notes,
    stopping_entries,
)
from simpletune.data.sources.source import RejectedEntry, SourceImage
from simpletune.data.split import split_images
from simpletune.stages.stream_plan import stream_plan
from simpletune.system.console import say
from simpletune.system.hub import cached_folder
from simpletune.system.options import UserError, plural
from simpletune.system.printable import printable_name

Lengths = Callable[[Sequence[str]], Sequence[int]]


@dataclass(frozen=True)
class PlannedData:
    """A scanned dataset and the plan of the run.

    Args:
        plan: selects the samples, noise levels and noise of each step.
        usable: the usable pictures.
        captions: a description of where the captions come from.
        left_out: the unusable entries.
    """

    plan: Plan
    usable: Sequence[SourceImage]
    captions: str
    left_out: Sequence[RejectedEntry]


def plan_data(config: ResolvedConfig) -> PlannedData:
    """Scan the data and plan the run.

    A data set in shards is planned by its index, without reading a row.

    Args:
        config: the configuration, with folders resolved.

    Raises:
        UserError: entries are unusable and ``data.on_error`` is ``stop``, no pictures are left, or a data set in shards
            is missing or damaged.
    """
    if config.concept is not None:
        prompts_alone = make_plan(config, [])
        require_positions(config, prompts_alone)
        return PlannedData(prompts_alone, [], "concept.directions", [])
    if config.pictures.streamed:
        streamed = stream_plan(config)
        for note in [*streamed.samples.rows.notes(), *source_notes(config.pictures, inpaints=streamed.inpaints)]:
            say(f"data    {note}")
        require_positions(config, streamed)
        return PlannedData(streamed, [], streamed.samples.source.captions_from, [])
    scan = scan_sources(config.pictures)
    small = find_too_small(scan.images, config.pictures, config.model.architecture.multiple)
    for line in [
        *sentences(scan.files),
        *scan.notes,
        *source_notes(config.pictures, scan.images, config.model.inpaints),
    ]:
        say(f"data    {line}")
    for hint in scan.hints:  # before errors, which they may explain
        say(f"hint    {hint}")
    report_rejected([*scan.rejected, *small], config.pictures)
    usable = drop_rejected(scan.images, small)
    plan = make_plan(config, usable, config.model.inpaints, prompt_lengths(config))
    hint_at_shares(plan)
    require_positions(config, plan)
    require_token(config, plan)
    return PlannedData(plan, usable, scan.captions, [*scan.rejected, *small])


def prompt_lengths(config: TrainConfig, download: bool = True) -> Lengths | None:
    """Return the function by which a plan deals micro-batches by the length of their prompts; None for a family whose
    prompts need no such thing, or, without ``download``, where the tokenizer is not at hand.

    Raises:
        UserError: the tokenizer is missing, or cannot be downloaded or read.
    """
    files, text = config.model.files, config.model.text
    multiple = text.length_multiple
    if multiple is None:
        return None
    (encoder,) = text.encoders
    hub = [part for part in files.hub_parts() if part.part == encoder.tokenizer]
    if not download and (any(files.problems()) or any(cached_folder(part) is None for part in hub)):
        return None
    folder = files.part(encoder.tokenizer).folder
    assert folder is not None  # single files never contain tokenizers
    tokenizer = encoder.read_tokenizer(folder)

    def lengths(prompts: Sequence[str]) -> list[int]:
        counts = (min(count, encoder.limit) for count in encoder.counts(tokenizer, prompts))
        return [count + -count % multiple for count in counts]

    return lengths


def make_plan(
    config: TrainConfig, images: Sequence[SourceImage], inpaints: bool = False, lengths: Lengths | None = None
) -> Plan:
    """Plan a run over the usable pictures, without those that ``validation.split`` holds out, or over its concept. The
    plan does not depend on the number of processes.

    Raises:
        UserError: a source has no pictures, or none are on one side of the split.
    """
    batch = GlobalBatch(config.train.micro_batch, config.train.accumulation)
    if config.concept is not None:
        return ConceptPlan(config.concept, config.objective, config.train.seed, batch)
    data, multiple = config.pictures, config.model.architecture.multiple
    for index, source in enumerate(data.members):
        if all(image.source != index for image in images):
            raise UserError(f"{field_of(data, index, 'path')}: {source.path} contains no usable pictures. Add some")
    kept = [image for image in images if data.members[image.source].regularization]
    others = [image for image in images if not data.members[image.source].regularization]
    training, held_out = split_images(others, config.validation.split)
    firsts = {image.digest: image.source for image in reversed(held_out)}  # a second source may hold copies
    return Plan(
        make_samples([*training, *kept], data.members, step=multiple),
        data,
        config.objective,
        config.train.seed,
        batch,
        make_samples([p for p in held_out if firsts[p.digest] == p.source], data.members, 1, multiple),
        inpaints,
        lengths,
    )


def hint_at_shares(plan: Plan) -> None:
    """Log the number of regularization samples if it is far from the number of the others."""
    of_class = sum(plan.source_of(sample).regularization for sample in plan.samples)
    others = len(plan.samples) - of_class
    ratio = of_class / others
    if of_class and not 0.5 <= ratio <= 2:
        more = f"about {ratio:.0f} times the repeats of the others" if ratio > 1 else "fewer repeats of the others"
        counts = f"{plural(others, 'sample')} to learn and {of_class:,} for regularization"
        say(f"hint    an epoch has {counts}. Equal shares are usual: use {more}")


def require_token(config: TrainConfig, plan: Plan) -> None:
    """Require the token of ``text.embeddings`` in the captions of the pictures to learn from; warn about those without
    it.

    Raises:
        UserError: no caption has it.
    """
    option = config.text.embeddings
    if option is None:
        return
    samples = [sample for sample in plan.samples if not plan.source_of(sample).regularization] or plan.samples
    prompts = [plan.prompt(sample, v) for sample in samples for v in range(plan.source_of(sample).variants)]
    without = [prompt for prompt in dict.fromkeys(prompts) if not occurs(prompt, option.token)]
    if len(without) == len(set(prompts)):
        raise UserError(
            f"text.embeddings.token: no caption has {option.token}, so its embeddings would not train. Write it into "
            f'the captions, or set data.prompt, such as "a photo of {option.token}"'
        )
    if without:
        count = f"{len(without):,} of {plural(len(set(prompts)), 'caption')}"
        say(f"warning {count} lack the token {option.token}, such as {without[0][:80]!r}: they do not train it")


def require_positions(config: TrainConfig, plan: Plan) -> None:
    """Require that the model has positions for every picture size of the run.

    Raises:
        UserError: a bucket or a validation picture is too large.
    """
    most = config.model.architecture.largest_side
    generated = [config.image_size()] if config.validation.prompts != [] else []
    trained = "data.resolution" if config.concept is None else "concept.resolutions"
    for field, sizes in ((trained, plan.sizes()), ("validation", generated)):
        for width, height in sizes:
            if max(width, height) > most:
                raise UserError(
                    f"{field}: pictures of {width} x {height} px are too large for this model, which has positions for "
                    f"{most} px a side. Use a smaller resolution"
                )


def report_rejected(rejected: Sequence[RejectedEntry], data: Data) -> None:
    """List unusable entries.

    Raises:
        UserError: there are unusable entries in a source whose ``on_error`` is ``stop``.
    """
    if not rejected:
        return
    fatal = stopping_entries(data, rejected)
    shown = fatal or rejected
    several = len(data.members) > 1
    listed = []
    for each in shown[:20]:
        source = f" in {printable_name(data.members[each.source].path)}" if several else ""
        listed.append(f"  {printable_name(each.name)}{source}: {each.reason}")
    if len(shown) > len(listed):
        listed.append(f"  and {len(shown) - len(listed)} more (simpletune data CONFIG lists all)")
    kinds = ", ".join(plural(count, kind) for kind, count in Counter(each.kind for each in shown).items())
    if fatal:
        remedy = "Fix or remove them, or set data.on_error=skip to skip them"
        raise UserError("\n".join([f"data.path: {kinds} cannot be used:", *listed, remedy]))
    say("\n".join([f"skipped {kinds} (data.on_error=skip):", *listed]))
