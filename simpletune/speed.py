"""The options for speed: none of them changes what is computed, but for the last bits."""

from __future__ import annotations

from simpletune.options import Option


class Speed(Option):
    """What makes a step faster and takes no memory on the device."""

    prefetch: bool = True
    """The next step's pictures, embeddings and noise are read and drawn by a thread while a step is computed. Exact. On
    the CPU, where that thread would take a core from the step, nothing is fetched ahead."""
