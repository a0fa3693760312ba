"""The pages of ``web`` in headless Chromium: a newcomer's path by clicks, many tabs, hostile names, kills."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlretrieve

import pytest
import web_browser
from PIL import Image
from web_browser import (
    DESKTOP,
    HOSTILE,
    PHONE,
    Browser,
    Server,
    browsing,
    images,
    make_root,
    make_run,
    needs_browser,
    serving,
)

from simpletune.adapters.files.describe import describe
from simpletune.stages.png import save_png
from simpletune.stages.sample import ImageRequest

pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as found:
        yield found


light, shared_browser = web_browser.browser, web_browser.shared_browser


FOCUSED = "const e = document.activeElement; return e.name || e.id || e.dataset.opens || e.className || e.tagName"
TAB, ENTER, ESCAPE, SPACE = "\ue004", "\ue007", "\ue00c", " "  # as WebDriver names the keys
LEFT, UP, RIGHT, DOWN = "\ue012", "\ue013", "\ue014", "\ue015"


def test_hostile_names_stay_text(server: Server, light: Browser) -> None:
    light.open(server.url + "/")
    light.until(lambda: HOSTILE.replace("/", "") in light.text("#runs"), "the run's name")
    light.open(server.url + "/start")
    light.fill('[name="data.path"]', HOSTILE.replace("/", ""))
    light.fill('[name="trigger"]', HOSTILE)
    light.until(lambda: light.find('[name="data.prompt"]').get_attribute("value") == f"a photo of {HOSTILE}", "prompt")
    assert "owned" not in light.driver.title
    assert light.driver.find_elements("css selector", "img[src=x]") == []
    assert light.complaints() == []


def test_the_form_answers_within_a_second_and_keeps_focus_and_values(server: Server, light: Browser) -> None:
    light.open(server.url + "/start")
    light.fill('[name="data.path"]', "pics")
    light.until(lambda: light.text("#why") == "" and light.raw("#command").startswith("simpletune init"), "no problems")
    light.until(lambda: "GiB" in light.text("#live") and light.text("#live-state") == "", "prediction", 120)
    light.click("#everything > summary")
    light.click("#d-train > summary")
    script = """
      const done = arguments[arguments.length - 1], begun = performance.now();
      const field = document.querySelector('[name="train.batch_size"]');
      new MutationObserver(() => {
        if (document.querySelector('#live.stale')) done(performance.now() - begun);
      }).observe(document.body, {subtree: true, childList: true, attributes: true});
      field.focus(); field.value = '2'; field.dispatchEvent(new Event('input', {bubbles: true}));
    """
    milliseconds = light.driver.execute_async_script(script)
    print(f"greyed {milliseconds:.0f} ms after a change")
    assert milliseconds < 1000
    assert light.driver.execute_script("return document.activeElement.name") == "train.batch_size"
    light.until(lambda: light.text("#live-state") == "", "the new prediction", 120)
    light.click("#d-optimizer > summary")
    select = light.find('[name="optimizer.name"]')
    light.driver.execute_script("arguments[0].focus()", select)
    select.send_keys("prod")
    light.until(lambda: light.driver.find_elements("css selector", '[name="optimizer.d_coef"]'), "Prodigy's fields")
    assert light.driver.execute_script("return document.activeElement.name") == "optimizer.name"
    assert "set by you" in light.raw("#n-optimizer-name")
    assert "chosen for your card" in light.raw("#n-schedule-name")
    assert light.find('[name="train.batch_size"]').get_attribute("value") == "2"
    assert light.complaints() == []


def test_pictures_come_to_the_page_and_fill_the_form(
    server: Server, folder: Path, light: Browser, tmp_path: Path
) -> None:
    files = [*sorted(images(tmp_path / "mine").iterdir()), tmp_path / "mine" / "0.txt", tmp_path / "mine" / "no.png"]
    files[-2].write_text("a red cat")
    files[-1].write_bytes(b"no picture")
    light.open(server.url + "/start")
    light.fill("#upload-name", "my cats")
    light.find("#upload-files").send_keys("\n".join(map(str, files)))
    light.until(lambda: "4 pictures are in" in light.text("#upload-said"), "the new folder")
    assert light.text("#upload-left") == "no.png is not a picture that Pillow can read"
    assert light.find('[name="data.path"]').get_attribute("value") == str(folder / "my cats")
    assert sorted(each.name for each in (folder / "my cats").iterdir()) == ["0.png", "0.txt", "1.png", "2.png", "3.png"]
    light.until(lambda: light.text("#why") == "" and "my cats" in light.raw("#command"), "the form as if typed")
    light.until(lambda: "GiB" in light.text("#live") and light.text("#live-state") == "", "prediction", 120)
    light.click("#upload-here > summary")
    light.find('[aria-label="Use pics"]')
    assert light.violations() == []
    light.click('[aria-label="Use pics"]')
    assert light.find('[name="data.path"]').get_attribute("value") == str(folder / "pics")
    light.open(server.url + "/data")
    light.find("#upload-folder").send_keys(str(tmp_path / "mine"))
    light.until(lambda: "4 pictures are in" in light.text("#upload-said"), "the folder by its own name")
    assert light.find("#data-place").get_attribute("value") == str(folder / "mine")
    (tmp_path / "mine" / "sub").mkdir()
    (tmp_path / "mine" / "0.png").rename(tmp_path / "mine" / "sub" / "0.png")
    for kind in ("dragEnter", "dragOver", "drop"):
        data = {"items": [], "files": [str(tmp_path / "mine")], "dragOperationsMask": 1}
        light.driver.execute_cdp_cmd("Input.dispatchDragEvent", {"type": kind, "x": 200, "y": 200, "data": data})
    light.until(lambda: "4 pictures are in" in light.text("#upload-said") and "mine-2" in light.text("#upload-said"))
    assert (folder / "mine-2" / "sub" / "0.png").is_file() and (folder / "mine-2" / "1.png").is_file()
    drop = """
      const content = new DataTransfer();
      content.items.add(new File(['no zip'], 'b.zip'));
      document.dispatchEvent(new DragEvent('drop', {dataTransfer: content, bubbles: true, cancelable: true}));
    """
    light.driver.execute_script(drop)
    light.until(lambda: "No picture could be used" in light.text("#upload-said"), "the refusal")
    assert [each for each in light.complaints() if "422" not in each] == []
    assert list(folder.glob(".*.part")) == []


def test_settings_are_found_by_search_and_a_reload_keeps_the_form(server: Server, light: Browser) -> None:
    light.open(server.url + "/start?folder=pics&trigger=glim&train.steps=60")
    light.click("#everything > summary")
    light.fill("#i-search", "learning rate warm")
    shown = lambda: [  # noqa: E731
        each.get_attribute("id")
        for each in light.driver.find_elements("css selector", "#everything .field")
        if each.is_displayed()
    ]
    light.until(lambda: "f-schedule-warmup_steps" in shown() and len(shown()) < 9, "few settings")
    assert light.text("#found") == f"{len(shown())} settings" and light.violations() == []
    light.fill("#i-search", "no such thing")
    light.until(lambda: shown() == [] and light.text("#found") == "0 settings", "none")
    light.fill("#i-search", "")
    light.until(lambda: light.find("#f-base").is_displayed(), "all of them")
    light.click("#d-optimizer > summary")
    light.fill('[name="optimizer.lr"]', "0.002")
    light.until(lambda: "optimizer.lr=0.002" in light.driver.current_url, "the address")
    light.driver.refresh()
    kept = {"data.path": "pics", "trigger": "glim", "train.steps": "60", "optimizer.lr": "0.002"}
    light.until(
        lambda: kept == {name: light.find(f'[name="{name}"]').get_attribute("value") for name in kept}, "the form again"
    )
    light.click("#captions > summary")
    light.fill('[name="trigger"]', "glum")
    light.until(lambda: "a photo of glum" in light.text("#captions"), "new")
    assert light.complaints() == [], "what is open stays open"


def test_the_start_page_works_by_keyboard_alone(server: Server, folder: Path, light: Browser) -> None:
    light.open(server.url + "/start")
    assert press(light, TAB) == "skip"
    tab_to(light, "data.path")
    press(light, "nothing", ENTER)  # Enter in a field starts nothing
    light.until(lambda: "does not exist" in light.text("#n-data-path"), "the problem")
    assert urlsplit(light.driver.current_url).path == "/start"
    assert "1 problem to fix" in light.text("#ready") and not light.find("#go").is_enabled()
    tab_to(light, "trigger")
    assert light.driver.execute_script("return getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert press(light, TAB) != "go"
    assert light.complaints() == [] and not (folder / "runs" / ".web" / "queue.json").exists()


def test_questions_are_answered_by_buttons_and_an_upload_shows_its_pictures(
    server: Server, folder: Path, light: Browser, tmp_path: Path
) -> None:
    files = sorted(images(tmp_path / "mine").iterdir())
    Image.new("L", (96, 96), 255).save(tmp_path / "mine" / "0-masklabel.png")
    light.open(server.url + "/start")
    light.fill("#upload-name", "brown lawn")
    light.find("#upload-files").send_keys("\n".join(map(str, [*files, tmp_path / "mine" / "0-masklabel.png"])))
    light.until(lambda: light.text("#sums") == "5 files: 4 pictures, 1 mask", "what is in the folder")
    light.until(lambda: len(light.driver.find_elements("css selector", ".strip img.tiny, .strip img")) == 4, "pictures")
    assert not light.find("#go").is_enabled() and light.violations() == []
    light.click(".question button")
    light.until(lambda: "the question above" in light.text("#ready"), "one is left")
    light.click(".question button:last-child")
    light.until(lambda: light.find("#go").is_enabled(), "both are answered")
    assert light.find("#i-trigger").get_attribute("value") == "sks"
    shown = lambda path: urlsplit(light.driver.current_url).path == path  # noqa: E731
    light.click("#see-all")
    light.until(lambda: shown("/data") and light.text("#sums") == "5 files: 4 pictures, 1 mask", "the same on Pictures")
    light.look(False, PHONE)
    assert light.overflow() <= 0 and light.violations() == []
    light.click("#train-on")
    light.until(lambda: shown("/start") and light.text("#sums") == "5 files: 4 pictures, 1 mask", "and back")
    light.look(False, DESKTOP)
    light.open(server.url + "/data")
    light.find("#upload-files").send_keys("\n".join(map(str, files)))
    light.until(lambda: len(light.driver.find_elements("css selector", "#upload-shown img")) == 4, "the new pictures")
    light.until(lambda: f"{folder / 'pictures'}" in light.text("#data-suggested"), "the fresh list")
    assert light.complaints() == []


def test_a_button_is_pressed_only_by_who_presses_it(server: Server, light: Browser, tmp_path: Path) -> None:
    files = sorted(images(tmp_path / "mine").iterdir())
    Image.new("L", (96, 96), 255).save(tmp_path / "mine" / "0-masklabel.png")
    light.open(server.url + "/start")
    light.fill("#upload-name", "red lawn")
    light.find("#upload-files").send_keys("\n".join(map(str, [*files, tmp_path / "mine" / "0-masklabel.png"])))
    light.until(lambda: len(light.driver.find_elements("css selector", ".question")) == 2, "two questions")
    focus = "document.querySelector(arguments[0]).focus(); const e = document.querySelector('[name=name]'); "
    focus += "e.value = arguments[1]; e.dispatchEvent(new Event('change', {bubbles: true}))"
    for css, word in ((".question button", "glim"), (".base[aria-pressed=false]", "glum"), ("#download", "glom")):
        light.driver.execute_script(focus, css, word)  # as when Tab leaves the field and passes over the button
        light.until(lambda word=word: word in light.raw("#command"), f"{word}, with the focus on {css}")
        assert len(light.driver.find_elements("css selector", ".question")) == 2, css
        assert "--model" not in light.raw("#command"), css
    light.driver.execute_script(  # both before the first is answered, and a change right after them
        "for (const e of document.querySelectorAll('.question')) e.querySelector('button:last-child').click(); "
        "document.querySelector('[name=name]').dispatchEvent(new Event('input', {bubbles: true}))"
    )
    light.until(lambda: not light.driver.find_elements("css selector", ".question"), "both answers are taken")
    light.driver.execute_script("document.querySelector('.base[aria-pressed=false]').click()")
    light.until(lambda: "--model" in light.raw("#command"), "the model that was pressed")
    assert light.complaints() == []


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("by", ["mouse", "touch", "keyboard"])
def test_an_empty_folder_becomes_a_file_for_comfyui_without_typing_a_path(by: str, tmp_path: Path) -> None:
    files = sorted(images(tmp_path / "elsewhere").iterdir())
    root, taken = tmp_path / "root", tmp_path / "taken"
    root.mkdir()
    start = time.monotonic()
    with serving(root) as server, browsing(size=PHONE if by == "touch" else DESKTOP) as browser:
        browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(taken)})

        def press_on(css: str, name: str) -> None:
            if by == "keyboard":
                tab_to(browser, name)
                press(browser, ENTER)
            elif by == "touch":
                tap(browser, css)
            else:
                browser.click(css)

        browser.open(server.url + "/")
        press_on('a.main[href="/start"]', "button main")
        browser.until(lambda: urlsplit(browser.driver.current_url).path == "/start", "the form")
        browser.driver.execute_script(  # the system's window, which a person would use now
            "document.getElementById('upload-files').addEventListener('click', (event) => { event.preventDefault(); "
            "document.title = 'files'; })"
        )
        press_on('[data-opens="upload-files"]', "upload-files")
        browser.until(lambda: browser.driver.title == "files", "the system's window")
        browser.find("#upload-files").send_keys("\n".join(map(str, files)))
        browser.until(lambda: "4 pictures are in" in browser.text("#upload-said"), "the upload")
        if by == "keyboard":
            tab_to(browser, "trigger")
            press(browser, "glim")
        else:
            browser.fill('[name="trigger"]', "glim")
        browser.until(lambda: browser.text("#why") == "" and "glim" in browser.raw("#command"), "the form", 120)
        press_on("#go", "go")
        browser.until(lambda: "/run/" in browser.driver.current_url, "the run's page", 300)
        browser.until(lambda: "finished" in browser.text("#run-state"), "the end", 600)
        press_on("#download", "download")
        browser.until(lambda: list(taken.glob("*.safetensors")), "the file", 120)
        assert browser.overflow() <= 0 and browser.complaints() == []
    (file,) = taken.glob("*.safetensors")
    print(f"by {by}: from an empty folder to {file.name} in {time.monotonic() - start:.0f} s")
    tools = {tool["tool"]: tool["loads"] for tool in describe(file)["tools"]}
    assert tools["ComfyUI"] == "yes"


def tap(browser: Browser, css: str) -> None:
    """Tap on an element with a finger."""
    script = "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'}); "
    script += "const box = e.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]"
    browser.find(css)
    x, y = browser.driver.execute_script(script, css)
    browser.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    browser.driver.execute_cdp_cmd(
        "Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]}
    )
    browser.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def test_two_pages_see_the_same_and_a_stopped_server_is_said(folder: Path, server: Server, light: Browser) -> None:
    with serving(folder) as second:
        light.open(second.url + "/")
        light.until(lambda: light.text("#connection") == "live", "the stream")
        make_run(folder / "runs" / "later")
        light.until(lambda: "later" in light.text("#runs"), "the run of another program", 10)
        second.kill()
        light.until(lambda: "not connected" in light.text("#connection"), "the lost server")
    light.complaints()  # of requests to a server that is gone


def test_pictures_fill_the_screen_and_what_is_chosen_stays(server: Server, folder: Path, light: Browser) -> None:
    run = make_run(folder / "runs" / "shown")

    def draw(state: str) -> None:
        for number, prompt in enumerate(("a <b>fox", "a hare")):
            picture = ImageRequest(prompt, 3)
            save_png(Image.new("RGB", (64, 64)), run / "samples" / state / f"prompt-0{number}.png", picture)

    for state in ("base", "step-000010", "step-000020"):
        draw(state)
    light.open(server.url + "/run/shown")
    slide = "const e = document.querySelector(arguments[0]); e.value = arguments[1]; "
    slide += "e.dispatchEvent(new Event('input', {bubbles: true}))"
    light.driver.execute_script(slide, "#frame-2 input", 20)
    light.driver.execute_script(slide, "#matrix-step", 1)
    light.click("#shot-1-2")
    assert light.text("#viewer-step") == "step 20" and light.text("#viewer-prompt") == "a <b>fox"
    light.until(lambda: light.driver.find_elements("css selector", "#viewer-stage img.tiny"), "a sharp picture")
    assert light.violations() == []
    seen = []
    for key in (LEFT, LEFT, LEFT, RIGHT, SPACE, SPACE, DOWN, DOWN, UP):
        press(light, key)
        seen.append(f"{light.text('#viewer-prompt')[2:]}, {light.text('#viewer-step')}")
    fox = ["step 10", "base", "base", "step 10", "base (of step 10)", "step 10"]
    assert seen == [*(f"<b>fox, {each}" for each in fox), "hare, step 10", "hare, step 10", "<b>fox, step 10"]
    swipe = (
        "for (const [kind, x] of [['down', 300], ['up', 200]]) document.getElementById('viewer-stage').dispatchEvent("
    )
    swipe += "new PointerEvent('pointer' + kind, {clientX: x, clientY: 200}))"
    light.driver.execute_script(swipe)
    assert light.text("#viewer-step") == "step 20"
    draw("step-000030")
    light.until(lambda: light.driver.find_elements("css selector", "#shot-1-3"), "the new step")
    press(light, RIGHT)
    assert light.text("#viewer-step") == "step 30"
    press(light, ESCAPE)
    light.until(lambda: light.driver.execute_script(FOCUSED) == "shot-1-3", "the focus where it was")
    kept = "return [document.querySelector('#frame-2 input').value, "
    kept += "getComputedStyle(document.getElementById('frame-2')).getPropertyValue('--cut')]"
    assert light.driver.execute_script(kept) == ["20", "20%"] and light.text("#matrix-shown") == "step 10"
    light.look(True, PHONE)
    press(light, ENTER)
    assert light.text("#viewer-step") == "step 30" and light.overflow() <= 0 and light.violations() == []
    light.click("#viewer-close")
    assert light.complaints() == []
    light.look(False, DESKTOP)


def test_runs_are_starred_hidden_deleted_and_restored_by_clicks(server: Server, folder: Path, light: Browser) -> None:
    for name in ("first", "second"):
        make_run(folder / "runs" / name, name=f"{name} of its kind")
    light.look(True, PHONE)
    light.open(server.url + "/")
    light.click('[data-run="first"] [value="star"]')
    light.until(lambda: light.text("#runs h2") == "first", "the starred run in front")
    light.click('[data-run="second"] [value="hide"]')
    light.until(lambda: "hidden" in light.text("#hidden-runs"), "the hidden run")
    light.click("#hidden-runs > summary")
    (folder / "runs" / "first" / "metrics.jsonl").write_text('{"step": 2, "loss": 0.5}\n')
    light.until(lambda: "2 of 3 steps" in light.text('[data-run="first"]'), "an update")
    assert light.text('#hidden-runs [data-run="second"] h2') == "second"  # which leaves it open
    light.click('[data-run="first"] [id^="delete-"]')
    light.until(lambda: "Delete first?" in light.text("#ask"), "the question")
    assert light.violations() == [] and light.overflow() <= 0
    press(light, ESCAPE)
    assert (folder / "runs" / "first").is_dir()
    light.click('[data-run="first"] [id^="delete-"]')
    light.click("#delete-now")
    light.until(lambda: "first is in the bin" in light.text("#said"), "the bin")
    light.until(lambda: not light.driver.find_elements("css selector", '[data-run="first"]'), "no card")
    assert not (folder / "runs" / "first").exists()
    light.click("#undo")
    light.until(lambda: light.text("#runs h2") == "first", "the run, with its star")
    light.click('[data-run="first"] [id^="delete-"]')
    light.click("#delete-now")
    light.click("#bin-list > summary")
    light.click("#empty-bin")
    light.until(lambda: "Empty the bin?" in light.text("#ask"), "the question")
    light.click("#empty-now")
    light.until(lambda: light.text("#bin") == "", "an empty bin")
    assert list((folder / "runs" / ".bin").iterdir()) == [] and light.complaints() == []
    light.look(False, DESKTOP)


@pytest.mark.timeout(3600)
def test_a_newcomers_path(tmp_path: Path) -> None:
    """From an empty folder, without typing a path: upload, Start, live loss and pictures, stop, continue, compare, the
    report, a LoRA that loads in diffusers."""
    files = sorted(images(tmp_path / "elsewhere" / "pics").iterdir())
    root = tmp_path / "root"
    root.mkdir()
    with serving(root) as server, browsing(size=DESKTOP) as browser:
        browser.open(server.url + "/start")
        browser.fill("#upload-name", "pics")
        browser.find("#upload-files").send_keys("\n".join(map(str, files)))
        browser.until(lambda: "4 pictures are in" in browser.text("#upload-said"), "the upload")
        browser.fill('[name="trigger"]', "glim")
        browser.until(lambda: browser.text("#why") == "" and "--trigger glim" in browser.raw("#command"), "the form")
        shorten(browser, steps=4000, every=40)
        browser.click("#go")
        browser.until(lambda: "/run/pics" in browser.driver.current_url, "the run's page", 300)
        first = browser.until(lambda: browser.text("#run-loss"), "a loss", 120)
        browser.until(lambda: browser.text("#run-loss") not in ("", first), "the next loss")
        browser.until(lambda: browser.driver.find_elements("css selector", "#timeline img"), "pictures", 120)
        assert browser.violations() == []
        browser.fill("#draw-prompt", "a photo of glim")
        browser.click("#draw-now")
        browser.until(lambda: browser.driver.find_elements("css selector", "#drawings img"), "a picture", 120)
        browser.click("#save-now")
        browser.until(lambda: "save done" in browser.text("#run-requests"), "a checkpoint", 120)
        browser.click("#stop-now")
        browser.until(lambda: "stopped" in browser.text("#run-state"), "the end", 120)
        stopped = step_of(browser)
        assert 0 < stopped < 4000
        browser.until(lambda: browser.driver.find_elements("css selector", "#continue-steps"), "the form to go on")
        browser.fill("#continue-steps", str(stopped + 5))
        browser.click("#continue")
        browser.until(lambda: "finished" in browser.text("#run-state"), "the continued run's end", 300)
        assert step_of(browser) == stopped + 5
        browser.fill("#compare-prompt", "a photo of glim")
        browser.fill("#compare-strengths", "0, 1")
        browser.click("#compare")
        browser.until(lambda: browser.driver.find_elements("css selector", "#frames-1 img"), "the comparison", 300)
        browser.click("#download")
        browser.until(lambda: "pics.safetensors" in browser.text("#file-said"), "the file for ComfyUI", 120)
        browser.click("#other-files > summary")
        browser.click("#download-other")
        browser.until(lambda: "as-written" in browser.text("#file-said"), "the file for diffusers")
        address = browser.find("#file-said a").get_attribute("href")
        assert browser.violations() == [] and browser.complaints() == []
        comparison = browser.find(".comparison a").get_attribute("href")
        for page in (browser.find("#open-report").get_attribute("href"), comparison):
            browser.look(False, DESKTOP)
            browser.open(page)
            assert browser.violations() == [], page
            browser.look(True, PHONE)
            assert browser.violations("color-contrast") == [], page
            assert browser.overflow() <= 0, page
    with serving(root) as server:  # the address outlives a server
        there = urlsplit(address)
        urlretrieve(f"{server.url}{there.path}?{there.query}", tmp_path / "lora.safetensors")
    assert layers_in_diffusers(tmp_path / "lora.safetensors") > 0


def shorten(browser: Browser, steps: int, every: int) -> None:
    """Shorten the run in the folded sections."""
    browser.click("#everything > summary")
    values = {
        "train": {"steps": steps, "batch_size": 1}, "checkpoint": {"every": every},
        "validation": {"every": every, "steps": 2, "loss_samples": 2},
    }  # fmt: skip
    for section, fields in values.items():
        browser.click(f"#d-{section} > summary")
        for name, value in fields.items():
            browser.fill(f'[name="{section}.{name}"]', str(value))
    for section, fields in values.items():
        words = f"{len(fields)} yours"
        browser.until(
            lambda section=section, words=words: words in browser.text(f"#c-{section}"), f"{section}: {words}"
        )


def press(browser: Browser, *keys: str) -> str:
    """Press keys; return what has the focus."""
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser.driver).send_keys(*keys).perform()
    return str(browser.driver.execute_script(FOCUSED))


def tab_to(browser: Browser, name: str) -> None:
    """Press Tab until an element has the focus."""
    assert any(press(browser, TAB) == name for _ in range(60)), f"{name} cannot be reached by Tab"


def step_of(browser: Browser) -> int:
    return int(browser.text("#run-state").partition("step ")[2].partition(" of")[0].replace(",", ""))


def layers_in_diffusers(file: Path) -> int:
    """Load a LoRA into the embedded model by diffusers alone; return how many layers it has."""
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
    from safetensors.torch import load_file

    from simpletune.data.demo import resolve

    folder = resolve("demo:tiny-sd3", file.parent / "cache")
    transformer = SD3Transformer2DModel.from_pretrained(folder, subfolder="transformer")
    state = StableDiffusion3Pipeline.lora_state_dict(load_file(file))
    StableDiffusion3Pipeline.load_lora_into_transformer(state, transformer, adapter_name="it")
    return sum("lora_A" in name for name, _ in transformer.named_parameters())


@pytest.mark.timeout(3600)
def test_a_page_that_is_killed_in_the_middle_of_a_run_loses_nothing(tmp_path: Path) -> None:
    images(tmp_path / "pics")
    with serving(tmp_path) as server, browsing() as browser:
        browser.open(server.url + "/start")
        browser.fill('[name="data.path"]', "pics")
        browser.until(lambda: browser.text("#why") == "", "the form")
        shorten(browser, steps=60, every=60)
        browser.click("#go")
        browser.until(lambda: "/start" not in browser.driver.current_url, "the queue")
        (config,) = (tmp_path / "runs" / ".web" / "configs").glob("*.json")
        browser.open(f"{server.url}/start?file={config}")
        browser.click("#go")
        browser.until(lambda: "/start" not in browser.driver.current_url, "the queue again")
        metrics = tmp_path / "runs" / "pics" / "metrics.jsonl"
        browser.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, "some steps", 200)
        port = urlsplit(server.url).port or 0
        server.kill()
        before = metrics.read_text().count("\n")
        browser.until(lambda: metrics.read_text().count("\n") > before + 2, "steps without a page", 100)
        with serving(tmp_path, port) as again:
            browser.open(again.url + "/")
            browser.until(lambda: browser.text("#runs").count("finished") == 2, "both runs", 300)
            assert "pics.1" in browser.text("#runs")
            browser.until(lambda: browser.text("#queue") == "", "an empty queue")
    for name in ("pics", "pics.1"):
        rows = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == list(range(1, 61))


@pytest.mark.timeout(300)
def test_twelve_tabs_of_a_browser_stay_alive(folder: Path, server: Server, light: Browser) -> None:
    driver = light.driver
    first = driver.current_window_handle
    tabs = [first]
    light.open(server.url + "/")
    for _ in range(11):
        driver.switch_to.new_window("tab")
        light.open(server.url + "/")
        tabs.append(driver.current_window_handle)
    for number, tab in enumerate(tabs):
        driver.switch_to.window(tab)
        make_run(folder / "runs" / f"tab{number}")
        light.until(lambda name=f"tab{number}": name in light.text("#runs"), f"tab {number} updates", 15)
        light.until(lambda: light.text("#connection") in ("live", "polling every 3 s"), "connection")
    for tab in tabs[1:]:
        driver.switch_to.window(tab)
        driver.close()
    driver.switch_to.window(first)


@pytest.mark.timeout(300)
def test_thirty_streams_cost_at_most_three_percent_of_a_core(folder: Path, server: Server) -> None:
    address = urlsplit(server.url)
    seconds, streams, events = 20.0, 30, [0] * 30
    stop = threading.Event()

    def listen(number: int) -> None:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        connection.request("GET", "/events")
        answer = connection.getresponse()
        while not stop.is_set():
            events[number] += answer.readline().startswith(b"event: changed")

    for number in range(streams):
        threading.Thread(target=listen, args=(number,), daemon=True).start()
    time.sleep(3)
    before, begun = server.processor_seconds(), time.monotonic()
    metrics = folder / "runs" / "old" / "metrics.jsonl"
    while time.monotonic() < begun + seconds:  # a run that steps: every second there is something to tell
        with metrics.open("a") as file:
            file.write('{"step": 3, "loss": 0.25}\n')
        time.sleep(0.5)
    share = (server.processor_seconds() - before) / (time.monotonic() - begun)
    stop.set()
    print(f"{streams} streams, {sum(events)} events: {share:.1%} of a core")
    assert min(events) >= seconds / 2 / 2, events
    assert share <= 0.03
