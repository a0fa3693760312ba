"""The part of ``simpletune serve``'s page that paints into a picture, in a real browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serving import BlockingGenerator, blocking, running
from web_browser import DESKTOP, PHONE, browsing, needs_browser

from simpletune.stages.sample import shown_inputs


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_picture_is_chosen_and_a_stroke_is_its_mask(size: tuple[int, int], tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains

    Image.new("RGB", (96, 64), "red").save(tmp_path / "picture.png")
    generator = BlockingGenerator(blocked=False)
    with running(blocking(generator)) as it, browsing(size=size) as browser:
        it.wait_ready()
        browser.open(it.service.address)
        browser.until(lambda: "LoRA" in browser.text("#state"))
        browser.fill("#prompt", "a red disc")
        browser.click("#painting summary")
        browser.find("#image").send_keys(str(tmp_path / "picture.png"))
        hole = browser.until(lambda: browser.find("#hole") if browser.find("#hole").is_displayed() else None)
        browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", hole)
        width = hole.size["width"]
        drag = ActionChains(browser.driver).move_to_element_with_offset(hole, -width // 4, 0)
        drag.click_and_hold().move_by_offset(width // 2, 0).release().perform()
        assert not browser.violations(), browser.violations()
        assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= size[0]
        browser.driver.save_screenshot(str(tmp_path / "page.png"))
        browser.click("#draw")
        browser.until(lambda: len(generator.started) == 2)
        assert not browser.complaints()
    found = shown_inputs(generator.started[0].request)
    mask = np.asarray(found["mask"]) > 0
    assert found["picture"].size == (64, 64) and found["picture"].getpixel((9, 9)) == (255, 0, 0)
    assert mask[32, 18:46].all() and not mask[:20].any() and not mask[:, :8].any()
