"""Load a run's model, and try out a micro-batch size that was chosen by prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from accelerate import Accelerator

from simpletune.config.batches import smaller_batch
from simpletune.config.schema import SettledConfig, TrainConfig, cache_of_bases, run_folder
from simpletune.data.plan import GlobalBatch, Plan
from simpletune.data.samples import PlannedSample
from simpletune.engine.denoiser import Denoiser
from simpletune.engine.fsdp.checkpoints import require_shared
from simpletune.engine.fsdp.rank_zero import GatheredAverage, RankZeroDriver
from simpletune.models.shared.buckets import Size
from simpletune.runs import checkpoint
from simpletune.runs.stack import read_stack
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.load import load_base, load_base_together
from simpletune.stages.plan_data import PlannedData
from simpletune.stages.prepared import PreparedData
from simpletune.stages.step.assignment import RankMicroBatches
from simpletune.stages.step.batch_loader import BatchLoader
from simpletune.stages.step.concept import ConceptLoader
from simpletune.stages.step.replay import graphs_of
from simpletune.stages.step.train_step import TrainStep, assemble, average_of
from simpletune.stages.text_side import load_text_side
from simpletune.system.console import say
from simpletune.system.options import UserError, plural
from simpletune.system.signals import stop_if_requested
from simpletune.training.assistant import Assistant
from simpletune.training.start_lora import Start

T = TypeVar("T", PreparedData, PlannedData)


def load(
    config: SettledConfig,
    prepared: PreparedData,
    accelerator: Accelerator,
    saved: checkpoint.SavedState | None,
    state_bytes: int | None,
    start: Start | None = None,
) -> tuple[TrainStep, BatchLoader, PreparedData]:
    """Load the model and this process's micro-batches.

    ``state_bytes`` are those that the optimizer's state will take on the device, if this start chose the micro-batch
    size by prediction and must try it out, by a pass of each bucket's size: the returned training step and plan have a
    size that fits. Raises UserError if none does.
    """
    stop_if_requested()
    # If any process runs out of memory, all of them halve the micro-batch and load the model again: no step has been
    # taken yet, and random numbers depend only on the step.
    while True:
        core = load_model(config, prepared, accelerator, saved, start)
        processes, train = accelerator.num_processes, config.train
        share = RankMicroBatches(
            accelerator.process_index, processes, train.reduce == "exact", train.uses_fsdp(processes)
        )
        if config.concept is None:
            batches = BatchLoader(prepared, train.seed, accelerator.device, core.modulation, config.prior, share)
        else:
            batches = ConceptLoader(prepared, train.seed, accelerator.device, share=share)
        size = None if state_bytes is None else find_too_large(core, batches, state_bytes)
        if size is None:
            core.graphs = graphs_of(core)
            return core, batches, prepared
        images = f"{plural(train.micro_batch, 'picture')} of {size[0]} x {size[1]} px"
        smaller = smaller_batch(config, processes)
        if smaller is None:
            raise UserError(
                f"train.batch_size: the device's memory is full with {images} in a micro-batch, the fewest that "
                "train.global_batch allows. Save memory (simpletune plan CONFIG), or use a smaller data.resolution",
                code=5,
            )
        config, train = smaller, smaller.train
        say(
            f"batch   out of memory with {images}: starts again with {train.accumulation} micro-batches of "
            f"{train.micro_batch}"
        )
        prepared = with_batch_size(prepared, config)
        del core, batches
        free_memory(accelerator.device)


def with_batch_size(data: T, config: TrainConfig) -> T:
    """Return the data with a plan for the configuration's batch sizes."""
    return replace(data, plan=data.plan.with_batch(GlobalBatch(config.train.micro_batch, config.train.accumulation)))


def find_too_large(core: TrainStep, batches: BatchLoader, state_bytes: int) -> Size | None:
    """Return the size of the first bucket whose micro-batch does not fit in some process's memory."""
    for samples in batches.plan.one_of_each_size():
        failed = torch.tensor(float(exceeds_memory(core, batches, samples, state_bytes)), device=core.device)
        if core.accelerator.reduce(failed, "sum").item() > 0:
            return samples[0].view.bucket
    return None


def exceeds_memory(core: TrainStep, batches: BatchLoader, samples: list[PlannedSample], state_bytes: int) -> bool:
    """Return whether memory runs out in a micro-batch's passes, given what the rest of the step will take."""
    train, later = core.config.train, state_bytes
    if train.reduce == "exact":  # partial sums of the gradients
        own = -(-train.accumulation // core.accelerator.num_processes)
        later += (own - 1).bit_length() * 4 * sum(parameter.numel() for parameter in core.parameters)
    try:
        held = torch.empty(later, dtype=torch.uint8, device=core.device)
        batch = batches.trial(samples)
        core.denoiser.train()
        with core.accelerator.no_sync(core.model):
            for _ in range(2):  # the second adds to the first's gradients
                core.compute(batch)
        del held
    except torch.OutOfMemoryError:
        return True
    finally:
        core.denoiser.eval()
        core.losses = []
        core.optimizer.zero_grad(set_to_none=True)
        free_memory(core.device)
    return False


def load_model(
    config: SettledConfig,
    prepared: PreparedData,
    accelerator: Accelerator,
    saved: checkpoint.SavedState | None,
    start: Start | None = None,
) -> TrainStep:
    """Load and quantise the model, attach the adapter, place it, create the optimizer, and restore a checkpoint, or
    begin with the updates of ``start``."""
    device, plan = accelerator.device, prepared.plan
    sizes, cache, with_batch = (
        prepared.sizes(),
        cache_of_bases(config),
        config.train.uses_fsdp(accelerator.num_processes),
    )
    if with_batch:  # each unit moves to the device when it is sharded
        denoiser = load_base(config, torch.device("cpu"), sizes, cache, read_stack(config))
    else:
        denoiser = load_base_together(config, accelerator, sizes, cache, read_stack(config))
    text = load_text_side(config, prepared.text, plan.captions() if config.text.trains else [], device)
    assistant = None
    if config.model.assistants and config.validation.prompts != []:
        assistant = Assistant(config, denoiser, device, accelerator.num_processes)
    core = assemble(config, denoiser, accelerator, len(plan.sizes()), text)
    if assistant is not None:
        core.base_to_draw = assistant.absent
    if start is not None:
        start.begin(denoiser)
    core.average = average_of(config, denoiser, core.optimizer)
    if core.fsdp is not None:
        driver = RankZeroDriver(core.fsdp)
        require_shared(run_folder(config), core.fsdp)
        if core.average is not None:
            core.average = GatheredAverage(core.average, driver)
    if saved:
        checkpoint.restore(saved, denoiser, core.optimizer, config.optimizer, core.average)
        if core.fp16 is not None and saved.fp16 is not None:
            core.fp16.load(saved.fp16)
    total = config.model.architecture.parameter_count()
    trainable = sum(parameter.numel() for parameter in core.named.values())
    say(f"model   {total:,} parameters, {trainable:,} of them trained ({100 * trainable / total:.2f}%)")
    announce_kernel(config, denoiser, device, plan)
    return core


def announce_kernel(config: TrainConfig, denoiser: Denoiser, device: torch.device, plan: Plan) -> None:
    """Log what tuning of the int8 kernel the first step will wait for; only on CUDA."""
    if device.type == "cuda":
        from simpletune.engine.quant.int8_tuning import announce_tuning

        batch = config.train.micro_batch
        sizes = [config.model.architecture.layer_rows(size) for size in plan.sizes()]
        announce_tuning(denoiser, lambda layer: {batch * rows(layer) for rows in sizes}, device)
