"""The text side in training: gradients against plain autograd, values that must not change, levers, and resuming."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file
from simulated import assert_same_bytes
from slow_cases import slow_but
from tiny_runs import TrainOnce, resumed_from
from tiny_runs import saved_weights as weights
from torch import Tensor, nn
from torch.func import functional_call
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from simpletune.adapters.files.read import read_lora
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.models.shared.conditioning import Conditioning, stack
from simpletune.runs.folder import read_metrics
from simpletune.stages.encode import prepare
from simpletune.stages.step.batch_loader import Batch, BatchLoader
from simpletune.stages.step.synthetic import SingleProcess
from simpletune.stages.step.train_step import TrainStep, assemble
from simpletune.stages.step.variant import restore_base
from simpletune.stages.text_cache import TextCache
from simpletune.stages.text_side import load_text_side
from simpletune.system.stage_timer import StageTimer
from simpletune.training.train import train
from simpletune.training.validation_images import Previews

CPU = torch.device("cpu")
VECTORS = {"token": "flat", "initial": "striped", "vectors": 2, "learning_rate": 0.01}
OUTPUT, INPUT = {"embeddings": VECTORS}, {"embeddings": VECTORS | {"place": "input"}}
LORA = {"lora": {"rank": 3, "alpha": 6, "targets": "attention_and_mlp", "learning_rate": 0.01}}
NONE = {"adapter": {"method": "none"}}
TEXTS: dict[str, dict[str, Any]] = {"output": OUTPUT, "input": INPUT, "lora": LORA, "all": INPUT | LORA}
FAMILIES = ("sd3", "sd15")


@pytest.fixture
def of_family(tiny_config: dict, unet_pipeline: Callable[..., Path]) -> Callable[[str], dict]:
    """``tiny_config`` for a family."""

    def config(family: str) -> dict:
        if family == "sd3":
            return tiny_config
        model = {"family": "sd15", "pretrained": str(unet_pipeline("sd15"))}
        return tiny_config | {"model": model, "data": tiny_config["data"] | {"resolution": 64}}

    return config


def data_of(tiny_config: dict, **sections: Any) -> dict[str, Any]:
    return copy.deepcopy(tiny_config) | copy.deepcopy(sections)


class Assembled:
    """A step core whose text side already differs from its first values, and the run's batches."""

    def __init__(self, config: TrainConfig, noise: float = 0.2):
        self.config = config
        self.prepared = prepare(config, Accelerator(cpu=True), StageTimer(cuda=False))
        model = config.model.load_denoiser(config.precision, CPU, 0)
        text = load_text_side(config, self.prepared.text, self.prepared.plan.captions(), CPU)
        self.core: TrainStep = assemble(config, model, SingleProcess(CPU), text=text)
        self.text = self.core.text
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in self.core.parameters:
                parameter.add_(torch.randn_like(parameter) * noise)
        self.batches = BatchLoader(self.prepared, config.train.seed, CPU, modulation=self.core.modulation)

    def reference(self, batch: Batch, embeds: Tensor, pooled: Tensor | None) -> Tensor:
        """The loss by the family's own prediction."""
        process = self.core.process
        z_t = process.noised(batch.z_0, batch.noise, batch.level)
        text = Conditioning(embeds, pooled=pooled)
        found = self.config.model.predict(self.core.model, z_t, process.time(batch.level), text, torch.float32)
        return (found - process.target(batch.z_0, batch.noise, batch.level)).square().mean()

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Those of the text side that the step core computes, and its loss."""
        loss = self.core.loss(self.core.model, batch)
        parameters = {n: p for n, p in self.text.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(loss, parameters.values(), allow_unused=True)
        return {"loss": loss.detach()} | {n: g for n, g in zip(parameters, found, strict=True) if g is not None}


def assembled(tiny_config: dict, text: dict, **sections: Any) -> Assembled:
    sections = NONE | {"train": {"steps": 1, "batch_size": 2}} | sections
    return Assembled(resolve_folders(validate(data_of(tiny_config, text=text, **sections), "test")))


def captions(run: Assembled) -> list[str]:
    return [draw.caption for draw in run.batches.passes.micro_batch(0, 0)]


def place_of(run: Assembled, name: str, rows: slice, caption: str) -> int:
    """The row of the token's first vector; CLIP's prompts begin with a token of their own."""
    written = caption.replace("flat", "striped striped").replace(",", " ,").replace(".", " .").split()
    return rows.start + written.index("striped") + (name != "t5")


def plainly_encoded(run: Assembled) -> Conditioning:
    """The batch's prompts with the words in place of the token, if it has embeddings, by the base's encoders."""
    written = captions(run)
    if run.config.text.embeddings is not None:
        written = [each.replace("flat", "striped striped") for each in written]
    plain = TextCache(run.config.model, torch.float32, Path(run.config.output.cache))
    plain.fill(written, CPU)
    return stack([plain.load(each) for each in written])


def columns(run: Assembled) -> dict[str, tuple[slice, slice]]:
    """Rows and columns of each encoder's output, written down by hand for the two tiny models."""
    clip = run.prepared.text.tokens.length(next(iter(run.prepared.text.tokens.encoders)))
    if run.config.model.family == "sd15":
        return {"clip": (slice(0, 77), slice(0, 32))}
    return {
        "clip_l": (slice(0, clip), slice(0, 16)),
        "clip_g": (slice(0, clip), slice(16, 32)),
        "t5": (slice(clip, clip + 8), slice(0, 32)),
    }


def require_gradients(run: Assembled, batch: Batch, loss: Tensor, leaves: dict[str, Tensor], *tolerance: float) -> None:
    """Those of the embeddings by another way, and the loss."""
    expected = torch.autograd.grad(loss, leaves.values())
    found = run.gradients(batch)
    torch.testing.assert_close(found["loss"], loss.detach(), rtol=tolerance[0], atol=0)
    for name, gradient in zip(leaves, expected, strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[f"embeddings.{name}"], gradient, rtol=tolerance[1], atol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_outputs_are_those_of_rows_put_in_by_hand(family: str, of_family: Callable) -> None:
    """Leaves in place of rows of the cached embeddings; the rows are found by counting the caption's words."""
    run = assembled(of_family(family), OUTPUT)
    (batch,) = run.batches.step(0)
    leaves = {n: v.detach().clone().requires_grad_() for n, v in run.text.embeddings.items()}
    embeds = batch.conditioning.embeds.clone()
    for name, (rows, wide) in columns(run).items():
        assert embeds[0, rows, wide].shape[1] == leaves[name].shape[1]
        for sample, caption in enumerate(captions(run)):
            for number, row in enumerate(range(place_of(run, name, rows, caption), rows.stop)[:2]):
                embeds[sample, row, wide] = leaves[name][number]
    assert (embeds != batch.conditioning.embeds).any()
    require_gradients(run, batch, run.reference(batch, embeds, batch.conditioning.pooled), leaves, 1e-6, 1e-4)


def plain_clip(run: Assembled, name: str, **changes: Any) -> CLIPTextModel:
    """A text encoder by transformers alone."""
    folder = Path(run.config.model.pretrained) / run.config.model.text.regions()[name].part
    kind = CLIPTextModel if run.config.model.family == "sd15" else CLIPTextModelWithProjection
    config = CLIPTextConfig.from_pretrained(folder, **changes)
    return kind.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def extended(clip: nn.Module, rows: Tensor, ids: Tensor, word: int) -> tuple[dict[str, Tensor], Tensor]:
    """A table with new rows at its end, and ids that name them where the word stands, in turn."""
    name = next(n for n, _ in clip.named_parameters() if n.endswith("token_embedding.weight"))
    table = dict(clip.named_parameters())[name].detach()
    new = ids.clone()
    for row in new:
        places = (row == word).nonzero().flatten()
        row[places] = len(table) + torch.arange(len(places)) % len(rows)
    return {name: torch.cat([table, rows])}, new


def outputs_of(run: Assembled, found: dict[str, Any], batch: Batch) -> tuple[Tensor, Tensor | None]:
    """A prompt's embeddings of the outputs of transformers' encoders: SD3's by hand, SD 1.5's last hidden state."""
    if run.config.model.family == "sd15":
        return found["clip"].last_hidden_state, None
    clip = torch.cat([found[n].hidden_states[-2] for n in ("clip_l", "clip_g")], dim=-1)
    embeds = batch.conditioning.embeds.clone()
    embeds[:, : clip.shape[1], : clip.shape[2]] = clip
    return embeds, torch.cat([found[n].text_embeds for n in ("clip_l", "clip_g")], dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_inputs_are_those_of_an_extended_table(family: str, of_family: Callable) -> None:
    run = assembled(of_family(family), INPUT)
    (batch,) = run.batches.step(0)
    leaves = {n: v.detach().clone().requires_grad_() for n, v in run.text.embeddings.items()}
    found = {}
    for name, rows in leaves.items():
        clip, ids = plain_clip(run, name), batch.text.ids[name]
        word = run.prepared.text.tokens.word_ids(name)[0]
        assert (ids == word).sum() >= 2
        table, new = extended(clip, rows, ids, word)
        found[name] = functional_call(clip, table, (new,), {"output_hidden_states": True})
    require_gradients(run, batch, run.reference(batch, *outputs_of(run, found, batch)), leaves, 1e-5, 1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_lora_are_those_of_merged_weights(family: str, of_family: Callable) -> None:
    """W + s B A in transformers' own encoders, for every projection and both layers of the feed-forward."""
    run = assembled(of_family(family), LORA)
    (batch,) = run.batches.step(0)
    factors = {n: p.detach().clone().requires_grad_() for n, p in run.text.named_parameters() if p.requires_grad}
    found = {}
    for name in run.text.encoders:
        clip = plain_clip(run, name)
        weights = dict(clip.named_parameters())
        changed = {}
        for key, down in factors.items():
            if key.startswith(f"encoders.{name}.") and ".lora_A." in key:
                up = factors[key.replace(".lora_A.", ".lora_B.")]
                module = key.removeprefix(f"encoders.{name}.").partition(".lora_A.")[0]
                changed[f"{module}.weight"] = weights[f"{module}.weight"].detach() + 2.0 * up @ down
        assert len(changed) == 6 * clip.config.num_hidden_layers
        found[name] = functional_call(clip, changed, (batch.text.ids[name],), {"output_hidden_states": True})
    loss = run.reference(batch, *outputs_of(run, found, batch))
    expected = torch.autograd.grad(loss, factors.values(), allow_unused=True)
    ours = run.gradients(batch)
    torch.testing.assert_close(ours["loss"], loss.detach(), rtol=1e-5, atol=0)
    compared = 0
    for name, gradient in zip(factors, expected, strict=True):
        if gradient is not None and gradient.abs().max() > 0:
            torch.testing.assert_close(ours[name], gradient, rtol=1e-2, atol=1e-3 * float(gradient.abs().max()))
            compared += 1
    assert compared > len(factors) // 2


def test_the_pooled_embedding_stays_at_the_end_of_the_text(tiny_config: dict) -> None:
    """Encoders whose end of text is said to be id 2 pool at the largest id, which a row past the end of the table would
    have moved. Ours keep the ids of the words: the same as overwriting a word's own row."""
    run = assembled(tiny_config, INPUT | {"embeddings": VECTORS | {"place": "input", "vectors": 1}})
    (batch,) = run.batches.step(0)
    clip = plain_clip(run, "clip_l", eos_token_id=2)
    run.text.encoders["clip_l"].config.eos_token_id = 2
    for module in run.text.encoders["clip_l"].modules():
        if hasattr(module, "eos_token_id"):
            module.eos_token_id = 2
    word, ids = run.prepared.text.tokens.word_ids("clip_l")[0], batch.text.ids["clip_l"]
    pooled = run.text(batch.conditioning, batch.text).pooled
    with torch.no_grad():
        clip.get_input_embeddings().weight[word] = run.text.embeddings["clip_l"][0]
        theirs = clip(ids)
        table, new = extended(clip, run.text.embeddings["clip_l"], ids, word)
        moved = functional_call(clip, table, (new,))
    first, width = run.text.regions["clip_l"].pooled
    ours = pooled[:, first : first + width]
    torch.testing.assert_close(ours, theirs.text_embeds)
    assert not torch.allclose(ours, moved.text_embeds)


@pytest.mark.parametrize(
    ("name", "family"), slow_but([("input", "sd3"), ("all", "sd15")], product(("input", "all"), FAMILIES))
)
def test_before_the_first_update_it_is_the_base_with_the_words(name: str, family: str, of_family: Callable) -> None:
    run = assembled(of_family(family), TEXTS[name])
    with torch.no_grad():  # as they begin
        fresh = load_text_side(run.config, run.prepared.text, [], CPU)
        fresh.attach_lora(0)
        run.text.load_state_dict(fresh.state_dict())
        (batch,) = run.batches.step(0)
        found = run.text(batch.conditioning, batch.text)
    torch.testing.assert_close(found.tensors(), plainly_encoded(run).tensors(), rtol=1e-4, atol=1e-5)


def test_output_vectors_start_from_the_mean_row(tiny_config: dict) -> None:
    run = assembled(tiny_config, OUTPUT)
    start = load_text_side(run.config, run.prepared.text, run.prepared.plan.captions(), CPU)
    for name, (rows, wide) in columns(run).items():
        found: list[list[Tensor]] = [[], []]
        for caption in run.prepared.plan.captions():
            for number, row in enumerate(range(place_of(run, name, rows, caption), rows.stop)[:2]):
                found[number].append(run.prepared.text.load(caption).embeds[row, wide])
        for number, own in enumerate(found):
            torch.testing.assert_close(start.embeddings[name][number].detach(), torch.stack(own).mean(0))


@pytest.mark.parametrize("name", ["output", "all"])
def test_disabled_it_is_the_base(name: str, tiny_config: dict) -> None:
    """What the adapter's, too: drift, base pictures and prior preservation see the base with the words."""
    run = assembled(tiny_config, TEXTS[name], adapter={"method": "lora", "rank": 2})
    (batch,) = run.batches.step(0)
    with torch.no_grad():
        changed = run.core.variant.predict(run.core.model, batch)
        with restore_base(run.config.adapter, run.core.model):
            ours = run.core.variant.predict(run.core.model, batch)
        again = run.core.variant.predict(run.core.model, batch)
        model = run.config.model.load_denoiser(run.config.precision, CPU, 0)
        z_t = run.core.process.noised(batch.z_0, batch.noise, batch.level)
        time = run.core.process.time(batch.level)
        theirs = run.config.model.predict(model, z_t, time, plainly_encoded(run), torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(changed, theirs, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(again, changed, rtol=0, atol=0)


def test_each_part_has_its_learning_rate(tiny_config: dict) -> None:
    """Adam's first step moves every number by the learning rate."""
    text = {"embeddings": VECTORS | {"learning_rate": 3e-3}, "lora": LORA["lora"] | {"learning_rate": 7e-4}}
    rates = {"text.embeddings.": 3e-3, "text.encoders.": 7e-4, "transformer_blocks": 1e-2}
    run = assembled(tiny_config, text, adapter={"method": "lora", "rank": 2}, train={"steps": 1, "clip_norm": None})
    named = {n: p for n, p in run.core.model.named_parameters() if p.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    run.core.step(run.batches.step(0))
    seen = set()
    for name, parameter in named.items():
        moved = (parameter.detach() - before[name]).abs().max().item()
        start = next(start for start in rates if name.startswith(start))
        if moved:
            assert moved == pytest.approx(rates[start], rel=1e-2), name
            seen.add(start)
    assert seen == set(rates)


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


@pytest.mark.parametrize("family", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow)])
def test_input_vectors_keep_the_norm_of_the_table(family: str, of_family: Callable) -> None:
    data = data_of(of_family(family), text=INPUT, train={"steps": 2}, **NONE)
    kept = weights(train(validate(data, "kept")), 2)
    data["text"]["embeddings"]["keep_norm"] = False
    free = weights(train(validate(data | {"name": "free"}, "free")), 2)
    run = assembled(of_family(family), INPUT)
    for name in run.text.encoders:
        table = plain_clip(run, name).get_input_embeddings().weight
        median = table.detach().norm(dim=1).median()
        torch.testing.assert_close(kept[f"text.embeddings.{name}"].norm(dim=1), median.expand(2), rtol=1e-5, atol=0)
        assert ((free[f"text.embeddings.{name}"].norm(dim=1) - median).abs() > 1e-3 * median).any()


@pytest.mark.parametrize("place", [pytest.param("output", marks=pytest.mark.slow), "input"])
def test_stopped_embeddings_stay_to_the_bit_and_resume_so(place: str, tiny_config: dict) -> None:
    """From half of the run on, in the middle of which a resumed run goes on."""
    vectors = VECTORS | {"place": place, "stop_at": 0.5}
    data = data_of(tiny_config, text={"embeddings": vectors}, checkpoint={"every": 1, "keep_last": "all"})
    data["optimizer"] = {"lr": 0.01, "weight_decay": 0.1}
    whole = train(validate(data | {"name": "whole"}, "whole"))
    steps = [weights(whole, step) for step in (1, 2, 3, 4)]
    for name in steps[0]:
        first, second, third, last = (step[name] for step in steps)
        if name.startswith("transformer_blocks") and (first == last).all():
            continue  # the last block's queries of the text have no effect
        moved = [(a != b).any().item() for a, b in ((first, second), (second, third), (third, last))]
        assert moved == ([True, False, False] if "embeddings" in name else [True] * 3), name
    for step in (1, 3):
        torch.testing.assert_close(weights(resumed_from(whole, data, step), 4), steps[3], rtol=0, atol=0)


LEVERS: dict[str, dict[str, Any]] = {
    "checkpointing": {"memory": {"checkpointing": "all"}},
    "streaming": {"memory": {"checkpointing": "all", "resident_blocks": 0}},
    "boundaries": {"memory": {"checkpointing": "all", "offload_checkpoint_inputs": True}},
    "plan": {"memory": {"checkpointing": "none", "modulation": "plan", "modulation_window": 3}},
}
COMBINED: dict[str, dict[str, Any]] = {
    "in-backward": {
        "memory": {"optimizer_in_backward": True}, "train": {"steps": 2, "batch_size": 2, "clip": "per_parameter"},
    },
    "fp16": {"precision": {"weights": "int8", "compute": "fp16"}, "memory": {"checkpointing": "all"}},
    "bf16": {"precision": {"weights": "bf16"}, "memory": {"checkpointing": "all"}},
    "autocast": {"precision": {"weights": "fp32", "compute": "bf16"}},
    "accumulation": {"train": {"steps": 2, "batch_size": 1, "gradient_accumulation": 2}, "ema": {"decay": 0.5}},
    "skip": {"train": {"steps": 2, "on_nonfinite": "skip"}, "optimizer": {"name": "adamw8bit", "lr": 0.01}},
    "prior": {"prior": {"method": "base_prediction", "prompt": "a picture", "trigger": "flat"}},
    "captions": {"data": {"variants": 2, "caption_dropout": 0.4, "shuffle_tags": True}},
}  # fmt: skip


def spread(pairs: list[tuple[str, ...]], fast: list[tuple[str, ...]]) -> list[Any]:
    """All pairs, of which only a few are fast."""
    assert set(fast) <= set(pairs)
    return [pytest.param(*each, marks=() if each in fast else pytest.mark.slow) for each in pairs]


def allowed(text: str, lever: str) -> bool:
    return lever != "plan" or text == "output"


LEVERED = [(text, lever) for text in TEXTS for lever in LEVERS if allowed(text, lever)]


@pytest.mark.parametrize(("text", "lever"), spread(LEVERED, [("output", "plan"), ("all", "streaming")]))
def test_levers_change_nothing(text: str, lever: str, tiny_config: dict, train_once: TrainOnce) -> None:
    data = data_of(tiny_config, text=TEXTS[text], train={"steps": 2, "batch_size": 2}, **NONE)
    expected = losses(train_once(data | {"name": "plain"}))
    assert len(set(expected)) == 2
    found = losses(train(validate(data | {"name": "lever"} | copy.deepcopy(LEVERS[lever]), "test")))
    assert found == pytest.approx(expected, rel=1e-5, abs=0) if lever == "plan" else found == expected


TOGETHER = [(text, lever) for text in ("output", "all") for lever in COMBINED]


@pytest.mark.parametrize(("text", "lever"), spread(TOGETHER, [("all", "in-backward"), ("output", "fp16")]))
def test_with_a_lora_every_combination_trains_and_resumes_to_the_bit(text: str, lever: str, tiny_config: dict) -> None:
    more = copy.deepcopy(COMBINED[lever])
    source = tiny_config["data"] | more.pop("data", {})
    sections = {"train": {"steps": 2}} | more | {"checkpoint": {"every": 1}}
    data = data_of(tiny_config, text=TEXTS[text], **sections) | {"data": source}
    whole = train(validate(data | {"name": "whole"}, "whole"))
    last = weights(whole, 2)
    assert all(tensor.isfinite().all() for tensor in last.values())
    assert any((weights(whole, 1)[name] != tensor).any() for name, tensor in last.items() if "text." in name)
    torch.testing.assert_close(weights(resumed_from(whole, data, 1), 2), last, rtol=0, atol=0)


PREDICTED = [
    (text, "sd3", lever) for text in TEXTS for lever in ("none", "plan", "in-backward", "bf16") if allowed(text, lever)
]
PREDICTED += [(text, "sd15", "none") for text in TEXTS]


@pytest.mark.parametrize(("text", "family", "lever"), spread(PREDICTED, [("output", "sd3", "plan")]))
def test_real_and_fake_tensors_take_the_same_bytes(text: str, family: str, lever: str, of_family: Callable) -> None:
    sections = copy.deepcopy({**LEVERS, **COMBINED, "none": {}}[lever])
    assert_same_bytes(validate(data_of(of_family(family), text=TEXTS[text], **sections), "case"))


def test_pictures_are_drawn_with_the_trained_text(tiny_config: dict, tmp_path: Path) -> None:
    for text in (OUTPUT, INPUT | LORA):
        run = assembled(tiny_config, text)
        previews = Previews(run.config, [], run.prepared.text, tmp_path, run.core)
        (batch,), caption = run.batches.step(0), captions(run)[0]
        drawn = previews.load(caption)
        with torch.no_grad():
            found = run.text(batch.conditioning, batch.text).map(lambda tensor: tensor[0])
        torch.testing.assert_close(drawn.tensors(), found.tensors(), rtol=1e-4, atol=1e-5)
        with restore_base(run.config.adapter, run.core.model):
            assert (previews.load(caption).embeds != drawn.embeds).any()


def test_the_result_has_what_was_trained(tiny_config: dict) -> None:
    """Embeddings in a file of their own, beside the LoRA with the text encoders' updates, scaled."""
    run = train(validate(data_of(tiny_config, text=INPUT | LORA), "files"))
    last, vectors = weights(run, 4), load_file(run / "tiny_flat.safetensors")
    assert set(vectors) == {"clip_l", "clip_g", "t5xxl"}
    for name in ("clip_l", "clip_g"):
        torch.testing.assert_close(vectors[name], last[f"text.embeddings.{name}"], rtol=0, atol=0)
    t5 = load_file(next((Path(tiny_config["model"]["pretrained"]) / "text_encoder_3").glob("*.safetensors")))
    table = next(tensor for name, tensor in t5.items() if name.endswith(("shared.weight", "embed_tokens.weight")))
    assert len(vectors["t5xxl"]) == 2 and (vectors["t5xxl"][0] == table).all(1).any()
    lora = load_file(run / "pytorch_lora_weights.safetensors")
    for part, name in (("text_encoder", "clip_l"), ("text_encoder_2", "clip_g")):
        keys = [key for key in lora if key.startswith(f"{part}.")]
        assert len(keys) == 2 * 6 * len({key.split(".layers.")[1].split(".")[0] for key in keys})
        for key in keys:
            inner = key.removeprefix(f"{part}.text_model.").replace(".weight", ".default.weight")
            own = next(t for n, t in last.items() if n.startswith(f"text.encoders.{name}.") and n.endswith(inner))
            torch.testing.assert_close(lora[key], 2 * own if ".lora_B." in key else own, rtol=0, atol=0)
    assert any(key.startswith("transformer.") for key in lora)
    card = (run / "README.md").read_text()
    assert "write `embedding:tiny_flat` for `flat`" in card and "LoRA of rank 3" in card


def test_a_file_of_several_ranks_says_those_of_the_text_encoders_too(tiny_config: dict) -> None:
    """diffusers takes no rank from the tensors if the header has any."""
    layers = [{"pattern": "to_q", "rank": 3}]
    data = data_of(tiny_config, text=LORA) | {"adapter": {"method": "lora", "rank": 2, "layers": layers}}
    file = train(validate(data | {"train": {"steps": 1}}, "ranks")) / "pytorch_lora_weights.safetensors"
    state, settings = StableDiffusion3Pipeline.lora_state_dict(
        str(file.parent), weight_name=file.name, return_lora_metadata=True
    )
    for part in ("transformer", "text_encoder", "text_encoder_2"):
        own = {key.removeprefix(f"{part}."): value for key, value in settings.items() if key.startswith(f"{part}.")}
        downs = {key: t for key, t in state.items() if key.startswith(f"{part}.") and ".lora_A." in key}
        assert {f"{part}.{layer}.lora_A.weight" for layer in own["target_modules"]} == set(downs)
        ranks = {"r", "lora_alpha", "target_modules"} | ({"rank_pattern", "alpha_pattern"} if own["r"] == 2 else set())
        assert set(own) == ranks and all(len(t) == own["r"] or "to_q" in key for key, t in downs.items())
    assert {update.scale for update in read_lora(file).values()} == {1.0}


def test_the_text_stage_skips_encoders_that_run_in_every_step(tiny_config: dict, tmp_path: Path) -> None:
    encoded = {"output": {"clip_l", "clip_g", "t5"}, "input": {"t5"}, "lora": {"t5"}, "one": {"clip_l", "t5"}}
    for name, expected in encoded.items():
        text = TEXTS.get(name, {"lora": {"encoders": ["clip_g"]}})
        config = resolve_folders(validate(data_of(tiny_config, text=text), "stages"))
        cache = TextCache(config.model, torch.float32, tmp_path / name, config.text)
        cache.fill(["a flat picture", "flat " * 40], CPU)
        (folder,) = (tmp_path / name / "prompts").iterdir()
        assert {each.partition("-")[0] for each in folder.name.split("+")} == expected
        assert cache.lacking(["a flat picture"]) == set() and cache.truncated_prompts(["flat " * 40]) == ["flat " * 40]
