"""A decoder-only text encoder run layer by layer: Qwen3's class with random weights, tapped at hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from simpletune.models.shared.parts import Part
from simpletune.models.text.encoder import Tokens
from simpletune.models.text.layered_qwen3 import LayeredQwen3

CPU = torch.device("cpu")
CONFIG = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = (7, 3, 5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen3Model, Path]:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).eval()  # type: ignore[arg-type]
    folder = tmp_path_factory.mktemp("qwen3") / "text_encoder"
    model.save_pretrained(folder)
    return model.model, folder


def tokens() -> Tokens:
    """Three prompts, padded behind."""
    ids = torch.randint(0, 60, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    return Tokens(ids, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None])


@pytest.mark.parametrize("taps", [(), (2, 3), (4,)], ids=str)
def test_hidden_states_are_the_whole_models_bit_for_bit(taps: tuple[int, ...], whole: tuple[Qwen3Model, Path]) -> None:
    """Each prompt alone, as it is encoded: neither its length nor its bits depend on the others."""
    model, folder = whole
    opened = LayeredQwen3(Part("text_encoder", folder), torch.float32, CPU, taps=taps)
    ids, mask, _ = tokens()
    assert mask is not None
    for output, row, own in zip(opened.encode(Tokens(ids, mask)), ids, mask, strict=True):
        with torch.no_grad():
            found = model(row[own][None], output_hidden_states=True)
            ours = model.norm(output["hidden"]) if taps == (4,) else output["hidden"]  # it returns no state before it
        between = bool(taps) and max(taps) < 4
        wanted = torch.cat([found.hidden_states[tap] for tap in taps], -1) if between else found.last_hidden_state
        assert torch.equal(ours, wanted[0])
        assert len(output["hidden"]) == int(own.sum())


def test_prompts_of_different_lengths_pass_a_layer_together(whole: tuple[Qwen3Model, Path]) -> None:
    """The mask then hides the padding: the same but for the last bits."""
    _, folder = whole
    opened = LayeredQwen3(Part("text_encoder", folder), torch.float32, CPU)
    alone, together = list(opened.encode(tokens())), list(opened.encode(tokens(), batch_size=3))
    for one, both in zip(alone, together, strict=True):
        torch.testing.assert_close(both["hidden"], one["hidden"], rtol=1e-5, atol=1e-5)
    assert not torch.equal(alone[0]["hidden"][:3], alone[1]["hidden"])


def test_a_layer_after_the_last_tap_is_never_loaded(
    whole: tuple[Qwen3Model, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = LayeredQwen3(Part("text_encoder", whole[1]), torch.float32, CPU, taps=(1, 2))
    read: list[str] = []
    get = opened.tensors.get
    monkeypatch.setattr(opened.tensors, "get", lambda name: read.append(name) or get(name))
    assert next(iter(opened.encode(tokens())))["hidden"].shape == (7, 64)
    assert {name.split(".")[2] for name in read if name.startswith("model.layers.")} == {"0", "1"}
    assert "model.norm.weight" not in read
