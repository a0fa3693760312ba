"""The option ``model``, and where its parts come from: which option provides each, and what is missing. No torch.

A single file takes precedence over ``model.text_encoders`` for the parts that it contains; the rest (always the
tokenizers, and the autoencoder in a family whose files have none) come from ``model.text_encoders``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field

from simpletune.models.shared.autoencoder import Autoencoder, Latents, autoencoder_config
from simpletune.models.shared.model_config import ModelConfig, read_config
from simpletune.models.shared.parts import Part
from simpletune.models.shared.single_file import FileLayout, SingleFile, is_single_file, open_file
from simpletune.models.shared.words import FewSteps, Words
from simpletune.models.text.family_text import FamilyText
from simpletune.system.hub import HubPart, Repository, fetch, files_folder, is_hub_name, part_folder
from simpletune.system.options import Option, Problem, UserError

INDEX = "model_index.json"
WITHOUT_WEIGHTS = ("tokenizer", "scheduler")
PIPELINE = "a folder in diffusers' layout, or a Hub name (owner/name)"

LoraNames = list[Annotated[str, Field(min_length=1)]]
"""The type of ``model.loras``."""
ONLY_TRAINING = "training:"
"""Begins the entries of ``model.loras`` that are used only while training."""


class ModelOption(Option):
    """The option ``model``, as the objects see it that a family is composed of."""

    if TYPE_CHECKING:  # every member declares them, so that its tag comes first in JSON
        family: str
        pretrained: str
        revision: str | None
        init: str
        loras: LoraNames
        vae: str | None
        text_encoders: str | None

    denoiser: ClassVar[str]
    """The part that is trained, and the option that replaces it: ``transformer`` or ``unet``."""
    latents: ClassVar[Latents]
    """The latents that the trained model reads, and what makes them."""
    words: ClassVar[Words]
    """What people and files are told of it."""
    files_class: ClassVar[type[FamilyFiles]]
    """The class of ``files``."""
    text_class: ClassVar[type[FamilyText[Any]]]
    """The class of ``text``."""

    @property
    def few_steps(self) -> FewSteps | None:
        """What is known of the base, if it is one that draws in few steps."""
        return self.words.few_steps_of(self.files.weights_from)

    @property
    def known_assistants(self) -> LoraNames:
        """The entries of ``loras`` under which a base that draws in few steps is trained, if one is published."""
        few = self.few_steps
        return [f"{ONLY_TRAINING}{few.assistant}"] if few is not None and few.assistant is not None else []

    @property
    def assistants(self) -> LoraNames:
        """The entries of ``loras`` that are used only while training."""
        return [name for name in self.loras if name.startswith(ONLY_TRAINING)]

    def without_assistants(self) -> Self:
        """Return the model that the result is for, which pictures are drawn with."""
        return self.model_copy(update={"loras": [name for name in self.loras if name not in self.assistants]})

    @property
    def files(self) -> FamilyFiles:
        """Where its parts come from."""
        return self.files_class(self)

    @property
    def text(self) -> FamilyText[Any]:
        """Its text encoders, and what the denoiser reads of their outputs."""
        return self.text_class(self)

    @property
    def autoencoder(self) -> Autoencoder:
        """Between pictures and the latents that the trained model reads."""
        raise NotImplementedError


class FamilyFiles:
    """Where a model's parts come from. Members state the fields below, where their models have such files.

    Args:
        family: the model's option.
    """

    layout: ClassVar[FileLayout | None] = None
    """The layout of the family's single files; None: it has none."""
    hub_names: ClassVar[Mapping[str, str]] = {}
    """The version of each Hub name whose configurations ship, a key of ``bundled_configs``."""
    hub_bytes: ClassVar[int] = 2
    """Bytes per parameter of the weights that are fetched for ``hub_names``: full precision, if a repository has it."""
    unread: ClassVar[Mapping[str, int]] = {}
    """Parameters in files of the Hub that are never read, by part."""
    scheduler_tells: ClassVar[bool] = False
    """Whether a single file may not say what it predicts, so that its scheduler has to come from the Hub too."""

    def __init__(self, family: ModelOption):
        self.family = family

    def bundled_configs(self) -> Mapping[str, Mapping[str, ModelConfig]]:
        """Return the configurations that ship, by version and part."""
        return {}

    def file_version(self) -> str:
        """Return the version, a key of ``bundled_configs``, of the single file ``pretrained``."""
        raise NotImplementedError

    @property
    def text_example(self) -> str:
        """A Hub name with tokenizers and text encoders for this model, for messages."""
        return str(type(self.family).model_fields["pretrained"].default)

    def part_names(self) -> list[str]:
        """Return the names of all parts that the model needs."""
        return ["scheduler", self.family.denoiser, "vae", *self.family.text.part_names()]

    def changes_of(self, part: str) -> ModelConfig:
        """Return what options change in a part's configuration."""
        return {}

    def part(self, name: str) -> Part:
        """Locate a part (``transformer``, ``vae``, ``scheduler``, ``tokenizer_2``), downloading it if necessary. Raises
        UserError if it is missing, or cannot be downloaded."""
        return self._changed(self._unchanged_part(name))

    def _changed(self, part: Part) -> Part:
        changes = self.changes_of(part.name)
        return replace(part, changes=changes) if changes else part

    def _unchanged_part(self, name: str) -> Part:
        field, value = self.provider(name)
        if name == "scheduler" and (value is None or is_single_file(value)):
            told = {} if value is None else self.single_file(value).scheduler_settings
            return Part(name, None, bundled={**self.bundled_configs()[self.file_version()][name], **told})
        if value is None:
            raise UserError(f"model.pretrained: {self._lacks(self.family.pretrained, name)}")
        if is_single_file(value):
            if not self.single_file(value).has(name):
                raise UserError(f"model.{field}: {self._lacks(value, name)}")
            folder, bundled = self._config_beside_file(name)
            return Part(name, folder, Path(value), self.layout, bundled)
        if is_hub_name(value):
            return Part(name, part_folder(self._hub_part(name, field, value)))
        if field == name and (Path(value) / "config.json").exists():
            return Part(name, Path(value))
        folder = self._scheduler_folder(value) if name == "scheduler" else Path(value) / name
        if not folder.is_dir():
            raise UserError(f"model.{field}: {Path(value)} has no {name}/ folder. Give {PIPELINE}")
        return Part(name, folder)

    def known_part(self, name: str) -> Part:
        """Locate a part's configuration; downloads nothing for a Hub name whose configuration ships."""
        config = self.bundled_config(self.provider(name)[1], name)
        return self.part(name) if config is None else self._changed(Part(name, None, bundled=config))

    def bundled_config(self, hub_name: str | None, part: str | None = None) -> ModelConfig | None:
        """Return a part's (default: the trained model's) ``config.json`` for a Hub name with bundled ones, else
        None."""
        version = self.hub_names.get(hub_name or "")
        return None if version is None else self.bundled_configs()[version].get(part or self.family.denoiser)

    def single_file(self, path: str) -> SingleFile:
        """Open a single file by its header. Raises UserError if it is damaged, or contains no model of this family."""
        return open_file(Path(path), self._layout_for(path))

    def _layout_for(self, path: str) -> FileLayout:
        if self.layout is None:
            raise UserError(f"{path} is a single file, and {self.family.words.title} models have none. Give {PIPELINE}")
        return self.layout

    @property
    def lacks_tokenizers(self) -> bool:
        """Whether the base is a single file, which contains no tokenizers, and no option names a source of them."""
        return is_single_file(self.family.pretrained) and self.family.text_encoders is None

    @property
    def weights_from(self) -> str:
        """Where the trained model comes from: a folder, a file or a Hub name."""
        return getattr(self.family, self.family.denoiser) or self.family.pretrained

    def denoiser_config(self, fetch: bool = True) -> ModelConfig | None:
        """Return the trained model's ``config.json``.

        Args:
            fetch: whether to query the Hub. If not, returns a bundled configuration, or None for another Hub name.
        """
        name = self.weights_from
        if not fetch and is_hub_name(name):
            return self.bundled_config(name)
        part = self.part(self.family.denoiser)
        return part.config() if part.file is None else part.single_file().denoiser_config

    def known_config(self) -> ModelConfig:
        """Return the trained model's ``config.json``, downloaded only if it is not available locally."""
        config = self.denoiser_config(fetch=False) or self.denoiser_config()
        assert config is not None
        return config

    def require_supported(self, config: ModelConfig, place: str) -> None:
        """Raise UserError if the trained model's configuration from ``place``, whose sizes are within the limits, is of
        another family, or of a variant that cannot be trained. Needed where several families share a class."""

    def fingerprints(self, sums: Path | None = None) -> dict[str, str]:
        """Return the fingerprint of every part that a training reads from files, by its name; ``sums`` as for
        ``Part.fingerprint``. A denoiser with random weights counts by its configuration."""

        def short(config: ModelConfig) -> str:
            return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]

        found: dict[str, str] = {}
        denoiser = self.family.denoiser
        for part in map(self.part, self.part_names()):
            if part.name == denoiser and self.family.init == "random":
                found[part.name] = short(self.known_config())
            elif part.folder is not None or part.file is not None:
                found[part.name] = part.fingerprint(sums)
                if part.name == denoiser and part.file is not None:  # its marks say what it predicts
                    found.setdefault("scheduler", short(part.single_file().scheduler_settings))
        return found

    def hub_parts(self) -> list[HubPart]:
        """List all parts that come from the Hub, so that their total size can be checked before the download."""
        provided = [(part, *self.provider(part)) for part in self.part_names()]
        return [self._hub_part(part, field, name) for part, field, name in provided if name and is_hub_name(name)]

    def fetch(self) -> None:
        """Download every part that comes from the Hub. Raises UserError if they do not fit on the disk, or it fails."""
        fetch(self.hub_parts(), self.family.text.optional)

    def scheduler_config(self) -> ModelConfig:
        return self.known_part("scheduler").config()

    def is_schedule_known(self) -> bool:
        """Return whether ``scheduler_config`` needs no download."""
        value = self.provider("scheduler")[1]
        return value is None or not is_hub_name(value) or self.bundled_config(value) is not None

    def schedule_source(self) -> str:
        """Say what ``scheduler_config`` comes from, for messages, if it needs no download."""
        field, value = self.provider("scheduler")
        if value is None:
            return "assumed, since the file does not tell"
        if is_single_file(value) and (file := self.single_file(value)).scheduler_settings:
            return "the file's marks" if any(mark in file.header for mark in file.layout.marks) else "the file's shapes"
        return "the model's scheduler config" if field == "pretrained" else f"the scheduler config in model.{field}"

    def pipeline_index(self) -> ModelConfig:
        """Read the pipeline's ``model_index.json`` of ``pretrained``; empty for one without, or whose configurations
        ship. Raises UserError if it is damaged."""
        name = self.family.pretrained
        if is_single_file(name) or name in self.hub_names:
            return {}
        folder = files_folder(name, (INDEX,), self.family.revision) if is_hub_name(name) else Path(name)
        return read_config(folder / INDEX, "pipeline") if folder is not None and (folder / INDEX).is_file() else {}

    def provider(self, part: str) -> tuple[str, str | None]:
        """Return the option that provides a part, and its value; None for the value if only a bundled configuration can
        serve. Raises UserError if a single file cannot be read."""
        family = self.family
        if single := is_single_file(family.pretrained):
            self._layout_for(family.pretrained)
        if part in (family.denoiser, "vae") and getattr(family, part) is not None:
            return part, getattr(family, part)
        beside = part.startswith(("tokenizer", "text_encoder"))
        beside = beside or single and part == "vae" and part not in self._layout_for(family.pretrained).prefixes
        if beside and family.text_encoders is not None:
            if not (single and self.single_file(family.pretrained).has(part)):
                return "text_encoders", family.text_encoders
        if part == "scheduler":
            return self._scheduler_provider()
        if single and part.startswith(WITHOUT_WEIGHTS):
            return "text_encoders", None
        return "pretrained", family.pretrained

    def _scheduler_provider(self) -> tuple[str, str | None]:
        """Return the ``provider`` of the scheduler, which says what the denoiser predicts, so it is that of whoever
        provides this: the marks of its file, or its pipeline's. Without, that of ``pretrained``; of a file without
        marks, that of the pipeline with its tokenizers."""
        field, value = self.provider(self.family.denoiser)
        if value is not None and field != "pretrained" and not is_hub_name(value) and not self._has_scheduler(value):
            field, value = "pretrained", self.family.pretrained
        if value is None or not is_single_file(value) or self._has_scheduler(value):
            return field, value
        text = self.family.text_encoders
        known = text is not None and (self.scheduler_tells if is_hub_name(text) else self._has_scheduler(text))
        return "text_encoders", text if known else None

    def _has_scheduler(self, source: str) -> bool:
        """Return whether a file has marks that tell its scheduler, or a folder is of a pipeline with one, or its
        denoiser's."""
        if is_single_file(source):
            return Path(source).is_file() and bool(self.single_file(source).scheduler_settings)
        return any(self._scheduler_folder(source).glob("*config.json"))

    def _scheduler_folder(self, source: str) -> Path:
        """Return the folder of the scheduler of a pipeline's folder, or beside a denoiser's."""
        beside = Path(source).name == self.family.denoiser and (Path(source) / "config.json").exists()
        return (Path(source).parent if beside else Path(source)) / "scheduler"

    def _config_beside_file(self, part: str) -> tuple[Path | None, ModelConfig | None]:
        """Return the configuration of a part that a single file stores without one: its folder in
        ``model.text_encoders``, if there is one, and the one that ships."""
        if part == self.family.denoiser or not is_single_file(self.family.pretrained):
            return None, None
        bundled = self.bundled_configs()[self.file_version()].get(part)
        folder = Path(self.family.text_encoders or "/nowhere") / part
        return (folder if bundled is not None and any(folder.glob("*config.json")) else None), bundled

    def _lacks(self, file: str, *parts: str) -> str:
        """Return the message for a single file without these parts."""
        remedy = (
            "Set model.vae to a folder or Hub name that has one"
            if parts == ("vae",)
            else "Set model.text_encoders to a folder in diffusers' layout or to a Hub name "
            f"(such as {self.text_example}; only missing parts are downloaded)"
        )
        titles = {encoder.model: encoder.title for encoder in self.family.text.encoders} | {"vae": "autoencoder (VAE)"}
        return f"{file} contains no {', '.join(titles.get(part, part) for part in parts)}. {remedy}"

    def _hub_part(self, part: str, field: str, value: str) -> HubPart:
        denoiser = part == self.family.denoiser
        weights = not part.startswith(WITHOUT_WEIGHTS) and not (denoiser and self.family.init == "random")
        repository = Repository(value, self.family.revision if field == "pretrained" else None)

        def check(folder: Path) -> None:
            self.require_supported(read_config(folder / "config.json", part), value)

        return HubPart(repository, part, weights, check if denoiser else None)

    def problems(self) -> Iterator[Problem]:
        """Find missing parts and unreadable files without building or downloading anything."""
        found = list(self._unusable_parts())
        yield from found or self._other_encoders()

    def _unusable_parts(self) -> Iterator[Problem]:
        """Report invalid paths, files of another family, and parts that no option provides."""
        family = self.family
        unusable = list(self._unusable_names())
        yield from unusable
        if any(problem.path == "model.pretrained" for problem in unusable):
            return
        named = {problem.path for problem in unusable}
        names = self.part_names()
        parts = [part for part in names if part != "scheduler" or f"model.{family.denoiser}" not in named]
        provided = [(part, *self.provider(part)) for part in parts]
        for field, value in dict.fromkeys((field, value) for _, field, value in provided):
            if value is not None and f"model.{field}" not in named and Path(value).is_dir():
                found = any((Path(value) / name).is_dir() for name in names)
                if not found and not (Path(value) / "config.json").exists():
                    yield Problem(f"model.{field}", f"{value} contains no part of a model. Give {PIPELINE}")
                    named.add(f"model.{field}")
        lacking = []  # parts of the text side that the single file lacks, and no other option provides
        for part, field, value in provided:
            if value is None or is_hub_name(value) or f"model.{field}" in named:
                continue
            if part.startswith("text_encoder") and is_single_file(value) and not self.single_file(value).has(part):
                lacking.append(part)
                continue
            try:
                located = self.part(part)
                if located.file is not None:
                    located.single_file().check(part)
                elif part == "vae":
                    autoencoder_config(located, family.latents, self._channels_on_disk())
                elif part != family.denoiser and not part.startswith("tokenizer"):  # the denoiser's is read elsewhere
                    located.config()
            except UserError as error:
                yield Problem(f"model.{field}", re.sub(r"^model\.\w+: ", "", str(error)))
        if any(part.startswith("tokenizer") and value is None for part, _, value in provided):
            lacking.append("tokenizers")
        if lacking:
            yield Problem("model.pretrained", self._lacks(family.pretrained, *lacking))

    def _unusable_names(self) -> Iterator[Problem]:
        """Report options that name neither a folder nor a usable file nor a Hub repository."""
        for field in ("pretrained", self.family.denoiser, "vae", "text_encoders"):
            value = getattr(self.family, field)
            if value is None or is_hub_name(value) or Path(value).is_dir():
                continue
            if is_single_file(value) and field in ("pretrained", self.family.denoiser):
                try:
                    self.single_file(value)
                except FileNotFoundError:
                    yield Problem(f"model.{field}", f"{value} does not exist. Check the path")
                except (UserError, OSError) as error:
                    yield Problem(f"model.{field}", str(error))
            else:
                yield Problem(
                    f"model.{field}", f"{value} is neither a folder nor a Hub name (owner/name). Check the path"
                )

    def _channels_on_disk(self) -> int | None:
        """Return the channels of the latents that the denoiser reads; None if its configuration has to be downloaded,
        or is damaged, which is reported elsewhere."""
        try:
            return None if self.denoiser_config(fetch=False) is None else self.family.autoencoder.channels
        except (UserError, OSError, KeyError, TypeError, ValueError):
            return None

    def _other_encoders(self) -> Iterator[Problem]:
        """Report text encoders of another model than the denoiser's, as far as both are known without a download."""
        family, text = self.family, self.family.text
        try:
            known = self.denoiser_config(fetch=False) is not None
            given = [self.provider(encoder.model)[1] or "" for encoder in text.encoders] if known else []
            if not given or any(is_hub_name(each) and self.bundled_config(each) is None for each in given):
                return
            configs = [(encoder, self.known_part(encoder.model).config()) for encoder in text.encoders]
            widths = [encoder.width(config) for encoder, config in configs]
            pooled = sum(encoder.pooled_width(config) for encoder, config in configs)
            reads, reads_pooled, fits = text.width, text.pooled_width, text.fits(widths)
        except (UserError, KeyError, TypeError, ValueError):
            return  # reported where the shapes are read, or the encoder is
        named = "a text encoder of width" if len(widths) == 1 else "text encoders of widths"
        field = "text_encoders" if family.text_encoders else "pretrained"
        title = {"unet": "UNet"}.get(family.denoiser, family.denoiser)
        for has, fitting, read in (
            (f"{named} {' + '.join(map(str, widths))}", fits, reads),
            (f"a pooled prompt of width {pooled}", pooled == reads_pooled, reads_pooled),
        ):
            if not fitting:
                remedy = f"Use the pipeline of the {title}'s own version"
                yield Problem(
                    f"model.{field}", f"{getattr(family, field)} has {has}, and the {title} reads {read}. {remedy}"
                )
                return
