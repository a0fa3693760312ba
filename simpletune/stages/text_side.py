"""Build what trains on the text side: loaded for a run, or without values for a simulation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simpletune.adapters.text.inputs import TextInputs, encoders_with_vectors
from simpletune.adapters.text.update import TextUpdate, token_table
from simpletune.config.schema import TrainConfig
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.text_cache import TextCache


def load_text_side(
    config: TrainConfig, cache: TextCache, captions: Sequence[str], device: torch.device
) -> TextUpdate | None:
    """Load what trains on the text side; None if nothing does.

    Args:
        config: the configuration, with folders resolved.
        cache: the run's cached prompts.
        captions: the prompts to train on, whose cached embeddings give the first values of output embeddings.
        device: where the run trains.

    Raises:
        UserError: a word of ``initial`` is not a single token, or an encoder cannot be loaded.
    """
    if not config.text.trains:
        return None
    tokens, encoders = cache.tokens, dict[str, nn.Module]()
    for name in tokens.resident:
        encoders[name] = cache.prompts.load(tokens.encoders[name])
    option = config.text.embeddings
    if option is None:
        vectors = {}
    elif option.place == "input":
        vectors = {  # no table outlives this line: on CUDA the move below frees the encoders' host memory
            name: token_table(encoders[name]).weight.detach()[list(tokens.word_ids(name))].float()
            for name in tokens.with_vectors
        }
    else:
        vectors = mean_rows(config, cache, captions)
    vectors = {name: tensor.to(device) for name, tensor in vectors.items()}
    update = TextUpdate(config.text, config.model, vectors, encoders).to(device)
    update.first = {name: tensor.detach().to("cpu", copy=True) for name, tensor in vectors.items()}
    if option is not None and option.place == "input":
        update.t5_rows = t5_rows(config, cache)
    free_memory(device)
    return update


def t5_rows(config: TrainConfig, cache: TextCache) -> dict[str, Tensor]:
    """Return T5's input embeddings of the words that stood for the token in training: ``t5`` [v, e]; empty without T5.

    A file without them would make other tools leave the token out of T5's prompt.
    """
    from simpletune.models.text.layered import LayeredEncoder

    for encoder in cache.prompts.encoders:
        if not encoder.may_train:
            part, tokenizer = config.model.files.part(encoder.model), cache.prompts.tokenizer(encoder)
            opened = encoder.open(part, cache.dtype, torch.device("cpu"), tokenizer)
            assert isinstance(opened, LayeredEncoder)
            return {encoder.name: opened.rows(cache.tokens.word_ids(encoder.name)).float()}
    return {}


def mean_rows(config: TrainConfig, cache: TextCache, captions: Sequence[str]) -> dict[str, Tensor]:
    """Compute the mean, over all captions, of the encoders' outputs at the token's words: fp32 [v, width] each.

    The words' outputs differ between captions; their mean is the one set of vectors with the smallest squared error.
    """
    tokens, regions = cache.tokens, config.model.text.regions()
    sums = {n: torch.zeros(tokens.vectors[n], regions[n].width, dtype=torch.float64) for n in tokens.with_vectors}
    counts = {name: torch.zeros(len(total), 1, dtype=torch.float64) for name, total in sums.items()}
    for caption in captions:
        inputs = tokens.of([caption])
        for name, slots in inputs.slots.items():
            places = slots[0] >= 0
            numbers = slots[0][places]
            if len(numbers):
                hidden = cache.parts(caption)[name]["hidden"][places]
                sums[name].index_add_(0, numbers, hidden.double())
                counts[name].index_add_(0, numbers, torch.ones(len(numbers), 1, dtype=torch.float64))
    return {name: (total / counts[name].clamp_min(1)).float() for name, total in sums.items()}


def empty_text_side(config: TrainConfig, device: torch.device) -> TextUpdate | None:
    """Load as ``load_text_side`` does, but without values, on the CPU: assumes one piece per word for T5, and as many
    tokens for CLIP as its configuration says."""
    if not config.text.trains:
        return None
    model, dtype = config.model, config.precision.encoder_dtype()
    resident = config.text.resident(model.text.trainable)
    encoders = {
        encoder.name: encoder.empty(model.files.known_part(encoder.model).config()).to(dtype)
        for encoder in model.text.encoders
        if encoder.name in resident
    }
    option, regions = config.text.embeddings, model.text.regions()
    count = 0 if option is None else option.vectors
    vectors = {name: torch.zeros(count, regions[name].width) for name in encoders_with_vectors(config.text, model)}
    return TextUpdate(config.text, model, vectors, encoders).to(device)


def empty_text_inputs(config: TrainConfig, b: int, device: torch.device) -> TextInputs | None:
    """Return inputs for a micro-batch of b prompts without values, with the first vector at every position; None if
    nothing trains on the text side."""
    if not config.text.trains:
        return None
    model = config.model
    lengths = {
        encoder.name: encoder.longest(model.files.known_part(encoder.model).config()) for encoder in model.text.encoders
    }
    both = (
        {name: torch.zeros((b, lengths[name]), dtype=torch.int64, device=device) for name in names}
        for names in (encoders_with_vectors(config.text, model), config.text.resident(model.text.trainable))
    )
    return TextInputs(*both)
