"""The text side: which combinations are refused and with what remedy, and where a token's words stand in a prompt."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_sd15
import torch
from transformers import CLIPTokenizer, T5TokenizerFast

from simpletune.adapters.text.inputs import PromptTokenizer
from simpletune.adapters.text.placeholders import expand, occurs, positions
from simpletune.adapters.text.text_option import Text, embedding_name
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.config.modulation import settle_modulation
from simpletune.config.resolve import resolve_folders
from simpletune.data.demo import SHIPPED
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.text.encoder import TextEncoder
from simpletune.models.text.prompts import Prompts
from simpletune.stages.plan_data import plan_data
from simpletune.stages.text_side import empty_text_side
from simpletune.system.options import ConfigError, UserError

VECTORS = {"token": "flat", "initial": "striped"}
INPUT = VECTORS | {"place": "input"}
NONE = {"adapter": {"method": "none"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing trains": (NONE, "adapter.method: none leaves the denoiser frozen.*Set text.embeddings or text.lora"),
    "a whole denoiser": (
        {"adapter": {"method": "full"}, "text": {"embeddings": VECTORS}},
        "text.embeddings: adapter.method full trains .* whole denoiser.*Use adapter.method lora",
    ),
    "a LoRA in the file of another method": (
        {"adapter": {"method": "lokr"}, "text": {"lora": {}}}, "text.lora: the file of adapter.method lokr .*Use",
    ),
    "T5": ({"text": {"lora": {"encoders": ["t5"]}}}, "text.lora.encoders: 't5' .*T5 is not trained.*Use clip_l"),
    "an encoder of another family": (
        {"text": {"lora": {"encoders": ["clip"]}}}, "text.lora.encoders: 'clip' is not a CLIP encoder of SD3",
    ),
    "a plan beside text encoders": (
        {"memory": {"modulation": "plan"}, "text": {"lora": {}}},
        "memory.modulation: plan .* text.lora changes the pooled prompt.*Use memory.modulation resident",
    ),
    "a plan beside inputs": (
        {"memory": {"modulation": "plan"}, "text": {"embeddings": INPUT}}, "memory.modulation: .*place input",
    ),
    "one learning rate for all": (
        {"optimizer": {"name": "prodigy"}, "text": {"embeddings": VECTORS}},
        "text.embeddings.learning_rate: .*prodigy computes one learning rate.*Use null",
    ),
    "the same of the LoRA": (
        {"optimizer": {"name": "prodigy"}, "text": {"lora": {}}}, "text.lora.learning_rate: .*Use null",
    ),
    "stopping the only thing that trains": (
        NONE | {"text": {"embeddings": VECTORS | {"stop_at": 0.5}}}, "text.embeddings.stop_at: 0.5.*nothing else",
    ),
    "stopping values that are not exported": (
        {"optimizer": {"name": "adamw_schedule_free"}, "text": {"embeddings": VECTORS | {"stop_at": 0.5}}},
        "text.embeddings.stop_at: .*average",
    ),
    "stopping part of one learning rate": (
        {"optimizer": {"name": "prodigy"}, "text": {"embeddings": VECTORS | {"stop_at": 0.5, "learning_rate": None}}},
        "text.embeddings.stop_at: .*one learning rate",
    ),
    "the norm of an average": (
        {"optimizer": {"name": "adamw_schedule_free"}, "text": {"embeddings": INPUT}},
        "text.embeddings.keep_norm: .*Use keep_norm false",
    ),
    "a class with the token": (
        {"prior": {"method": "base_prediction", "prompt": "a flat thing"}, "text": {"embeddings": VECTORS}},
        "prior.prompt: 'a flat thing' has the token flat",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_reason_and_remedy(name: str, tiny_config: dict) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        validate(copy.deepcopy(tiny_config) | copy.deepcopy(changes), "refused")


def test_what_is_allowed(tiny_config: dict) -> None:
    """The same with the remedy in place."""
    for changes in (
        {"text": {"embeddings": VECTORS}, "memory": {"modulation": "plan"}},
        {"text": {"embeddings": VECTORS | {"stop_at": 0.5}}},
        {"adapter": {"method": "lokr"}, "text": {"embeddings": INPUT}},
        {"adapter": {"method": "dora"}, "text": {"lora": {"encoders": ["clip_g"]}}},
        NONE | {"text": {"embeddings": INPUT, "lora": {}}},
        {"optimizer": {"name": "prodigy"}, "text": {"embeddings": INPUT | {"learning_rate": None}}},
        {"optimizer": {"name": "adamw_schedule_free"}, "text": {"embeddings": INPUT | {"keep_norm": False}}},
    ):
        assert validate(copy.deepcopy(tiny_config) | changes, "allowed").text.trains


def test_auto_keeps_the_modulation_where_the_pooled_prompt_trains(tiny_config: dict) -> None:
    kinds = ({"embeddings": VECTORS}, "plan"), ({"embeddings": INPUT}, "resident"), ({"lora": {}}, "resident")
    for text, kind in kinds:
        config = validate(copy.deepcopy(tiny_config) | {"text": text}, "auto")
        assert settle_modulation(config, on_host=False).memory.modulation == kind
        assert ("plans modulations" in explain(config.model_copy(update={"device": "auto"}))) == (kind == "plan")


TOKENIZERS = {
    "clip": lambda: CLIPTokenizer.from_pretrained(SHIPPED / "tokenizer"),
    "t5": lambda: T5TokenizerFast.from_pretrained(SHIPPED / "tokenizer_3"),
}
PROMPTS = ("a <dots>, red <dots> picture.", "<dots> red", "A Déjà 猫 (<dots>) x", "red<dots>red", "red", "")


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_rows_are_those_of_the_words(kind: str, prompt: str) -> None:
    """The words' own ids stand there, as often as the token does, and nothing else of the prompt changes."""
    tokenizer, words = TOKENIZERS[kind](), ["green", "striped"]
    own = tokenizer("green striped", add_special_tokens=False).input_ids
    ids = tokenizer(expand(prompt, "<dots>", words)).input_ids
    found = positions(tokenizer, prompt, "<dots>", words, 40)
    assert [[ids[row] for row in rows] for rows in found] == [own] * prompt.count("<dots>")
    places = {row for rows in found for row in rows}
    rest = [id for row, id in enumerate(ids) if row not in places]
    without = tokenizer(prompt.replace("<dots>", " ")).input_ids
    ours, theirs = (tokenizer.decode(each, skip_special_tokens=True).replace(" ", "") for each in (rest, without))
    assert ours == theirs


def test_truncated_rows_are_dropped() -> None:
    tokenizer = TOKENIZERS["clip"]()
    prompt = " ".join(["red"] * 4) + " <dots> red <dots>"
    assert positions(tokenizer, prompt, "<dots>", ["green", "green"], 9) == [[5, 6]]
    assert positions(tokenizer, prompt, "<dots>", ["green", "green"], 7) == [[5]]
    assert positions(tokenizer, prompt, "<dots>", ["green", "green"], 6) == []


def test_a_plain_word_is_no_part_of_longer_words() -> None:
    assert expand("dots, polkadots and dots2 dots", "dots", ["red"]) == "red, polkadots and dots2 red"
    assert occurs("a dots", "dots") and not occurs("polkadots", "dots") and occurs("a<dots>", "<dots>")


def test_words_are_used_in_turn() -> None:
    option = Text.model_validate({"embeddings": {"token": "<d>", "initial": "red big", "vectors": 3}}).embeddings
    assert option.words() == ["red", "big", "red"]
    names = [embedding_name("run", token) for token in ("<d>/../x", "<>")]
    assert names == ["run_d..x.safetensors", "run_token.safetensors"]


def test_a_word_of_several_tokens_is_refused() -> None:
    model = SD3(pretrained=str(SHIPPED), t5_length=8)
    text = Text.model_validate({"embeddings": {"token": "<d>", "initial": "red zwxq", "vectors": 2}})
    tokens = PromptTokenizer(text, model, Prompts(model.text, torch.float32))
    with pytest.raises(UserError, match="text.embeddings.initial: 'zwxq' is [234] tokens of CLIP .*Use a common word"):
        tokens.vectors  # noqa: B018


def test_a_token_that_no_caption_has_is_refused_and_one_that_some_lack_is_told(
    tiny_config: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = copy.deepcopy(tiny_config) | {"text": {"embeddings": VECTORS | {"token": "<dots>"}}}
    with pytest.raises(UserError, match="text.embeddings.token: no caption has <dots>.*data.prompt"):
        plan_data(resolve_folders(validate(data, "none")))
    data["data"]["prompt"] = "a photo of <dots>"
    plan_data(resolve_folders(validate(data, "all")))
    assert "warning" not in capsys.readouterr().out
    first = tiny_config["data"] | {"prompt": "a photo of <dots>"}
    data["data"] = {"sources": [first, tiny_config["data"]]}
    plan_data(resolve_folders(validate(data, "some")))
    assert "lack the token <dots>" in capsys.readouterr().out
    data["data"]["sources"][1]["regularization"] = True
    plan_data(resolve_folders(validate(data, "class")))
    assert "lack the token" not in capsys.readouterr().out


@pytest.mark.parametrize("family", ["sd3", "sd15"])
@pytest.mark.parametrize(
    "text",
    [
        {"embeddings": VECTORS | {"vectors": 3}},
        {"embeddings": INPUT},
        {"lora": {"rank": 3, "targets": "attention_and_mlp"}},
    ],
    ids=["output", "input", "lora"],
)
def test_the_parameters_are_counted_without_torch(family: str, text: dict, tiny_config: dict, tmp_path: Path) -> None:
    data = copy.deepcopy(tiny_config) | {"text": text} | NONE
    if family == "sd15":
        data["model"] = {"family": "sd15", "pretrained": str(tiny_sd15.build(tmp_path / "sd15"))}
        data["data"]["resolution"] = 64
    config = validate(data, "count")
    built = empty_text_side(config, torch.device("cpu"))
    built.attach_lora(0)
    assert config.text.trainable(config.model) == sum(p.numel() for p in built.parameters() if p.requires_grad)


def test_real_sizes() -> None:
    """6,144 numbers a vector in SD3; a LoRA of rank 1 has 73,728 numbers in CLIP-L and 327,680 in CLIP-G."""
    sd3, one = SD3(), {"token": "x", "initial": "y"}
    assert Text.model_validate({"embeddings": one}).trainable(sd3) == 768 + 1280 + 4096
    assert Text.model_validate({"embeddings": one | {"place": "input"}}).trainable(sd3) == 768 + 1280
    assert Text.model_validate({"lora": {"rank": 1}}).trainable(sd3) == 73_728 + 327_680
    mlp_too = {"rank": 1, "encoders": ["clip_l"], "targets": "attention_and_mlp"}
    assert Text.model_validate({"lora": mlp_too}).trainable(sd3) == 165_888
    assert Text.model_validate({"embeddings": one}).trainable(SD15()) == 768


def test_names_of_encoders_are_those_of_the_family() -> None:
    for model in (SD3(), SD15()):
        encoders: list[TextEncoder] = list(model.text.encoders)
        assert list(model.text.trainable) == [encoder.name for encoder in encoders if encoder.kind == "CLIP"]
        regions = {name: region.part for name, region in model.text.regions().items()}
        assert {e.name: e.model for e in encoders} == regions
