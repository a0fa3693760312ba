"""Check what the text side requires of other options. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simpletune.adapters.text.option import Embeddings, TextLora
from simpletune.adapters.text.placeholders import occurs
from simpletune.system.options import Problem

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig


def text_rules(config: TrainConfig) -> Iterator[Problem]:
    """Report configurations that train nothing, and methods, levers and optimizers that text cannot be combined
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
    resident = text.resident(config.model.clip_encoders)
    if resident and config.memory.modulation == "plan":
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
    """Check the requirements of stopping, the norm and prior preservation."""
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
    """Check the encoders, and that the result's file can hold their updates."""
    known = config.model.clip_encoders
    for name in dict.fromkeys(option.encoders or ()):
        if name not in known:
            t5 = "T5 is not trained: its 9.5 GB would stay on the device. " if name == "t5" else ""
            yield Problem(
                "text.lora.encoders",
                f"{name!r} is not a CLIP encoder of {config.model.title}. {t5}Use {', '.join(known)}, or null for all",
            )
    if not (config.adapter.holds_lora or config.adapter.trains_base):
        yield Problem(
            "text.lora",
            f"the file of adapter.method {config.adapter.method} is not a LoRA's, so the text "
            "encoders' LoRA cannot join it. Use adapter.method lora, dora or none, or text.lora null",
        )
