"""Pictures and captions for training and measuring the tiny encoders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import Image

from simpletune.data.demo import demo_scenes
from simpletune.data.demo.demo_scenes import COLOURS, SHAPES, STYLES, SUBJECT, Scene

SIDE = 64
TABLES = {
    "shape": SHAPES, "colour": tuple(COLOURS), "background": tuple(demo_scenes.BACKGROUNDS),
    "size": tuple(demo_scenes.SIZES), "position": tuple(demo_scenes.POSITIONS), "style": STYLES,
}  # fmt: skip
Figure = tuple[str, str, str, str, str]
"""Shape, colour, style, and the inner shape and colour, which are empty without an inner shape."""


def figures(count: int, seed: int) -> list[Figure]:
    """Choose figures, one plain one for every two with another inside; none is the demo's own.

    Args:
        count: maximum number; duplicates are left out.
        seed: seed of the choice.
    """
    rng = np.random.default_rng([seed, 11])
    found: dict[Figure, None] = {}
    for number in range(count):
        shape, inner = (str(rng.choice(SHAPES)) for _ in range(2))
        colour, other = (str(each) for each in rng.choice(list(COLOURS), 2, replace=False))
        style = str(rng.choice(STYLES))
        found[(shape, colour, style, "", "") if number % 3 == 0 else (shape, colour, "flat", inner, other)] = None
    found.pop((*SUBJECT[:2], "flat", *SUBJECT[2:]), None)
    return list(found)


def view(figure: Figure, seed: int) -> Image.Image:
    """Draw a figure on a random background, at a random place and size."""
    rng = np.random.default_rng([seed, 12])
    shape, colour, style, *inner = figure
    allowed = [name for name in demo_scenes.BACKGROUNDS if inner[0] or not demo_scenes.is_held_out(shape, colour, name)]
    places = str(rng.choice(allowed)), str(rng.choice(TABLES["size"])), str(rng.choice(TABLES["position"]))
    scene = Scene(shape, colour, *places, style)
    return (
        demo_scenes.render_figure(scene, (inner[0], inner[1]), SIDE, seed)
        if inner[0]
        else demo_scenes.render(scene, SIDE, seed)
    )


def captioned(scene: Scene, seed: int) -> tuple[str, Scene]:
    """Describe a scene by a full caption, one without its style, or one that calls its shape a figure.

    Returns:
        The caption, and the scene, where fields that the caption leaves out are empty.
    """
    rng = np.random.default_rng([seed, 13])
    kind = int(rng.integers(6))
    if kind == 0:
        text = demo_scenes.SUBJECT_TEMPLATE.format(**{**vars(scene), "subject": ""})
        return " ".join(text.split()), replace(scene, shape="", colour="", style="")
    text = demo_scenes.caption(scene, int(rng.integers(len(demo_scenes.TEMPLATES))))
    if kind > 2:
        return text, scene
    return without_style(text, scene.style), replace(scene, style="")


def without_style(text: str, style: str) -> str:
    """Remove a style's own word, as `prompts.without` removes a rare token."""
    return " ".join(word for word in text.split() if word != style)


def scenes_with_captions(count: int, seed: int, held_out: bool) -> tuple[list[Image.Image], list[str], list[Scene]]:
    """Draw captioned scenes; one in six shows a figure in a figure, which its caption calls a figure.

    Args:
        count: number of scenes.
        seed: seed of scenes, captions and variations.
        held_out: whether to draw held-out triples in full captions instead.
    """
    drawn, captions, known = [], [], []
    for number, scene in enumerate(demo_scenes.sample_scenes(count, seed, held_out=held_out)):
        each = seed * 1_000_003 + number
        text, told = (demo_scenes.caption(scene, number), scene) if held_out else captioned(scene, each)
        inner = figures(3, each)[-1][3:]
        is_figure = not told.shape and number % 2 == 0 and bool(inner[0])
        is_figure = is_figure and (scene.shape, scene.colour, *inner) != SUBJECT
        drawn.append(
            demo_scenes.render_figure(scene, inner, SIDE, each) if is_figure else demo_scenes.render(scene, SIDE, each)
        )
        captions.append(text)
        known.append(told)
    return drawn, captions, known
