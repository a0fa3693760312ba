"""Hypernetworks as AUTOMATIC1111's web UI and ComfyUI compute and read them, written out by hand.

Part of the independent reference: it imports neither the package under test nor PEFT.

- The web UI (``modules/hypernetworks/hypernetwork.py``, 2023): h(x) = x + strength MLP(x) for every attention whose
  context has the width of the network, in self-attention the picture; before ``to_k`` and before ``to_v``. The MLP is a
  Sequential, rebuilt from ``layer_structure``; its numbers count activations, layer norms and dropout.
- Its check of files (``modules/safe.py``): a zip archive may hold nothing but ``data.pkl``, ``version`` and numbered
  data; another file is five pickled objects, which may name a few classes only.
- ComfyUI (``comfy_extras/nodes_hypernetwork.py``, 2025): takes the linear layers in the order of the keys; drops while
  it draws if the file says ``use_dropout``.
"""

from __future__ import annotations

import collections
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp_min(0),
    "leakyrelu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "elu": lambda x: torch.where(x > 0, x, x.exp() - 1),
    "swish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    "tanh": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
}


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A layer norm over the last side."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def network(x: Tensor, state: Mapping[str, Tensor], strength: float, about: Mapping[str, Any]) -> Tensor:
    """h(x) of one network by its numbered tensors, placed as the web UI's constructor does."""
    structure, y, number = about["layer_structure"], x, 0
    for step in range(len(structure) - 1):
        last = step == len(structure) - 2
        y = y @ state[f"linear.{number}.weight"].T + state[f"linear.{number}.bias"]
        number += 1
        if about["activation_func"] != "linear" and (not last or about["activate_output"]):
            y = ACTIVATIONS[about["activation_func"]](y)
            number += 1
        if about["is_layer_norm"]:
            y = normed(y, state[f"linear.{number}.weight"], state[f"linear.{number}.bias"])
            number += 1
        dropped = step < len(structure) - 3 or (about["last_layer_dropout"] and step < len(structure) - 2)
        number += bool(about["use_dropout"] and dropped)
    assert f"linear.{number}.weight" not in state
    return x + strength * y


def comfyui(x: Tensor, state: Mapping[str, Tensor], strength: float, about: Mapping[str, Any]) -> Tensor:
    """h(x) of one network as ComfyUI builds it; only without layer norm and dropout."""
    assert not about["is_layer_norm"] and not about["use_dropout"]
    y, names = x, [key.removesuffix(".weight") for key in state if key.endswith(".weight")]
    for place, name in enumerate(names):
        y = y @ state[f"{name}.weight"].T + state[f"{name}.bias"]
        if about["activation_func"] != "linear" and (place < len(names) - 1 or about["activate_output"]):
            y = ACTIVATIONS[about["activation_func"]](y)
    return x + strength * y


class Attention(nn.Module):
    """Replaces diffusers' processor: softmax(q k^T / sqrt(d)) v, with keys and values from h(context).

    Args:
        networks: what k and v are computed from, by width.
    """

    def __init__(self, networks: Mapping[int, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]):
        super().__init__()
        self.networks = networks

    def __call__(self, attention: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, **more: Any) -> Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        for_k, for_v = self.networks.get(context.shape[-1], (lambda x: x, lambda x: x))

        def heads(x: Tensor) -> Tensor:  # [b, n, h d] -> [b, h, n, d]
            return x.unflatten(-1, (attention.heads, -1)).transpose(1, 2)

        q = heads(attention.to_q(hidden_states))
        k, v = heads(attention.to_k(for_k(context))), heads(attention.to_v(for_v(context)))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return attention.to_out[0]((weights @ v).transpose(1, 2).flatten(2))


def require_safe(file: Path) -> None:
    """Check a file as the web UI does before it loads it; raises what it would refuse."""
    try:
        with zipfile.ZipFile(file) as archive:
            odd = [n for n in archive.namelist() if not re.match(r"^([^/]+)/((data/\d+)|version|(data\.pkl))$", n)]
            assert not odd, f"bad file inside: {odd[0]}"
    except zipfile.BadZipfile:
        with open(file, "rb") as handle:
            unpickler = Restricted(handle)
            for _ in range(5):
                unpickler.load()


class Restricted(pickle.Unpickler):
    """Loads nothing but the classes that the web UI allows."""

    def persistent_load(self, saved: Any) -> Any:
        assert saved[0] == "storage"
        return torch.storage.TypedStorage(_internal=True)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return lambda *parts: None
        if module == "torch" and name in ("FloatStorage", "HalfStorage", "BFloat16Storage"):
            return getattr(torch, name)
        raise AssertionError(f"global {module}/{name} is forbidden")
