"""Fill the cache without training."""

from __future__ import annotations

from simpletune.config.compute import settle_compute
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.data.storage.claims import KeyRange
from simpletune.runs.summary import print_data
from simpletune.stages.copy_cache import copy_cache
from simpletune.stages.encode import encode
from simpletune.stages.plan_data import plan_data
from simpletune.system.console import say
from simpletune.system.devices import capability_of
from simpletune.system.stage_timer import StageTimer
from simpletune.training.accelerator import make_accelerator
from simpletune.training.class_images import with_class_images
from simpletune.training.heartbeats import leave, watch_processes


def prepare_only(config: TrainConfig, source: str | None = None) -> None:
    """Fill the cache and stop, so that a later run, perhaps on a smaller machine, can start training at once.

    Several processes can divide the work, started by one launcher or by several on machines that share the cache's
    folder. ``source``: the folder or URL of another cache, whose samples are copied instead of encoded.
    """
    with watch_processes():
        accelerator, reason = make_accelerator(config)
        config = settle_compute(config, capability_of(accelerator.device))
        say(f"simpletune {config.name}: prepare on {reason}")
        stages = StageTimer(cuda=accelerator.device.type == "cuda")
        resolved = with_class_images(resolve_folders(config), accelerator, stages)
        data = plan_data(resolved)
        if source is not None:
            with stages.stage("copy"):
                copy_cache(resolved, data.plan, source, KeyRange(accelerator.process_index, accelerator.num_processes))
        prepared = encode(resolved, data, accelerator, stages)
        print_data(prepared)
        for name, figures in stages.as_json().items():
            say(f"{name:<8}{figures['seconds']:.1f} s")
        leave(accelerator)
