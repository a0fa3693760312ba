"""The Hub on New run: its token is kept by the Hub's library and shown nowhere; what it allows; paused downloads."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import fake_hub
import huggingface_hub
import pytest
from fake_hub import TOKEN, Failure, FakeHub
from huggingface_hub import constants
from PIL import Image
from serving import until
from web_pages import open_pages

from simpletune.apps.web import processes, queue, start
from simpletune.apps.web.form import presets
from simpletune.apps.web.roots import make_roots
from simpletune.commands.init.init_command import ask_for_token
from simpletune.models.sd3.sd3_files import SD3_MEDIUM
from simpletune.system import hub_account
from simpletune.system.gpus import find_card
from simpletune.system.options import UserError

NAME = "owner/tiny-sd3"
HX = {"hx-request": "true"}
FORM = {"sure": "yes"}


@pytest.fixture
def hub(tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the tiny pipeline, for this process and for children; no token, an empty cache."""
    with fake_hub.serve(tiny_pipeline) as hub:
        hub.name = NAME
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/" + fake_hub.COMMIT + "/{filename}"
        )
        for name, place in (("HF_HUB_CACHE", "hf"), ("HF_TOKEN_PATH", "token"), ("HF_STORED_TOKENS_PATH", "tokens")):
            monkeypatch.setattr(constants, name, str(tmp_path / "home" / place))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "home" / "hf"))
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setattr(hub_account, "KEPT", 0.0)  # ask each time
        hub_account._asked.clear()
        yield hub
        hub_account._asked.clear()


def words(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def test_a_token_is_kept_by_the_hubs_library_and_shown_nowhere(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    pages = open_pages(tmp_path)
    answers = [pages.post("/hub/token", data={"token": f"  {TOKEN}\n"}, headers=HX)]
    assert answers[0].headers["hx-trigger"] == "account" and "knows this token as tester" in answers[0].text
    assert huggingface_hub.get_token() == TOKEN and hub_account.token_source() == "stored"
    answers += [pages.get(address) for address in ("/start", f"/hub?model={NAME}")]
    answers.append(pages.post("/hub/token/delete", data=FORM, headers=HX))
    assert huggingface_hub.get_token() is None and "was deleted" in answers[-1].text
    assert not any(TOKEN in answer.text for answer in answers) and all(answer.status_code == 200 for answer in answers)
    shown = capsys.readouterr()
    assert TOKEN not in shown.out + shown.err + caplog.text
    kept = [file for file in tmp_path.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]
    assert kept == []


@pytest.mark.parametrize(
    ("token", "failure", "said"),
    [
        ("hf_WrongOfTheTest", None, "does not accept this token (401): it is mistyped, expired or revoked"),
        ("no token", None, "is not a token of the Hub: one begins with hf_"),
        ("hf_" + "x" * 5000, None, "is not a token of the Hub"),
        (TOKEN, Failure(500), "gave no answer about the token (status 500)"),
        (TOKEN, Failure("close"), "cannot be reached"),
    ],
)
def test_a_token_that_is_not_accepted_is_not_kept(
    token: str, failure: Failure | None, said: str, hub: FakeHub, tmp_path: Path
) -> None:
    hub.failure = failure
    answer = open_pages(tmp_path).post("/hub/token", data={"token": token}, headers=HX)
    assert answer.status_code == 422 and said in words(answer.text) and token not in answer.text
    assert huggingface_hub.get_token() is None


def test_a_token_from_the_environment_is_not_deleted(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    answer = open_pages(tmp_path).post("/hub/token/delete", data=FORM, headers=HX)
    assert answer.status_code == 422 and "comes from HF_TOKEN" in answer.text and TOKEN not in answer.text


@pytest.mark.parametrize(
    ("failure", "with_token", "state", "said"),
    [
        (None, False, "ready", "may be downloaded"),
        (Failure(401, "GatedRepo", on="resolve"), False, "no token", "needs a token of the Hub"),
        (Failure(401, "GatedRepo", on="resolve"), True, "refused", "mistyped, expired or revoked"),
        (Failure(401, on="resolve"), True, "refused", "mistyped, expired or revoked"),
        (Failure(403, "GatedRepo", on="resolve"), True, "licence", "has not accepted SD3 Medium's licence"),
        (Failure(404, "RepoNotFound", on="resolve"), True, "not found", "not found on the hub, or it is private (404)"),
        (
            Failure(401, "RepoNotFound", on="resolve"),
            False,
            "not found",
            "not found on the hub, or it is private (401)",
        ),
        (Failure("close", on="resolve"), False, "unknown", "is unknown: the Hub gave no answer"),
        (Failure(500, on="resolve"), True, "unknown", "is unknown: the Hub gave no answer"),
    ],
)
def test_each_state_of_a_base_says_what_to_do(
    failure: Failure | None,
    with_token: bool,
    state: str,
    said: str,
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.name, hub.failure, hub.files["model_index.json"] = SD3_MEDIUM, failure, b"{}"
    if with_token:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    access = hub_account.access_to(SD3_MEDIUM)
    assert access.state == state and access.may_fail == (state not in ("ready", "unknown"))
    text = open_pages(tmp_path).get(f"/hub?model={SD3_MEDIUM}").text
    assert said in words(text) and TOKEN not in text
    assert ('id="hub-licence"' in text) == (state in ("no token", "licence"))
    assert ('id="hub-token"' in text) == (with_token or state in ("no token", "not found"))
    assert ('id="hub-download"' in text) == (state == "ready")


def test_a_run_that_cannot_download_its_base_does_not_start(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pics").mkdir()
    for number in range(3):
        Image.effect_noise((96, 96), 60 + number).convert("RGB").save(tmp_path / "pics" / f"{number}.png")
    for module in (presets, start):
        monkeypatch.setattr(module, "card_here", lambda: find_card("RTX4090"))
    monkeypatch.setattr(queue, "ensure_runner", lambda roots: None)
    monkeypatch.setattr(start.live.Estimator, "want", lambda *_: None)
    pages, address = open_pages(tmp_path), f"/start?folder=pics&model.pretrained={SD3_MEDIUM}"
    assert "SD3 Medium needs a token of the Hub" in words(pages.get(address).text.partition('id="why"')[2])
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert not words(pages.get(address).text.partition('id="why">')[2].partition("</div>")[0]), "nothing is known yet"
    hub.name, hub.failure = SD3_MEDIUM, Failure(403, "GatedRepo", on="resolve")
    monkeypatch.setattr(hub_account, "KEPT", 60.0)
    assert hub_account.access_to(SD3_MEDIUM).state == "licence"
    assert "has not accepted its licence" in words(pages.get(address).text.partition('id="why"')[2])


def test_init_asks_for_a_token_where_the_base_needs_one(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []
    said = iter(["hf_WrongOfTheTest", TOKEN])

    def read(question: str) -> str:
        asked.append(question)
        return next(said)

    hub.name, hub.failure, hub.files["model_index.json"] = SD3_MEDIUM, Failure(401, "GatedRepo", on="resolve"), b"{}"
    ask_for_token(SD3_MEDIUM, read)
    shown = capsys.readouterr().out
    assert "does not accept this token (401)" in shown and "the token is kept for tester" in shown
    assert TOKEN not in shown and len(asked) == 2 and "not shown" in asked[0]
    assert huggingface_hub.get_token() == TOKEN
    hub.failure = None
    ask_for_token(SD3_MEDIUM, read)
    ask_for_token("demo:tiny-sd3", read)
    assert len(asked) == 2, "nothing is asked that is not needed"
    hub.failure = Failure(401, "GatedRepo", on="resolve")
    ask_for_token(SD3_MEDIUM, lambda _: "")


@pytest.mark.slow
def test_a_base_is_downloaded_paused_and_finished(hub: FakeHub, tmp_path: Path) -> None:
    pages, roots, job = (
        open_pages(tmp_path),
        make_roots(tmp_path / "runs", [tmp_path]),
        processes.job_name("download", NAME),
    )
    hub.delay, cache = 0.3, tmp_path / "home" / "hf"
    hub.failure = Failure("stall", on="weights", method="GET")
    asked = {"model.pretrained": NAME}
    text = pages.post("/hub/download", data=asked, headers=HX).text
    assert 'id="hub-pause"' in text and "every 2s" in text
    until(lambda: any(cache.rglob("*.incomplete")), 60)
    assert "is still running" in pages.post("/hub/download", data=asked, headers=HX).text
    pages.post("/hub/pause", data=asked, headers=HX)
    until(lambda: not processes.is_running(roots, job), 60)
    until(lambda: processes.exit_code(roots, job) is not None, 10)
    text = pages.get("/hub", params={"model": NAME}).text
    assert "Go on" in words(text) and "Paused: complete files stay" in words(text) and "problem" not in text
    kept = {file.relative_to(cache) for file in cache.rglob("*.json")}
    assert not list(cache.rglob("*.incomplete")), "no later download would continue it"
    hub.delay, hub.failure = 0.0, None
    pages.post("/hub/download", data=asked, headers=HX)
    until(lambda: not processes.is_running(roots, job), 120)
    until(lambda: processes.exit_code(roots, job) is not None, 10)
    assert processes.exit_code(roots, job) == 0, processes.tail(roots, job, 20)
    assert "owner/tiny-sd3 is on this machine" in words(pages.get("/hub", params={"model": NAME}).text)
    now = {file.relative_to(cache) for file in cache.rglob("*.json")}
    assert kept <= now and any(each.name == "config.json" for each in now)
    hub.failure = Failure(404, "RepoNotFound")
    pages.post("/hub/download", data={"model.pretrained": "owner/no-sd3"}, headers=HX)
    other = processes.job_name("download", "owner/no-sd3")
    until(lambda: processes.exit_code(roots, other) is not None, 60)
    assert "owner/no-sd3 was not found on the hub" in words(pages.get("/hub?model=owner/no-sd3").text)


def test_only_names_of_the_hub_are_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "owner" / "folder").mkdir(parents=True)
    pages = open_pages(tmp_path)
    for name in ("", "demo:tiny-sd3", "/etc", "../x", "owner/folder", "<b>", "a/b/c"):
        assert "hub-access" not in pages.get("/hub", params={"model": name}).text, name
        if name != "owner/folder":
            answer = pages.post("/hub/download", data={"model.pretrained": name}, headers=HX)
            assert answer.status_code == 422 and "is not a name on the Hub" in html.unescape(answer.text)
    assert hub.requests == []
    with pytest.raises(UserError, match="is not a token"):
        hub_account.keep_token("")
