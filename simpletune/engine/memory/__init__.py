"""What may leave the card, or be computed again, to save memory? The memory levers, and accounting of bytes by kind.

Each lever is a small module that is exact or documents what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from simpletune.engine.memory.profiles import Name
from simpletune.system.options import Option, Problem, UserError, plural

if TYPE_CHECKING:
    import torch
    from torch import nn

    from simpletune.engine.memory.block_offload import BlockOffload


class Memory(Option):
    """Options that save device memory, mostly at the cost of time."""

    profile: Name | None = None
    """A preset of options for a card of this size, for LoRA or full fine-tuning. Explicit values override the preset;
    the run's config.json and docs/reference/memory-levers.md list its values."""
    checkpointing: Literal["all", "none", "feed_forward", "auto"] | Annotated[int, Field(ge=1)] = "all"
    """Gradient checkpointing. all: every block recomputes its activations instead of storing them, which is about a
    third slower and takes several times less memory; none: every block stores them; feed_forward: only those inside of
    feed-forward networks are recomputed; a number: only this many blocks, from the first, recompute theirs; auto: the
    smallest number predicted to fit into budget_gib, or into the free memory of the card. Exact."""
    keep_attention: Literal["all", "none", "auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Checkpointed blocks that keep the output of attention, so that its products are not computed a second time. all:
    every one; a number: only this many, the last ones; auto: the most that fit if checkpointing is auto, otherwise
    none. Takes as much memory as the blocks' inputs. Exact."""
    feed_forward: Literal["auto", "block", "alone"] | Annotated[int, Field(ge=64)] = "auto"
    """How checkpointed blocks recompute their feed-forward networks. block: with the block; alone: each by itself,
    later. Where the modulation carries no gradient, as with LoRA on attention, its second product is then not
    recomputed at all, and its inner activations are never in memory together with the block's. A number: alone, in
    tiles of this many tokens, which takes less memory. auto: alone if checkpointing is auto and this saves time,
    otherwise block. block and alone are exact; tiles add in another order inside of some kernels and in gradients of
    the network's weights."""
    budget_gib: Annotated[float, Field(gt=0)] | None = None
    """Device memory in GiB for checkpointing auto and train.batch_size auto, excluding the CUDA context. null: the
    memory that is free at the start, less allowances for the context and for fragmentation."""
    offload_checkpoint_inputs: bool = False
    """Store the inputs of checkpointed blocks, and the outputs that keep_attention keeps, in pinned host memory, and
    fetch them one block ahead in the backward pass. Exact."""
    resident_blocks: Annotated[int, Field(ge=0)] | None = None
    """Block offload: how many blocks keep their weights on the device. The weights of the others stay in pinned host
    memory and are copied to the device, one block ahead, for every forward and backward pass; two such blocks are on
    the device at a time. null: all blocks stay on the device. Needs checkpointing all. Exact."""
    crop_positions: bool = True
    """Crop the position table to the part that the run's pictures need. Exact; a full model is exported with the whole
    table."""
    modulation: Literal["auto", "resident", "plan"] = "auto"
    """Where the adaLN modulation weights, a third of SD3 Medium, are kept. resident: on the device; plan: in host
    memory, and modulations are computed several steps ahead, for adapters that do not train these weights. Exact except
    for the last bits, because one product computes the rows of several steps. auto: plan for such an adapter on a GPU,
    otherwise resident; generate, compare and serve treat auto as resident."""
    modulation_window: Annotated[int, Field(ge=1, le=1024)] = 16
    """How many steps' modulations to compute at once and keep on the device; each window copies the modulation weights
    to the device once."""
    cache_quantised: bool = True
    """Cache the quantised base under output.cache, so that the next start neither reads nor quantises the
    full-precision weights. It takes as much disk space as the quantised weights take device memory. Exact."""
    host_weights: Literal["pinned", "mapped"] = "pinned"
    """Where the weights that modulation plan and resident_blocks leave in host memory are. pinned: in memory of their
    own, from which copies to the device overlap with the computation; mapped: in the file of the quantised base
    (cache_quantised), whose pages the system keeps while it has memory for them and otherwise reads again, so that a
    large model trains on a machine with little memory, more slowly. Exact."""
    optimizer_in_backward: bool = False
    """Update each parameter and free its gradient during the backward pass, so that the gradients never exist all at
    once. Saves full fine-tuning 2 bytes per parameter in bf16, 4 in fp32. Exact. Needs gradient_accumulation 1, one
    process, and train.clip per_parameter (or clip_norm null)."""
    vae_tile: Annotated[int, Field(ge=128, multiple_of=64)] | None = None
    """Encode and decode larger pictures in overlapping, blended tiles with sides of this many pixels, using the memory
    of one tile; null: whole pictures. Not exact: a tile's norms and attention do not see its neighbours.
    AutoencoderTiny needs little memory and always processes whole pictures."""

    def offloaded_blocks(self, blocks: int) -> list[int]:
        """Return the indices of the offloaded blocks. Resident blocks are spread evenly between them: their computation
        overlaps with copies."""
        if self.resident_blocks is None:
            return []
        stay = {(2 * number + 1) * blocks // (2 * self.resident_blocks) for number in range(self.resident_blocks)}
        return [index for index in range(blocks) if index not in stay]

    def host_filter(self, units: Sequence[str]) -> Callable[[str], bool]:
        """Return whether the module of a given name stays in host memory when the model loads; ``units`` are the names
        of the model's units, in order."""
        prefixes = tuple(f"{units[index]}." for index in self.offloaded_blocks(len(units)))
        return lambda name: f"{name}.".startswith(prefixes)

    def attach(
        self, blocks: Sequence[nn.Module], device: torch.device, trained: bool = False, last: bool = False
    ) -> BlockOffload | None:
        """Wrap the blocks' forward passes for checkpointing and offloading. Attach the adapter first.

        Args:
            blocks: the blocks of the loaded model, in order; changed in place.
            device: where it runs.
            trained: whether to offload trained weights too (see ``BlockOffload``).
            last: whether blocks end with their feed-forward networks (see ``FeedForwards``).

        Returns:
            The block offload; None if all blocks are resident.

        Raises:
            UserError: a lever for feed-forward networks finds none.
        """
        from simpletune.engine.memory.block_offload import BlockOffload
        from simpletune.engine.memory.checkpointing import Parts, set_passes
        from simpletune.engine.memory.feed_forward import FEED_FORWARDS, feed_forwards
        from simpletune.engine.memory.offload_inputs import CheckpointInputOffload

        offloaded = self.offloaded_blocks(len(blocks))
        mapped = self.host_weights == "mapped"
        offloading = BlockOffload(blocks, offloaded, device, trained, mapped=mapped) if offloaded else None
        inputs = CheckpointInputOffload(device) if self.offload_checkpoint_inputs else None
        alone: Literal["checkpointed", "all", "none"] = "none"
        if self.checkpointing == "feed_forward":
            alone = "all"
        elif self.feed_forward not in ("auto", "block"):
            alone = "checkpointed"
        if alone != "none" and not any(map(feed_forwards, blocks)):
            field = "memory.checkpointing" if alone == "all" else "memory.feed_forward"
            known = ", ".join(name.removeprefix("diffusers.models.") for name in FEED_FORWARDS)
            raise UserError(
                f"{field}: {self.checkpointing if alone == 'all' else self.feed_forward} recomputes feed-forward "
                f"networks by themselves, but the model's blocks have none of diffusers' classes {known}. Use "
                + ("checkpointing all" if alone == "all" else "feed_forward block")
            )
        tile = self.feed_forward if isinstance(self.feed_forward, int) else None
        parts = Parts(self.keeping_count(len(blocks)), alone, tile, last)
        set_passes(blocks, self.checkpointed_count(len(blocks)), inputs, offloading, parts)
        return offloading

    def checkpointed_count(self, blocks: int) -> int:
        """Return the number of checkpointed blocks."""
        if isinstance(self.checkpointing, int):
            return self.checkpointing
        assert self.checkpointing != "auto", "resolve it with estimate.auto_settings first"
        return blocks if self.checkpointing == "all" else 0

    def keeping_count(self, blocks: int) -> int:
        """Return the number of checkpointed blocks that keep the output of attention."""
        if isinstance(self.keep_attention, int):
            return self.keep_attention
        return self.checkpointed_count(blocks) if self.keep_attention == "all" else 0

    def rules(self) -> Iterator[Problem]:
        """Report incompatible levers."""
        if self.resident_blocks is not None and self.checkpointing != "all":
            yield Problem(
                "memory.checkpointing",
                f"{self.checkpointing} with memory.resident_blocks: blocks without checkpointing need their weights in "
                "the backward pass, when these have left the device. Use checkpointing all, or resident_blocks null",
            )
        if self.host_weights == "mapped" and not self.cache_quantised:
            yield Problem(
                "memory.host_weights",
                "mapped needs the quantised base in a file, and memory.cache_quantised is false. Use true, or "
                "host_weights pinned",
            )
        if self.host_weights == "mapped" and self.resident_blocks is None and self.modulation == "resident":
            yield Problem(
                "memory.host_weights",
                "mapped changes nothing: no weights stay in host memory without memory.resident_blocks or modulation "
                "plan. Leave it out",
            )
        if self.offload_checkpoint_inputs and self.checkpointing in ("none", "feed_forward"):
            yield Problem(
                "memory.offload_checkpoint_inputs",
                f"true needs checkpointed blocks, and memory.checkpointing is {self.checkpointing}. Use checkpointing "
                "all or a number, or offload_checkpoint_inputs false",
            )
        keep, checkpointing = self.keep_attention, self.checkpointing
        if keep not in ("auto", "none") and checkpointing in ("none", "feed_forward"):
            yield Problem(
                "memory.keep_attention",
                f"{keep} needs checkpointed blocks, and memory.checkpointing is {checkpointing}: every block keeps the "
                "output of attention. Use keep_attention auto, or checkpointing all or a number",
            )
        elif isinstance(keep, int) and checkpointing == "auto":
            yield Problem(
                "memory.keep_attention",
                f"{keep} with memory.checkpointing auto, which may checkpoint fewer blocks. Use auto, all or none",
            )
        elif isinstance(keep, int) and isinstance(checkpointing, int) and keep > checkpointing:
            yield Problem(
                "memory.keep_attention",
                f"{keep} is more than the {plural(checkpointing, 'block')} that memory.checkpointing names. Use all",
            )
        if self.feed_forward not in ("auto", "block") and checkpointing == "none":
            yield Problem(
                "memory.feed_forward",
                f"{self.feed_forward}, but memory.checkpointing none recomputes nothing. Use feed_forward auto, or "
                "checkpointing feed_forward",
            )
        if self.feed_forward == "block" and checkpointing == "feed_forward":
            yield Problem(
                "memory.feed_forward",
                "block, but memory.checkpointing feed_forward recomputes the networks alone. Use auto or alone",
            )

    def model_rules(self, blocks: int, has_modulation: bool) -> Iterator[Problem]:
        """Report levers that the model does not have, and numbers of blocks beyond its own."""
        if self.modulation == "plan" and not has_modulation:
            yield Problem("memory.modulation", "plan, but the model has no adaLN modulations. Use auto or resident")
        if isinstance(self.checkpointing, int) and self.checkpointing > blocks:
            yield Problem(
                "memory.checkpointing",
                f"{self.checkpointing} is more than the model's {plural(blocks, 'block')}. Use all",
            )
        if isinstance(self.keep_attention, int) and self.keep_attention > blocks:
            yield Problem(
                "memory.keep_attention",
                f"{self.keep_attention} is more than the model's {plural(blocks, 'block')}. Use all",
            )
        if self.resident_blocks is not None and self.resident_blocks >= blocks:
            yield Problem(
                "memory.resident_blocks",
                f"{self.resident_blocks} leaves none of the model's {plural(blocks, 'block')} to offload. "
                "Use fewer, or null",
            )
