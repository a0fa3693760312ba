"""Write a run's checkpoints."""

from __future__ import annotations

from pathlib import Path

from simpletune.config.schema import TrainConfig
from simpletune.data.plan import Plan
from simpletune.engine.fsdp.checkpoints import NonFinite
from simpletune.engine.fsdp.fsdp_model import local_parameters
from simpletune.runs import checkpoint
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.remote.checkpoint_store import CheckpointStore
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.console import working
from simpletune.system.options import Json
from simpletune.system.stage_timer import StageTimer
from simpletune.training.nonfinite import not_saved, require_finite


class Checkpointer:
    """Writes a run's checkpoints, and hands them to its object store; ``config`` is as the user gave it, ``base`` what
    it trains on (``resume.base_of``)."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        core: TrainStep,
        plan: Plan,
        stages: StageTimer,
        attempt: AttemptRecorder,
        store: CheckpointStore,
        base: Json,
    ):
        self.config = config
        self.folder = folder
        self.core = core
        self.plan = plan
        self.stages = stages
        self.attempt = attempt
        self.store = store
        self.base = base

    def save(self, step: int) -> None:
        """Write the checkpoint after ``step`` steps.

        Raises:
            UserError: a trained parameter is not finite.
        """
        with self.stages.stage("save"), working("saving"):
            require_finite(local_parameters(self.core.denoiser), self.folder, step)
            try:
                checkpoint.save_checkpoint(self.folder, self._state(step))
            except NonFinite as error:  # found by a process in its own part of the weights
                raise not_saved(error.names, self.folder, step) from None
        self.attempt.update()
        self.store.note_saved(step)

    def save_own_part(self, step: int) -> None:
        """Write this process's part of divided weights, while the first process saves."""
        checkpoint.save_own_part(self.folder, self._state(step))

    def _state(self, step: int) -> checkpoint.TrainingState:
        core = self.core
        return checkpoint.TrainingState(
            step=step,
            config=self.config,
            model=core.denoiser,
            optimizer=core.optimizer,
            manifest=self.plan.manifest(),
            average=core.average,
            processes=core.accelerator.num_processes,
            fp16=None if core.fp16 is None else core.fp16.state(),
            base=self.base,
        )
