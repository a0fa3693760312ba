"""What a model card says of a run's text side: the token, and how tools call it."""

from __future__ import annotations

from collections.abc import Iterator

from simpletune.config.schema import TrainConfig
from simpletune.text.files import how_to_use
from simpletune.text.option import embedding_name


def has_one_encoder(config: TrainConfig) -> bool:
    """Whether the model has one text encoder, whose embeddings diffusers and A1111 read."""
    return len(config.model.clip_encoders) == 1


def titles_of(config: TrainConfig) -> str:
    """What the result holds, in words."""
    found = [config.adapter.title] if config.adapter.trains else []
    found += ["LoRA of the text encoders"] if config.text.lora is not None else []
    found += [f"Embeddings of `{config.text.embeddings.token}`"] if config.text.embeddings is not None else []
    return " and ".join(found)


def loaded_tokens(config: TrainConfig) -> list[str]:
    """The files of embeddings that diffusers loads."""
    option = config.text.embeddings
    if option is None or option.place == "output" or not has_one_encoder(config):
        return []
    return [embedding_name(config.name, option.token)]


def loads_in_diffusers(config: TrainConfig) -> bool:
    """Whether diffusers loads any of the result."""
    return config.adapter.trains or config.text.lora is not None or bool(loaded_tokens(config))


def token_usage(config: TrainConfig) -> Iterator[str]:
    """How tools call the token, as a list in Markdown; nothing for a run without embeddings."""
    option = config.text.embeddings
    if option is None:
        return
    name = embedding_name(config.name, option.token)
    uses = how_to_use(name, option.token, option.place, has_one_encoder(config))
    others = [f"- {use}" for use in uses if not use.startswith(("ComfyUI", "These"))]
    yield "\n".join([option.use(name), "", *others])
