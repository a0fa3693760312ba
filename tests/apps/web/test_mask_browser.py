"""Masks painted in headless Chromium: with a mouse, by touch and by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from web_browser import DESKTOP, PHONE, Browser, browsing, needs_browser, serving

pytestmark = [needs_browser, pytest.mark.slow]
CONTROL, SHIFT, RIGHT, DOWN = "\ue009", "\ue008", "\ue014", "\ue015"  # as WebDriver names the keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two pictures."""
    root = tmp_path_factory.mktemp("root")
    (root / "pics").mkdir()
    for name in ("a", "b"):
        Image.effect_noise((600, 400), 60).convert("RGB").save(root / "pics" / f"{name}.png")
    return root


@pytest.fixture
def browser(folder: Path) -> Iterator[Browser]:
    """A browser on the page that paints the first picture's mask."""
    for file in (folder / "pics").glob("*-masklabel.png"):
        file.unlink()
    with serving(folder) as server, browsing() as found:
        found.open(f"{server.url}/data/mask?place=pics&name=a.png")
        found.find("#paint")
        yield found


def keys(browser: Browser, text: str, hold: str = "") -> None:
    """Press keys in the picture, while others are held."""
    from selenium.webdriver.common.action_chains import ActionChains

    browser.driver.execute_script("document.getElementById('paint').focus()")
    chain = ActionChains(browser.driver)
    for key in hold:
        chain.key_down(key)
    chain.send_keys(text)
    for key in hold:
        chain.key_up(key)
    chain.perform()


def drag(browser: Browser, kind: str, *points: tuple[int, int]) -> None:
    """Draw a line through points, in pixels from the picture's centre."""
    from selenium.webdriver.common.actions.action_builder import ActionBuilder
    from selenium.webdriver.common.actions.pointer_input import PointerInput

    canvas = browser.find("#paint")
    browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    builder = ActionBuilder(browser.driver, mouse=PointerInput(kind, "pointer"))
    builder.pointer_action.move_to(canvas, *points[0]).pointer_down()
    for x, y in points[1:]:
        builder.pointer_action.move_to(canvas, x, y)
    builder.pointer_action.pointer_up()
    builder.perform()


def painted(browser: Browser) -> np.ndarray:
    """The opacity of every tenth pixel of the canvas: uint8 [40, 60]."""
    script = """const c = document.getElementById('paint'), found = [];
    const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
    for (let y = 0; y < c.height; y += 10)
      for (let x = 0; x < c.width; x += 10) found.push(d[4 * (y * c.width + x) + 3]);
    return found"""
    return np.array(browser.driver.execute_script(script)).reshape(40, 60)


def complaints(browser: Browser, *expected: str) -> list[str]:
    """What the page complains of, but for what is expected, or comes of ``painted``."""
    return [each for each in browser.complaints() if not any(one in each for one in (*expected, "willReadFrequently"))]


def save(browser: Browser, file: Path) -> np.ndarray[Any, Any]:
    before = file.read_bytes() if file.exists() else b""
    browser.click("#paint-save")
    browser.until(lambda: "Saved as a-masklabel.png" in browser.text("#paint-said"), "saved")
    assert file.read_bytes() != before
    return np.asarray(Image.open(file), dtype=np.float32)


def test_a_mask_is_painted_with_a_mouse_saved_and_undone(browser: Browser, folder: Path) -> None:
    file = folder / "pics" / "a-masklabel.png"
    browser.click("#paint-save")
    browser.until(lambda: "nothing would be learned" in browser.text("#paint-said"), "an empty mask is refused")
    drag(browser, "mouse", (-200, 0), (200, 0))
    line = painted(browser)
    assert line[20, 30] == 255 and line[2].max() == 0
    keys(browser, "i")
    assert (painted(browser) == 255 - line).all()
    keys(browser, "zz", CONTROL)
    assert painted(browser).max() == 0
    keys(browser, "z", CONTROL + SHIFT)
    assert (painted(browser) == line).all()
    first = save(browser, file)
    assert first.shape == (400, 600) and first[200, 300] == 255 and first[20].max() == 0
    browser.click("#paint-eraser")
    drag(browser, "mouse", (0, -150), (0, 150))
    second = save(browser, file)
    assert second[200, 300] == 0 and second[200, 220] == 255
    browser.open(browser.driver.current_url)
    browser.until(lambda: painted(browser).max() == 255, "the mask so far")
    assert painted(browser)[20, 30] == 0  # as it was saved
    browser.click("#data-undo-last")
    browser.until(lambda: painted(browser)[20, 30] == 255, "the page shows the earlier mask again")
    assert (np.asarray(Image.open(file)) == first).all()
    assert complaints(browser, "422") == []


def test_a_mask_is_painted_by_keyboard_alone(browser: Browser, folder: Path) -> None:
    before = browser.find("#paint-size").get_property("value")
    keys(browser, "]]")
    assert int(browser.find("#paint-size").get_property("value")) > int(before)
    keys(browser, "[[[[[[[[[[")
    assert int(browser.find("#paint-size").get_property("value")) < int(before)
    keys(browser, " ")
    assert 0 < (painted(browser) == 255).sum() and painted(browser)[20, 30] == 255
    keys(browser, RIGHT * 20, SHIFT)
    assert painted(browser)[20, 32] == 255
    keys(browser, "e")
    keys(browser, " ")
    keys(browser, "b" + DOWN * 3 + " ")
    keys(browser, "s", CONTROL)
    browser.until(lambda: "Saved as" in browser.text("#paint-said"), "saved")
    assert Image.open(folder / "pics" / "a-masklabel.png").getextrema() == (0, 255)
    assert complaints(browser) == []


def test_the_page_is_accessible_and_paints_by_touch_on_a_phone(browser: Browser, folder: Path) -> None:
    browser.driver.execute_script("document.querySelectorAll('details').forEach((each) => each.open = true)")
    assert browser.violations() == []
    browser.look(True, PHONE)
    assert browser.violations("color-contrast") == []
    width = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.driver.execute_script(width) <= 0
    drag(browser, "touch", (0, 90), (0, 45), (0, 0), (0, -90))  # down the page, unless the picture takes the touch
    assert painted(browser)[[6, 20, 34], 30].min() == 255
    browser.click("#paint-fill")
    browser.click("#paint-next")
    browser.until(lambda: "Mask of b.png" in browser.text("h1"), "the next picture")
    assert Image.open(folder / "pics" / "a-masklabel.png").getextrema() == (255, 255)
    browser.look(False, DESKTOP)
    assert complaints(browser) == []
