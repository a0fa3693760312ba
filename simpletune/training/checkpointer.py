"""Write a run's checkpoints."""

from __future__ import annotations

from pathlib import Path

from simpletune.config.schema import TrainConfig
from simpletune.data.plan import Plan
from simpletune.engine.fsdp.fsdp_model import held_parameters
from simpletune.runs import checkpoint
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.remote.checkpoint_store import CheckpointStore
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.stage_timer import StageTimer
from simpletune.training.nonfinite import finite_only, require_finite


class Checkpointer:
    """Writes a run's checkpoints, and hands them to its object store.

    Args:
        config: configuration as the user gave it.
        folder: run folder.
        core: training step, with the model, the optimizer and the average.
        plan: plan of the data, which a resumed run must have, too.
        stages: records the time of the stage ``save``.
        attempt: record of this process.
        store: keeps the checkpoints, if an object store does.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        core: TrainStep,
        plan: Plan,
        stages: StageTimer,
        attempt: AttemptRecorder,
        store: CheckpointStore,
    ):
        self.config, self.folder, self.core, self.plan = config, folder, core, plan
        self.stages, self.attempt, self.store = stages, attempt, store

    def save(self, step: int) -> None:
        """Write the checkpoint after ``step`` steps.

        Raises:
            UserError: a trained parameter is not finite.
        """
        with self.stages.stage("save"), finite_only(self.folder, step):
            require_finite(held_parameters(self.core.denoiser), self.folder, step)
            checkpoint.save_checkpoint(self.folder, self._state(step))
        self.attempt.update()
        self.store.saved(step)

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
        )
