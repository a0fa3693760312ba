"""Track the phase and the module that run, so that an accounting can name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from simpletune.system.phases import phase_name


class PhaseTracker:
    """The running phase and module."""

    def __init__(self) -> None:
        self.module = ""
        """The watched module that runs; empty if none does."""
        self.visit = 0
        """How many phases have been entered so far."""
        self._phases: list[tuple[str, int]] = []
        self._inside = 0  # number of watched modules in their forward pass, and of recomputations

    @property
    def phase(self) -> str:
        """The running phase; empty outside of all."""
        return self._phases[-1][0] if self._phases else ""

    @property
    def name(self) -> str:
        """The running phase, or ``recompute`` for a recomputation in the backward pass."""
        phase = self.phase
        return "recompute" if phase == "backward" and self._inside else phase

    @property
    def place(self) -> tuple[str, str]:
        """The running phase, as ``name``, and module."""
        return self.name, self.module

    def enter(self, range_name: str) -> None:
        """Enter a phase. Foreign ranges, such as torch's ``Optimizer.step``, belong to the enclosing phase."""
        name = phase_name(range_name)
        if name is None:
            self._phases.append((self.phase, 0))
            return
        self.visit += 1
        self.module = ""
        self._phases.append((name, self.visit))

    def leave(self) -> tuple[str, int]:
        """Leave a phase; returns it and the number of its visit, 0 for a foreign range."""
        left, visit = self._phases.pop()
        if visit:
            self.module = ""
        return left, visit

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Count what a backward pass runs in this context as recomputation."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def watch_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> list[RemovableHandle]:
        """Track the running module: in forward passes and recomputation when it is entered, in the backward pass when
        its outputs' gradients arrive. The handles remove the hooks."""
        return [handle for name, module in modules for handle in self._watch(name, module)]

    def _watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        def begin_forward(*_: object) -> None:
            self.module = name
            self._inside += 1

        def begin_backward(_: Tensor) -> None:
            self.module = name

        def end_forward(_module: nn.Module, _inputs: object, output: object) -> None:
            self._inside -= 1
            self.module = name if self.phase == "backward" else ""  # its backward pass follows a recomputation
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(begin_backward)

        # A checkpoint ends the recomputation with an exception as soon as it has everything it needs.
        end = module.register_forward_hook(end_forward, always_call=True)
        return [module.register_forward_pre_hook(begin_forward), end]
