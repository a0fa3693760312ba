"""Concept sliders and erasure (part of the independent reference): the loss of a step.

A slider (arXiv:2311.12092, eq. 8) learns at strength s, of 1 or -1, with c0 the target, c+ and c- its ends and h the
guidance:

    v_s(z_t, c0) = v_0(z_t, c0) + s h (v_0(z_t, c+) - v_0(z_t, c-))

where v_0 is the base. An erasure (arXiv:2303.07345, eq. 7) is its one side s = 1 with the empty text as c+ and the
concept as c-, from the empty text instead of from c0:

    v_1(z_t, c) = v_0(z_t, "") - h (v_0(z_t, c) - v_0(z_t, ""))

Prompts that are preserved: v_s(z_t, p) = v_0(z_t, p). All are fitted by mean squares, and averaged over the strengths.
"""

from collections.abc import Callable

from torch import Tensor

Predict = Callable[[str, float], Tensor]
"""The prediction at z_t for a prompt, with the adapter at a strength."""


def slider(predict: Predict, target: str, ends: tuple[str, str], guidance: float) -> Tensor:
    total = 0.0
    for strength in (1.0, -1.0):
        difference = predict(ends[0], 0.0) - predict(ends[1], 0.0)
        wanted = predict(target, 0.0) + strength * guidance * difference
        total = total + (predict(target, strength) - wanted.detach()).square().mean()
    return total / 2


def erasure(predict: Predict, concept: str, guidance: float) -> Tensor:
    empty = predict("", 0.0)
    wanted = empty - guidance * (predict(concept, 0.0) - empty)
    return (predict(concept, 1.0) - wanted.detach()).square().mean()


def preserved(predict: Predict, prompt: str, strengths: tuple[float, ...]) -> Tensor:
    losses = [(predict(prompt, s) - predict(prompt, 0.0).detach()).square().mean() for s in strengths]
    return sum(losses[1:], losses[0]) / len(losses)
