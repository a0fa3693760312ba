"""The plan of a run from prompts alone: what its epochs hold, and what follows from seed and step."""

from __future__ import annotations

from collections import Counter

from simpletune.data.concept import Concept, Direction
from simpletune.data.concept_plan import ConceptPlan
from simpletune.data.plan import GlobalBatch
from simpletune.models.objectives.flow import Flow

BOTH = Direction(target="a", positive="b", negative="c", preserved=["d", "e"])
ERASED = Direction(target="f", negative="f", neutral="")


def plan_of(seed: int = 0, batch: int = 2, accumulation: int = 1, **changes: object) -> ConceptPlan:
    fields = {"directions": [BOTH, ERASED], "resolutions": [64, 32], "drawing_steps": 5, **changes}
    return ConceptPlan(Concept(**fields), Flow(), seed, GlobalBatch(batch, accumulation))  # type: ignore[arg-type]


def test_an_epoch_has_every_direction_at_every_size_once() -> None:
    plan = plan_of(batch=3)
    assert (plan.steps_per_epoch, plan.fillers, plan.images(), plan.views()) == (4, 0, 0, [])
    for epoch in range(3):
        seen = Counter()
        for step in range(4 * epoch, 4 * epoch + 4):
            samples = plan.micro_batch(step, 0)
            assert len(samples) == 3 and all(sample.weight for sample in samples)
            assert len({sample.view for sample in samples}) == 1 and len({s.noise_key for s in samples}) == 3
            assert plan.drawing(step, 0).direction.target == samples[0].caption
            seen[samples[0].caption, samples[0].view.bucket] += 1
        assert seen == {(target, (side, side)): 1 for target in "af" for side in (32, 64)}
    assert plan.captions() == ["a", "b", "c", "", "d", "e", "f"]


def test_drawings_follow_from_seed_and_step() -> None:
    plan, same, other = plan_of(), plan_of(batch=4), plan_of(seed=1)
    drawings = [plan.drawing(step, 0) for step in range(200)]
    assert [each.steps for each in drawings] == [same.drawing(step, 0).steps for step in range(200)]
    assert [each.steps for each in drawings] != [other.drawing(step, 0).steps for step in range(200)]
    assert set(Counter(each.steps for each in drawings)) == set(range(5))
    both = Counter((each.strength, each.preserved) for each in drawings if each.direction == BOTH)
    assert set(both) == {(strength, kept) for strength in (1.0, -1.0) for kept in "de"}
    assert {(each.strength, each.preserved) for each in drawings if each.direction == ERASED} == {(1.0, None)}


def test_the_drawings_of_a_step_stop_together() -> None:
    plan = plan_of(accumulation=4)
    assert plan.steps_per_epoch == 1
    steps = [{plan.drawing(step, micro).steps for micro in range(4)} for step in range(9)]
    assert all(len(each) == 1 for each in steps) and len(set().union(*steps)) > 1


def test_the_manifest_has_all_that_a_sample_depends_on() -> None:
    rows = plan_of().manifest()
    assert [row["file"] for row in rows[::2]] == [f"direction {n} at {side} px" for side in (64, 32) for n in (1, 2)]
    assert {row["repeat"] for row in rows} == {0, 1} and rows == plan_of(batch=2).manifest()
    for changes in (
        {"drawing_steps": 6},
        {"drawing_guidance": 2.0},
        {"directions": [BOTH, ERASED.model_copy(update={"guidance": 2.0})]},
        {"directions": [BOTH.model_copy(update={"preserved": ["d"]}), ERASED]},
        {"resolutions": [32, 64]},
    ):
        assert plan_of(**changes).manifest() != rows
