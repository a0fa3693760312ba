"""Random numbers drawn on the device, from the CPU's generator with the same seed.

A CUDA generator is a seed and an offset, which every draw advances. The CPU's state for each (seed, offset) is kept, so
a saved and restored state gives the same numbers again.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from softgpu import queues

STATES = 4096
"""How many states to keep, 5 KB each."""

_states: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()


class Draw:
    """One draw of a CUDA generator. Enter it around the operator of the device, and draw with ``generator`` in it.

    Args:
        of: the CUDA generator; None for the device's own.
        device: the device's index.
    """

    def __init__(self, of: torch.Generator | None, device: int):
        if queues.captures(queues.current_stream(device)):
            raise NotImplementedError("softgpu: random numbers in a graph have no values here")
        self._of = torch.cuda.default_generators[device] if of is None else of
        self.generator = torch.Generator()
        self._seed, begin = self._of.initial_seed(), self._of.get_offset()
        known = _states.get((self._seed, begin))
        if known is not None:
            self.generator.set_state(known)
        elif begin == 0:
            self.generator.manual_seed(self._seed)
        else:
            raise NotImplementedError(
                f"softgpu: a CUDA generator stands at offset {begin} of seed {self._seed}, and no draw has led there"
            )

    def __enter__(self) -> torch.Generator:
        return self.generator

    def __exit__(self, *_: object) -> None:
        """Remember the state after the draw; the device's operator has advanced the offset."""
        key = self._seed, self._of.get_offset()
        _states[key] = self.generator.get_state()
        _states.move_to_end(key)
        if len(_states) > STATES:
            _states.popitem(last=False)
