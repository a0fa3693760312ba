"""T5 layer by layer: the whole encoder's results, with one layer at a time in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import original_layout
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5EncoderModel
from transformers.models.t5.modeling_t5 import T5Block

from simpletune.models.sd3.sd3_files import LAYOUT
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_text import SD3Text
from simpletune.models.shared.parts import Part
from simpletune.models.text import layered
from simpletune.models.text.encoder import Tokens
from simpletune.models.text.layered_t5 import LayeredT5
from simpletune.models.text.prompts import Prompts
from simpletune.system.options import UserError

CPU = torch.device("cpu")
CONFIG = {"vocab_size": 50, "d_model": 48, "d_kv": 16, "d_ff": 80, "num_layers": 4, "num_heads": 3,
          "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8,
          "relative_attention_max_distance": 12}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 of four layers in bf16, in at least three shards."""
    torch.manual_seed(1)
    model = T5EncoderModel(T5Config(**CONFIG)).bfloat16()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))  # norms of one would hide a norm that is not loaded
    out = tmp_path_factory.mktemp("t5") / "text_encoder_3"
    model.save_pretrained(out, max_shard_size="60KB")
    assert len(list(out.glob("*.safetensors"))) >= 3
    return out


def single_file(folder: Path, file: Path) -> Part:
    """The same weights inside a file in the original layout, with the embeddings under both of their names."""
    state = {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    state["encoder.embed_tokens.weight"] = state["shared.weight"].clone()
    save_file({original_layout.T5 + name: tensor for name, tensor in state.items()}, file)
    return Part("text_encoder_3", folder, file, LAYOUT)


def token_ids(n: int = 5) -> torch.Tensor:
    return torch.randint(0, CONFIG["vocab_size"], (n, 20), generator=torch.Generator().manual_seed(2))


def rows_of(t5: LayeredT5, batch_size: int) -> list[torch.Tensor]:
    return [output["hidden"] for output in t5.encode(Tokens(token_ids()), batch_size)]


def whole(folder: Path, ids: torch.Tensor, dtype: torch.dtype, batch_size: int) -> torch.Tensor:
    """transformers' own encoder over the same batches."""
    model = T5EncoderModel.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return torch.cat([model(batch)[0] for batch in ids.split(batch_size)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["shards", "single file"])
def test_results_are_the_whole_encoders_bit_for_bit(
    layout: str, dtype: torch.dtype, folder: Path, tmp_path: Path
) -> None:
    part = Part("text_encoder_3", folder)
    if layout == "single file":
        part = single_file(folder, tmp_path / "sd3.safetensors")
    rows = rows_of(LayeredT5(part, dtype, CPU), 2)
    assert rows[0].shape == (20, 48) and rows[0].dtype == dtype
    torch.testing.assert_close(torch.stack(rows), whole(folder, token_ids(), dtype, 2), rtol=0, atol=0)


def test_one_layer_at_a_time_has_weights_and_each_is_loaded_once_a_chunk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks of two and three prompts at most: every layer is loaded twice, and never beside another."""
    loads, alive = [], []
    t5 = LayeredT5(Part("text_encoder_3", folder), torch.float32, CPU)
    forward, load = T5Block.forward, T5Block.load_state_dict

    def count_loads(self: T5Block, *rest: object, **options: object) -> object:
        loads.append(self)
        return load(self, *rest, **options)

    def watch(self: T5Block, *rest: object, **options: object) -> object:
        present = [name for name, parameter in t5.model.named_parameters() if not parameter.is_meta]
        alive.append({name.rpartition(".layer.")[0] for name in present})
        return forward(self, *rest, **options)

    monkeypatch.setattr(T5Block, "load_state_dict", count_loads)
    monkeypatch.setattr(T5Block, "forward", watch)
    monkeypatch.setattr(layered, "CHUNK_BYTES", 3 * 20 * 48 * 4)
    rows = torch.stack(rows_of(t5, 3))
    blocks = list(t5.model.encoder.block)
    assert loads == [*blocks, *blocks]
    assert alive == [{f"encoder.block.{number}"} for number in range(4)] * 2
    assert all(parameter.is_meta for parameter in t5.model.parameters())
    torch.testing.assert_close(rows, whole(folder, token_ids(), torch.float32, 3), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_layers": 5}, "missing: encoder.block.4.layer.0.SelfAttention.k.weight"),
        ({"num_layers": 3}, "unexpected: encoder.block.3.layer.0.SelfAttention.k.weight"),
        ({"d_ff": 81}, "wrong shape: encoder.block.0.layer.1.DenseReluDense.wi_0.weight"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(change: dict, said: str, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "text_encoder_3"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=said):
        LayeredT5(Part("text_encoder_3", copy), torch.float32, CPU)


def test_a_t5_with_its_decoder_serves(folder: Path, tmp_path: Path) -> None:
    """google/t5-v1_1-xxl, say: what is not the encoder's is left."""
    copy = tmp_path / "text_encoder_3"
    shutil.copytree(folder, copy)
    for shard in sorted(copy.glob("*.safetensors"))[:1]:
        state = load_file(shard) | {"decoder.final_layer_norm.weight": torch.ones(48), "lm_head.weight": torch.ones(2)}
        save_file(state, shard, {"format": "pt"})
    rows = rows_of(LayeredT5(Part("text_encoder_3", copy), torch.float32, CPU), 8)
    torch.testing.assert_close(torch.stack(rows), whole(folder, token_ids(), torch.float32, 8), rtol=0, atol=0)


def test_fp8_is_widened_exactly(folder: Path, tmp_path: Path) -> None:
    part = single_file(folder, tmp_path / "sd3_fp8.safetensors")
    state = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(part.file).items()}
    save_file(state, part.file)
    wide = tmp_path / "text_encoder_3"
    wide.mkdir()
    shutil.copy(folder / "config.json", wide)
    names = {name.removeprefix(original_layout.T5): tensor.float() for name, tensor in state.items()}
    save_file(names, wide / "model.safetensors", {"format": "pt"})
    rows = [rows_of(LayeredT5(p, torch.float32, CPU), 8) for p in (part, Part("text_encoder_3", wide))]
    torch.testing.assert_close(torch.stack(rows[0]), torch.stack(rows[1]), rtol=0, atol=0)


def test_a_prompts_embeddings_do_not_depend_on_what_is_encoded_with_it(tiny_pipeline: Path) -> None:
    prompts = Prompts(SD3(pretrained=str(tiny_pipeline), t5_length=8).text, torch.float32)
    texts = [f"a red disc, number {number}" for number in range(3)]
    for encoder in prompts.encoders:
        together = list(prompts.encode(encoder, texts, CPU))
        alone = [next(iter(prompts.encode(encoder, [text], CPU))) for text in texts]
        for first, second in zip(together, alone, strict=True):
            assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("t5", [False, True])
def test_a_prompts_embeddings_by_hand(t5: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CLIP-L and CLIP-G side by side, then zeros up to T5's width; T5's tokens behind them."""
    parts = {
        "clip_l": {"hidden": torch.full((2, 1), 1.0), "pooled": torch.full((1,), 4.0)},
        "clip_g": {"hidden": torch.full((2, 2), 2.0), "pooled": torch.full((2,), 5.0)},
        "t5": {"hidden": torch.full((3, 5), 3.0)},
    }
    text = SD3Text(SD3(t5=t5, t5_length=3))
    monkeypatch.setattr(SD3Text, "width", 5)
    found = text.assemble(parts)
    assert found.embeds.tolist() == [[1, 2, 2, 0, 0]] * 2 + [[3.0 * t5] * 5] * 3
    assert found.pooled.tolist() == [4, 5, 5]
