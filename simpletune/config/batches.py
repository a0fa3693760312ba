"""Divide a step's pictures into micro-batches, and these among processes: rules, and how ``auto`` is resolved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from simpletune.system.options import ConfigError, Json, Problem, plural

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig

AnyConfig = TypeVar("AnyConfig", bound="TrainConfig")  # given, resolved or settled: the result is of the same kind


def batch_rules(config: TrainConfig) -> Iterator[Problem]:
    """Report sizes that contradict each other, and an exact sum over gradients that are freed."""
    train = config.train
    if train.global_batch is None:
        if train.batch_size == "auto":
            yield Problem(
                "train.batch_size",
                "auto lets the card decide how to divide train.global_batch, which is not set: the card would then "
                "decide what a step learns from. Set train.global_batch to the number of pictures per step",
            )
    elif train.gradient_accumulation != 1:
        yield Problem(
            "train.global_batch",
            f"global_batch {train.global_batch} and gradient_accumulation {train.gradient_accumulation} are both set. "
            "Remove one of them: a step has global_batch / batch_size micro-batches",
        )
    elif train.batch_size != "auto" and train.global_batch % train.batch_size:
        fitting = [size for size in divisors(train.global_batch) if size < train.batch_size][-1]
        yield Problem(
            "train.batch_size",
            f"{train.batch_size} does not divide train.global_batch {train.global_batch}. Use {fitting}, or auto",
        )
    memory = config.memory
    if memory.budget_gib is not None and memory.checkpointing != "auto" and train.global_batch is None:
        yield Problem(
            "memory.budget_gib",
            f"{memory.budget_gib} with memory.checkpointing {memory.checkpointing}: only checkpointing auto and "
            "train.batch_size auto use the budget. Set memory.checkpointing=auto, or memory.budget_gib=null",
        )
    if train.reduce == "exact" and config.memory.optimizer_in_backward:
        yield Problem(
            "train.reduce",
            "exact sums the gradients of whole micro-batches, but memory.optimizer_in_backward frees each after its "
            "update. Use fast, or optimizer_in_backward false",
        )


def require_processes(config: TrainConfig, processes: int) -> None:
    """Refuse, with a ``ConfigError``, what a number of processes cannot do with a batch size other than auto."""
    train, problems = config.train, list[Problem]()
    micros = train.accumulation
    if processes > micros:
        size = train.micro_batch
        remedy = (
            f"train.gradient_accumulation={processes}, which makes {processes * size} pictures a step"
            if train.global_batch is None
            else f"a smaller train.batch_size, or train.global_batch={processes * size}"
        )
        field = "gradient_accumulation" if train.global_batch is None else "global_batch"
        why = (
            f"a step has {plural(micros, 'micro-batch', 'micro-batches')} over all processes, and there are "
            f"{processes} processes. Use {remedy}, or fewer processes"
        )
        problems.append(Problem(f"train.{field}", why))
    if train.reduce == "exact" and processes & (processes - 1):
        why = (
            f"exact joins processes in pairs, and there are {processes}. Use {2 ** (processes.bit_length() - 1)} "
            "processes, or fast"
        )
        problems.append(Problem("train.reduce", why))
    if problems:
        raise ConfigError(problems, f"{config.name}, {processes} processes")


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def with_batch(config: AnyConfig, batch_size: int) -> AnyConfig:
    """Return the configuration with a micro-batch of ``batch_size`` pictures."""
    return config.model_copy(update={"train": config.train.model_copy(update={"batch_size": batch_size})})


def with_saved_batch(config: TrainConfig, saved: Json | None) -> TrainConfig:
    """Replace ``batch_size: auto`` by the number that the run chose when it first started and a checkpoint saved."""
    before = ((saved or {}).get("train") or {}).get("batch_size")
    return with_batch(config, before) if config.train.batch_size == "auto" and isinstance(before, int) else config


def mixes_lengths(config: TrainConfig) -> bool:
    """Return whether a micro-batch to train on may have prompts of different lengths, which take a mask. Those of a
    concept have one prompt each."""
    text, data = config.model.text, config.data
    if data is None or text.one_length or config.train.micro_batch == 1:
        return False
    sources = data.members
    varied = any(source.variants > 1 for source in sources) or len({each.caption_dropout for each in sources}) > 1
    return text.length_multiple is None or data.streamed or varied


def share_of_process(config: AnyConfig, processes: int) -> AnyConfig:
    """Return the configuration of one process's share of a step, to predict its memory and time."""
    if processes == 1:
        return config
    own = {"gradient_accumulation": -(-config.train.accumulation // processes), "global_batch": None}
    return config.model_copy(update={"train": config.train.model_copy(update=own)})


def sizes_of(global_batch: int, processes: int) -> list[int]:
    """List the possible micro-batch sizes of a step of ``global_batch`` pictures, ascending: every process gets at
    least one micro-batch, and all get equally many if possible."""
    dealt = [size for size in divisors(global_batch) if global_batch // size >= processes]
    return [size for size in dealt if global_batch // size % processes == 0] or dealt or [1]


def smaller_batch(config: AnyConfig, processes: int) -> AnyConfig | None:
    """Return the configuration with a micro-batch of at most half the size; None if there is none."""
    assert config.train.global_batch is not None, "a rule"
    sizes = [size for size in sizes_of(config.train.global_batch, processes) if size <= config.train.micro_batch // 2]
    return with_batch(config, sizes[-1]) if sizes else None
