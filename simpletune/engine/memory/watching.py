"""Watch phases, a model's modules and gradients, so that an accounting can name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from simpletune.system.phases import phase_name


class PhaseTracker:
    """Tracks the running phase and module for an accounting."""

    def __init__(self) -> None:
        self._phases: list[tuple[str, int]] = []
        self._visit = 0
        self._module = ""
        self._inside = 0  # number of watched modules in their forward pass, and of recomputations

    @property
    def place(self) -> tuple[str, str]:
        """The current phase and module; the phase of a recomputation is ``recompute``."""
        return self._snapshot_name(), self._module

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Count what a backward pass runs in this context as recomputation."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _enter_phase(self, range_name: str) -> None:
        """Enter a phase. Foreign ranges, such as torch's ``Optimizer.step``, belong to the enclosing phase."""
        name = phase_name(range_name)
        if name is None:
            self._phases.append((self._phase(), 0))
            return
        self._visit += 1
        self._module = ""
        self._phases.append((name, self._visit))

    def _snapshot_name(self) -> str:
        phase = self._phase()
        return "recompute" if phase == "backward" and self._inside else phase

    def _phase(self) -> str:
        return self._phases[-1][0] if self._phases else ""

    def register(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Assign a kind to tensors."""
        raise NotImplementedError

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> list[RemovableHandle]:
        """Count the parameters' ``.grad`` as gradients; the handles remove the hooks."""

        def mark(parameter: Tensor) -> None:
            self.register([parameter.grad], "gradients")

        return [parameter.register_post_accumulate_grad_hook(mark) for parameter in parameters]

    def watch_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> list[RemovableHandle]:
        """Track the running module: in forward passes and recomputation when it is entered, in the backward pass when
        its outputs' gradients arrive. The handles remove the hooks."""
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
