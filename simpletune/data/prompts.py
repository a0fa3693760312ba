"""The prompt of each variant of a picture: one of its captions, its tags shuffled and dropped, its prefix and suffix.

Everything is drawn from (seed, picture, variant), as crops are, so the prompts of a run are known before it starts: the
number of variants bounds how many the text encoders must encode.
"""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate

from simpletune.data.sources.source import Source, SourceImage
from simpletune.system.rng import stream

CLOSING = ".,;:!?)"  # a suffix that begins with one of these follows the caption without a space
GOLDEN = (5**0.5 - 1) / 2


def prompt_of(image: SourceImage, source: Source, seed: int, variant: int) -> str:
    """Build the prompt of one variant of a picture, by its source's caption options."""
    if image.as_it_is:
        return image.caption
    captions = image.captions
    place = variant % len(captions)
    if image.weights:  # steps of the golden ratio: few variants, too, come close to the weights
        sums = list(accumulate(image.weights))
        point = (stream(seed, "caption", image.digest).random() + variant * GOLDEN) % 1
        place = min(bisect(sums, point * sums[-1]), len(captions) - 1)
    elif len(captions) > 1:  # the variants cycle through them, in a random order per picture
        place = int(stream(seed, "caption", image.digest).permutation(len(captions))[place])
    caption = captions[place]
    if source.shuffle_tags or source.tag_dropout:
        caption = _tags(caption, source, seed, image.digest, variant)
    parts = [source.caption_prefix.strip(), caption]
    joined = " ".join(part for part in parts if part)
    suffix = source.caption_suffix.strip()
    space = " " if joined and suffix and suffix[0] not in CLOSING else ""
    return f"{joined}{space}{suffix}"


def _tags(caption: str, source: Source, seed: int, digest: str, variant: int) -> str:
    """Shuffle and drop the tags of a caption, but for its first ``keep_tags``."""
    tags = [tag.strip() for tag in caption.split(source.tag_separator) if tag.strip()]
    kept, rest = tags[: source.keep_tags], tags[source.keep_tags :]
    draw = stream(seed, "tags", digest, variant)
    order, chances = draw.permutation(len(rest)), draw.random(len(rest))
    places = order if source.shuffle_tags else range(len(rest))
    left = [rest[place] for place in places if chances[place] >= source.tag_dropout]
    separator = source.tag_separator.strip()
    return (f"{separator} " if separator else " ").join([*kept, *left])
