"""The trained text side as a module: a token's vectors, and the CLIP encoders that have a LoRA or read the vectors.

It becomes the submodule ``text`` of the denoiser, so that its parameters are trained, saved, averaged and checked like
the adapter's. The denoiser never calls it: the step core passes each micro-batch's embeddings through it first.

Shapes: b prompts, L tokens of an encoder, t text tokens of the denoiser, e their width, p the pooled width, v vectors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simpletune.adapters.files.header import ADAPTER_METADATA
from simpletune.adapters.text.embedding_files import COSINES, EmbeddingFile, write_embeddings
from simpletune.adapters.text.inputs import TextInputs
from simpletune.adapters.text.text_option import Text, embedding_name
from simpletune.models.families import Model
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.shared.lora_layout import ALPHA, DOWN, UP
from simpletune.models.text.family_text import TextRegion
from simpletune.models.text_layers import text_key
from simpletune.system.safetensors_file import WeightReader, read_header, write_safetensors

NAME = "text"
"""Its name in the denoiser."""
TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "attention_and_mlp": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
}


class TextUpdate(nn.Module):
    """What trains on the text side.

    Args:
        text: the option.
        model: the family.
        vectors: initial values of the embeddings, fp32 [v, width] by the encoder's name.
        encoders: the CLIP encoders that run in every step, frozen and on the device, by name.
    """

    def __init__(self, text: Text, model: Model, vectors: Mapping[str, Tensor], encoders: Mapping[str, nn.Module]):
        super().__init__()
        self.option, self.family = text, model
        self._kinds = {encoder.name: encoder for encoder in model.text.encoders}
        self.regions: Mapping[str, TextRegion] = model.text.regions()
        self.embeddings = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in vectors.items()})
        self.encoders = nn.ModuleDict(dict(encoders))
        self.enabled, self.frozen = True, False
        self.first: dict[str, Tensor] = {}  # the vectors before training, for the file's header
        self.t5_rows: dict[str, Tensor] = {}  # T5's input embeddings of the token's words, for the file
        self._slots: Mapping[str, Tensor] = {}
        self.at_input = text.embeddings is not None and text.embeddings.place == "input"
        for name, encoder in self.encoders.items():
            encoder.requires_grad_(False)
            if self.at_input:
                table = token_table(encoder)
                norms = torch.linalg.vector_norm(table.weight.detach(), dim=1, dtype=torch.float32)
                self.register_buffer(f"norm_{name}", norms.median(), persistent=False)
                table.register_forward_hook(partial(self._inserted, name))

    def train(self, mode: bool = True) -> TextUpdate:
        """Stay in evaluation mode: the encoders use no dropout."""
        return super().train(False)

    def attach_lora(self, seed: int) -> None:
        """Add the updates to the chosen encoders' layers, with fp32 factors drawn from the seed."""
        from peft import LoraConfig, inject_adapter_in_model

        from simpletune.adapters.methods.lora_layers import compute_in_output_type
        from simpletune.system.rng import reseed_global

        option = self.option.lora
        if option is None:
            return
        reseed_global(seed, NAME)
        for name in self.option.with_lora(self.family.text.trainable):
            names = [each for each, _ in self.encoders[name].named_modules() if each.endswith(TARGETS[option.targets])]
            config = LoraConfig(r=option.rank, lora_alpha=option.scale * option.rank, target_modules=names)
            inject_adapter_in_model(config, self.encoders[name])
            compute_in_output_type(self.encoders[name])

    def follow_schedule(self, step: int, steps: int) -> None:
        """Freeze the embeddings after their last step: without a gradient, no optimizer changes them."""
        option = self.option.embeddings
        self.frozen = option is not None and option.stop_at < 1 and step >= max(1, round(option.stop_at * steps))

    def forward(
        self,
        conditioning: Conditioning,  # of b prompts
        inputs: TextInputs,
    ) -> Conditioning:
        """Insert what trains into a micro-batch's cached embeddings, in their type."""
        if not self.encoders and not self.enabled:
            return conditioning
        embeds, pooled = conditioning.embeds.clone(), conditioning.pooled
        poolings: dict[int, Tensor] = {}  # the encoders' new parts, by their first columns
        for name in self.encoders:
            region = self.regions[name]
            self._slots = inputs.slots if self.enabled and self.at_input else {}  # for ``_inserted``
            try:
                found = self._kinds[name].outputs(self.encoders[name], inputs.ids[name])
            finally:
                self._slots = {}
            self._place(embeds, region, found["hidden"].shape[1])[:] = found["hidden"]
            if region.pooled is not None:
                poolings[region.pooled[0]] = found["pooled"]
        if self.enabled and not self.at_input:
            for name, slots in inputs.slots.items():
                place = self._place(embeds, self.regions[name], slots.shape[1])
                place[:] = self._replaced(name, slots, place)
        if poolings:
            assert pooled is not None
            pooled = pooled.clone()
            for column, own in poolings.items():
                pooled[:, column : column + own.shape[1]] = own
        return replace(conditioning, embeds=embeds, pooled=pooled)

    def _place(self, embeds: Tensor, region: TextRegion, length: int) -> Tensor:  # [b, L, width], a view
        """Return a view of an encoder's output in the embeddings."""
        rows = slice(embeds.shape[1] - length, None) if region.last else slice(length)
        return embeds[:, rows, region.column : region.column + region.width]

    def _replaced(self, name: str, slots: Tensor, otherwise: Tensor) -> Tensor:  # [b, L, width]
        """Insert the vectors at their positions, in the tensor's type."""
        vectors = self.embeddings[name]
        rows = F.embedding(slots.clamp(min=0), vectors.detach() if self.frozen else vectors)
        return torch.where((slots >= 0).unsqueeze(-1), rows.to(otherwise.dtype), otherwise)

    def _inserted(self, name: str, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        """Forward hook of an encoder's token table: inserts the vectors among its input embeddings."""
        slots = self._slots.get(name)
        return output if slots is None else self._replaced(name, slots, output)

    @torch.no_grad()
    def constrain(self) -> None:
        """Scale every vector to the median norm of its table (``keep_norm``), unless the embeddings are frozen."""
        option = self.option.embeddings
        if option is None or not self.at_input or not option.keep_norm or self.frozen:
            return
        for name, vectors in self.embeddings.items():
            norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
            vectors.mul_(self.get_buffer(f"norm_{name}") / norms.clamp_min(1e-12))

    def export_embeddings(self, folder: Path, run: str, metadata: Mapping[str, str]) -> None:
        """Write the embeddings, if there are any, into a file named after run and token."""
        option = self.option.embeddings
        if option is None:
            return
        vectors = {name: each.detach() for name, each in self.embeddings.items()}
        moved = {}  # the cosine of every vector with its value before training: how far it has moved from its word
        for name, each in vectors.items() if self.first else ():
            found = F.cosine_similarity(each.cpu().float(), self.first[name].float(), dim=1)
            moved[name] = [round(float(cosine), 4) for cosine in found]
        about = {**metadata, COSINES: json.dumps(moved)} if moved else metadata
        words = tuple(option.words())
        embedding = EmbeddingFile(option.token, option.place, vectors | self.t5_rows, self.family.family, words, about)
        write_embeddings(folder / embedding_name(run, option.token), embedding)

    def export_lora(self, file: Path, metadata: Mapping[str, str]) -> None:
        """Add the encoders' LoRA, if there is one, to the file of the denoiser's, or write a new one with this
        metadata, under the keys of the family's results."""
        from simpletune.adapters.methods.lora_layers import lora_factors

        option, layout = self.option.lora, self.family.lora[0]
        if option is None:
            return
        parts = {encoder.name: encoder.model for encoder in self.family.text.encoders}
        state: dict[str, Tensor] = {}
        for name in self.option.with_lora(self.family.text.trainable):
            for layer, a, b in lora_factors(self.encoders[name]):
                module = "text_model." + layer.removeprefix("text_model.")  # transformers names it with or without
                key_of = partial(text_key, f"{parts[name]}.{module}", layout=layout.name, single=len(parts) == 1)
                state[key_of(DOWN)], state[key_of(UP)] = a.detach(), b.detach()
                if layout.alpha:
                    state[key_of(ALPHA)] = torch.tensor(option.scale * option.rank)
                elif option.scale != 1:  # readers of this layout ignore alpha
                    state[key_of(UP)] = b.detach() * option.scale
        if not state:
            return
        known: dict[str, Tensor] = {}
        header = dict(metadata)
        if file.exists():
            known = WeightReader([file]).get_all()
            header = {key: value for key, value in read_header(file)["__metadata__"].items() if key != "format"}
        if ADAPTER_METADATA in header:  # of a denoiser with several ranks: diffusers then takes all settings from it
            settings = json.loads(header[ADAPTER_METADATA])
            for key in (key for key in state if key.endswith(layout.down)):
                part, _, layer = key.removesuffix(f".{layout.down}").partition(".")
                settings |= {f"{part}.r": option.rank, f"{part}.lora_alpha": option.rank}
                settings.setdefault(f"{part}.target_modules", []).append(layer)
            header[ADAPTER_METADATA] = json.dumps(settings)
        write_safetensors({**known, **state}, file, header)


def token_table(encoder: nn.Module) -> nn.Embedding:
    """Return the table of a CLIP encoder's token embeddings."""
    table: nn.Embedding = encoder.get_input_embeddings()  # type: ignore[operator]
    return table


def trained_text(model: nn.Module) -> TextUpdate | None:
    """Return the text side that trains with a denoiser; None if there is none."""
    found = model._modules.get(NAME)
    return found if isinstance(found, TextUpdate) else None


@contextmanager
def without_text(model: nn.Module) -> Iterator[None]:
    """Take the text side out of a denoiser within this context, to export and constrain the denoiser alone."""
    found = model._modules.pop(NAME, None)
    try:
        yield
    finally:
        if found is not None:
            model._modules[NAME] = found


@contextmanager
def text_disabled(model: nn.Module) -> Iterator[None]:
    """Disable what trains on the text side within this context: the words of ``initial`` then replace the token."""
    from simpletune.adapters.methods.layers import updates_disabled

    found = trained_text(model)
    if found is None:
        yield
        return
    found.enabled, before = False, found.enabled
    try:
        with updates_disabled(found):
            yield
    finally:
        found.enabled = before
