"""The dataset report as text for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from simpletune.commands.inspect_data.scan import LONG, DatasetReport
from simpletune.data.source_mix import source_lines
from simpletune.data.sources.accounts import sentences
from simpletune.system.options import Json, first_lines, join_names, plural
from simpletune.system.printable import printable_name

LISTED = 10  # entries of a list on the terminal
SIZES = ("under half of it", "half of it to all", "up to twice", "up to four times", "more")
ASPECTS = {
    "1:3 and narrower": 0.3334,
    "1:2": 0.58,
    "2:3": 0.71,
    "3:4": 0.87,
    "square": 1.15,
    "4:3": 1.42,
    "3:2": 1.73,
    "2:1": 2.5,
    "3:1 and wider": float("inf"),
}


def sizes(found: DatasetReport) -> list[tuple[str, int]]:
    """Count sizes, as the side of a square with the same area, relative to the training resolution."""
    counts = [0] * len(SIZES)
    for seen in found.usable:
        side = (seen.image.size[0] * seen.image.size[1]) ** 0.5 / found.resolution
        counts[sum(side >= edge for edge in (0.5, 1, 2.0001, 4.0001))] += 1
    edges = [round(found.resolution * edge) for edge in (0.5, 1, 2, 4)]
    names = [
        f"under {edges[0]} px",
        *(f"{low} to {high} px" for low, high in zip(edges, edges[1:], strict=False)),
        f"over {edges[3]} px",
    ]
    return list(zip(names, counts, strict=True))


def aspects(found: DatasetReport) -> list[tuple[str, int]]:
    """Count aspect ratios, width to height."""
    counts = dict.fromkeys(ASPECTS, 0)
    for seen in found.usable:
        aspect = seen.image.size[0] / seen.image.size[1]
        counts[next(name for name, edge in ASPECTS.items() if aspect < edge or edge == float("inf"))] += 1
    return list(counts.items())


def describe_unusable(found: DatasetReport) -> str:
    """Describe what training would do about unusable entries."""
    if not found.rejected:
        return "training would use every picture"
    if found.on_error == "skip":
        return "training would skip them (data.on_error=skip)"
    return "training would stop (data.on_error=stop). Fix them, or set data.on_error=skip"


def format_limit(found: DatasetReport) -> str:
    if not found.tokens or found.reader is None:
        return f"{LONG} characters (no tokenizer is available)"
    return f"{found.reader.limit} {found.reader.kind} tokens"


def format_report(found: DatasetReport) -> str:
    """Format the report as lines; shortens long lists."""
    return "\n".join(f"{title:<10} {line}" for title, line in _lines(found))


def _lines(found: DatasetReport) -> Iterator[tuple[str, str]]:
    total = len(found.usable) + sum(each.kind == "picture" for each in found.rejected)
    yield "data", f"{printable_name(found.path)}: {plural(total, 'picture')}, {len(found.usable)} usable"
    for number, line in enumerate(sentences(found.files)):
        yield "" if number else "files", line
    yield "captions", printable_name(f"from {found.captions}")
    for note in found.notes:
        yield "note", note
    for hint in found.hints:
        yield "hint", hint
    for line in source_lines(found.sources):
        yield "source", line
    for words in found.augmentation:
        yield "augmented", words
    if found.holes:
        yield "holes", f"to inpaint: {' and '.join(found.holes)} (inpainting_mask)"
    if found.held_out:
        yield (
            "held out",
            f"{plural(len(found.held_out), 'picture')} (validation.split), excluded from buckets and epochs",
        )
        yield from _format_list([printable_name(name) for name in found.held_out])
    for group in found.split_duplicates:
        names = join_names([printable_name(name) for name in group], LISTED)
        yield "leak", f"near-duplicates, some held out and some trained on: {names}"
    if found.left_alone and not found.files:
        counted = ", ".join(f"{count} {suffix}" for suffix, count in sorted(found.left_alone.items()))
        yield "not read", f"{counted}. Convert them to jpg, png or webp to train on them"
    if found.animated:
        yield "animated", f"{plural(len(found.animated), 'picture')}: the first frame or page is used"
        yield from _format_list([printable_name(name) for name in found.animated])
    if found.rejected:
        yield "unusable", f"{plural(len(found.rejected), 'entry', 'entries')}: {describe_unusable(found)}"
        yield from _format_list([f"{printable_name(each.name)}: {each.reason}" for each in found.rejected])
    if found.small:
        yield "small", f"{plural(len(found.small), 'picture')} scaled up to fill a bucket"
        yield from _format_list(
            [f"{printable_name(seen.image.name)}: {seen.upscale:.2f} times" for seen in found.small]
        )
    for title, groups, what in (
        ("duplicate", found.exact, "identical files"),
        ("alike", found.near, "nearly identical pictures"),
    ):
        if groups:
            yield title, f"{plural(len(groups), 'group')} of {what}"
            yield from _format_list([join_names([printable_name(name) for name in group], LISTED) for group in groups])
    if found.same_caption:
        yield "same text", f"{plural(len(found.same_caption), 'caption')} shared by several pictures"
        yield from _format_list(
            [f"{len(names)} pictures: {printable_name(c)}" for c, names in found.same_caption.items()]
        )
    if found.long:
        yield "too long", f"{plural(len(found.long), 'caption')} longer than {format_limit(found)}"
        yield from _format_list([f"{printable_name(name)}: {length:,}" for name, length in found.long])
    if not found.usable:
        return
    yield "sizes", ", ".join(f"{name}: {count}" for name, count in sizes(found) if count)
    yield "aspects", ", ".join(f"{name}: {count}" for name, count in aspects(found) if count)
    yield "buckets", f"{len(found.buckets)}; pictures, batches, fillers in the last batch, share cropped after scaling"
    yield from _format_list(
        [
            f"{row.size[0]}x{row.size[1]}: {row.images}, {row.batches}, {row.fillers}, {row.lost:.1%}"
            for row in found.buckets
        ]
    )
    batches, fillers = sum(row.batches for row in found.buckets), sum(row.fillers for row in found.buckets)
    samples = sum(row.samples for row in found.buckets)
    yield (
        "an epoch",
        f"{plural(found.steps, 'step')} of up to {found.batch}; {plural(samples, 'sample')} in "
        f"{plural(batches, 'batch', 'batches')}, {plural(fillers, 'filler')} with zero weight, 0 dropped",
    )


def _format_list(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for line in first_lines(lines, LISTED):
        yield "", f"  {line}"


def as_json(found: DatasetReport) -> Json:
    return {
        "path": found.path,
        "captions": found.captions,
        "on_error": found.on_error,
        "left_alone": found.left_alone,
        "files": {name: {"class": kind, "reason": why} for name, (kind, why) in found.files.files.items()},
        "hints": list(found.hints),
        "notes": list(found.notes),
        "sources": [asdict(each) for each in found.sources],
        "augmentation": found.augmentation,
        "inpainting_masks": found.holes,
        "held_out": found.held_out,
        "held_out_and_alike": found.split_duplicates,
        "usable": [
            {
                "name": seen.image.name,
                "size": seen.image.size,
                "bucket": seen.bucket,
                "caption": seen.image.caption,
                "captions": seen.image.captions,
                "weights": seen.image.weights,
                "upscale": round(seen.upscale, 4),
                "cut_away": round(seen.lost, 4),
                "sha256": seen.image.digest,
            }
            for seen in found.usable
        ],
        "unusable": [{"name": each.name, "kind": each.kind, "reason": each.reason} for each in found.rejected],
        "animated": found.animated,
        "without_caption": [each.name for each in found.uncaptioned],
        "scaled_up": {seen.image.name: round(seen.upscale, 4) for seen in found.small},
        "duplicates": found.exact,
        "alike": found.near,
        "same_caption": found.same_caption,
        "too_long": {"limit": format_limit(found), "captions": dict(found.long)},
        "sizes": dict(sizes(found)) if found.usable else {},
        "aspects": dict(aspects(found)),
        "buckets": [
            {
                "size": row.size,
                "pictures": row.images,
                "samples": row.samples,
                "batches": row.batches,
                "fillers": row.fillers,
                "cut_away": round(row.lost, 4),
            }
            for row in found.buckets
        ],
        "epoch": {
            "steps": found.steps,
            "pictures_a_step": found.batch,
            "dropped": 0,
            "fillers": sum(row.fillers for row in found.buckets),
        },
    }
