"""Z-Image's transformer: its units and sizes. Shapes: as in ``zimage_transformer``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.shared.architecture import Architecture, AttentionShape
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.modulation import Modulation
from simpletune.models.zimage.zimage_files import BLOCKS, CLASS, padded

if TYPE_CHECKING:
    from simpletune.engine.denoiser import Denoiser


class ZImageArchitecture(Architecture):
    """Blocks for the picture and for the text, then blocks for both as one sequence."""

    diffusers_class: ClassVar[str] = CLASS
    multiple: ClassVar[int] = 16
    after_units: ClassVar[str] = "all_final_layer.2-1"
    starts_small: ClassVar[str] = r"adaLN_modulation\.|^all_final_layer\."
    modulation: ClassVar[Modulation | None] = Modulation(
        embed="t_embedder",
        layers={r"^(noise_refiner|layers)\.\d+\.adaLN_modulation\.0$": None, r"^all_final_layer\..*\.1$": "0"},
        inputs=lambda time, pooled, dtype: (time * 1000.0,),
        reads_pooled=False,
    )
    # 2% of the weights, whose int8 would make a tenth to a sixth of a stack's error: benchmarks/results/notes.md
    quantises_modulation: ClassVar[bool] = False
    fp16_overflows: ClassVar[str | None] = "its networks' features reach 344,064, and fp16 ends at 65,504"

    @property
    def largest_side(self) -> int:
        """The longest side that there are positions for, in pixels."""
        return min(self.family.files.known_config()["axes_lens"][1:]) * self.multiple

    def units_among(self, names: Collection[str]) -> tuple[str, ...]:
        blocks = (name.split(".") for name in names if name.split(".")[0] in BLOCKS)
        return tuple(dict.fromkeys(f"{block}.{number}" for block, number, *_ in blocks))

    def empty_model(self, config: ModelConfig) -> Denoiser:
        """Build it on the meta device, with this package's forward pass and blocks."""
        from simpletune.models.zimage.zimage_transformer import ZImageTransformer2DModel, use_blocks

        model = super().empty_model(config)
        model.__class__ = ZImageTransformer2DModel
        use_blocks(model, BLOCKS)
        return model

    def image_tokens(self, size: Size) -> int:
        return size[0] // self.multiple * (size[1] // self.multiple)

    def layer_rows(self, size: Size) -> Callable[[str], int]:
        image, text = padded(self.image_tokens(size)), padded(self.family.text.tokens)
        rows = {"noise_refiner": image, "context_refiner": text}
        return lambda layer: rows.get(layer.partition(".")[0], image + text)

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        config, image = self.family.files.known_config(), padded(self.image_tokens(size))
        text, heads = padded(self.family.text.tokens), config["n_heads"]
        shapes = (AttentionShape(heads, n, n, config["dim"] // heads) for n in (image + text, image, text))
        return sorted(shapes, key=lambda shape: -shape.queries)
