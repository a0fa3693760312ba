"""``simpletune check``: explain a configuration. Imports no torch and does not use the network."""

from __future__ import annotations

import math
from collections.abc import Iterator

from simpletune.adapters.text.text_option import result_names
from simpletune.config.modulation import auto_modulation
from simpletune.config.prior import BasePrediction, ClassImages
from simpletune.config.resolve import known_to_inpaint, resolve_model_folder
from simpletune.config.schema import TrainConfig, profile_folder, run_folder, run_url
from simpletune.config.validation_schedule import ON_TRAINING
from simpletune.data.sources.augmentation import format_augmentation
from simpletune.data.sources.multi_source import source_notes
from simpletune.data.sources.source import Source
from simpletune.models.families import family_suggested
from simpletune.models.shared.model_config import Shape
from simpletune.models.shared.single_file import is_single_file
from simpletune.system.hub import is_hub_name
from simpletune.system.notify import find_receiver
from simpletune.system.options import UserError, join_names, plural
from simpletune.system.shell import quote_command

HIGH_LR_FULL = 1e-4
SCALES = ("optimizer.lr", "train.clip_norm", "adapter.alpha", "adapter.conv_alpha", "objective.min_snr_gamma")
NEGLIGIBLE = 1e-12  # for each of these
FEW_STATES = 64 * 2**20  # bytes of optimizer state in fp32 below which 8-bit state saves nothing that a card feels
HIGH_LR = 1000  # times an optimizer's default
WITHOUT_BF16 = "T4, V100 and RTX 20 lack it"


def explain(config: TrainConfig) -> str:
    """Describe what a configuration trains, on which data, for how long, and what it saves where."""
    lines = [f"{config.name}: {config.about}" if config.about else config.name]
    lines += [f"  {title:<10} {text}" for title, text in _rows(config)]
    notes = list(_notes(config))
    return "\n".join([*lines, *(["  notes"] if notes else []), *(f"    - {note}" for note in notes)])


def _rows(config: TrainConfig) -> Iterator[tuple[str, str]]:
    model, train = config.model, config.train
    local = "single file" if is_single_file(model.pretrained) else "local folder"
    source = "hub" if is_hub_name(model.pretrained) else "bundled" if config.is_demo else local
    under = f" with {', '.join(model.loras)} merged in" if model.loras else ""
    under += ", which pictures are drawn without" if model.assistants else ""
    yield "model", f"{model.pretrained} ({source}){under}, {model.text.describe()}"
    shapes, located = _shapes(config), resolve_model_folder(config).model
    if shapes is not None and located.inpaints:
        weights = located.architecture.new_weights
        new = f"; {weights} begins with zeros for them" if weights else ""
        yield "inpaints", f"the model also reads a mask and the latents of the masked picture{new}"
    if shapes is not None:
        total, trained = sum(math.prod(s) for s in shapes.values()), _trained(config, shapes)
        of_denoiser = [config.adapter.describe(shapes)] if config.adapter.trains else []
        yield "trains", "; ".join([*of_denoiser, *config.text.describe()])
        yield "parameters", f"{trained:,} of the base's {total:,} trained ({100 * trained / total:.2f}%)"
    else:
        yield "trains", f"by {config.adapter.method}; the number of parameters is unknown until the model is downloaded"
    known, predicts = located.files.is_schedule_known(), None
    if len(model.objectives) > 1:
        predicts = config.objective.describe(
            located.files.scheduler_config() if known else None, located.files.schedule_source() if known else ""
        )
    if predicts is not None:
        yield "predicts", predicts
    yield "weights", f"{config.precision.weights}, {config.precision.describe_matmul()}"
    yield "memory", ", ".join(_memory(config))
    ahead = "prefetches batches on a GPU" if config.speed.prefetch else "does not prefetch batches"
    more = ", compiles blocks" * config.speed.compile + ", deterministic" * config.speed.deterministic
    more += ", replays passes as CUDA graphs" * (config.speed.graphs is True)
    yield "speed", f"attention {config.speed.attention}, {ahead}{more}"
    steps = plural(train.epochs, "epoch") if train.epochs else plural(config.steps(1), "step")
    batch = train.micro_batch * train.accumulation
    item = "picture" if config.concept is None else "drawing"
    portion = f"up to {plural(batch, item)}" if batch > 1 else f"1 {item}"
    yield "runs", f"{steps} of {portion}, seed {train.seed}, device {config.device}"
    optimizer, schedule = config.optimizer, config.schedule
    warm = f" after {plural(schedule.warmup_steps, 'warm-up step')}" if schedule.warmup_steps else ""
    yield "optimizer", f"{optimizer.name}, learning rate {optimizer.lr:g}, {schedule.name}{warm}"
    inpaints = known_to_inpaint(config)
    yield from (("data", _source(member, inpaints)) for member in config.sources)
    if (concept := config.concept) is not None:
        yield from (("concept", direction.describe()) for direction in concept.directions)
        sides = join_names([f"{side} px" for side in concept.resolutions])
        yield (
            "draws",
            f"{plural(concept.drawing_steps, 'step')}, stopped at any, guidance {concept.drawing_guidance:g}; {sides}",
        )
    prior = config.prior
    if isinstance(prior, ClassImages):
        yield "prior", f"{plural(prior.count, 'class picture')} of {prior.prompt!r}, weight {prior.weight:g}"
    elif isinstance(prior, BasePrediction):
        where = "the sources for regularization" if prior.prompt is None else repr(prior.prompt)
        yield "prior", f"the base's own predictions for {where}, weight {prior.weight:g}"
    files = result_names(config.name, config.adapter, config.text, config.model.denoiser)
    every, kept = config.checkpoint.every, config.checkpoint.describe()
    when = f"every {plural(every, 'step')} and at the end" if every else "at the end"
    results = " and ".join(str(run_folder(config) / file) for file in files)
    yield "saves", f"{results}, checkpoints {when} ({kept})"
    if (url := run_url(config)) is not None:
        yield "uploads", f"every checkpoint and all other files to {url}"
    yield "evaluates", _evaluates(config)
    empty = config.validation.prompts == []
    generated = "no pictures (validation.prompts is empty)" if empty else str(run_folder(config) / "samples")
    board = "no TensorBoard"
    if config.tracking.tensorboard:
        board = quote_command("tensorboard", "--logdir", profile_folder(config).parent)
    wandb = config.tracking.wandb
    synced = "" if wandb == "disabled" else f"; wandb ({wandb}), project {config.tracking.wandb_project}"
    if config.tracking.trackio is not None:
        synced += f"; trackio, project {config.tracking.trackio}"
    yield "shows", f"{generated}; {board}{synced}"
    try:
        receiver = find_receiver()
    except UserError as error:
        yield "notifies", str(error)
    else:
        if receiver is not None:
            images = " and with validation pictures" if config.tracking.notify == "pictures" else ""
            yield "notifies", f"{receiver} at the end{images}"


def _source(source: Source, inpaints: bool) -> str:
    captions = f"prompt {source.prompt!r}" if source.prompt else "captions"
    parts = [f"{source.path} ({source.source})", captions, f"{source.resolution} px in {source.aspect}"]
    parts += [f"{source.repeats} times an epoch"] if source.repeats > 1 else []
    parts += [f"loss weight {source.weight:g}"] if source.weight != 1 else []
    if inpaints:
        holes = "random holes" if source.inpainting_mask == "random" else f"masks as holes ({source.mask})"
        parts.append(f"{holes}, loss {source.inpainting_loss}")
    if source.mask and source.inpainting_mask == "random":
        parts.append(f"masks ({source.mask}), weight outside {source.unmasked_weight:g}")
    parts += [f"{source.variants} variants"] if source.variants > 1 else []
    parts += [words] if (words := format_augmentation(source)) else []
    parts += ["for regularization"] if source.regularization else []
    return ", ".join([*parts, f"on_error {source.on_error}"])


def _evaluates(config: TrainConfig) -> str:
    """Describe what the validation loss measures."""
    count, split = config.validation.loss_samples, config.validation.split
    if not count:
        return "nothing (validation.loss_samples is 0)"
    size = "4 to 16 samples" if count == "auto" else plural(count, "sample")
    draws = f"a fixed set of {size} with noise"
    if split is None:
        return f"{ON_TRAINING}, {draws} (no validation.split)"
    held_out = f"a share of {split:g}" if split < 1 else plural(int(split), "picture")
    return f"validation loss on {held_out} held out from training, {draws}"


def _memory(config: TrainConfig) -> Iterator[str]:
    """Describe the active memory levers."""
    memory = config.memory
    if memory.profile is not None:
        yield f"profile {memory.profile}"
    alone = "recomputes feed-forward networks alone"
    room = "the card" if memory.budget_gib is None else f"{memory.budget_gib} GiB"
    words = {
        "all": "checkpoints all blocks",
        "none": "no checkpointing",
        "feed_forward": alone,
        "auto": f"checkpoints as few blocks as {room} allows",
    }
    number = f"checkpoints {memory.checkpointing} {'block' if memory.checkpointing == 1 else 'blocks'}"
    yield words.get(str(memory.checkpointing), number)
    if memory.keep_attention not in ("auto", "none"):
        kept = "" if memory.keep_attention == "all" else f" of {memory.keep_attention} of them"
        yield f"keeps attention's output{kept}"
    if memory.feed_forward not in ("auto", "block") and memory.checkpointing != "feed_forward":
        yield alone
    if isinstance(memory.feed_forward, int):
        yield f"in tiles of {memory.feed_forward} tokens"
    if memory.offload_checkpoint_inputs:
        yield "offloads their inputs to the host"
    plannable = memory.modulation == "auto" and config.model.architecture.modulation is not None
    shapes = _shapes(config) if plannable else None
    may_plan = shapes is not None and auto_modulation(config, config.device == "cpu", shapes)[0] == "plan"
    if config.tabulates_modulations:
        yield f"keeps the modulations of {plural(len(config.tabulated_levels), 'noise level')} in host memory"
    elif memory.modulation == "plan" or may_plan:
        where = "" if memory.modulation == "plan" else " on a GPU"
        yield f"plans modulations {plural(memory.modulation_window, 'step')} ahead{where}"
    if memory.resident_blocks is not None:
        yield f"offloads blocks to the host, {memory.resident_blocks} resident"
    if memory.optimizer_in_backward:
        yield "updates weights during the backward pass"
    if memory.vae_tile is not None:
        yield f"runs the autoencoder in tiles of {memory.vae_tile} px"


def _shapes(config: TrainConfig) -> dict[str, Shape] | None:
    shapes = resolve_model_folder(config).model.architecture.shapes(fetch=False)
    return None if shapes is None else dict(shapes)


def _trained(config: TrainConfig, shapes: dict[str, Shape]) -> int:
    """Count the parameters that a run trains."""
    return config.adapter.trainable(shapes) + config.text.trainable(resolve_model_folder(config).model)


def _idle(config: TrainConfig) -> Iterator[str]:
    """Yield the settings with which a run trains nothing; it warns of them, too, once it has tried."""
    options = config.model_dump(mode="json")
    for path in SCALES:
        section, _, name = path.partition(".")
        value = options[section].get(name)
        if value is not None and value < NEGLIGIBLE:
            yield f"{path} {value:g} is so small that nothing trains"
    located = resolve_model_folder(config).model
    scheduler = located.files.scheduler_config() if located.files.is_schedule_known() else {}
    if config.objective.is_idle(scheduler):
        yield (
            "the only level from objective.min_timestep on has a weight of 0, by objective.min_snr_gamma and an SNR of "
            "0, so that nothing trains"
        )


def rate_notes(config: TrainConfig) -> Iterator[str]:
    """Yield that a learning rate is far above those that people use with its optimizer."""
    lr, usual = config.optimizer.lr, type(config.optimizer).model_fields["lr"].default
    if lr > HIGH_LR * usual:
        yield f"a learning rate of {lr:g} is {lr / usual:,.0f} times the usual {usual:g}: training would diverge"


def _notes(config: TrainConfig) -> Iterator[str]:
    """Yield what a user should know before the run."""
    plain, shapes = config.optimizer.same_in_fp32, _shapes(config)
    if plain is not None and shapes is not None and (state := 8 * _trained(config, shapes)) < FEW_STATES:
        yield (
            f"optimizer.name {config.optimizer.name} gains nothing here: the state of {plain} takes "
            f"{state / 2**20:.1f} MiB"
        )
    yield from rate_notes(config)
    if config.adapter.trains_base and config.optimizer.lr > HIGH_LR_FULL and not config.is_demo:
        yield f"a learning rate of {config.optimizer.lr:g} is high for full fine-tuning; 1e-5 to 5e-5 is common"
    if config.adapter.trains_base and config.precision.weights == "fp32":
        yield "full fine-tuning with fp32 weights takes 16 bytes per parameter before activations"
    yield from _idle(config)
    suggested = family_suggested(config.model.pretrained)
    if suggested is not None and suggested.family != config.model.family:
        yield (
            f"the name of {config.model.pretrained} suggests {suggested.words.title}, and model.family is "
            f"{config.model.family}: its configuration is checked before its weights are downloaded"
        )
    if config.objective.usage(config.model.flow) is not None:
        if config.model.pretrained in config.model.files.hub_names and not config.adapter.trains_base:
            yield (
                f"{config.model.pretrained} predicts noise: a LoRA by objective.name {config.objective.name} needs a "
                "base that was trained by it. Name one: model.pretrained"
            )
        yield (
            f"nothing in the files tells whether {config.model.pretrained} was trained by objective.name "
            f"{config.objective.name}. With validation.loss_samples, the run first prints the base's loss of one step "
            f"by {' and by '.join(config.model.objectives)}"
        )
    if config.data is not None:
        yield from source_notes(config.data, inpaints=known_to_inpaint(config))
    if config.train.steps is None and config.train.epochs is None:
        yield f"train.steps and train.epochs are unset: the run has {plural(config.steps(1), 'step')}"
    few = config.model.few_steps if config.concept is None else None  # a slider learns what its base itself predicts
    if few is not None and not config.model.assistants:
        under = f"model.loras=[training:{few.assistant}]" if few.assistant else "an assistant (model.loras, training:)"
        yield (
            f"{config.model.files.weights_from} is, by its name or model.turbo, {few.title}, which draws in few steps. "
            f"Ordinary training undoes that: train the model that it was distilled from, or under {under}"
        )
    precision = config.precision
    if precision.compute == "bf16" and config.device != "cpu":
        yield f"precision.compute bf16 needs a card of sm_80 or newer (A100, RTX 30, L4); {WITHOUT_BF16}: use auto"
    elif precision.compute == "auto" and precision.settled_compute == "bf16" and config.device != "cpu":
        if config.adapter.trains_base:
            yield f"training bf16 weights needs a card with bf16; {WITHOUT_BF16}: use precision.weights=fp32"
    if config.device == "auto" and config.is_demo:
        yield "device auto: uses the GPU if available, else the CPU, which is allowed for the demo model only"
