"""The base class of objectives, and protocols of their noising processes and of the solvers that generate with them.

Shapes: b samples, c latent channels, h and w are the latent's height and width (an eighth of the picture's), s steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from simpletune.models.objectives.conventions import USUAL, FlowConventions
from simpletune.models.shared.model_config import ModelConfig
from simpletune.system.options import ConfigError, Option, Problem

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


OTHER_NOISE = "EDM"
"""Begins diffusers' names of schedulers whose noise is another one, as in Playground 2.5 and CosXL."""


class TrainingObjective(Option):
    """Draw noise levels and noise, and build the noising process and the solver. Members define ``name`` (the tag)."""

    if TYPE_CHECKING:  # every member declares it, so that its tag comes first in JSON
        name: str

    sampler: ClassVar[str]
    """The solver's name in AUTOMATIC1111's web UI."""

    def rules(self, resolutions: Iterable[int] = ()) -> Iterator[Problem]:
        """Check what needs no model, and the density of noise levels at training resolutions in pixels."""
        yield from ()

    def problems(self, scheduler: Callable[[], ModelConfig], conventions: FlowConventions = USUAL) -> Iterator[Problem]:
        """Check whether the objective fits the model; ``scheduler`` returns its ``scheduler_config.json``."""
        yield from ()

    def require(self, scheduler: ModelConfig, conventions: FlowConventions = USUAL) -> None:
        """Raise ConfigError if the objective does not fit the model."""
        problems = [*self.rules(), *self.problems(lambda: scheduler, conventions)]
        if problems:
            raise ConfigError(problems)

    def describe(self, scheduler: ModelConfig | None, source: str) -> str | None:
        """Say what the network predicts, and by what, for ``check``; None: there is no choice, or it is not known.

        Args:
            scheduler: the model's ``scheduler_config.json``; None if it needs a download.
            source: what tells it.
        """
        return None

    def is_idle(self, scheduler: ModelConfig) -> bool:
        """Return whether every level that it draws has a weight of 0."""
        return False

    def shift_at(self, resolution: float) -> float:
        """Return the shift of noise levels for the side in pixels of a square picture; 1 does not shift."""
        return 1.0

    def draw(self, stream: np.random.Generator, shift: float) -> float:
        """Draw one noise level from its density."""
        raise NotImplementedError

    @property
    def draws_from_few(self) -> bool:
        """Whether ``draw`` chooses from a few noise levels."""
        return False

    def levels_at(self, shift: float) -> Sequence[float]:
        """Return the noise levels that ``draw`` chooses from, at a shift; empty: any."""
        return ()

    def quantile(self, quantile: float, shift: float) -> float:
        """Return the noise level at a quantile of the density, for the fixed levels of the validation loss."""
        raise NotImplementedError

    def noise(self, stream: np.random.Generator, shape: Sequence[int]) -> np.ndarray:  # [c, h, w]
        """Draw a sample's noise of shape (c, h, w), normal in fp32, from a stream that its key seeds."""
        return stream.standard_normal(tuple(shape), dtype="float32")

    def scheduler_config(self, scheduler: ModelConfig, conventions: FlowConventions = USUAL) -> dict[str, Any]:
        """Derive the trained model's scheduler config from its base's, in diffusers' format."""
        return dict(scheduler)

    def process(self, scheduler: Callable[[], ModelConfig], conventions: FlowConventions) -> NoisingProcess:
        """Build the noising process.

        Args:
            scheduler: returns the model's ``scheduler_config.json``.
            conventions: the family's, if it is trained by flow.

        Raises:
            ConfigError: the objective does not fit the model.
        """
        raise NotImplementedError

    def solver(
        self,
        scheduler: ModelConfig,
        steps: int,
        skipped: int,
        conventions: FlowConventions,
        tokens: Callable[[], int],
    ) -> Solver:
        """Build the solver of one generation.

        Args:
            scheduler: the model's ``scheduler_config.json``.
            steps: the number of steps.
            skipped: how many of the first, noisiest steps to leave out.
            conventions: the family's (``Family.conventions``), if it is trained by flow.
            tokens: returns the number of tokens of the generated picture, on which the shift may depend.

        Raises:
            ConfigError: the objective does not fit the model.
        """
        raise NotImplementedError

    def usage(self, conventions: FlowConventions) -> str | None:
        """Say what a user of the result has to set, because no file tells it; None: nothing."""
        return None

    def diffusers_scheduler(self, conventions: FlowConventions = USUAL) -> tuple[str, dict[str, object]] | None:
        """Return the class of diffusers' scheduler that steps as ``solver`` does, and its changes to the base's
        scheduler config; None if it is the base's own scheduler."""
        return None


class NoisingProcess(Protocol):
    """An objective on tensors; reads nothing from the device."""

    def noised(self, z_0: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Compute z_t of samples [b, c, h, w] at their levels [b]."""

    def target(self, z_0: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Compute what the network should predict [b, c, h, w]."""

    def split(self, z_t: Tensor, prediction: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Return z_0 and the noise whose z_t and target at this level are those given: what a prediction takes z_t
        for."""

    def loss(self, prediction: Tensor, target: Tensor, level: Tensor, weight: Tensor | None = None) -> Tensor:
        """Compute the loss, an fp32 scalar: the mean over all elements of error times ``weight``.

        Args:
            prediction: the network's prediction [b, c, h, w].
            target: what it should predict [b, c, h, w].
            level: the noise levels [b].
            weight: weights of samples or places, [b, 1, h or 1, w or 1] in fp32; None: 1 everywhere.
        """

    def time(self, level: Tensor) -> Tensor:
        """Return the timestep [b] that the network receives."""


class Solver(Protocol):
    """The steps of one generation. Make a new solver for each: it may keep earlier predictions."""

    levels: Tensor
    """[s], fp32, on the CPU: the noise level of each step, in the objective's terms."""
    times: Tensor
    """[s], on the CPU: what the network receives as its timestep."""

    def start(self, noise: Tensor, z_0: Tensor | None) -> Tensor:  # [b, c, h, w] each
        """Return the first z: the noise, or a starting picture's latents noised to the first level."""

    def noised(self, z_0: Tensor, noise: Tensor, index: int) -> Tensor:  # [b, c, h, w] each
        """Return z_0 noised to the level of step ``index``, the one to be taken next."""

    def step(self, prediction: Tensor, index: int, z: Tensor) -> Tensor:  # [b, c, h, w] each, fp32
        """Return the next z from the network's prediction at step ``index``; steps are taken in order."""
