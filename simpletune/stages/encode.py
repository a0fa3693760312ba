"""The prepare stages: encode each prompt and picture once with the frozen encoders, into the cache.

Several processes divide prompts and pictures by the hash of what their files depend on (``Cache.claimed``).
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator

from simpletune.config.schema import ResolvedConfig, TrainConfig
from simpletune.data.concept_plan import ConceptPlan
from simpletune.data.plan import Plan
from simpletune.data.samples import drop_rejected
from simpletune.stages.plan_data import PlannedData, make_plan, plan_data, report_rejected
from simpletune.stages.prepared import (
    Caches,
    PreparedData,
    prompts_outside_data,
    require_inputs,
    validation_requests,
    with_class,
    with_inputs,
)
from simpletune.stages.sample import ImageRequest
from simpletune.stages.stream_encode import encode_stream
from simpletune.stages.stream_plan import StreamPlan
from simpletune.system.stage_timer import StageTimer


def encode(
    config: ResolvedConfig, data: PlannedData, accelerator: Accelerator, stages: StageTimer, start: int = 0
) -> PreparedData:
    """Fill the caches. Each process encodes its share, then waits for the others.

    Args:
        config: the configuration, with folders resolved.
        data: the scanned data and its plan.
        accelerator: provides the processes and the device.
        stages: records the time and memory of each stage.
        start: the number of finished steps. For a stream, encodes only what the remaining steps use.

    Raises:
        UserError: pictures cannot be decoded and ``data.on_error`` is ``stop``, or none are left; or a picture or
            mask of ``validation`` cannot be used.
    """
    plan, caches = data.plan, Caches(config, accelerator, stages)
    if isinstance(plan, StreamPlan):
        return encode_stream(config, plan, caches, start)
    requests = validation_requests(config, plan)
    require_inputs(requests, config.model.autoencoder.downsampling)
    caches.fill_text(needed_prompts(config, plan, requests))
    if isinstance(plan, ConceptPlan):
        return PreparedData(plan, caches.text, caches.latents, requests, data.captions)
    rejected = caches.fill_images([plan.views()])
    report_rejected(rejected, config.pictures)
    if rejected:
        plan = make_plan(config, drop_rejected(data.usable, rejected), plan.inpaints, plan.lengths)
        requests = validation_requests(config, plan)  # its captions are among those encoded
    left_out = [*data.left_out, *rejected]
    requests = with_inputs(config, plan, requests)
    return PreparedData(plan, caches.text, caches.latents, requests, data.captions, left_out)


def prepare(config: ResolvedConfig, accelerator: Accelerator, stages: StageTimer) -> PreparedData:
    """Run ``plan_data``, then ``encode``."""
    return encode(config, plan_data(config), accelerator, stages)


def needed_prompts(config: TrainConfig, plan: Plan, requests: Sequence[ImageRequest]) -> list[str]:
    """Return every prompt whose embeddings a run needs."""
    return [*with_class(config, plan.captions()), *prompts_outside_data(config, requests)]
