"""Masks by a saliency model in the form of U2-Net (arXiv:2005.09007): an ONNX file, [1, 3, h, w] -> [1, 1, h, w]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from simpletune.commands.caption.onnx_model import open_onnx
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.image_files import decode
from simpletune.data.sources.mask_files import mask_content, read_mask, write_mask
from simpletune.data.sources.masks import without_masks
from simpletune.data.sources.source import RejectedEntry, UnusableImage
from simpletune.data.sources.walk import read_regular, replace_surrogates, walk
from simpletune.system.console import progress, say
from simpletune.system.extras import require_extra
from simpletune.system.options import UserError, plural
from simpletune.system.printable import first_line, printable_name

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, RGB
SIDE = 320  # of models that take any
MOST_SIDE = 4096  # of the input; U2-Net's successors have 1024
MODEL_BYTES = 2**31  # of a protobuf


class SaliencyModel:
    """A loaded saliency model.

    Args:
        file: an ONNX file that holds its weights itself.

    Raises:
        UserError: onnxruntime is missing or cannot load the model, or the model has another input.
    """

    def __init__(self, file: Path):
        require_extra("onnxruntime", "masks", "--masks-from: a saliency model needs")
        self.file = file
        try:
            self._session = open_onnx(read_regular(file, MODEL_BYTES))  # as bytes, a model cannot name other files
        except UnusableImage as reason:
            raise UserError(f"--masks-from: {file} {reason}. Name an ONNX file") from None
        except ValueError as error:
            raise UserError(f"--masks-from: {file} cannot be loaded ({error}). Name an ONNX file") from None
        inputs = self._session.get_inputs()
        shapes = [each.shape for each in inputs]
        shape = shapes[0] if len(shapes) == 1 else []
        sides = [size if isinstance(size, int) else SIDE for size in shape[2:]]
        batch, channels = (size if isinstance(size, int) else None for size in (*shape, 0, 0)[:2])
        if len(sides) != 2 or batch not in (1, None) or channels not in (3, None):
            raise UserError(
                f"--masks-from: {file} has the inputs {shapes}, not one of [1, 3, {SIDE}, {SIDE}]. Name another model"
            )
        if not all(1 <= side <= MOST_SIDE for side in sides):
            raise UserError(
                f"--masks-from: the input of {file} is {sides[0]} x {sides[1]} px; sides are from 1 to {MOST_SIDE}. "
                "Name another model"
            )
        if not self._session.get_outputs():
            raise UserError(f"--masks-from: {file} has no output. Name another model")
        self._input, (height, width) = inputs[0], sides
        self.size = width, height

    @property
    def license(self) -> str:
        """What the file says about its licence; empty if it says nothing."""
        entries = self._session.get_modelmeta().custom_metadata_map
        return ", ".join(text for name, text in sorted(entries.items()) if name.lower() in ("license", "licence"))

    def mask(self, image: Image.Image) -> Image.Image:
        """Compute the mask of an RGB picture: white where it stands out. Raises UnusableImage if nothing does."""
        pixels = np.asarray(image.resize(self.size, Image.Resampling.LANCZOS), np.float32)
        scaled = (pixels / max(float(pixels.max()), 1e-6) - MEAN) / STD  # as U2-Net's RescaleT and ToTensorLab do
        batch = scaled.transpose(2, 0, 1)[None].astype(np.float32)  # [1, 3, height, width]
        try:
            saliency = np.squeeze(self._session.run(None, {self._input.name: batch})[0]).astype(np.float64)
        except Exception as error:
            raise UserError(f"--masks-from: onnxruntime failed ({first_line(error)}). Name another model") from None
        if saliency.shape != batch.shape[2:]:
            raise UserError(
                f"--masks-from: the output of {self.file} is {list(saliency.shape)}, not one value for each pixel. "
                "Name another model"
            )
        low, high = saliency.min(), saliency.max()
        if not high > low:  # neither are NaNs
            raise UnusableImage("has nothing that stands out. Paint its mask")
        grey = ((saliency - low) / (high - low) * 255).round().astype(np.uint8)
        return Image.fromarray(grey).resize(image.size, Image.Resampling.BILINEAR)


@dataclass
class MaskResult:
    """What happened to the pictures."""

    written: int = 0
    kept: int = 0  # had a mask
    rejected: list[RejectedEntry] = field(default_factory=list)


def write_masks(sources: Sequence[Folder], file: Path) -> MaskResult:
    """Write a mask for every picture that has none, and print what was done."""
    model, result = SaliencyModel(file), MaskResult()
    named = model.license
    say(f"license  {named} (by its file)" if named else f"license  {file.name} names none: check that you may use it")
    for source in sources:
        root = Path(source.path)
        folder = None if source.mask_path is None else Path(source.mask_path)
        files, _ = without_masks(walk(root, source.links, source.reading).images, "files", folder)
        with progress("masks", len(files), "pictures") as advance:
            for each in files:
                try:
                    before = read_mask(root, folder, each)
                    if before.found is None:
                        write_mask(before, mask_content(model.mask(decode(read_regular(each)))))
                        result.written += 1
                    else:
                        result.kept += 1
                except UnusableImage as reason:
                    result.rejected.append(
                        RejectedEntry(replace_surrogates(each.relative_to(root).as_posix()), str(reason))
                    )
                advance()
    say(f"masks    {result.written:,} written; {plural(result.kept, 'picture')} had one")
    for entry in result.rejected:
        say(f"         {printable_name(entry.name)} {entry.reason}")
    if result.rejected:
        say(f"{plural(len(result.rejected), 'picture has', 'pictures have')} no mask")
    if any(source.mask != "files" for source in sources):
        say("training reads masks with data.mask=files; without it, it leaves them alone")
    return result
