"""Watch a model's modules and gradients, so that an accounting can name them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class Watching:
    """What an accounting knows of the running module."""

    _module: str
    _inside: int  # number of watched modules in their forward pass

    def _phase(self) -> str:
        raise NotImplementedError

    def register(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Assign a kind to tensors."""
        raise NotImplementedError

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> list[RemovableHandle]:
        """Count the parameters' ``.grad`` as gradients; the handles remove the hooks."""

        def mark(parameter: Tensor) -> None:
            self.register([parameter.grad], "gradients")

        return [parameter.register_post_accumulate_grad_hook(mark) for parameter in parameters]

    def watch_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> list[RemovableHandle]:
        """Track the running module: in forward passes and recomputation by its entry, in the backward pass by its
        outputs' gradients. The handles remove the hooks."""
        return [handle for name, module in modules for handle in self._watch(name, module)]

    def _watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        def begin_forward(*_: object) -> None:
            self._module = name
            self._inside += 1

        def begin_backward(_: Tensor) -> None:
            self._module = name

        def end_forward(_module: nn.Module, _inputs: object, output: object) -> None:
            self._inside -= 1
            self._module = name if self._phase() == "backward" else ""  # its backward pass follows a recomputation
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(begin_backward)

        # A checkpoint ends the recomputation with an exception as soon as it has everything it needs.
        end = module.register_forward_hook(end_forward, always_call=True)
        return [module.register_forward_pre_hook(begin_forward), end]
