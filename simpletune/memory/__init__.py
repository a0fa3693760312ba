"""The memory levers, each a small module that is exact or says what it changes; and the counting of bytes by kind.

May import options, tensors and system. Models, profiling and the rooms above may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from simpletune.memory.profiles import Name
from simpletune.options import Option, Problem, plural

if TYPE_CHECKING:
    import torch
    from torch import nn

    from simpletune.memory.block_offload import BlockOffload

BLOCKS = "transformer_blocks"


class Memory(Option):
    """What is given for less memory on the device: mostly time."""

    profile: Name | None = None
    """A set of options for a card of this size, for LoRA or full fine-tuning; values of one's own go before it. What it
    stands for is written out in the run's config.json, and in docs/memory.md."""
    checkpointing: Literal["all", "none", "auto"] | Annotated[int, Field(ge=1)] = "all"
    """Gradient checkpointing. all: every block computes its activations twice instead of keeping them, about a third
    slower and several times less memory; none: they are kept; a number: so many blocks, the first ones, do; auto: as
    few as fit into budget_gib, or without it into the card at hand, by prediction. Exact."""
    budget_gib: Annotated[float, Field(gt=0)] | None = None
    """What checkpointing auto may take on the device, in GiB, without the CUDA context. null: what is free on the card
    at the start, less allowances for the context and for fragmentation."""
    offload_checkpoint_inputs: bool = False
    """Keep the inputs of checkpointed blocks in pinned host memory, fetched one block ahead in the backward pass: at
    1024 px that frees 311 MiB of a batch of one. Exact."""
    resident_blocks: Annotated[int, Field(ge=0)] | None = None
    """How many blocks keep their weights on the device; the others' live in pinned host memory and are brought in, one
    ahead, for every forward and backward pass: the device holds two blocks at a time instead of all. null: all blocks
    stay. Needs checkpointing all. Exact."""
    crop_positions: bool = True
    """Keep only the part of the position table that the run's pictures need: 12 MiB instead of 108 for SD3 Medium in
    bf16 at 1024 px. Exact; a full model is exported with the whole table."""
    modulation: Literal["auto", "resident", "plan"] = "auto"
    """The adaLN modulation weights, a third of SD3 Medium. resident: on the device; plan: in host memory, and the
    modulations of the coming steps are computed ahead, for adapters that leave these weights alone. Exact but for the
    last bits: products of several steps' rows at once. auto: plan where such an adapter trains on a GPU, else resident;
    generate, compare and serve take it as resident."""
    modulation_window: Annotated[int, Field(ge=1, le=1024)] = 16
    """Steps whose modulations are computed at once: for SD3 Medium each takes 0.9 MB a sample in bf16, and each window
    moves the modulation weights to the device once."""
    cache_quantised: bool = True
    """Keep the quantised base under output.cache: the next start reads it, and neither reads nor quantises the
    full-precision weights. It takes the disk what the quantised weights take the device. Exact."""
    optimizer_in_backward: bool = False
    """Each parameter is updated, and its gradient freed, during the backward pass, so that gradients never stand
    together: saves a full fine-tuning 2 bytes a parameter in bf16, 4 in fp32. Exact; needs gradient_accumulation 1, one
    process, and train.clip per_parameter (or clip_norm null)."""
    vae_tile: Annotated[int, Field(ge=128, multiple_of=64)] | None = None
    """The autoencoder encodes and decodes larger pictures in overlapping tiles of this many pixels, blended, with the
    memory of one tile; null: whole pictures. Not exact: a tile's norms and attention do not see its neighbours.
    AutoencoderTiny takes pictures whole all the same: it needs little."""

    def streamed(self, blocks: int) -> list[int]:
        """Which of so many blocks are streamed. The resident ones are spread among them: while those compute, there is
        time to copy."""
        if self.resident_blocks is None:
            return []
        stay = {(2 * number + 1) * blocks // (2 * self.resident_blocks) for number in range(self.resident_blocks)}
        return [index for index in range(blocks) if index not in stay]

    def on_host(self, blocks: int) -> Callable[[str], bool]:
        """Whether a module of that name stays in host memory when the transformer is loaded."""
        prefixes = tuple(f"{BLOCKS}.{index}." for index in self.streamed(blocks))
        return lambda name: f"{name}.".startswith(prefixes)

    def attach(self, blocks: Sequence[nn.Module], device: torch.device, trained: bool = False) -> BlockOffload | None:
        """Give the blocks their passes: checkpointed, streamed, as asked. The adapter is on them already.

        Args:
            blocks: of the loaded transformer, in order; changed in place.
            device: where it runs.
            trained: whether trained weights are streamed too (see ``BlockOffload``).

        Returns:
            What streams; None if all blocks are resident.
        """
        from simpletune.memory.block_offload import BlockOffload
        from simpletune.memory.checkpointing import set_passes
        from simpletune.memory.offload_inputs import CheckpointInputOffload

        streamed = self.streamed(len(blocks))
        streaming = BlockOffload(blocks, streamed, device, trained) if streamed else None
        inputs = CheckpointInputOffload(device) if self.offload_checkpoint_inputs else None
        set_passes(blocks, self.checkpointed(len(blocks)), inputs, streaming)
        return streaming

    def checkpointed(self, blocks: int) -> int:
        """How many of so many blocks are checkpointed."""
        if isinstance(self.checkpointing, int):
            return self.checkpointing
        assert self.checkpointing != "auto", "estimate.auto_checkpointing comes first"
        return blocks if self.checkpointing == "all" else 0

    def rules(self) -> Iterator[Problem]:
        """Levers that do not go together."""
        if self.budget_gib is not None and self.checkpointing != "auto":
            yield Problem(
                "memory.budget_gib",
                f"{self.budget_gib} with memory.checkpointing {self.checkpointing}: the budget is what checkpointing "
                "auto chooses by. Use memory.checkpointing=auto with it, or memory.budget_gib=null",
            )
        if self.resident_blocks is not None and self.checkpointing != "all":
            yield Problem(
                "memory.checkpointing",
                f"{self.checkpointing} leaves blocks that keep activations, and with memory.resident_blocks their "
                "weights are gone when the backward pass needs them. Use checkpointing all, or resident_blocks null",
            )
        if self.offload_checkpoint_inputs and self.checkpointing == "none":
            yield Problem(
                "memory.offload_checkpoint_inputs",
                "true moves what checkpointing keeps, and memory.checkpointing is none. Use checkpointing all or a "
                "number, or offload_checkpoint_inputs false",
            )

    def shape_rules(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
        """Numbers of blocks that the model does not have."""
        blocks = count_blocks(shapes)
        if isinstance(self.checkpointing, int) and self.checkpointing > blocks:
            yield Problem(
                "memory.checkpointing",
                f"{self.checkpointing} is more than the model's {plural(blocks, 'block')}. Use all",
            )
        if self.resident_blocks is not None and self.resident_blocks >= blocks:
            yield Problem(
                "memory.resident_blocks",
                f"{self.resident_blocks} leaves none of the model's {plural(blocks, 'block')} to stream. "
                "Use fewer, or null",
            )


def count_blocks(names: Iterable[str]) -> int:
    """How many blocks a transformer has, by its parameters' names."""
    return len({name.split(".")[1] for name in names if name.startswith(f"{BLOCKS}.")})
