"""LoRAs that a configuration names: that of ``adapter.start``, and those of ``model.loras``, the stack under a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.config.schema import TrainConfig, run_folder
from simpletune.models.lora_registry import require_family_of
from simpletune.models.shared.family_files import ONLY_TRAINING
from simpletune.models.text_layers import encoders_in, split_text
from simpletune.runs.folder import read_stacked
from simpletune.runs.model_card import public_name
from simpletune.runs.weights_names import find_lora
from simpletune.system.checksums import sha256_of
from simpletune.system.console import say
from simpletune.system.hub import hub_file, is_hub_name
from simpletune.system.options import Json, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from simpletune.adapters.files.base_reader import BaseReader
    from simpletune.adapters.files.merge import Merger
    from simpletune.adapters.files.updates import Updates
    from simpletune.models.shared.family import Family
    from simpletune.models.shared.parts import Part


@dataclass(frozen=True)
class GivenLora:
    """A LoRA that an option names.

    Args:
        option: ``adapter.start`` or ``model.loras``.
        name: as the user gave it, without the strength.
        scale: its strength.
        only_training: whether pictures are drawn without it.
    """

    option: str
    name: str
    file: Path
    scale: float
    only_training: bool = False

    @property
    def place(self) -> str:
        """What messages begin with."""
        return f"{self.option}: {self.name}"

    def read(self) -> tuple[Updates, Updates]:
        """Read the updates of the denoiser, and those of text encoders."""
        from simpletune.adapters.files.read import read_lora

        try:
            return split_text(read_lora(self.file))
        except UserError as error:
            raise UserError(f"{self.option}: {error}", error.code) from None

    def about(self) -> Json:
        """Return what runs record of it: name, SHA-256, steps if known, and strength."""
        from simpletune.adapters.files.header import open_lora

        metadata = open_lora(self.file).metadata
        steps = metadata.get("simpletune_step", metadata.get("ss_steps", ""))
        return {
            "name": public_name(self.name),
            "sha256": sha256_of(self.file),
            "steps": int(steps) if steps.isdecimal() else None,
            "scale": self.scale,
            **({"only_training": True} if self.only_training else {}),
        }


def given_lora(option: str, text: str) -> GivenLora:
    """Find the LoRA that an option names. Raises UserError if there is none."""
    named = find_lora(text.removeprefix(ONLY_TRAINING), f"{option}: ")
    assert named.lora is not None
    scale = 1.0 if named.scale is None else named.scale
    return GivenLora(option, named.name, named.lora, scale, text.startswith(ONLY_TRAINING))


def require_lora_families(config: TrainConfig) -> None:
    """Check by their headers, without a download, that the LoRAs which a configuration names are of the base's family.

    Raises:
        UserError: one is of another family. One that is not there is left to training.
    """
    start = getattr(config.adapter, "start", None)
    named = [*(("model.loras", text) for text in config.model.loras), *([("adapter.start", start)] if start else [])]
    for option, text in named:
        name = text.removeprefix(ONLY_TRAINING)
        if any(is_hub_name(each) or hub_file(each) for each in (name, name.rpartition(":")[0])):  # with a strength
            continue
        try:
            given = given_lora(option, text)
        except UserError:  # a run that is to come, perhaps; training looks again
            continue
        require_lora_of(given.place, given.file, config)


def require_lora_of(place: str, file: Path, config: TrainConfig) -> None:
    """Check by its header, before the base is loaded, that a LoRA is of the base's family, and name another objective.
    Raises UserError, which begins with its option, if it is of another family."""
    from simpletune.adapters.files.header import LoraHeader

    header = LoraHeader(file)
    sizes = ((module, header.size(module)) for module in header.modules.values())
    layers = {layer: (size.outputs, size.inputs) for module, size in sizes if size for layer in module.layers}
    require_family_of(place, layers, [config.model.lora[0].names])
    told, own = header.objective, config.objective.name
    if told in config.model.objectives and told != own:
        say(
            f"note    {place} was trained by {told}, as its header says, and the base is used by {own}: its update "
            "does not suit it"
        )


def require_elsewhere(given: GivenLora, config: TrainConfig) -> None:
    """Refuse a LoRA of the older run whose folder a new run of this name moves aside."""
    own = run_folder(config)
    if own.resolve() in given.file.resolve().parents:
        raise UserError(
            f"{given.place} lies in {own}, which a new run of this name moves aside. Give this run another name"
        )


@dataclass(frozen=True)
class Stack:
    """The LoRAs of ``model.loras``, an ``Overlay`` of the base.

    Args:
        loras: updates and strengths.
        about: the run's record of them.
    """

    loras: Sequence[tuple[Updates, float]]
    about: list[Json]

    @property
    def key(self) -> object:
        return [[each["sha256"], each["scale"]] for each in self.about]

    def merger(self, base: BaseReader) -> Merger:
        """Build the merger that returns a base's tensors with the LoRAs in them, in its types: the bits of ``simpletune
        merge``."""
        from simpletune.adapters.files.merge import Merger

        return Merger(base, self.loras, None)

    def over(self, family: Family, part: Part) -> _StackedTensors:
        from simpletune.adapters.files.base_reader import BaseReader

        return _StackedTensors(self.merger(BaseReader(part.place, (family, part))))


class _StackedTensors:
    """A merger's tensors, with the place of the mistake in its messages."""

    def __init__(self, merger: Merger):
        self._merger, self.names = merger, merger.names

    def get(self, name: str) -> Tensor:
        try:
            return self._merger.get(name)
        except UserError as error:
            raise UserError(f"model.loras: {error} in simpletune lora merge, and train on its result") from None


def read_stack(config: TrainConfig, run: Path | None = None) -> Stack | None:
    """Read ``model.loras``, if it names any; the configuration has the model's folder resolved.

    Args:
        run: a run that trained on top of them; the files must be those that it recorded.

    Raises:
        UserError: a name is none of a LoRA, the LoRA does not fit the base, or has changed.
    """
    from simpletune.adapters.files.attach import require_shapes
    from simpletune.adapters.files.base_reader import weight_shapes
    from simpletune.adapters.files.updates import without_other_input

    given = list(_given_for(config, run))
    if not given:
        return None
    if run is None:
        for each in given:
            require_elsewhere(each, config)
    part, shapes = config.model.denoiser, weight_shapes(config.model.architecture.stored_shapes())
    loras: list[tuple[Updates, float]] = []
    for each in given:
        updates, text = each.read()
        if text:
            encoders = encoders_in(text, config.model.lora[0].names.encoders)
            raise UserError(
                f"{each.place} also updates {encoders}, and model.loras changes only the {part}. Train on "
                "what simpletune lora merge writes: a single file with its text encoders, or with --denoiser-only a "
                f"folder for model.{part}"
            )
        updates = without_other_input(each.place, updates, shapes)
        require_shapes(each.place, updates, shapes)
        loras.append((updates, each.scale))
    return Stack(loras, [each.about() for each in given])


def without_assistants(config: TrainConfig) -> TrainConfig:
    """Return the configuration of what is drawn and exported, without LoRAs that are used only while training."""
    return config.model_copy(update={"model": config.model.without_assistants()})


def require_stack(config: TrainConfig, run: Path) -> None:
    """Check that the files of ``model.loras`` are those that a run recorded."""
    for _ in _given_for(config, run):
        pass


def _given_for(config: TrainConfig, run: Path | None) -> Iterator[GivenLora]:
    """Find the LoRAs; those of a run must have the SHA-256 that it recorded."""
    names = config.model.loras
    before = read_stacked(run) if run is not None else []
    if not config.model.assistants:
        before = [each for each in before if not each.get("only_training")]
    if len(before) != len(names):  # unknown; other names are refused as a changed setting
        before = []
    for text, recorded in zip_longest(names, before):
        base = recorded and f"{run} was trained on top of {recorded['name']}, SHA-256 {recorded['sha256']}"
        try:
            given = given_lora("model.loras", text)
        except UserError as error:
            raise UserError(f"{error}. {base}", error.code) if base else error from None
        if given.scale == 0:
            raise UserError(f"{given.place}: a strength of 0 adds nothing. Remove the LoRA, or change the strength")
        if recorded and (digest := sha256_of(given.file)) != recorded["sha256"]:
            raise UserError(
                f"{given.place} has the SHA-256 {digest}, but {base}. Put that file back, or train a new run"
            )
        yield given
