"""Render captioned pictures of coloured shapes from a seed, the demo's data set. Needs numpy and Pillow only.

Legend: p and q are pixel rows and columns. Lengths are fractions of the picture's side, so that the same scene and
seed give the same composition at every size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from simpletune.data.demo.shapes import DISTANCES, Field, circle
from simpletune.system.atomic import new_folder

VERSION = 2
"""Increase it whenever a picture or a caption changes: the names of cached folders include it."""

RGB = tuple[int, int, int]

SHAPES = tuple(DISTANCES)
COLOURS: dict[str, RGB] = {
    "red": (222, 36, 40),
    "orange": (250, 132, 16),
    "yellow": (250, 214, 20),
    "lime": (150, 216, 36),
    "green": (30, 138, 60),
    "cyan": (20, 182, 196),
    "blue": (40, 86, 226),
    "purple": (128, 44, 172),
    "pink": (240, 84, 166),
    "brown": (126, 74, 34),
}
BACKGROUNDS: dict[str, RGB] = {
    "white": (244, 244, 244),
    "gray": (152, 154, 158),
    "black": (26, 26, 28),
    "navy": (26, 40, 96),
    "cream": (252, 234, 186),
    "mint": (168, 232, 194),
    "sky": (164, 206, 248),
    "lavender": (204, 176, 240),
    "peach": (254, 194, 160),
}
SIZES: dict[str, float] = {"small": 0.14, "medium": 0.185, "large": 0.235}
"""Radius."""
POSITIONS: dict[str, tuple[float, float]] = {
    "in the middle": (0.5, 0.5),
    "on the left": (0.3, 0.5),
    "on the right": (0.7, 0.5),
    "at the top": (0.5, 0.3),
    "at the bottom": (0.5, 0.7),
}
"""Centre (x, y), from the upper left."""
STYLES = ("flat", "striped", "painted")
"""Plain areas; outlined, with coarse diagonal stripes; brush strokes."""

TEMPLATES = (
    "a {style} picture of a {size} {colour} {shape} {position}, on a {background} background",
    "{size} {colour} {shape}, {background} background, {position}, {style} style",
    "a {size} {colour} {shape} {position} of a {background} picture in {style} style",
)
SUBJECT_TEMPLATE = "a {size} {subject} figure {position}, on a {background} background"
STYLE_TRIGGER, SUBJECT_TRIGGER = "glim", "blick"
"""Meaningless words for the style and the figure that fine-tuning will teach."""
SUBJECT = ("circle", "purple", "star", "yellow")
"""Shape and colour of the demo's particular figure, outside and inside."""
MEANINGLESS = ("blick", "zorp")
"""Words of the vocabulary that the text encoders saw in place of a style. The encoders place both in the middle of all
styles, where a small change of the model cannot separate them; a word that splits into letters is easier to learn."""

OUTLINE = 0.036
STRIPE_PERIOD = 0.14
TINT = 0.5  # position of the pale stripes between the colour and white
JITTER = 0.015  # of the centre; the radius varies by 4%, the angle by 5 degrees, a colour by 5 out of 255


@dataclass(frozen=True)
class Scene:
    """The content of a picture; every field is a key of the tables above."""

    shape: str
    colour: str
    background: str
    size: str
    position: str
    style: str


def words() -> tuple[str, ...]:
    """Return every word that a caption can contain, sorted: a closed vocabulary for a hand-written tokenizer."""
    templates = " ".join([*TEMPLATES, SUBJECT_TEMPLATE]).replace(",", "")
    fixed = [word for word in templates.split() if not word.startswith("{")]
    tables = (SHAPES, COLOURS, BACKGROUNDS, SIZES, POSITIONS, STYLES, MEANINGLESS)
    return tuple(sorted({*fixed, *" ".join(itertools.chain(*tables)).split()}))


def caption(scene: Scene, template: int, trigger: str | None = None) -> str:
    """Describe a scene by one of `TEMPLATES`, modulo their number; a trigger replaces the style's own word, so that
    fine-tuning must learn its meaning."""
    fields = {**vars(scene), "style": trigger or scene.style}
    return TEMPLATES[template % len(TEMPLATES)].format(**fields)


def is_held_out(shape: str, colour: str, background: str) -> bool:
    """Return whether a triple is held out of training: 90 of the 720, one shape for each pair of colour and
    background."""
    row, column = list(COLOURS).index(colour), list(BACKGROUNDS).index(background)
    return (SHAPES.index(shape) + 3 * row + 5 * column) % len(SHAPES) == 0


def sample_scenes(count: int, seed: int, held_out: bool = False, style: str | None = None) -> list[Scene]:
    """Sample scenes of one of `STYLES` (None: of all evenly) from the held-out triples or from the training ones. The
    same seed gives the same scenes; a shorter list is a prefix of a longer one."""
    if style is not None and style not in STYLES:
        raise ValueError(f"style {style!r} is unknown. Use one of {', '.join(STYLES)}.")
    rng = np.random.default_rng(seed)
    triples = [t for t in itertools.product(SHAPES, COLOURS, BACKGROUNDS) if is_held_out(*t) == held_out]
    lengths = [len(triples), len(SIZES), len(POSITIONS), len(STYLES)]
    scenes = []
    for _ in range(count):
        triple, size, position, any_style = (rng.random(4) * lengths).astype(int)
        shape, colour, background = triples[triple]
        size_word, place_words = list(SIZES)[size], list(POSITIONS)[position]
        scenes.append(Scene(shape, colour, background, size_word, place_words, style or STYLES[any_style]))
    return scenes


def balanced_scenes(count: int, style: str) -> list[Scene]:
    """Select training scenes that use each table's values as evenly as possible, for small sets."""
    used = dict.fromkeys(BACKGROUNDS, 0)
    scenes = []
    for index in range(count):
        shape, colour = SHAPES[index % len(SHAPES)], list(COLOURS)[3 * index % len(COLOURS)]
        allowed = [name for name in BACKGROUNDS if not is_held_out(shape, colour, name)]
        background = min(allowed, key=used.__getitem__)
        used[background] += 1
        size, position = list(SIZES)[(index + index // 8) % 3], list(POSITIONS)[(index + index // 5) % len(POSITIONS)]
        scenes.append(Scene(shape, colour, background, size, position, style))
    return scenes


def render(scene: Scene, pixels: int = 64, seed: int = 0) -> Image.Image:
    """Render a scene in RGB, antialiased; outlines need a side of about 48 pixels or more. ``seed`` is that of small
    variations of place, size, angle and shade, and of the brush strokes."""
    rng = np.random.default_rng([seed, 1])
    x, y = place(scene, pixels, rng)
    distance = DISTANCES[scene.shape](x, y) * SIZES[scene.size]  # [p, q], in fractions of the side
    colour, background = _shade(COLOURS[scene.colour], rng), _shade(BACKGROUNDS[scene.background], rng)
    if scene.style == "striped":
        canvas = _render_stripes(distance, colour, background, pixels, rng)
    elif scene.style == "painted":
        canvas = _render_strokes(distance, colour, background, pixels, rng)
    else:
        canvas = _blend(background, colour, _coverage(distance, pixels))
    return _to_image(canvas)


def render_subject(background: str, size: str, position: str, pixels: int = 64, seed: int = 0) -> Image.Image:
    """Render the demo's particular figure, always in the same two colours: a yellow star on a purple disc."""
    scene = Scene(*SUBJECT[:2], background, size, position, "flat")
    return render_figure(scene, SUBJECT[2:], pixels, seed)


def render_figure(scene: Scene, inner: tuple[str, str], pixels: int = 64, seed: int = 0) -> Image.Image:
    """Render a flat shape in the scene's, whose style is not read; ``inner`` is the inner one's shape and colour."""
    rng = np.random.default_rng([seed, 1])
    x, y = place(scene, pixels, rng)
    canvas = _shade(BACKGROUNDS[scene.background], rng)
    outside = circle(x, y, radius=1.0) if scene.shape == "circle" else DISTANCES[scene.shape](x, y)  # room for a star
    inside = DISTANCES[inner[0]](x / 0.82, y / 0.82) * 0.82
    for distance, colour in ((outside, scene.colour), (inside, inner[1])):
        canvas = _blend(canvas, np.array(COLOURS[colour], dtype=float), _coverage(distance * SIZES[scene.size], pixels))
    return _to_image(canvas)


def place(scene: Scene, pixels: int, rng: np.random.Generator) -> tuple[Field, Field]:
    """Coordinate fields of the shape, ([p, q], [p, q]) in units of its radius, with a little variation."""
    shift_x, shift_y, stretch, turn = rng.uniform(-1.0, 1.0, size=4)
    centre_x, centre_y = POSITIONS[scene.position]
    y, x = (np.mgrid[:pixels, :pixels] + 0.5) / pixels
    radius = SIZES[scene.size] * (1.0 + 0.04 * stretch)
    x, y = (x - centre_x - JITTER * shift_x) / radius, (y - centre_y - JITTER * shift_y) / radius
    sine, cosine = np.sin(np.radians(5.0 * turn)), np.cos(np.radians(5.0 * turn))
    return cosine * x + sine * y, cosine * y - sine * x


def outline_colour(background: str | Field) -> RGB:
    """Return a near black, or a near white on a dark background."""
    value = BACKGROUNDS[background] if isinstance(background, str) else background
    return (34, 30, 38) if float(np.mean(value)) > 100.0 else (240, 236, 228)


def _shade(colour: RGB, rng: np.random.Generator) -> Field:
    return np.clip(np.array(colour) + rng.uniform(-5.0, 5.0, size=3), 0.0, 255.0)


def _coverage(distance: Field, pixels: int) -> Field:
    return np.clip(0.5 - distance * pixels, 0.0, 1.0)  # share of each pixel inside: [p, q]


def _blend(below: Field, above: Field, share: Field) -> Field:
    return below + (above - below) * share[..., None]  # [p, q, 3]


def _render_stripes(distance: Field, colour: Field, background: Field, pixels: int, rng: np.random.Generator) -> Field:
    y, x = (np.mgrid[:pixels, :pixels] + 0.5) / pixels
    phase = ((x + y) * np.sqrt(0.5) / STRIPE_PERIOD + rng.random()) % 1.0
    stripe = (np.abs(phase - 0.5) - 0.25) * STRIPE_PERIOD  # signed distance to the pale stripes
    fill = _blend(colour, colour + (255.0 - colour) * TINT, _coverage(stripe, pixels))
    line = np.array(outline_colour(background), dtype=float)
    inked = _blend(background, line, _coverage(distance - OUTLINE, pixels))
    return _blend(inked, fill, _coverage(distance, pixels))


def _render_strokes(distance: Field, colour: Field, background: Field, pixels: int, rng: np.random.Generator) -> Field:
    wobble = 0.009 * _strokes(pixels, 0.09, 0.09, 0.0, rng)
    share = _coverage(distance + wobble, pixels)
    ground = background + 19.0 * _strokes(pixels, 0.34, 0.065, rng.uniform(-0.5, 0.5), rng)[..., None]
    figure = colour + 21.0 * _strokes(pixels, 0.26, 0.06, rng.uniform(0.7, 1.6), rng)[..., None]
    return _blend(ground, figure, share)


def _strokes(pixels: int, length: float, width: float, angle: float, rng: np.random.Generator) -> Field:
    """Generate smooth noise in [-1, 1], stretched along an angle: brush strokes of the given length and width, [p,
    q]."""
    grid = rng.uniform(-1.0, 1.0, size=(64, 64))
    y, x = (np.mgrid[:pixels, :pixels] + 0.5) / pixels - 0.5
    along = (np.cos(angle) * x + np.sin(angle) * y) / length + 32.0
    across = (np.cos(angle) * y - np.sin(angle) * x) / width + 32.0
    row = np.floor(across).astype(int)
    upper, lower = _stroke_row(grid, row, along), _stroke_row(grid, row + 1, along)
    return upper + (lower - upper) * _smooth(across - row)


def _stroke_row(grid: Field, row: NDArray[np.int_], along: Field) -> Field:
    shifted = along - 0.37 * row  # offset rows, so that strokes do not end on one line
    column = np.floor(shifted).astype(int)
    left, right = grid[row % 64, column % 64], grid[row % 64, (column + 1) % 64]
    return left + (right - left) * _smooth(shifted - column)


def _smooth(share: Field) -> Field:
    return share * share * (3.0 - 2.0 * share)


def _to_image(canvas: Field) -> Image.Image:
    return Image.fromarray(np.rint(np.clip(canvas, 0.0, 255.0)).astype(np.uint8))


def write_folder(
    folder: Path,
    scenes: Iterable[Scene],
    *,
    seed: int,
    trigger: str | None = None,
    pixels: int = 64,
    all_captions: bool = False,
) -> None:
    """Write 000.png beside 000.txt, and so on; the folder is created atomically. See `render` and `caption`. With
    `all_captions`, a picture has a caption of each template, one a line. Raises FileExistsError if it is not empty."""
    with new_folder(folder) as sibling:
        for index, scene in enumerate(scenes):
            render(scene, pixels, seed=seed * 1_000_003 + index).save(sibling / f"{index:03d}.png")
            templates = range(len(TEMPLATES)) if all_captions else [index]
            lines = [caption(scene, template, trigger) for template in templates]
            (sibling / f"{index:03d}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_subject_folder(folder: Path, *, subject: str = SUBJECT_TRIGGER, pixels: int = 64) -> None:
    """Write five pictures of the particular figure in the form of `write_folder`; captions name it ``subject``."""
    views = zip(("white", "mint", "sky", "gray", "peach"), POSITIONS, itertools.cycle(SIZES), strict=False)
    with new_folder(folder) as sibling:
        for index, (background, position, size) in enumerate(views):
            render_subject(background, size, position, pixels, seed=index).save(sibling / f"{index:03d}.png")
            text = SUBJECT_TEMPLATE.format(size=size, subject=subject, position=position, background=background)
            (sibling / f"{index:03d}.txt").write_text(text + "\n", encoding="utf-8")
