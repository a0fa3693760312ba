"""CLIP's text encoder: the last or penultimate hidden state of 77 tokens, and a projected state at the text's end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import (
    Part,
    explain_load_errors,
    only_local,
    require_tensor_shapes,
    require_weights,
    tensor_shapes,
)
from simpletune.models.text.encoder import BATCH, UNCHANGED, EncoderChanges, OpenEncoder, TextEncoder, Tokens
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

LIMIT = 77
"""The tokens of every published CLIP encoder."""
WIDTH = 512  # transformers' default, which files may leave out
HIDDEN_ALONE = "-hidden"
"""The end of a fingerprint of penultimate states without a pooled output. Without it, it is that of both."""


@dataclass(frozen=True)
class ClipEncoder(TextEncoder):
    """A CLIP text encoder, which fits on every card whole."""

    projected: bool = False  # whether it has a projection, whose pooled output is used
    penultimate: bool = False
    """Whether the penultimate hidden state is used, rather than the last one after the final norm."""

    kind: ClassVar[str] = "CLIP"
    may_train: ClassVar[bool] = True
    one_piece: ClassVar[bool] = True

    @property
    def states(self) -> str:
        return HIDDEN_ALONE if self.penultimate and not self.projected else ""

    @property
    def limit(self) -> int:
        return self.length or LIMIT

    def width(self, config: ModelConfig) -> int:
        return int(config.get("hidden_size", WIDTH))

    def pooled_width(self, config: ModelConfig) -> int:
        return int(config.get("projection_dim", WIDTH)) if self.projected else 0

    def positions(self, config: ModelConfig) -> int | None:
        found = config.get("max_position_embeddings")
        return found if isinstance(found, int) else None

    def tokenizer_class(self) -> type[PreTrainedTokenizerBase]:
        from transformers import CLIPTokenizer

        return CLIPTokenizer

    def load(self, part: Part, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Load it on the CPU. Its pooled output is taken at the first token that its tokenizer calls the end of a text:
        the published configurations name another (eos_token_id 2), for which transformers takes the largest id, and a
        token that was added to the vocabulary has a larger one."""
        model = load_text_model(part, dtype, self.projected).eval()
        for module in model.modules():
            if hasattr(module, "eos_token_id"):
                module.eos_token_id = tokenizer.eos_token_id
        return model

    def empty(self, config: ModelConfig) -> nn.Module:
        from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

        kind = CLIPTextModelWithProjection if self.projected else CLIPTextModel
        return kind(CLIPTextConfig.from_dict(config))

    def outputs(self, model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
        output = model(ids, output_hidden_states=self.penultimate)
        hidden = output.hidden_states[-2] if self.penultimate else output.last_hidden_state
        return {"hidden": hidden, "pooled": output.text_embeds} if self.projected else {"hidden": hidden}

    def open(
        self,
        part: Part,
        dtype: torch.dtype,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
        changes: EncoderChanges | None = None,
    ) -> OpenEncoder:
        import torch
        from torch import nn

        model, changes = self.load(part, dtype, tokenizer), changes or UNCHANGED
        layers = dict(model.named_modules())
        for name, change in changes.layers.items():
            layer = layers.get(name) or layers.get(name.removeprefix("text_model."))
            if not isinstance(layer, nn.Linear):
                raise UserError(f"{change.source}: {self.name} has no layer {name}. The LoRA belongs to another model")
            with torch.no_grad():
                layer.weight.copy_(change.apply(layer.weight))
        return OpenClip(self, model.to(device), device, changes)

    def open_empty(self, part: Part, dtype: torch.dtype, device: torch.device) -> OpenEncoder:
        import torch

        with nullcontext() if device.type == "cpu" else torch.device("meta"):
            model = self.empty(part.config()).eval().to(dtype)
        return OpenClip(self, model if device.type == "cpu" else model.to_empty(device=device), device)


class OpenClip:
    """A CLIP encoder on its device; see ``OpenEncoder``."""

    layered = False

    def __init__(self, encoder: ClipEncoder, model: Any, device: torch.device, changes: EncoderChanges = UNCHANGED):
        self.encoder, self.model, self.device, self.changes = encoder, model, device, changes

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def resident(self) -> Iterable[Tensor]:
        from simpletune.engine.tensors import all_tensors

        return all_tensors(self.model)

    def encode(self, tokens: Tokens, batch_size: int = BATCH) -> Iterator[dict[str, Tensor]]:
        import torch

        rows = self.changes.rows
        for number, batch in enumerate(tokens.ids.split(1 if rows else batch_size)):
            hook = None
            if rows and rows[number]:
                hook = self.model.get_input_embeddings().register_forward_hook(partial(_with_rows, rows[number]))
            try:
                with torch.no_grad():
                    found = self.encoder.outputs(self.model, batch.to(self.device))
            finally:
                if hook is not None:
                    hook.remove()
            for row in zip(*found.values(), strict=True):
                yield dict(zip(found, row, strict=True))


def _with_rows(rows: Mapping[int, Tensor], table: nn.Module, inputs: object, output: Tensor) -> Tensor:  # [1, L, w]
    """Replace rows of a token table's output for one prompt; a forward hook."""
    changed = output.clone()
    for row, vector in rows.items():
        changed[0, row] = vector.to(changed.device, changed.dtype)
    return changed


def load_text_model(part: Part, dtype: torch.dtype, projected: bool = True) -> Any:
    """Load a CLIP text encoder, with its projection or without, on the CPU. Raises UserError if the weights do not
    match the configuration."""
    from accelerate import init_empty_weights
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kind = CLIPTextModelWithProjection if projected else CLIPTextModel
    with explain_load_errors(part), init_empty_weights():
        config = CLIPTextConfig.from_dict(part.config())
        expected = tensor_shapes(kind(config).state_dict())
    if part.file is None:
        with explain_load_errors(part):
            require_weights(part, expected, "" if projected else "text_model.")
            model = kind.from_pretrained(part.folder, dtype=dtype, **only_local(part))
    else:
        tensors = _clip_tensors(part)
        require_tensor_shapes(part, expected, tensor_shapes(tensors))
        model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
        del tensors
    # Out of the memory-mapped file, one at a time, into aligned memory that torch allocates: a matrix-vector product
    # selects its kernel by the weight's alignment, so otherwise the last bits of an embedding would depend on the
    # weight's offset in the file.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _clip_tensors(part: Part) -> dict[str, Tensor]:
    """Read a CLIP encoder's tensors under transformers' names, in the types they have on disk."""
    import torch

    file = part.single_file()
    read = file.read(part.name)
    if file.layout.text is not None:
        return file.layout.text(read, part.config())
    unused = ("position_ids", "logit_scale")
    tensors = {key: tensor for key, tensor in read.items() if not key.endswith(unused)}
    # The original CLIP-L has no projection; diffusers and ComfyUI use the identity, too.
    if part.name == "text_encoder" and "text_projection.weight" not in tensors:
        width = tensors["text_model.embeddings.token_embedding.weight"].shape[1]
        tensors["text_projection.weight"] = torch.eye(width)
    return tensors
