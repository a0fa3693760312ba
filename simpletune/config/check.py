"""Check a whole configuration: all rules between its sections, in the order in which their problems are reported."""

from __future__ import annotations

from collections.abc import Iterator

from simpletune.adapters.methods.targets import TargetedMethod
from simpletune.adapters.text.placeholders import occurs
from simpletune.adapters.text.text_option import Embeddings, TextLora
from simpletune.config.batches import batch_rules
from simpletune.config.prior import ClassImages
from simpletune.config.schema import TrainConfig
from simpletune.data.concept import Concept
from simpletune.data.sources.multi_source import field_of, source_rules
from simpletune.engine.optim.schedule import Constant
from simpletune.models.families import family_of
from simpletune.system.options import Problem, plural


def config_rules(config: TrainConfig, family_known: bool = True) -> Iterator[Problem]:
    """Check combinations of options by the components' capabilities, not by their names; those of the family only if
    it is known."""
    if config.adapter.trains_base and not config.precision.trainable:
        yield Problem(
            "precision.weights",
            f"{config.precision.weights} weights are frozen, but adapter.method {config.adapter.method} trains them. "
            "Use precision.weights bf16 or fp32, or adapter.method lora",
        )
    if config.memory.modulation == "plan" and config.adapter.trains_base:
        yield Problem(
            "memory.modulation",
            "plan freezes the modulation weights and removes them from the model, but adapter.method "
            f"{config.adapter.method} trains and exports the whole model. Use memory.modulation resident, or "
            "adapter.method lora",
        )
    if family_known:
        yield from _family_rules(config)
    if config.concept is None and config.data is None:
        yield Problem(
            "data", "missing, like concept. Name pictures to train on (data.path), or prompts (concept.directions)"
        )
        return
    if config.concept is not None:
        yield from _concept_rules(config, config.concept)
    sides = {source.resolution for source in config.sources}
    yield from config.objective.rules(sorted(sides if config.concept is None else config.concept.resolutions))
    if config.data is not None:
        yield from source_rules(config.data)
    yield from _adapter_rules(config)
    yield from _optimizer_rules(config)
    yield from _text_rules(config)
    if config.data is not None:
        yield from config.prior.rules(config.adapter, config.data, config.memory)
    yield from _fp16_rules(config)
    yield from _offload_rules(config)
    yield from config.memory.rules()
    yield from _recompute_rules(config)
    yield from config.precision.rules()
    yield from _in_backward_rules(config)
    yield from batch_rules(config)
    yield from _stream_rules(config)
    yield from _fsdp_rules(config)
    yield from config.speed.rules()
    yield from config.checkpoint.rules()
    yield from config.output.rules()
    if config.train.steps is not None and config.train.epochs is not None:
        yield Problem("train.epochs", "steps and epochs are both set. Remove one of them")
    if config.train.steps is not None and config.schedule.warmup_steps >= config.train.steps:
        yield Problem(
            "schedule.warmup_steps",
            f"{plural(config.schedule.warmup_steps, 'warm-up step')} must be fewer than the run's "
            f"{plural(config.train.steps, 'step')}. Use fewer",
        )
    yield from config.validation.rules()
    for side in ("width", "height"):
        if (getattr(config.validation, side) or 0) > 4096:
            yield Problem(f"validation.{side}", f"{getattr(config.validation, side)} is over 4096 px. Use less")


def _concept_rules(config: TrainConfig, concept: Concept) -> Iterator[Problem]:
    """Check the prompts, and for what needs pictures, changes the base, or has no strength."""
    if config.data is not None:
        yield Problem("concept", "set beside data, but a run trains from pictures or from prompts. Remove one of them")
    yield from concept.rules()
    adapter, instead = config.adapter, "Use adapter.method lora"
    if adapter.trains_base or not adapter.trains:
        why = "overwrites the base, from which a concept learns" if adapter.trains_base else "trains no slider"
        yield Problem("adapter.method", f"{adapter.method} {why}. {instead}")
    elif getattr(adapter, "start", None) is not None:
        yield Problem(
            "adapter.start", "a slider begins at the base, which strength 0 leaves as it is. Leave it out, and merge "
            "the LoRA into the base instead (model.loras)"
        )  # fmt: skip
    if config.text.trains:
        yield Problem("text", "a concept's prompts are encoded once, before training. Leave text out")
    if config.prior.method != "none":
        yield Problem(
            "prior.method",
            f"{config.prior.method} preserves the class of pictures. Name what a concept preserves in "
            "concept.directions, as preserved",
        )
    if config.memory.optimizer_in_backward and concept.passes > 1:
        yield Problem(
            "memory.optimizer_in_backward",
            f"the {concept.passes} passes of a micro-batch, of its strengths and preserved prompts, accumulate "
            "gradients, and it keeps none. Use false",
        )
    validation = config.validation
    if validation.loss_samples != 0:
        yield Problem(
            "validation.loss_samples",
            f"{validation.loss_samples}, but a concept has no pictures to evaluate on. Use 0, its default here",
        )
    for field in ("split", "early_stop", "class_prompt"):
        if getattr(validation, field) is not None:
            yield Problem(f"validation.{field}", "a concept has no pictures to evaluate on. Leave it out")


def _family_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check for a base of another family, an objective that its models are not trained with, a method that it lacks,
    sizes that they cannot process."""
    model, name = config.model, config.objective.name
    other = family_of(model.pretrained)
    if other is not None and other.family != model.family:
        yield Problem(
            "model.pretrained",
            f"{model.pretrained} is a model of {other.words.title}. Set model.family to {other.family}, or name an "
            f"{model.words.title} model",
        )
    if model.loras and model.init == "random":
        yield Problem("model.loras", "LoRAs of a trained model do not suit random weights. Remove them, or model.init")
    if model.assistants and config.adapter.trains_base:
        yield Problem(
            "model.loras",
            f"{model.assistants[0]} is used only while training, but adapter.method {config.adapter.method} trains the "
            "weights that it is merged into, so nothing can take it out. Use adapter.method lora, or leave it out",
        )
    if name not in model.objectives:
        allowed = " or ".join(model.objectives)
        yield Problem(
            "objective.name",
            f"{name}, but {model.words.title} models are trained with {allowed}. Leave it out, or use {allowed}",
        )
    if config.adapter.needs_contexts and (reason := model.words.no_hypernetwork) is not None:
        yield Problem(
            "adapter.method", f"{config.adapter.method} changes what the attention to the prompt reads, but {reason}"
        )
    sides: dict[str, int | None] = {
        field_of(config.pictures, index, "resolution"): source.resolution for index, source in enumerate(config.sources)
    }
    if config.concept is not None:
        sides |= {f"concept.resolutions.{index}": side for index, side in enumerate(config.concept.resolutions)}
    sides |= {f"validation.{side}": getattr(config.validation, side) for side in ("width", "height")}
    multiple, title = model.architecture.multiple, model.words.title
    for path, side in sides.items():
        if side is not None and side % multiple:
            low = side // multiple * multiple
            near = f"{low} or {low + multiple}" if low else str(multiple)
            yield Problem(path, f"{side} is not a multiple of {multiple}, which {title} needs. Use {near}")


def _adapter_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check what the training method requires of the optimizer."""
    if getattr(config.adapter, "b_lr_ratio", 1) != 1 and not config.optimizer.steps_in_backward:
        yield Problem(
            "adapter.b_lr_ratio",
            f"optimizer.name {config.optimizer.name} computes one learning rate from all gradients. Use b_lr_ratio 1, "
            "or another optimizer",
        )
    layers = config.adapter.layers if isinstance(config.adapter, TargetedMethod) else ()
    for number, each in enumerate(layers):
        if each.lr_ratio not in (None, 0, 1) and not config.optimizer.steps_in_backward:
            yield Problem(
                f"adapter.layers.{number}.lr_ratio",
                f"optimizer.name {config.optimizer.name} computes one learning rate from all gradients. Use lr_ratio "
                "1 or 0, or another optimizer",
            )
    if getattr(config.adapter, "max_norm", None) is not None and config.optimizer.averages:
        yield Problem(
            "adapter.max_norm",
            f"optimizer.name {config.optimizer.name} averages the weights, and the limit would not hold for their "
            "average. Use max_norm null, or another optimizer",
        )


def _optimizer_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check the optimizer's own rules, and that no schedule or EMA stands beside one that averages the weights
    itself."""
    yield from config.optimizer.rules()
    if not config.optimizer.averages:
        return
    name = config.optimizer.name
    if not isinstance(config.schedule, Constant):
        yield Problem(
            "schedule.name",
            f"{config.schedule.name} lowers the learning rate, but optimizer.name {name} averages the weights instead. "
            "Use constant",
        )
    if config.ema is not None:
        yield Problem("ema", f"optimizer.name {name} averages the weights itself. Use ema null, or another optimizer")


def _text_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check for what trains nothing, and for methods, levers and optimizers that the text side cannot be combined
    with."""
    text, adapter = config.text, config.adapter
    if not text.trains:
        if not adapter.trains:
            yield Problem(
                "adapter.method",
                "none leaves the denoiser frozen, and text trains nothing either. Set text.embeddings or text.lora, or "
                "use adapter.method lora",
            )
        return
    if adapter.trains_base:
        part = "embeddings" if text.embeddings is not None else "lora"
        yield Problem(
            f"text.{part}",
            f"adapter.method {adapter.method} trains and exports the whole denoiser, whose folder holds no text side. "
            "Use adapter.method lora, or text without embeddings and lora",
        )
    if config.trains_conditioning and config.memory.modulation == "plan":
        what = "text.lora" if text.lora is not None else "text.embeddings.place input"
        yield Problem(
            "memory.modulation",
            f"plan computes modulations ahead from cached prompts, but {what} changes the pooled prompt in every step. "
            "Use memory.modulation resident, or text.embeddings.place output alone",
        )
    if text.embeddings is not None:
        yield from _embedding_rules(config, text.embeddings)
    if text.lora is not None:
        yield from _lora_rules(config, text.lora)
    for part in ("embeddings", "lora"):
        option = getattr(text, part)
        rate = None if option is None else option.learning_rate
        if rate not in (None, config.optimizer.lr) and not config.optimizer.steps_in_backward:
            yield Problem(
                f"text.{part}.learning_rate",
                f"optimizer.name {config.optimizer.name} computes one learning rate from all gradients. Use null, or "
                "another optimizer",
            )


def _embedding_rules(config: TrainConfig, option: Embeddings) -> Iterator[Problem]:
    """Check what stopping, the norm and prior preservation require of new embeddings."""
    alone = not config.adapter.trains and config.text.lora is None
    if option.stop_at < 1 and alone:
        yield Problem(
            "text.embeddings.stop_at",
            f"{option.stop_at:g}, but nothing else trains after that. Use stop_at 1 with fewer steps, or train a LoRA "
            "too (adapter.method lora)",
        )
    if option.stop_at < 1 and config.optimizer.averages:
        yield Problem(
            "text.embeddings.stop_at",
            f"optimizer.name {config.optimizer.name} trains other values than the average that it exports, so stopped "
            "embeddings would differ from the result's. Use stop_at 1, or another optimizer",
        )
    if option.stop_at < 1 and not config.optimizer.steps_in_backward:
        yield Problem(
            "text.embeddings.stop_at",
            f"optimizer.name {config.optimizer.name} computes one learning rate from all gradients, of stopped "
            "embeddings too. Use stop_at 1, or another optimizer",
        )
    if option.place == "input" and option.keep_norm and config.optimizer.averages:
        yield Problem(
            "text.embeddings.keep_norm",
            f"optimizer.name {config.optimizer.name} averages the vectors, and their average would not keep the norm. "
            "Use keep_norm false, or another optimizer",
        )
    prompt = getattr(config.prior, "prompt", None)
    if prompt is not None and occurs(prompt, option.token):
        yield Problem(
            "prior.prompt",
            f"{prompt!r} has the token {option.token}, whose embeddings are to change. Name the class without it",
        )


def _lora_rules(config: TrainConfig, option: TextLora) -> Iterator[Problem]:
    """Check which encoders there are, and whether the result's file can hold their updates."""
    known, encoders = config.model.text.trainable, config.model.text.encoders
    kind = " or ".join(sorted({each.kind for each in encoders if each.may_train}))
    frozen = {each.name: each.kind for each in encoders if not each.may_train}
    for name in dict.fromkeys(option.encoders or ()):
        if name not in known:
            why = f"{frozen[name]} is not trained: all of it would stay on the device. " if name in frozen else ""
            yield Problem(
                "text.lora.encoders",
                f"{name!r} is not a {kind} encoder of {config.model.words.title}. {why}Use {', '.join(known)}, or null "
                "for all",
            )
    if not (config.adapter.holds_lora or config.adapter.trains_base):
        yield Problem(
            "text.lora",
            f"the file of adapter.method {config.adapter.method} is not a LoRA's, so the text "
            "encoders' LoRA cannot join it. Use adapter.method lora, dora or none, or text.lora null",
        )


def fp16_refusal(title: str, why: str) -> str:
    """Say that a family computes nothing in fp16 (``Architecture.fp16_overflows``)."""
    return f"{title} is not computed in fp16: {why}. Use bf16, which cards of sm_80 and newer have"


def _fp16_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check what fp16 products require."""
    if config.precision.settled_compute != "fp16":
        return
    if why := config.model.architecture.fp16_overflows:
        yield Problem("precision.compute", fp16_refusal(config.model.words.title, why))
    if config.adapter.trains_base and config.precision.trainable and config.precision.bytes_per_weight < 4:
        yield Problem(
            "precision.weights",
            f"adapter.method {config.adapter.method} would train 16-bit weights with fp16 products, whose updates "
            "are lost. Use precision.weights fp32, which multiplies in fp16 by autocast, or adapter.method lora",
        )
    if not config.optimizer.undoes:
        yield Problem(
            "optimizer.name",
            f"{config.optimizer.name} cannot undo the step whose scaled gradients overflow in fp16 without waiting "
            "for the device. Use adamw8bit",
        )


def _offload_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check what block offload requires, and weights that are mapped from a file."""
    if config.memory.host_weights == "mapped":
        why = (
            None if config.precision.cacheable else f"precision.weights is {config.precision.weights}. Use int8 or nf4"
        )
        if config.model.init == "random":
            why = "model.init random has none. Use pretrained"
        if why:
            yield Problem("memory.host_weights", f"mapped needs the file of a quantised base, and {why}")
    if config.memory.resident_blocks is None:
        return
    if config.adapter.trains_base and not config.memory.optimizer_in_backward:
        yield Problem(
            "memory.resident_blocks",
            f"adapter.method {config.adapter.method} trains the offloaded weights, which must be updated while on the "
            "device. Use memory.optimizer_in_backward true, or resident_blocks null",
        )
    if not config.precision.can_offload:
        yield Problem(
            "memory.resident_blocks",
            f"{config.precision.weights} weights cannot be offloaded block by block. Use resident_blocks null, or "
            "precision.weights int8",
        )


def _recompute_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check which parts of blocks cannot be kept or recomputed separately."""
    memory = config.memory
    keeps = memory.keep_attention not in ("auto", "none")
    if keeps and config.speed.attention == "math":
        yield Problem(
            "memory.keep_attention",
            f"{memory.keep_attention} keeps what an attention kernel returns, and speed.attention math has none. Use "
            "speed.attention auto, or keep_attention none",
        )
    if keeps and config.speed.compile:
        yield Problem(
            "memory.keep_attention",
            f"{memory.keep_attention} with speed.compile: a compiled block does not show its attention. Use "
            "keep_attention none, or speed.compile false",
        )
    value: object
    if memory.checkpointing == "feed_forward":  # feed-forward networks are recomputed separately
        field, value, instead = "checkpointing", memory.checkpointing, "checkpointing all"
    elif memory.feed_forward not in ("auto", "block"):
        field, value, instead = "feed_forward", memory.feed_forward, "feed_forward block"
    else:
        return
    if config.speed.compile:
        yield Problem(
            f"memory.{field}",
            f"{value} with speed.compile: a compiled block is recomputed as a whole. Use {instead}, or "
            "speed.compile false",
        )
    if config.precision.settled_compute == "fp16":
        yield Problem(
            f"memory.{field}",
            f"{value} with products in fp16: a block that overflows uses wider weights during its passes, which a "
            f"network recomputed separately would miss. Use {instead}, or precision.compute bf16",
        )


def can_recompute_feed_forward(config: TrainConfig) -> bool:
    """Return whether recomputing feed-forward networks separately saves time, because nothing needs their outputs
    again; for a known model and resolved demo names."""
    if not config.model.architecture.ends_with_feed_forward or config.speed.compile:
        return False
    if config.precision.settled_compute == "fp16":
        return False
    if config.adapter.trains_base or config.trains_conditioning:
        return False
    return not config.trained_modulation(config.model.architecture.known_shapes())


def _in_backward_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check for what needs all gradients at once, if the backward pass frees each after its update."""
    if not config.memory.optimizer_in_backward:
        return
    if config.train.clip_norm is not None and config.train.clip == "global":
        yield Problem(
            "train.clip",
            "global clipping needs all gradients at once, but memory.optimizer_in_backward frees each after its "
            "update. Use train.clip per_parameter, or train.clip_norm null",
        )
    if config.train.accumulation > 1:
        field = "gradient_accumulation" if config.train.global_batch is None else "global_batch"
        yield Problem(
            f"train.{field}",
            f"{config.train.accumulation} passes accumulate gradients, but memory.optimizer_in_backward "
            "keeps none. Use gradient_accumulation 1 with a larger batch_size, or optimizer_in_backward false",
        )
    if config.train.on_nonfinite == "skip":
        yield Problem(
            "train.on_nonfinite",
            "skip needs all gradients before the update, but memory.optimizer_in_backward updates the weights "
            "during the backward pass. Use stop, or optimizer_in_backward false",
        )
    if not config.optimizer.steps_in_backward:
        yield Problem(
            "memory.optimizer_in_backward",
            f"optimizer.name {config.optimizer.name} needs all gradients at once. Use another optimizer, or false",
        )


def _stream_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check for what needs all pictures or captions before the first step, when rows are streamed instead of listed."""
    if config.data is None or not config.data.streamed:
        return
    if config.train.batch_size == "auto":
        yield Problem(
            "train.batch_size",
            "auto may change after pictures were encoded, which would change the rows of a stream that the run uses. "
            "Use a number; simpletune estimate says what fits",
        )
    split = config.validation.split
    if split is not None and split < 1:
        yield Problem(
            "validation.split",
            f"{split:g} would hold out a share of a stream by the bytes of all its pictures, which are not read. Use a "
            "whole number of pictures, such as 64",
        )
    if config.text.trains:
        yield Problem(
            "text",
            "training the text side reads every caption before the first step, but a stream's are only read when "
            "they are needed. Use data.source table or folder, or text without embeddings and lora",
        )
    if isinstance(config.prior, ClassImages):
        yield Problem(
            "prior.method",
            f"{config.prior.method} adds a source of class pictures, and a stream does not mix with other sources. Use "
            "another prior.method, or data.source table",
        )


def _fsdp_rules(config: TrainConfig) -> Iterator[Problem]:
    """Check for what does not work when each process holds only a part of the weights."""
    memory, train, none = config.memory, config.train, "or train.fsdp none"
    if train.fsdp == "none":
        return
    if not config.adapter.supports_fsdp:
        yield Problem(
            "train.fsdp",
            f"full divides what trains, and adapter.method {config.adapter.method} trains little beside a frozen "
            "base, of which each process keeps a whole copy: quantised, that takes the least memory. Use none, or "
            "adapter.method full",
        )
    if not config.model.architecture.supports_fsdp:
        yield Problem(
            "train.fsdp",
            f"full divides a transformer block by block, and {config.model.words.title} models are not transformers. "
            "Use none",
        )
    if config.optimizer.no_fsdp_reason is not None:
        yield Problem(
            "optimizer.name",
            f"{config.optimizer.name} {config.optimizer.no_fsdp_reason}, but train.fsdp full gives it a part of "
            f"each parameter. Use adamw, adamw8bit or adamw_bf16, {none}",
        )
    if memory.resident_blocks is not None:
        yield Problem(
            "memory.resident_blocks",
            f"{memory.resident_blocks} offloads blocks whose weights each process holds whole, but train.fsdp full "
            f"gathers them from all processes. Use null, {none}",
        )
    if memory.optimizer_in_backward:
        yield Problem(
            "memory.optimizer_in_backward",
            "true updates each parameter on its own, but train.fsdp full sums the gradients of a whole block. Use "
            f"false, {none}",
        )
    if train.reduce == "exact":
        yield Problem(
            "train.reduce",
            "exact sums whole gradients in each process, but train.fsdp full leaves it only a part of them. Use "
            f"fast, {none}",
        )
    if train.batch_size == "auto":
        yield Problem(
            "train.batch_size",
            "auto tries out a micro-batch, but with train.fsdp full a process that runs out of memory in it "
            f"would leave the others waiting for its weights. Use a number, {none}",
        )
    if config.speed.compile:
        yield Problem(
            "speed.compile",
            f"true compiles blocks whose weights stay where they are, but train.fsdp full gathers them for each "
            f"pass. Use false, {none}",
        )
    if config.text.trains:
        yield Problem(
            "text",
            "the text side trains whole in each process, but train.fsdp full divides all that trains. Use neither "
            f"text.lora nor text.embeddings, {none}",
        )
    if config.precision.settled_compute == "fp16":
        yield Problem(
            "precision.compute",
            "fp16 undoes a step by what each process sees overflow, but with train.fsdp full it sees a part of the "
            f"gradients. Use bf16 or fp32, {none}",
        )
