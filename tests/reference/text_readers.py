"""How other tools read LoRA keys of text encoders and files of embeddings, written out by hand.

Part of the independent reference: it imports neither the package under test nor diffusers. Rules after ComfyUI's
`comfy/lora.py` (`model_lora_keys_clip`) and `comfy/sd1_clip.py` (`load_embed`): every weight of a text encoder has
several names; a file of embeddings gives each encoder the tensor under its key, or else the first tensor of the file.
"""

import torch
from torch import Tensor, nn

CLIP_LEAVES = {
    "mlp.fc1": "mlp_fc1",
    "mlp.fc2": "mlp_fc2",
    "self_attn.k_proj": "self_attn_k_proj",
    "self_attn.q_proj": "self_attn_q_proj",
    "self_attn.v_proj": "self_attn_v_proj",
    "self_attn.out_proj": "self_attn_out_proj",
}
PAIRS = ((".lora_up.weight", ".lora_down.weight"), (".lora_B.weight", ".lora_A.weight"))


def names(state: dict[str, Tensor]) -> dict[str, str]:
    """Names in LoRA files, each with the weight that it is for.

    Args:
        state: weights under ComfyUI's names: `clip_l.transformer.text_model...`, `clip_g...`, `t5xxl.transformer...`.
    """
    known = {
        f"text_encoders.{weight.removesuffix('.weight')}": weight for weight in state if weight.endswith(".weight")
    }
    has_l = any(weight.startswith("clip_l.") for weight in state)
    for block in range(32):
        for leaf, flat in CLIP_LEAVES.items():
            weight = f"clip_l.transformer.text_model.encoder.layers.{block}.{leaf}.weight"
            if weight in state:
                known[f"lora_te_text_model_encoder_layers_{block}_{flat}"] = weight
                known[f"lora_te1_text_model_encoder_layers_{block}_{flat}"] = weight
                known[f"text_encoder.text_model.encoder.layers.{block}.{leaf}"] = weight
            weight = f"clip_g.transformer.text_model.encoder.layers.{block}.{leaf}.weight"
            if weight in state and has_l:
                known[f"lora_te2_text_model_encoder_layers_{block}_{flat}"] = weight
                known[f"text_encoder_2.text_model.encoder.layers.{block}.{leaf}"] = weight
    for weight in state:
        if weight.startswith("t5xxl.transformer.") and weight.endswith(".weight"):
            module = weight.removeprefix("t5xxl.transformer.").removesuffix(".weight")
            known[f"lora_te3_{module.replace('.', '_')}"] = weight
    return known


def apply(
    state: dict[str, Tensor], file: dict[str, Tensor], strength: float = 1.0
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights with the file applied, and the keys of the file that nothing asked for."""
    patched, used = {name: tensor.clone() for name, tensor in state.items()}, set()
    for name, weight in names(state).items():
        for up_ending, down_ending in PAIRS:
            if name + up_ending in file:
                up, down = file[name + up_ending].double(), file[name + down_ending].double()
                alpha = file.get(name + ".alpha")
                scale = 1.0 if alpha is None else alpha.item() / down.shape[0]
                patched[weight] += (strength * scale * (up @ down)).to(patched[weight].dtype)
                used |= {name + up_ending, name + down_ending, name + ".alpha"}
    return patched, sorted(set(file) - used)


def embedding(file: dict[str, Tensor], key: str, width: int) -> Tensor | None:
    """What ComfyUI puts in place of `embedding:NAME` for the encoder with this key; None if it ignores the file."""
    found = file[key] if key in file else None
    if found is None:
        for name in file:
            if name.startswith("bundle_emb.") and name.endswith((".string_to_param.*", f".{key}")):
                found = file[name]
    if found is None:
        found = next(iter(file.values()))
    found = found if found.ndim == 2 else found[None]
    return found if found.shape[1] == width else None


def with_rows(encoder: nn.Module, rows: Tensor) -> list[int]:
    """Add rows to the end of an encoder's table of token embeddings, and give their ids: a tokenizer with new tokens.

    Args:
        encoder: of transformers, changed in place.
        rows: [v, d].
    """
    table = encoder.get_input_embeddings()
    count = table.num_embeddings
    larger = nn.Embedding(count + len(rows), table.embedding_dim)
    larger.weight.data = torch.cat([table.weight.data, rows.to(table.weight)])
    encoder.set_input_embeddings(larger)
    return list(range(count, count + len(rows)))
