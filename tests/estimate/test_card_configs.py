"""Configurations named after a card's size fit it with a margin, and take the settings that ``plan`` finds fastest."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from simpletune.config.load import shipped_files
from simpletune.estimate.estimate_command import read_for_estimate
from simpletune.estimate.job_estimate import estimate
from simpletune.estimate.planning import Search, candidate_lists, find_first_fit, guess_first_fit
from simpletune.system.gpus import FOUND_UNDER_WSL, Card, find_card

FILES = [file for name, file in shipped_files().items() if re.search(r"_\d+gb$", name)]
TOLERANCE = 1.02  # on the seconds of a step: constants of the prediction may move a little


def card_of(file: Path) -> Card:
    """The card of a file's name, of which Windows or a display takes a tenth."""
    card = find_card(file.stem.rpartition("_")[2])
    return replace(card, found=card.found * FOUND_UNDER_WSL)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_card_s_configuration_fits_it_and_no_faster_setting_does(file: Path, shared_cache: Path) -> None:
    """Among plan's settings at the file's precision, with its optimizer and time of the update."""
    card, config = card_of(file), read_for_estimate(file, [f"output.cache={shared_cache}"])
    whole = estimate(config, card.capability)
    assert whole.fits(card), f"needs {whole.needed_bytes() / 2**20:,.0f} of {card.bytes / 2**20:,.0f} MiB"
    search, weights = Search(config, card), config.precision.weights
    candidates = next(each for each in candidate_lists(config, card) if each[0].config.precision.weights == weights)
    assert not candidates[0].lossy
    configs = [each.config for each in candidates]
    first = find_first_fit(configs, search.fits, guess_first_fit(configs, search._limit))
    assert first is not None
    best = next(found[0] for each in candidates[first:] if (found := search._fit_whole_job(each)))
    own = search.step_time(config).seconds
    assert own <= TOLERANCE * best.step_time.seconds, f"{best.choice.about} takes less: {best.choice.overrides}"


def test_every_size_has_a_configuration() -> None:
    sizes = {file.stem.rpartition("_")[2] for file in FILES}
    assert sizes == {"4gb", "6gb", "8gb", "12gb", "16gb", "24gb"} and len(FILES) == 47
