"""The page of ``simpletune serve`` as its files: it loads nothing, and every field has a label."""

from __future__ import annotations

import re

from simpletune.apps.serve.app import PAGE


def test_it_needs_nothing_from_elsewhere_and_every_field_has_a_label() -> None:
    page = {file.name: file.read_text() for file in PAGE.iterdir()}
    assert set(page) == {"page.html", "page.css", "page.js"}
    for name, text in page.items():
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text), name
    text = page["page.html"]
    assert not re.search(r"<style|style=|\son\w+=|<script>", text)  # the policy forbids them
    assert "innerHTML" not in page["page.js"]
    for field in re.finditer(r"<(?:input|select|textarea)\b", text):
        before = text[: field.start()]
        assert before.rfind("<label") > before.rfind("</label>"), text[field.start() : field.start() + 60]
    assert 'lang="en"' in text and 'role="alert"' in text and "viewport" in text
