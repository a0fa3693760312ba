"""Load a run's model, and try out a micro-batch size that was chosen by prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from simpletune.config.batches import smaller_batch
from simpletune.config.schema import TrainConfig, cache_of_bases, run_folder
from simpletune.data.plan import GlobalBatch, Plan
from simpletune.data.samples import SampleDraw
from simpletune.engine.fsdp.checkpoints import require_shared
from simpletune.engine.fsdp.rank_zero import GatheredAverage, RankZeroDriver
from simpletune.engine.optim.ema import Average
from simpletune.engine.quant.int8_tuning import announce_tuning
from simpletune.models.shared.buckets import Size
from simpletune.runs import checkpoint
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.load import load_base, load_base_together
from simpletune.stages.prepared import PreparedData
from simpletune.stages.step.assignment import RankMicroBatches
from simpletune.stages.step.batch_loader import BatchLoader
from simpletune.stages.step.train_step import TrainStep, assemble, average_of
from simpletune.stages.text_side import load_text_side
from simpletune.system.console import say
from simpletune.system.options import UserError, plural
from simpletune.system.signals import stop_if_requested

if TYPE_CHECKING:
    from simpletune.models.shared.denoiser import Denoiser


@dataclass(frozen=True)
class LoadedModel:
    """Hold the model of a run, ready for its first step.

    Args:
        transformer: model with its adapter, not wrapped.
        core: step core.
        average: average of the trained weights, if enabled.
        total: number of parameters of the base model.
    """

    denoiser: Denoiser
    core: TrainStep
    average: Average | None
    total: int


@dataclass(frozen=True)
class FirstStepState:
    """Everything for the first step, with a micro-batch size that fits.

    Args:
        config: the model's configuration: folders, ``memory`` and batch size resolved.
        prepared: plan and caches.
        model: the loaded model.
        batches: this process's batches.
    """

    config: TrainConfig
    prepared: PreparedData
    model: LoadedModel
    batches: BatchLoader


def load(
    config: TrainConfig,
    prepared: PreparedData,
    accelerator: Accelerator,
    saved: checkpoint.SavedState | None,
    state_bytes: int | None,
) -> FirstStepState:
    """Load the model and this process's micro-batches.

    Args:
        config: configuration with folders, ``memory`` and batch size resolved.
        prepared: plan and caches.
        accelerator: accelerate's view of processes and device.
        saved: checkpoint to continue from, if any.
        state_bytes: bytes that the optimizer's state will take on the device, if this start chose the micro-batch size
            by prediction and must try it out.

    Raises:
        UserError: the smallest micro-batch is too large.
    """
    stop_if_requested()
    if state_bytes is None:
        return _loaded(config, prepared, accelerator, saved)
    return _load_guarded(config, prepared, accelerator, state_bytes)


def _loaded(
    config: TrainConfig, prepared: PreparedData, accelerator: Accelerator, saved: checkpoint.SavedState | None
) -> FirstStepState:
    """Load without a trial."""
    model = load_model(config, prepared, accelerator, saved)
    processes, train = accelerator.num_processes, config.train
    share = RankMicroBatches(accelerator.process_index, processes, train.reduce == "exact", train.uses_fsdp(processes))
    modulation = model.core.modulation
    batches = BatchLoader(prepared, config.train.seed, accelerator.device, modulation, config.prior, share)
    return FirstStepState(config, prepared, model, batches)


def _load_guarded(
    config: TrainConfig, prepared: PreparedData, accelerator: Accelerator, state_bytes: int
) -> FirstStepState:
    """Load a new run's model, and run one pass for each bucket's size.

    If any process runs out of memory, halves the micro-batch in all of them and loads the model again: no step has been
    taken yet, and random numbers depend only on the step.
    """
    while True:
        trial = _loaded(config, prepared, accelerator, None)
        size = too_large(trial, accelerator, state_bytes)
        if size is None:
            return trial
        pictures = f"{plural(config.train.micro_batch, 'picture')} of {size[0]} x {size[1]} px"
        smaller = smaller_batch(config, accelerator.num_processes)
        if smaller is None:
            raise UserError(
                f"train.batch_size: the device's memory is full with {pictures} in a micro-batch, the fewest that "
                "train.global_batch allows. Save memory (simpletune plan CONFIG), or use a smaller data.resolution",
                code=5,
            )
        say(
            f"batch   out of memory with {pictures}: starts again with {smaller.train.accumulation} micro-batches of "
            f"{smaller.train.micro_batch}"
        )
        config = smaller
        plan = prepared.plan.divided(GlobalBatch(config.train.micro_batch, config.train.accumulation))
        prepared = replace(prepared, plan=plan)
        del trial
        free_memory(accelerator.device)


def too_large(trial: FirstStepState, accelerator: Accelerator, state_bytes: int) -> Size | None:
    """Return the size of the first bucket whose micro-batch does not fit in some process's memory."""
    for draws in trial.prepared.plan.of_each_size():
        failed = torch.tensor(float(runs_out(trial, draws, state_bytes)), device=accelerator.device)
        if accelerator.reduce(failed, "sum").item() > 0:
            return draws[0].view.bucket
    return None


def runs_out(trial: FirstStepState, draws: list[SampleDraw], state_bytes: int) -> bool:
    """Return whether memory runs out in a micro-batch's passes, given what the rest of the step will take."""
    core, tree = trial.model.core, trial.model.core.tree
    own = -(-trial.config.train.accumulation // core.accelerator.num_processes)
    sums = (own - 1).bit_length() * 4 * sum(parameter.numel() for parameter in core.parameters)
    device = trial.batches.device
    try:
        held = torch.empty(state_bytes + (0 if tree is None else sums), dtype=torch.uint8, device=device)
        batch = trial.batches.trial(draws)
        trial.model.denoiser.train()
        with core.accelerator.no_sync(core.model):
            for _ in range(2):  # the second adds to the first's gradients
                core.compute(batch)
        del held
    except torch.OutOfMemoryError:
        return True
    finally:
        trial.model.denoiser.eval()
        core.losses = []
        core.optimizer.zero_grad(set_to_none=True)
        free_memory(device)
    return False


def load_model(
    config: TrainConfig, prepared: PreparedData, accelerator: Accelerator, saved: checkpoint.SavedState | None
) -> LoadedModel:
    """Load and quantise the model, attach the adapter, place it, create the optimizer, and restore a checkpoint.

    Args:
        config: configuration with folders and ``memory`` resolved.
        prepared: plan and caches.
        accelerator: accelerate's view of processes and device.
        saved: checkpoint to continue from, if any.
    """
    sizes, cache, divided = prepared.sizes(), cache_of_bases(config), config.train.uses_fsdp(accelerator.num_processes)
    if divided:  # each unit moves to the device when it is sharded
        denoiser = load_base(config, torch.device("cpu"), sizes, cache)
    else:
        denoiser = load_base_together(config, accelerator, sizes, cache)
    total = config.model.parameter_count()
    captions = prepared.plan.captions() if config.text.trains else []
    text = load_text_side(config, prepared.text, captions, accelerator.device)
    core = assemble(config, denoiser, accelerator, len(prepared.plan.sizes()), text)
    average = average_of(config, denoiser, core.optimizer)
    leading = None if core.fsdp is None else RankZeroDriver(core.fsdp)
    if core.fsdp is not None:
        require_shared(run_folder(config), core.fsdp)
    if leading is not None and average is not None:
        average = GatheredAverage(average, leading)
    if saved:
        checkpoint.restore(saved, denoiser, core.optimizer, config.optimizer, average)
        if core.fp16 is not None and saved.fp16 is not None:
            core.fp16.load(saved.fp16)
    trainable = sum(parameter.numel() for parameter in core.named.values())
    say(f"model   {total:,} parameters, {trainable:,} of them trained ({100 * trainable / total:.2f}%)")
    announce_kernel(config, denoiser, accelerator.device, prepared.plan)
    return LoadedModel(denoiser, core, average, total)


def announce_kernel(config: TrainConfig, denoiser: Denoiser, device: torch.device, plan: Plan) -> None:
    """Log what tuning of the int8 kernel the first step will wait for; only on CUDA."""
    if device.type != "cuda":
        return
    batch = config.train.micro_batch
    image_rows = [batch * config.model.image_tokens(size) for size in plan.sizes()]
    announce_tuning(denoiser, image_rows, batch * config.model.text_tokens, device)
