"""Calculate how long a training step should take, to rank settings before any of them has run.

Work is divided by a card's sustained rate, traffic by its bandwidth; nothing here was measured by a run of this tool.
Use it to rank settings of one job on one card, not to promise seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from simpletune.cards import Card
from simpletune.config.schema import TrainConfig
from simpletune.estimate.simulate import StepReport
from simpletune.models.buckets import Size
from simpletune.models.flops import trained_of

SUSTAINED = 0.5  # of a card's dense peak: 57 of an L4's 121 TFLOP/s in products of this model's size
TFLOPS, BANDWIDTH = 60.0, 300.0  # sustained TFLOP/s and GB/s of a card known by its memory only: those of an L4
WITHOUT_TENSOR_CORES = 8  # times slower: fp32 matrix products do not use the tensor cores
COMPUTED = 2  # bytes of a weight in the compute type
LOOKED_UP = 1.5  # times the traffic: every nf4 weight is looked up in a table
UPDATED = 7  # bytes moved per trained byte by an update: read weight, gradient, two states; write all but the gradient


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by use."""

    products: float
    recomputation: float
    unpacking: float
    """Convert quantised weights to the compute type in every pass."""
    transfer: float
    """Copies to and from the host that computation does not hide."""
    update: float

    @property
    def seconds(self) -> float:
        """Total of the step."""
        return self.products + self.recomputation + self.unpacking + self.transfer + self.update


def predict_step_time(config: TrainConfig, report: StepReport, card: Card, size: Size | None = None) -> StepTime:
    """Calculate the time of a step.

    Args:
        config: of the run, demo names resolved.
        report: of its simulation.
        card: that the step runs on.
        size: width and height in pixels; None: the square of ``data.resolution``.
    """
    size = size or (config.data.resolution, config.data.resolution)
    blocks = config.model.blocks()
    checkpointed = config.memory.checkpointed(blocks)
    flops = config.model.flops(trained_of(report.trained), size, config.train.batch_size, checkpointed)
    rate = (card.tflops * SUSTAINED if card.tflops else TFLOPS) * 1e12
    if config.precision.settled == "fp32":
        rate /= WITHOUT_TENSOR_CORES
    products, again = flops.model / rate, flops.recomputed / rate
    unpacking = (
        _unpacked(config, config.precision.dequantise_count(1 + checkpointed / blocks))
        / (card.bandwidth or BANDWIDTH)
        / 1e9
    )
    hidden = products + again + unpacking
    transfer = max(0.0, _moved(config, report, size) / card.link / 1e9 - hidden)
    update = UPDATED * report.trained_bytes / (card.bandwidth or BANDWIDTH) / 1e9
    if config.prior.predicts:  # a forward pass of the base, without a backward pass
        products += flops.forward / rate
    micro = config.train.gradient_accumulation * (2 if config.prior.second_pass else 1)
    return StepTime(micro * products, micro * again, micro * unpacking, micro * transfer, update)


def _unpacked(config: TrainConfig, passes: float) -> float:
    """Return the bytes that unpacking quantised weights reads and writes in ``passes`` passes."""
    each = config.precision.bytes_per_weight
    if each >= COMPUTED:
        return 0.0
    work = LOOKED_UP if each < 1 else 1.0
    return work * config.model.parameter_count() * (each + COMPUTED) * passes


def _moved(config: TrainConfig, report: StepReport, size: Size) -> float:
    """Return the bytes over the link to the host: streamed weights in the forward and the backward pass, copied back
    with their states if they train; checkpoint inputs in both directions."""
    blocks = config.model.blocks()
    share = len(config.memory.streamed(blocks)) / blocks
    weights = share * config.model.parameter_count() * config.precision.bytes_per_weight
    moved = 2 * weights
    if config.adapter.trains_base:
        moved += weights + 2 * share * report.state_bytes
    if config.memory.offload_checkpoint_inputs:
        inputs = config.model.unit_inputs(size)[: config.memory.checkpointed(blocks)]
        moved += 2 * config.train.batch_size * sum(inputs) * COMPUTED
    return moved
