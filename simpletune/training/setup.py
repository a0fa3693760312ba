"""Set up a training run: device, data, caches, folder and model."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from simpletune.config.compute import compute_of, settle_compute
from simpletune.config.modulation import settle_modulation
from simpletune.config.resolve import checked_folders
from simpletune.config.schema import TrainConfig, cache_of_bases, run_folder
from simpletune.data.plan import Plan
from simpletune.ema import Average
from simpletune.estimate.disk_needs import require_room
from simpletune.options import Json, UserError, plural
from simpletune.pipeline.encode import Prepared, encode
from simpletune.pipeline.load import load_base
from simpletune.pipeline.plan_data import plan_data
from simpletune.pipeline.text_side import load_text_side
from simpletune.quant.int8_tuning import announce_tuning
from simpletune.runs import checkpoint
from simpletune.runs.attempts import AttemptRecorder, close_killed
from simpletune.runs.choice import best_step
from simpletune.runs.folder import (
    CONFIG,
    DATA,
    ENVIRONMENT,
    chosen_before,
    clear_unsaved,
    finished_steps,
    open_again,
    open_fresh,
    put_chosen,
)
from simpletune.runs.predicted import keep
from simpletune.runs.resume import check_resumable
from simpletune.runs.summary import print_data
from simpletune.step.attention import settle_attention
from simpletune.step.batches import Batches
from simpletune.step.core import StepCore, assemble, average_of
from simpletune.system.atomic import write_json
from simpletune.system.console import say
from simpletune.system.devices import capability_of, choose_device
from simpletune.system.environment import describe_machine
from simpletune.system.failpoints import failpoint
from simpletune.system.signals import stop_if_asked
from simpletune.system.stage_timer import StageTimer
from simpletune.system.threads import choose_threads, use_threads
from simpletune.training.class_pictures import with_class_pictures
from simpletune.training.nonfinite import NonFiniteGuard
from simpletune.training.run import Run
from simpletune.training.trackers import open_trackers
from simpletune.training.validation import Previews

if TYPE_CHECKING:
    from simpletune.estimate.predict import Estimate
    from simpletune.models.transformer import Transformer

PATIENCE = timedelta(days=2)  # for which processes wait while one fills the cache or draws; NCCL's default: 10 minutes


@dataclass(frozen=True)
class StartOptions:
    """Options of a start that are not part of the configuration.

    Args:
        attempt: record of this process.
        resume: ``latest``, ``auto`` or a checkpoint's folder; None starts a new run.
        force: start even if the run is predicted not to fit on the device or the disk.
        estimate_first: predict the memory on the CPU too.
    """

    attempt: AttemptRecorder
    resume: str | None = None
    force: bool = False
    estimate_first: bool = False


@dataclass(frozen=True)
class LoadedModel:
    """Hold the model of a run, ready for its first step.

    Args:
        transformer: model with its adapter, not wrapped.
        core: step core.
        average: average of the trained weights, if enabled.
        total: number of parameters of the base model.
    """

    transformer: Transformer
    core: StepCore
    average: Average | None
    total: int


def set_up(config: TrainConfig, options: StartOptions) -> Run:
    """Do everything before the first step: device, data, caches, folder and model.

    Args:
        config: configuration as the user gave it.
        options: options of this start.

    Raises:
        UserError: for anything that the user can fix.
    """
    accelerator, reason = make_accelerator(config)
    device, main, process = accelerator.device, accelerator.is_main_process, accelerator.process_index
    stages = StageTimer(cuda=device.type == "cuda")
    with accelerator.main_process_first():  # the first process sets damaged checkpoints aside
        saved = checkpoint.find(options.resume, run_folder(config)) if options.resume else None
    start = saved.step if saved else 0
    config = settle_compute(config, capability_of(device), compute_of(saved.config) if saved else None)
    say(f"simpletune {config.name} on {reason}: {config.precision.describe()}")
    resolved = checked_folders(config)
    threads = settle_threads(resolved, device, resumed=saved is not None)
    resolved = with_class_pictures(resolved, accelerator, stages)
    data = plan_data(resolved, accelerator.num_processes)
    if main:
        require_room(resolved, data.plan, start, options.force)
    fitted = fit_memory(resolved, device, data.plan, saved)
    predicted, timed = predict(fitted, device, data.plan, options) if main else (None, None)
    attention = settle_attention(resolved, data.plan.sizes(), device)
    prepared = encode(resolved, data, accelerator, stages)
    print_data(prepared)
    steps = config.steps(prepared.plan.steps_per_epoch)
    if saved:
        announce_resume(saved, config, prepared, steps, accelerator.num_processes)
    folder = run_folder(config)
    if main:
        open_folder(config, prepared, saved, timed, anew=options.resume == "auto")
        options.attempt.begin(reason, start, stages)
        put_chosen(resolved, fitted, threads)
    stop_if_asked()
    with stages.stage("load"):
        model = load_model(fitted, prepared, accelerator, saved)
    batches = Batches(prepared, config.train.seed, device, process, model.core.modulation, config.prior)
    trackers = open_trackers(config, folder, start, main)
    return Run(
        config=config,
        folder=folder,
        accelerator=accelerator,
        device=reason,
        stages=stages,
        prepared=prepared,
        **vars(model),
        batches=batches,
        previews=Previews(resolved, prepared.requests, prepared.text, folder / "samples", model.core),
        trackers=trackers,
        start=start,
        steps=steps,
        attention=attention,
        attempt=options.attempt,
        guard=NonFiniteGuard(config, folder, model.core, batches, start, trackers.warn),
        predicted=predicted,
    )


def settle_threads(config: TrainConfig, device: torch.device, resumed: bool) -> int:
    """Set the number of CPU threads, and print it if the CPU is the device; a resumed run keeps its number."""
    earlier = chosen_before(config).get("threads") if resumed else None
    on_cpu = device.type == "cpu"
    threads, why = choose_threads(config.speed.threads, config.model.parameter_count(), on_cpu, earlier)
    if on_cpu:
        say(f"threads {threads} ({why})")
    use_threads(threads)
    return threads


def fit_memory(
    config: TrainConfig, device: torch.device, plan: Plan, saved: checkpoint.SavedState | None
) -> TrainConfig:
    """Resolve the ``auto`` values of ``memory``; a resumed run keeps its earlier choices."""
    before = {**saved.config.get("memory", {}), **chosen_before(config)} if saved else {}
    config = settle_modulation(config, device.type == "cpu", before.get("modulation"))
    if config.memory.checkpointing != "auto":
        return config
    from simpletune.estimate.auto_checkpointing import choose_on

    return choose_on(config, device, plan.largest(), before.get("checkpointed"))


def predict(
    config: TrainConfig, device: torch.device, plan: Plan, options: StartOptions
) -> tuple[Estimate | None, Json | None]:
    """Predict the memory and the time of the run on CUDA or on request.

    Raises:
        UserError: the run does not fit on the device.
    """
    if device.type != "cuda" and not options.estimate_first:
        return None, None
    from simpletune.estimate.forecast import forecast, forecast_time

    predicted = forecast(config, device, plan.largest(), options.force)
    return predicted, forecast_time(config, predicted, device, plan)


def load_model(
    config: TrainConfig, prepared: Prepared, accelerator: Accelerator, saved: checkpoint.SavedState | None
) -> LoadedModel:
    """Load and quantise the model, attach the adapter, place it, create the optimizer, and restore a checkpoint.

    Args:
        config: configuration with folders and ``memory`` resolved.
        prepared: plan and caches.
        accelerator: accelerate's view of processes and device.
        saved: checkpoint to continue from, if any.
    """
    transformer = load_base(config, accelerator.device, prepared.sizes(), cache_of_bases(config))
    failpoint("model.loaded")
    total = config.model.parameter_count()
    text = load_text_side(config, prepared.text, prepared.plan.captions(), accelerator.device)
    core = assemble(config, transformer, accelerator, len(prepared.plan.sizes()), text)
    average = average_of(config, transformer, core.optimizer)
    if saved:
        checkpoint.restore(saved, transformer, core.optimizer, config.optimizer, average)
        if core.fp16 is not None and saved.fp16 is not None:
            core.fp16.load(saved.fp16)
        failpoint("run.restored")
    trainable = sum(parameter.numel() for parameter in core.parameters)
    say(f"model   {total:,} parameters, {trainable:,} of them trained ({100 * trainable / total:.2f}%)")
    announce_kernel(config, transformer, accelerator.device, prepared.plan)
    return LoadedModel(transformer, core, average, total)


def announce_kernel(config: TrainConfig, transformer: Transformer, device: torch.device, plan: Plan) -> None:
    """Say what tuning of the int8 kernel the first step will wait for; on CUDA only."""
    if device.type != "cuda":
        return
    batch = config.train.batch_size
    image_rows = [batch * config.model.image_tokens(size) for size in plan.sizes()]
    announce_tuning(transformer, image_rows, batch * config.model.text_tokens, device)


def open_folder(
    config: TrainConfig, prepared: Prepared, saved: checkpoint.SavedState | None, timed: Json | None, anew: bool
) -> None:
    """Create or reopen the run's folder, and record configuration, environment, data and predicted time.

    Args:
        config: configuration as the user gave it.
        prepared: plan and caches.
        saved: checkpoint to continue from, if any.
        timed: predicted time; a resumed run keeps that of its first start, which is of its whole length.
        anew: replace an unfinished run without a checkpoint.
    """
    if anew or saved:
        close_killed(run_folder(config))
    if anew and not saved:
        clear_unsaved(config)
    folder = open_again(config, saved.step, best_step) if saved else open_fresh(config)
    write_json(folder / CONFIG, config.model_dump(mode="json", by_alias=True))
    write_json(folder / ENVIRONMENT, describe_machine())
    write_json(folder / DATA, prepared.data())
    if timed is not None and saved is None:
        keep(folder, timed)


def make_accelerator(config: TrainConfig) -> tuple[Accelerator, str]:
    """Create accelerate's ``Accelerator``, and describe the device and why it was chosen.

    Raises:
        UserError: accelerate uses another device, or a setting needs a single process.
    """
    device, reason = choose_device(config.device, config.precision.compute, config.is_demo)
    accelerator = _accelerator_on(device)
    if config.memory.optimizer_in_backward and accelerator.num_processes > 1:
        raise UserError(
            f"memory.optimizer_in_backward: {accelerator.num_processes} processes would update with their own "
            "gradients before averaging them. Set it to false, or use one process"
        )
    return accelerator, reason


def _accelerator_on(device: torch.device) -> Accelerator:
    """Create an ``Accelerator`` for a device.

    accelerate keeps the device of a process's first run and would silently train a later one there, so its state is
    reset first; not in one of several processes, which would leave their group.
    """
    known = PartialState._shared_state
    if known and known["device"].type != device.type and known["num_processes"] == 1:
        AcceleratorState._reset_state(reset_partial_state=True)
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)  # the last block's add_q_proj gets no gradient
    patient = InitProcessGroupKwargs(timeout=PATIENCE)
    accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[unused, patient])
    if accelerator.device.type != device.type:
        raise UserError(
            f"device: the run was to use {device.type}, but accelerate uses {accelerator.device.type}. "
            "Unset ACCELERATE_USE_CPU, or set device=cpu"
        )
    return accelerator


def announce_resume(
    saved: checkpoint.SavedState, config: TrainConfig, prepared: Prepared, steps: int, processes: int
) -> None:
    """Print the checkpoint that a run continues from, and the changed settings.

    Raises:
        UserError: the run cannot continue from this checkpoint.
    """
    for change in check_resumable(saved, config, prepared.plan.manifest(), processes):
        say(f"resume  changed {change}")
    if saved.step > steps or saved.step == steps == finished_steps(run_folder(config)):
        raise UserError(
            f"--resume: the checkpoint has {plural(saved.step, 'step')} and the configuration asks for {steps}. "
            "Increase train.steps or train.epochs"
        )
    say(f"resume  from {saved.folder}: step {saved.step} of {steps}")
