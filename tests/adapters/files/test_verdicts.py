"""What is said of how other tools read a LoRA file, over families x layouts x kinds of files.

``verdicts.json`` has every sentence about a tool, with how many of the files get it and a hash of which. Its first
version is of commit a13f70e7; each change since was read sentence by sentence."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up import registered
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from simpletune.adapters.files.compatibility import FACTS, verdicts
from simpletune.adapters.files.header import LoraHeader
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.write import file_tensors
from simpletune.models.lora_registry import LAYOUTS
from simpletune.models.shared.fused import Fused, Rows
from simpletune.models.shared.lora_layout import ALPHA, DOWN, UP, Layout, LoraNames
from simpletune.models.shared.lora_verdicts import TOOLS, Fact
from simpletune.system.options import UserError

Shapes = dict[str, tuple[int, ...]]
PLACE = "down_blocks.1.attentions.0.transformer_blocks"
RESNET = "down_blocks.1.resnets.0.conv1"
LAYERS: Mapping[str, Mapping[str, tuple[int, int]]] = {  # inputs and outputs: of an attention's, which tells the model
    "Stable Diffusion 3": {"transformer_blocks.0.attn.to_k": (1536, 1536), "transformer_blocks.1.ff.net.2": (24, 8)},
    "Stable Diffusion XL": {f"{PLACE}.1.attn2.to_k": (2048, 8), RESNET: (24, 8)},
    "Stable Diffusion 1.5 or 2": {f"{PLACE}.0.attn2.to_k": (768, 8), RESNET: (24, 8)},
    "FLUX.2 klein 4B": {
        "single_transformer_blocks.0.attn.to_out": (12288, 8),
        "transformer_blocks.1.attn.to_k": (3072, 8),
    },
    "Qwen-Image": {"transformer_blocks.0.img_mlp.net.2": (12288, 8), "transformer_blocks.1.attn.to_k": (3072, 8)},
    "Z-Image": {"layers.0.attention.to_k": (3840, 8), "layers.1.feed_forward.w1": (3840, 8)},
}
CLIP, T5 = "text_model.encoder.layers.0.self_attn.", "encoder.block.0.layer.0.SelfAttention.q"
TEXT = {  # modules of text encoders by the layout of their keys
    "text diffusers": (f"text_encoder.{CLIP}q_proj", f"text_encoder.{CLIP}out_proj"),
    "text kohya": (f"lora_te1_{CLIP}q_proj".replace(".", "_"), f"lora_te1_{CLIP}out_proj".replace(".", "_")),
    "text kohya, no out": (f"lora_te1_{CLIP}q_proj".replace(".", "_"),),
    "text comfy": (f"text_encoders.clip_l.transformer.{CLIP}q_proj", f"text_encoders.clip_l.transformer.{CLIP}k_proj"),
    "T5 diffusers": (f"text_encoder_3.{T5}",),
    "T5 kohya": (f"lora_te3_{T5}".replace(".", "_"),),
    "T5 comfy": (f"text_encoders.t5xxl.transformer.{T5}",),
}


class Part:
    """A layer in a file of one layout."""

    def __init__(self, layer: str, layout: Layout, sides: tuple[int, int]):
        names, self.layout, self.name = layout.names, layout, layer
        self.inputs, self.outputs = sides
        if layout.original:
            self.name = getattr(names, "originals", {}).get(layer) or names.original(layer)[0]
            self.outputs *= 3 if self.name.endswith("qkv") else 1

    def key(self, role: str) -> str:
        return self.layout.key(self.name, role)

    def lora(self, rank: int = 2) -> Shapes:
        return {self.key(DOWN): (rank, self.inputs), self.key(UP): (self.outputs, rank)}

    def lokr(self) -> Shapes:
        return {self.key("lokr_w1"): (2, 2), self.key("lokr_w2"): (self.outputs // 2, self.inputs // 2)}

    def vector(self, role: str) -> Shapes:
        return {self.key(role): (self.outputs,)}


def files_of(one: Part, two: Part) -> Iterator[tuple[str, Shapes, dict[str, str]]]:
    """Files with updates of two layers: what each is called, the shapes of its tensors, and its header."""
    plain, alphas = one.lora() | two.lora(), [one.key(ALPHA), two.key(ALPHA)]
    yield "LoRA", plain, {}
    yield "alphas", {**plain, alphas[0]: (), alphas[1]: ()}, {}
    yield "one alpha", {**plain, alphas[0]: ()}, {}
    yield "ranks", plain | two.lora(3), {}
    yield "settings", plain, {"lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 4})}
    yield "settings of 1", plain, {"lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 2})}
    yield "unmatched", plain | {one.layout.key("nowhere", role): (4, 4) for role in (DOWN, UP)}, {}
    yield "Tucker", {**plain, one.key("lora_mid.weight"): (2, 2, 3, 3)}, {}
    yield "LoRA of one layer", two.lora(), {}
    processor = {key.replace(".to_k", ".processor.to_k"): shape for key, shape in one.lora().items()}
    yield "processors", processor, {}
    yield "LoKr", one.lokr() | two.lokr(), {}
    yield "LoKr and LoRA", plain | two.lokr(), {}
    yield "OFT", {one.key("oft_blocks"): (2, one.outputs // 2, one.outputs // 2)}, {}
    scales = one.vector("dora_scale") | two.vector("dora_scale")
    magnitudes = one.vector("lora_magnitude_vector") | two.vector("lora_magnitude_vector")
    mark = {"simpletune_dora_scale": "m ||W|| / ||W + s B A||"}
    yield "DoRA", plain | scales, {}
    yield "DoRA for ComfyUI", plain | scales, mark
    yield "DoRA for diffusers", plain | magnitudes, {}
    yield "DoRA for both", plain | magnitudes | scales, mark
    yield "DoRA and LoRA", plain | one.vector("lora_magnitude_vector"), {}
    yield "DoRA and OFT", plain | one.vector("dora_scale") | {two.key("oft_blocks"): (2, 4, 4)}, {}
    for title, modules in TEXT.items():
        ends = ("lora_A", "lora_B") if "diffusers" in title else ("lora_down", "lora_up")
        more = {f"{module}.{end}.weight": (8, 8) for module in modules for end in ends}
        yield title, plain | more, {}
        yield f"{title} LoKr", plain | {f"{module}.lokr_w{n}": (2, 4) for module in modules for n in (1, 2)}, {}
        yield f"{title} alone", more, {}
    yield "embedding", {**plain, "bundle_emb.sks.clip_l": (1, 768)}, {}


def sentences(file: Path) -> Iterator[tuple[str, str]]:
    """Each tool's verdict on each file, and which file that is."""
    for names, layouts in LAYOUTS.items():
        comfy = next(each for each in layouts if each.name == "comfy")
        pairs = {each.name: (each, each) for each in layouts} | {"mixed": (layouts[0], comfy)}
        for title, pair in pairs.items():
            layers = zip(LAYERS[names.title].items(), pair, strict=True)
            parts = (Part(layer, layout, sides) for (layer, sides), layout in layers)
            for kind, shapes, metadata in files_of(*parts):
                if title == "mixed" and kind in TEXT or kind.endswith(" alone") and title != layouts[0].name:
                    continue  # as with one layout; no layer tells the family
                save_file({key: np.full(shape, 1 + len(key), "f2") for key, shape in shapes.items()}, file, metadata)
                damaged = kind == "ranks"
                for each in verdicts(LoraHeader(file), "it is odd" if damaged else None, damaged):
                    yield "; ".join([each.tool, each.loads, *each.notes]), f"{names.title}, {title}, {kind}"


def test_what_is_said_of_other_tools_is_what_was_said(tmp_path: Path) -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for sentence, case in sentences(tmp_path / "x.safetensors"):
        found[sentence].append(case)
    known = json.loads(Path(__file__).with_name("verdicts.json").read_text(encoding="utf-8"))
    assert sum(map(len, found.values())) > 2900
    assert {said: _short(cases) for said, cases in found.items()} == known


def _short(cases: list[str]) -> str:
    return f"{len(cases)} {hashlib.sha256(repr(sorted(cases)).encode()).hexdigest()[:6]}"


class MadeUpNames(LoraNames):
    """A family of a parallel block, which its original files fuse: q, k, v and the mlp."""

    title, denoiser, targets, short, header = "Made-up", "transformer", {}, {}, {}
    fused = Fused("blocks.0.all", [f"blocks.0.{leaf}" for leaf in ("to_q", "to_k", "to_v", "mlp")], (1, 1, 1, 4))

    def layers(self, module: str, layout: Layout) -> tuple[str, ...]:
        if layout.original:
            return tuple(self.fused.parts) if module == layout.spelt(self.fused.module) else ()
        return tuple(part for part in self.fused.parts if module == layout.spelt(part))

    def original(self, layer: str) -> tuple[str, Rows]:
        return self.fused.rows()[layer]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> tuple[Layout, Layout]:
    names = MadeUpNames()
    layouts = Layout("diffusers", "transformer.", names), Layout("comfy", "diffusion_model.", names, True, alpha=True)
    monkeypatch.setitem(LAYOUTS, names, layouts)
    return layouts


def test_a_family_without_verdicts_is_untested(made_up: tuple[Layout, Layout], tmp_path: Path) -> None:
    text = {f"text_encoder.{CLIP}q_proj.lora_A.weight": (2, 8), f"text_encoder.{CLIP}q_proj.lora_B.weight": (8, 2)}
    for layout in made_up:
        for more in ({}, text):
            shapes = Part("blocks.0.to_q", layout, (8, 28)).lora() | more
            save_file({key: np.ones(shape, "f4") for key, shape in shapes.items()}, tmp_path / "x.safetensors")
            header = LoraHeader(tmp_path / "x.safetensors")
            assert (header.family.model, header.layout) == ("Made-up", layout) and not header.unmatched
            said = [(each.tool, each.loads) for each in verdicts(header, None)]
            assert said == [*((tool, "untested") for tool in TOOLS), ("simpletune", "yes")]


def test_a_fused_layer_of_a_family_is_read_in_parts_and_written_whole(made_up, tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, comfy = made_up
    down, up = torch.randn(3, 8), torch.randn(28, 3)
    key = "diffusion_model.blocks.0.all."
    save_torch({f"{key}lora_A.weight": down, f"{key}lora_B.weight": up, f"{key}alpha": torch.tensor(6.0)},
                      tmp_path / "x.safetensors")  # fmt: skip
    parts = read_lora(tmp_path / "x.safetensors")
    assert {layer: update.shape for layer, update in parts.items()} == {
        f"blocks.0.{leaf}": (rows, 8) for leaf, rows in (("to_q", 4), ("to_k", 4), ("to_v", 4), ("mlp", 16))
    }
    whole = torch.cat([update.delta() for update in parts.values()])
    torch.testing.assert_close(whole, 2 * up @ down, rtol=1e-6, atol=1e-6)
    back = file_tensors(parts, comfy)
    assert torch.equal(back[f"{key}lora_B.weight"], up) and back[f"{key}alpha"] == 6
    del parts["blocks.0.to_k"]
    some = file_tensors(parts, comfy)
    alone = some[f"{key}lora_B.weight"] @ some[f"{key}lora_A.weight"] * some[f"{key}alpha"] / 9
    torch.testing.assert_close(alone, torch.cat([whole[:4], torch.zeros(4, 8), whole[8:]]), rtol=1e-6, atol=1e-5)
    save_torch({f"{key}lora_A.weight": down, f"{key}lora_B.weight": up[:24].clone()}, tmp_path / "y.safetensors")
    with pytest.raises(UserError, match="which do not match"):
        read_lora(tmp_path / "y.safetensors")


def test_the_family_that_tests_make_up_leaves_the_order_of_families() -> None:
    before = list(LAYOUTS)  # it decides which family a layer that several share is said to be of
    with registered():
        assert [names for names in LAYOUTS if names in before] == [names for names in before if names in LAYOUTS]
        assert list(LAYOUTS) != before
    assert list(LAYOUTS) == before


def test_every_fact_of_a_row_is_known_of_a_file_and_every_family_states_every_tool() -> None:
    assert set(FACTS) == set(Fact) - {Fact.DROPPED}  # which a row states
    for names in LAYOUTS:
        last = {tool: row for row in names.verdicts for tool in row.tools}
        assert last.keys() == set(TOOLS) and not any(row.layouts or row.facts for row in last.values())
