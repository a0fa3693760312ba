"""Decide on what and how often a run is evaluated, and name its validation loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import stdev
from typing import TYPE_CHECKING

from simpletune.system.options import Json, plural

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig
    from simpletune.config.validation import Validation
    from simpletune.data.samples import PlannedSample

LEAST, MOST = 4, 16  # range of samples of an automatic evaluation
SHARE = 0.02  # largest share of the run's forward passes
TRAINED, CLASS, UNRELATED = "training", "class", "unrelated"
_GROUPS = {TRAINED: "the captions", CLASS: "the class", UNRELATED: "unrelated prompts"}

ON_TRAINING = "loss on training pictures at fixed noise"


def loss_name(seen: int, held_out: int) -> str:
    """Name the loss for users, computed on ``seen`` of the ``held_out`` pictures (0 without a split)."""
    if not held_out:
        return ON_TRAINING
    of = f"{seen:,} of " if seen < held_out else ""
    return f"validation loss ({of}{plural(held_out, 'held-out picture')})"


def drift_prompts(option: Validation) -> list[str]:
    """Return the prompts besides the captions for which drift is measured."""
    if option.loss_samples == 0:
        return []
    return [*([option.class_prompt] if option.class_prompt is not None else []), *option.unrelated_prompts]


def drift_groups(option: Validation, samples: list[PlannedSample]) -> dict[str, list[PlannedSample]]:
    """Return the samples of the validation loss for each group of prompts, with the same latents, levels and noise."""
    groups = {TRAINED: samples}
    if option.class_prompt is not None:
        groups[CLASS] = [replace(sample, caption=option.class_prompt) for sample in samples]
    if prompts := option.unrelated_prompts:
        groups[UNRELATED] = [replace(sample, caption=prompts[n % len(prompts)]) for n, sample in enumerate(samples)]
    return groups


def has_start(config: TrainConfig) -> bool:
    """Return whether training begins with other weights than the base's: with a LoRA (``adapter.start``)."""
    return getattr(config.adapter, "start", None) is not None


def is_due(every: int | None, step: int) -> bool:
    """Return whether something with period ``every`` (None: never) is due after ``step`` steps."""
    return every is not None and step % every == 0


def is_validation_due(config: TrainConfig, step: int) -> bool:
    """Return whether an evaluation is due after ``step`` steps, before the last one."""
    if config.validation.loss_samples == 0:
        return False
    return is_due(config.validation.every, step) or is_due(config.checkpoint.every, step)


@dataclass(frozen=True)
class ValidationSchedule:
    """Extent of a run's evaluations."""

    samples: int  # (picture, noise level, noise) of an evaluation; 0: no evaluation
    times: int  # evaluations in the run
    share: float  # of the run's forward passes, counted in samples

    @property
    def is_costly(self) -> bool:
        """Whether even the fewest samples take more than their share."""
        return self.share > SHARE and self.samples == LEAST

    def describe(self) -> str:
        """Describe the evaluation, and note if it takes more than its share."""
        over = f": more than {SHARE:.0%}, because fewer samples say little" if self.is_costly else ""
        return f"{plural(self.samples, 'sample')} {self.times} times, {self.share:.1%} of the forward passes{over}"


def choose_validation_samples(
    config: TrainConfig, samples_per_step: float, steps: int, before: int | None = None
) -> ValidationSchedule:
    """Choose the number of samples, so that evaluating takes at most 2% of the forward passes, within 4 and 16.

    ``samples_per_step`` is the mean over the run's ``steps``. A resumed run keeps ``before``, the number of its first
    start, because losses are paired only then, unless it no longer evaluates.
    """
    option = config.validation
    periods = (option.every or steps, config.checkpoint.every or steps)
    times = 2 + has_start(config) + len({step for every in periods for step in range(every, steps, every)})
    each = times * (1 + (option.class_prompt is not None) + bool(option.unrelated_prompts))
    passes = samples_per_step * steps
    asked = option.loss_samples if before is None or option.loss_samples == 0 else before
    count = min(MOST, max(LEAST, int(SHARE * passes / each))) if asked == "auto" else asked
    return ValidationSchedule(count, times if count else 0, count * each / passes)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; 0 for a single value."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def drift_group(name: str) -> str:
    """Name a group of prompts in words."""
    return _GROUPS.get(name, name)


def drift_words(summary: Json) -> str | None:
    """Describe a run's drift: how much predictions changed, in percent of the base's; None if it was not measured."""
    measured = [
        ", ".join(f"{100 * value:.3g}% for {drift_group(group)}" for group, value in summary[name].items())
        for name in ("drift_start", "drift_after")
        if summary.get(name)
    ]
    if not summary.get("drift_after"):
        return None
    return measured[0] if len(measured) == 1 else f"{measured[0]} at the start; {measured[1]} after"


def loss_words(summary: Json) -> str | None:
    """Describe a run's validation losses: the base's, that of the LoRA that it began with, if it did, and its result's;
    None if they were not computed."""
    before, start, after = (summary.get(f"eval_loss_{name}") for name in ("before", "start", "after"))
    if before is None or after is None:
        return None
    base = "the base with its LoRAs" if summary.get("on_top_of") else "the base"
    if start is not None:
        return f"{before:.4f} for {base}, {start:.4f} at the start, {after:.4f} after"
    return f"{before:.4f} before{f' ({base})' if summary.get('on_top_of') else ''}, {after:.4f} after"
