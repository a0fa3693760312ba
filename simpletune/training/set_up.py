"""Set up a training run: device, data, caches, folder and model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from simpletune.config.batches import require_processes, share_of_process, with_batch, with_saved_batch
from simpletune.config.compute import settle_compute
from simpletune.config.modulation import settle_modulation
from simpletune.config.resolve import require_model_rules, resolve_folders
from simpletune.config.schema import ResolvedConfig, SettledConfig, TrainConfig, run_folder
from simpletune.data.plan import Plan
from simpletune.engine.quant.precision import WeightPrecision
from simpletune.estimate.disk_needs import require_room
from simpletune.runs import checkpoint
from simpletune.runs.attempts import AttemptRecorder, close_killed
from simpletune.runs.best_checkpoint import step_to_keep
from simpletune.runs.figure_sums import require_figures
from simpletune.runs.folder import (
    CONFIG,
    DATA,
    ENVIRONMENT,
    PARENT,
    STACK,
    clear_unsaved,
    earlier_validation_samples,
    finished_steps,
    open_again,
    open_fresh,
    put_chosen,
    read_chosen,
)
from simpletune.runs.remote.checkpoint_store import CheckpointStore, LocalOnly
from simpletune.runs.resume import base_of, changed_versions, check_resumable, kept_settings, require_same_base
from simpletune.runs.stack import read_stack, require_lora_families
from simpletune.runs.summary import print_data
from simpletune.stages.encode import encode
from simpletune.stages.plan_data import plan_data
from simpletune.stages.prepared import PreparedData
from simpletune.stages.step.attention import settle_attention
from simpletune.system.atomic import write_json
from simpletune.system.console import detail, say
from simpletune.system.devices import capability_of
from simpletune.system.environment import describe_machine
from simpletune.system.options import Json, UserError, plural
from simpletune.system.stage_timer import StageTimer
from simpletune.system.threads import choose_threads
from simpletune.training.accelerator import make_accelerator
from simpletune.training.class_images import with_class_images
from simpletune.training.load_job import load, with_batch_size
from simpletune.training.start_lora import read_start
from simpletune.training.trainer import Job

if TYPE_CHECKING:
    from simpletune.estimate.job_estimate import Estimate


LOCAL_ONLY = LocalOnly()


def set_up(
    config: TrainConfig,
    attempt: AttemptRecorder,
    store: CheckpointStore = LOCAL_ONLY,
    resume: str | None = None,
    force: bool = False,
    estimate_first: bool = False,
) -> Job:
    """Do everything before the first step: device, settings, data, caches, folder and model.

    Args:
        config: configuration as the user gave it.
        attempt: record of this process.
        store: keeps the run's checkpoints, if an object store does.
        resume: ``latest``, ``auto`` or a checkpoint's folder; None starts a new run.
        force: start even if the run is predicted not to fit on the device or the disk.
        estimate_first: predict the memory on the CPU too.

    Raises:
        UserError: anything that the user can fix.
    """
    # The device
    accelerator, reason = make_accelerator(config)
    device, main, processes = accelerator.device, accelerator.is_main_process, accelerator.num_processes
    stages = StageTimer(cuda=device.type == "cuda")

    # The checkpoint, if the run continues
    with accelerator.main_process_first():  # the first process sets damaged checkpoints aside
        saved = checkpoint.find_checkpoint(resume, run_folder(config)) if resume else None
    start, before = (saved.step, saved.config) if saved else (0, None)

    # The model: where it is, what it starts from, whether it is the checkpoint's
    given = settle_compute(with_saved_batch(config, before), capability_of(device), before)
    say(f"simpletune {given.name}: {given.adapter.method} of {given.model.pretrained} on {reason}")
    detail(f"        {given.precision.describe()}")
    if saved is None:
        require_lora_families(given)  # before the download
    located = resolve_folders(given)
    require_model_rules(located)
    precision = settle_products(located, accelerator, before)
    given = given.model_copy(update={"precision": precision})
    located = ResolvedConfig(located.model_copy(update={"precision": precision}))
    begins, stacked = None if saved else read_start(located), require_loras(located, saved)
    with accelerator.main_process_first():  # computes the checksums of large files, which the others then know
        base = base_of(located, stacked)
    if saved is not None:
        require_same_base(saved, located, base)
    chosen = {**saved.config.get("memory", {}), **read_chosen(located)} if saved else {}
    threads = settle_threads(located, device, chosen.get("threads"))

    # The data, and the batch and memory that fit
    resolved = with_class_images(located, accelerator, stages)
    data = plan_data(resolved)
    tries_batch = given.train.batch_size == "auto"
    settled = settle_memory(resolved, accelerator, data.plan, chosen)
    recorded = given.model_copy(update={"train": settled.train})
    resolved = resolved.model_copy(update={"train": settled.train})
    data = with_batch_size(data, settled)

    # What it will need
    if main:
        require_room(resolved, data.plan, start, force)
    predicted, timed = None, None
    if main and (device.type == "cuda" or estimate_first):
        predicted, timed = estimate_start(share_of_process(settled, processes), device, data.plan, force)

    # The cache
    attention = settle_attention(resolved, data.plan.sizes(), device)
    prepared = encode(resolved, data, accelerator, stages, start)
    print_data(prepared)

    # The run's folder
    announce_resume(saved, recorded, prepared, processes, threads, chosen)
    if main:
        open_folder(recorded, prepared, saved, anew=resume == "auto")
        if begins is not None:
            write_json(run_folder(recorded) / PARENT, begins.about)
        if stacked:
            write_json(run_folder(recorded) / STACK, {"loras": stacked})
        attempt.begin(reason, start, stages)
        put_chosen(resolved, settled, threads)

    # The weights
    state_bytes = None
    if tries_batch:  # as known to the first process
        state_bytes = 0 if predicted is None or predicted.job is None else predicted.job.train.state_bytes
        state_bytes = max(gather_object([state_bytes])) if processes > 1 else state_bytes
    with stages.stage("load"):
        core, batches, prepared = load(settled, prepared, accelerator, saved, state_bytes, begins)
    recorded = recorded.model_copy(update={"train": core.config.train})
    if main and tries_batch:
        write_config(recorded)
    return Job(
        config=recorded,
        accelerator=accelerator,
        stages=stages,
        prepared=prepared,
        core=core,
        batches=batches,
        start=start,
        attention=attention,
        attempt=attempt,
        store=store,
        base=base,
        predicted=predicted,
        timed=None if saved else timed,
    )


def require_loras(config: TrainConfig, saved: checkpoint.SavedState | None) -> list[Json]:
    """Print and return the record of the LoRAs under a run. Raises UserError if they do not fit the base, or are not
    those that a resumed run began with."""
    stack = read_stack(config, run_folder(config) if saved else None)
    for each in stack.about if stack else []:
        only = ", only while training" if each.get("only_training") else ""
        say(f"base    with {each['name']} at a strength of {each['scale']:g}, SHA-256 {each['sha256'][:16]}{only}")
    return stack.about if stack else []


def settle_products(config: ResolvedConfig, accelerator: Accelerator, before: Json | None) -> WeightPrecision:
    """Return the precision with ``products: auto`` replaced by what the first process finds faster on its card."""
    if getattr(config.precision, "products", None) != "auto":
        return config.precision
    from simpletune.estimate.int8_choice import choose_products

    chosen = choose_products(config, accelerator.device, before).precision
    first: WeightPrecision = gather_object([chosen])[0] if accelerator.num_processes > 1 else chosen
    return first


def settle_threads(config: TrainConfig, device: torch.device, earlier: int | None) -> int:
    """Set the number of CPU threads, and print it if the CPU is the device; a resumed run keeps its ``earlier`` one."""
    on_cpu = device.type == "cpu"
    threads, why = choose_threads(config.speed.threads, config.model.architecture.parameter_count(), on_cpu, earlier)
    if on_cpu:
        detail(f"threads {threads} ({why})")
    torch.set_num_threads(threads)
    return threads


def settle_memory(config: ResolvedConfig, accelerator: Accelerator, plan: Plan, before: Json) -> SettledConfig:
    """Settle the ``auto`` values of ``memory`` and of the batch size, and check the number of processes; a resumed run
    keeps its earlier choices (``before``)."""
    device, processes = accelerator.device, accelerator.num_processes
    sized = settle_modulation(config, device.type == "cpu", before.get("modulation"))
    if sized.train.batch_size == "auto":
        from simpletune.estimate.auto_settings import choose_batch

        sized = choose_batch(sized, plan.largest(), processes, device)
        if processes > 1:
            sized = with_batch(sized, min(gather_object([sized.train.micro_batch])))
    require_processes(sized, processes)
    if sized.memory.checkpointing != "auto":
        return SettledConfig(sized)
    from simpletune.estimate.auto_settings import RecomputeCounts, resolve_checkpointing

    count = before.get("checkpointed")
    earlier = None if count is None else RecomputeCounts(count, before.get("keeping_attention", 0))
    chosen = resolve_checkpointing(share_of_process(sized, processes), plan.largest(), device, before=earlier)
    return SettledConfig(chosen.model_copy(update={"train": sized.train}))


def estimate_start(
    config: SettledConfig, device: torch.device, plan: Plan, force: bool
) -> tuple[Estimate, Json | None]:
    """Predict the memory and the time of the run. Raises UserError if it does not fit on the device."""
    from simpletune.estimate.run_estimate import estimate_run, estimate_time
    from simpletune.estimate.simulate.processes import simulated_process_count

    predicted = estimate_run(config, device, plan.largest(), force)
    if config.train.uses_fsdp(simulated_process_count()):
        say("time    not predicted: with train.fsdp full it depends on the link between the processes")
        return predicted, None
    return predicted, estimate_time(config, predicted, device, plan)


def open_folder(config: TrainConfig, prepared: PreparedData, saved: checkpoint.SavedState | None, anew: bool) -> None:
    """Create or reopen the run's folder, and record configuration, environment and data; ``anew``: replace an
    unfinished run without a checkpoint."""
    if anew or saved:
        close_killed(run_folder(config))
    if anew and not saved:
        clear_unsaved(config)
    if saved:
        require_figures(run_folder(config), saved.figures)
    folder = open_again(config, saved.step, step_to_keep) if saved else open_fresh(config)
    write_config(config)
    write_json(folder / ENVIRONMENT, describe_machine())
    write_json(folder / DATA, prepared.data())


def write_config(config: TrainConfig) -> None:
    """Write the complete configuration into the run's folder."""
    write_json(run_folder(config) / CONFIG, config.model_dump(mode="json", by_alias=True))


def announce_resume(
    saved: checkpoint.SavedState | None,
    config: TrainConfig,
    prepared: PreparedData,
    processes: int,
    threads: int,
    chosen: Json,
) -> None:
    """Print the checkpoint that a run continues from, if any, the changed settings, and those that stay as they were.
    ``chosen``: what it chose before (``read_chosen``). Raises UserError if it cannot continue from there."""
    if saved is None:
        return
    steps = config.steps(prepared.plan.steps_per_epoch)
    kept = kept_settings(config, earlier_validation_samples(run_folder(config)), chosen, threads)
    for change in check_resumable(saved, config, prepared.plan.manifest(), processes):
        path, _, values = change.partition(": ")
        no_drift = config.adapter.trains_base and path in ("validation.class_prompt", "validation.unrelated_prompts")
        more = ". Drift is no longer measured: the base has trained since it predicted for the others" * no_drift
        say(f"resume  {path} stays {kept[path]} ({values})" if path in kept else f"resume  changed {change}{more}")
    if saved.step > steps or saved.step == steps == finished_steps(run_folder(config)):
        raise UserError(
            f"--resume: the checkpoint has {plural(saved.step, 'step')} and the configuration asks for {steps}. "
            "Increase train.steps or train.epochs"
        )
    say(f"resume  from {saved.folder}: step {saved.step} of {steps}")
    if changed := changed_versions(saved):
        say(f"resume  with {changed}: what follows may differ in the last bits")
