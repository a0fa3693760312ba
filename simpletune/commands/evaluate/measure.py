"""Turn embeddings into the scores of every point, each with its interval and its difference from the base.

Legend: p prompts, n pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from simpletune.commands.evaluate import scores
from simpletune.commands.evaluate.embed import ImageEmbeddings
from simpletune.commands.evaluate.plan import EvaluatedWeights, EvaluationPlan
from simpletune.commands.evaluate.scores import Array, jackknife, mean_over_prompts
from simpletune.system.options import Json

ByPrompt = dict[int, float]
"""Mean of each prompt, by its number."""
Scores = dict[str, dict[str, Json]]
"""Values by score and title of the encoder."""


SETS: Mapping[str, Callable[[Array, Array], float]] = {"cmmd": scores.cmmd, "kid": scores.kid}
"""Distances between the sets of generated and real pictures."""


def measure(plan: EvaluationPlan, embedded: Sequence[ImageEmbeddings]) -> dict[EvaluatedWeights, Scores]:
    """Compute every score of every point by every encoder."""
    found: dict[EvaluatedWeights, Scores] = {point: {} for point in plan.points}
    base = plan.points[0]
    for one in embedded:
        means = {point: means_of(plan, one, one.generated[point]) for point in plan.points}
        for point in plan.points:
            for score, (values, images) in means[point].items():
                each = list(values.values())
                entry = mean_over_prompts(each).as_json()
                entry |= {"n": images, "prompts": len(each), "by_prompt": [round(value, 6) for value in each]}
                if point is not base:
                    other = means[base][score][0]
                    paired = [values[number] - other[number] for number in values]
                    entry["from_base"] = mean_over_prompts(paired).as_json()
                found[point].setdefault(score, {})[one.about.title] = entry
            for score, statistic in SETS.items():
                value = set_distance(plan, one, point, statistic)
                if value is not None:
                    found[point].setdefault(score, {})[one.about.title] = value
    return found


def means_of(plan: EvaluationPlan, one: ImageEmbeddings, generated: Array) -> dict[str, tuple[ByPrompt, int]]:
    """Compute the scores that are means over pictures from a point's embeddings [n, d]: by prompt, with the number of
    pictures."""

    def by_prompt(values: Array, rows: Mapping[int, list[int]]) -> tuple[ByPrompt, int]:
        return {number: float(values[own].mean()) for number, own in rows.items()}, sum(map(len, rows.values()))

    rows, of_class = rows_by_prompt(plan, of_class=False), rows_by_prompt(plan, of_class=True)
    about_subject = {number: rows[number] for number in subject_prompts(plan)}
    fidelity = scores.subject_fidelity(generated, one.real)
    found = {"subject_fidelity": by_prompt(fidelity, about_subject)}
    if one.prompts is not None:
        asked = one.prompts[[shot.prompt for shot in plan.shots]]
        found["prompt_fidelity"] = by_prompt(scores.prompt_fidelity(generated, asked), rows)
    if all(len(own) > 1 for own in rows.values()):
        varied = {number: scores.diversity(generated[own]) for number, own in rows.items()}
        found["diversity"] = varied, sum(map(len, rows.values()))
    if of_class:
        found["pres"] = by_prompt(fidelity, of_class)
    found["nearest"] = by_prompt(scores.nearest_similarity(generated, one.real), about_subject)
    if len(one.real) > 1:
        found["copying"] = by_prompt(scores.find_copies(generated, one.real), about_subject)
    return found


def set_distance(
    plan: EvaluationPlan, one: ImageEmbeddings, point: EvaluatedWeights, statistic: Callable[[Array, Array], float]
) -> Json | None:
    """Compute the distance of a point's pictures of the subject from the real ones; None for fewer than 2 of either."""
    rows = rows_by_prompt(plan, of_class=False)
    prompts, generated = subject_prompts(plan), one.generated[point]
    count = sum(len(rows[number]) for number in prompts)
    smallest = count - max(len(rows[number]) for number in prompts)  # with one prompt left out, as for the interval
    if min(count, len(one.real)) < 2:
        return None

    def distance(chosen: Sequence[int]) -> float:
        return statistic(generated[np.concatenate([rows[prompts[each]] for each in chosen])], one.real)

    measured = jackknife(distance, len(prompts), interval=smallest > 1)
    return {**measured.as_json(), "n": count, "prompts": len(prompts)}


def rows_by_prompt(plan: EvaluationPlan, of_class: bool) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for row, shot in enumerate(plan.shots):
        if shot.of_class == of_class:
            rows.setdefault(shot.prompt, []).append(row)
    return rows


def subject_prompts(plan: EvaluationPlan) -> list[int]:
    """Return the prompts that name the subject; all of them if none is known to."""
    named = [number for number, prompt in enumerate(plan.prompts.prompts) if prompt.has_token]
    return named or list(range(len(plan.prompts.prompts)))
