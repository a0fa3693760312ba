"""Read a checkpoint's denoiser tensor by tensor from a folder, a single file or a cached quantised base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from simpletune.engine.denoiser import quantised_layer, quantised_layers
from simpletune.models.families import FAMILIES, family_of, family_of_config
from simpletune.models.shared.family import Family
from simpletune.models.shared.model_config import ModelConfig, Shape, read_config
from simpletune.models.shared.parts import Part
from simpletune.models.shared.single_file import DENOISER_PREFIXES, is_single_file
from simpletune.system.hub import is_hub_name
from simpletune.system.model_folder import weight_files
from simpletune.system.options import Json, UserError
from simpletune.system.safetensors_file import WeightReader, read_header

if TYPE_CHECKING:
    from simpletune.models.shared.weights import TensorSource

KEPT = "made_from.json"  # marks a cached quantised base (see models/shared/quantised_cache.py)
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = {dtype: kind for kind, dtype in TYPES.items()}
FP8 = ("F8_E4M3", "F8_E5M2")


class BaseReader:
    """The denoiser of a checkpoint, read on demand under diffusers' names.

    Args:
        name: the folder of a pipeline, transformer or U-Net in diffusers' layout, a single file in the original layout,
            a Hub name, or the folder of a quantised base in a run's cache.
        located: its family and part, if they are known; ``name`` is then only for messages.
        scheduler: the configuration of its scheduler, if it is known.

    Raises:
        UserError: it is not a denoiser of a known family, or cannot be read.
    """

    def __init__(self, name: str, located: tuple[Family, Part] | None = None, scheduler: ModelConfig | None = None):
        from simpletune.models.shared.weights import open_tensors

        self.name, self._located, self._scheduler = name, located is not None, scheduler
        self.rest: Path | None = None
        """The single file with the pipeline's other tensors."""
        self.part: Part | None = None
        if located is None and (Path(name) / KEPT).is_file():
            self.file: Path | None = None
            quantised = QuantisedBaseReader(Path(name))
            self.tensors: QuantisedBaseReader | TensorSource = quantised
            self.family, self.config = quantised.family, quantised.config
            self.shapes, self.kinds = quantised.shapes, quantised.kinds
            return
        self.family, self.part = located or locate_denoiser(name)
        self.file, self.tensors = self.part.file, open_tensors(self.part)
        self.rest = self.file
        if located is not None and is_single_file(self.family.pretrained):
            self.rest = Path(self.family.pretrained)
        if self.file is None:
            assert self.part.folder is not None
            self.config = self.part.config()
            entries = {k: v for file in weight_files(self.part.folder) for k, v in read_header(file).items()}
            self.kinds = {k: v["dtype"] for k, v in entries.items() if k != "__metadata__"}
            self.shapes = {k: tuple(v["shape"]) for k, v in entries.items() if k != "__metadata__"}
            return
        single = self.part.single_file()
        self.config = single.denoiser_config
        found, origins = single.tensors_of(self.part.name), single.layout.origins(self.config)
        self.shapes, self.kinds = {}, {}
        for tensor, origin in origins.items():
            entry = found[origin.name]
            first, *others = entry["shape"]
            rows = origin.rows.within(first) if origin.rows else slice(0, first)
            self.shapes[tensor] = (rows.stop - rows.start, *others)
            self.kinds[tensor] = "BF16" if entry["dtype"] in FP8 else entry["dtype"]

    def get(self, name: str) -> Tensor:
        """Read one tensor on the CPU in its type on disk; dequantises a quantised one."""
        return self.tensors.get(name)

    def others(self) -> dict[str, Path]:
        """Return the folders of the pipeline's parts that a written single file holds beside the denoiser, by name;
        none for other bases. Downloads those of a Hub name."""
        layout, part = self.family.files.layout, self.part
        if layout is None or layout.others is None:
            return {}
        if self._located:
            parts = [self.family.files.part(name) for name in layout.prefixes]
            return {each.name: each.folder for each in parts if each.file is None and each.folder is not None}
        if part is None or part.folder is None or (Path(self.name) / "config.json").is_file():
            return {}
        if is_hub_name(self.name):
            found = self.family.model_copy(update={"pretrained": self.name})
            return {name: folder for name in layout.prefixes if (folder := found.files.part(name).folder) is not None}
        folders = {name: part.folder.parent / name for name in layout.prefixes}
        return {name: folder for name, folder in folders.items() if folder.is_dir()}

    def marks(self) -> list[str] | None:
        """Return the empty tensors that say in a written single file how the model was trained; None: those of the
        single file that it comes from."""
        known, layout = self.scheduler(), self.family.files.layout
        if known is None or layout is None:
            return None
        return [mark for mark, settings in layout.marks.items() if settings.items() <= known.items()]

    def scheduler(self) -> ModelConfig | None:
        """Return the configuration of its scheduler, empty if it has none; None: that of the single file that it comes
        from."""
        part = self.part
        if self._scheduler is not None:
            return self._scheduler
        if part is None or part.folder is None:
            return None
        folder: Path | None = part.folder.parent / "scheduler"
        if is_hub_name(self.name):
            folder = self.family.model_copy(update={"pretrained": self.name}).files.part("scheduler").folder
        return Part("scheduler", folder).config() if folder is not None and folder.is_dir() else {}

    def weight_shapes(self) -> dict[str, Shape]:
        """Return the shapes of the weights of every linear layer and convolution, by layer."""
        return weight_shapes(self.shapes)

    def save_config(self, folder: Path) -> None:
        """Write the denoiser's ``config.json``."""
        if self.part is not None and self.part.folder is not None:
            shutil.copyfile(self.part.folder / "config.json", folder / "config.json")
        else:
            config = {"_class_name": self.family.architecture.diffusers_class, **self.config}
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def weight_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """See ``BaseReader.weight_shapes``."""
    weights = {name: shape for name, shape in shapes.items() if name.endswith(".weight") and len(shape) in (2, 4)}
    return {name.removesuffix(".weight"): shape for name, shape in weights.items()}


class QuantisedBaseReader:
    """Reads a cached quantised base, a folder with its files and ``made_from.json``, and dequantises layers on
    demand."""

    def __init__(self, folder: Path):
        from pydantic import TypeAdapter

        from simpletune.engine.quant import Precision
        from simpletune.models.shared.quantised_cache import files_of

        about: Json = json.loads((folder / KEPT).read_text(encoding="utf-8"))
        self.config: ModelConfig = about["config"]
        self._precision = TypeAdapter(Precision).validate_python(about["precision"])
        self._reader = WeightReader(list(files_of(folder)))
        self.family = family_of_config(self.config)
        self._model = self.family.architecture.empty_model(self.config)
        self._quantised = {f"{layer}.weight" for layer in quantised_layers(self._model, self._precision)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}
        self.kinds = {  # types of what ``get`` returns, by safetensors' names
            name: "F32" if name in self._quantised else KINDS[self._reader.get(name).dtype] for name in self.shapes
        }

    def get(self, name: str) -> Tensor:
        """Read one tensor on the CPU; the weight of a quantised layer is dequantised to fp32."""
        if name not in self._quantised:
            return self._reader.get(name)
        owner = name.removesuffix(".weight")
        twin = quantised_layer(self._model, owner, self._precision)
        twin.load_state_dict({own: self._reader.get(f"{owner}.{own}") for own in twin.state_dict()}, assign=True)
        if (dequantise := getattr(twin, "dequantise", None)) is not None:  # our own quantised layers
            return dequantise()
        return twin.get_parameter("weight").dequantize().float()  # quanto's


def locate_denoiser(name: str) -> tuple[Family, Part]:
    """Locate the denoiser of a checkpoint, and find its family. Raises UserError if there is none."""
    from simpletune.data.demo import resolve

    path = Path(name)
    if name.startswith("demo:"):
        path = resolve(name, Path(".cache"))
        name = str(path)
    inside = [family for family in FAMILIES if (path / family.denoiser).is_dir()]
    if (path / "config.json").is_file() and not inside:
        family = family_of_config(read_config(path / "config.json", "model"))
        return family, Part(family.denoiser, path)
    if is_single_file(name) and not path.is_file():
        raise UserError(f"{name} does not exist. Check the path")
    if (path.is_absolute() or name.startswith(".")) and not path.exists():
        raise UserError(f"{name} does not exist. Give a folder, a .safetensors file or a Hub name (owner/name)")
    if path.is_file() and path.suffix == ".safetensors":
        header = read_header(path)
        layouts = [(family, family.files.layout) for family in FAMILIES]
        fitting = [f for f, own in layouts if own and any(start + own.marker in header for start in DENOISER_PREFIXES)]
    else:  # a Hub name of a family that ships with this package
        fitting = [f for f in FAMILIES if f.files.bundled_config(name) is not None]
    family = family_of(name) or (inside or fitting or [FAMILIES[0]])[0]
    try:
        return family, family.model_copy(update={"pretrained": name}).files.part(family.denoiser)
    except UserError as error:  # the message begins with a configuration option
        raise UserError(str(error).removeprefix("model.pretrained: "), error.code) from None
