"""The layers that put a hypernetwork's networks before the keys and values of attention.

Shapes: [..., d] an attention's input, o outputs of its projection.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from simpletune.adapters.methods.hypernetworks.network import Network, Pair
from simpletune.adapters.methods.layers import ADAPTER, UpdateLayer, innermost_layer, outer_layers, shape_of, wrap
from simpletune.engine.tensors import all_tensors
from simpletune.models.lora_names import context_layers
from simpletune.system.options import UserError


class HypernetworkLayer(UpdateLayer):
    """Projection to keys or values that reads h(x) instead of x.

    Args:
        base_layer: the frozen projection, with or without updates of its own.
        network: shared by all projections of its kind (keys or values) and width.
        adapter: name by which ``scaling`` holds the strength.
    """

    def __init__(self, base_layer: nn.Module, network: Network, adapter: str = ADAPTER):
        super().__init__(base_layer, adapter)
        self.network = network

    def forward(self, x: Tensor) -> Tensor:  # [..., d] -> [..., o]
        """Project h(x), or x itself if updates are disabled."""
        y: Tensor = self.base_layer(self.network(x, self.strength) if self.enabled else x)
        return y

    def merged(self, weight: Tensor) -> Tensor:
        """Refuse: a network is not an update of a weight.

        Raises:
            UserError: always.
        """
        raise UserError(
            "a hypernetwork is a function of the attention's inputs, so no weights can contain it. Draw with it "
            "instead: --lora FILE"
        )


def put_before(model: nn.Module, pairs: Mapping[int, Pair], adapter: str = ADAPTER) -> None:
    """Put networks before every projection to keys and values whose input has their width, in place.

    Args:
        model: a U-Net.
        pairs: the networks by width.
        adapter: name by which ``scaling`` holds the strength of these layers.

    Raises:
        UserError: the model has no attention of one of the widths.
    """
    missing = dict(pairs)
    sides = {name: shape_of(layer) for name, layer in _projections(model).items()}
    for name, shape in sides.items():
        if shape is None or shape[1] not in pairs:
            continue
        missing.pop(shape[1], None)
        network = pairs[shape[1]].k if name.endswith("k") else pairs[shape[1]].v
        layer = model.get_submodule(name)
        network.to(next(tensor.device for tensor in all_tensors(layer)))
        wrap(model, name, HypernetworkLayer(layer, network, adapter))
    if missing:
        known = sorted({shape[1] for shape in sides.values() if shape is not None})
        known_words = f"its attention reads widths {', '.join(map(str, known))}" if known else "it is no U-Net"
        raise UserError(
            f"a hypernetwork for attention inputs of width {', '.join(map(str, missing))} does not fit this model: "
            f"{known_words}. Use one that was trained on this model"
        )


def _projections(model: nn.Module) -> dict[str, nn.Module]:
    """Return the frozen projections to keys and values, by the name of the module or of its outermost wrapper."""
    modules = dict(model.named_modules())
    return {name: innermost_layer(modules[name]) for name in context_layers(modules)}


def networks_of(model: nn.Module) -> dict[int, Pair]:
    """Return a model's trained networks by width."""
    found: dict[int, dict[str, Network]] = {}
    for name, layer in outer_layers(model):
        if isinstance(layer, HypernetworkLayer):
            assert layer.shape is not None
            found.setdefault(layer.shape[1], {})[name[-1]] = layer.network
    return {width: Pair(**sides) for width, sides in sorted(found.items())}
