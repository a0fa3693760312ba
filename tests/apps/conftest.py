"""What every test of the page and of the commands shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simpletune.apps.web import live


@pytest.fixture(autouse=True)
def predictors_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End what a test leaves predicting, so that the next test neither counts it nor waits for it."""
    made: list[live.Estimator] = []
    honest = live.Estimator.__init__

    def init(self: live.Estimator, *arguments: object) -> None:
        honest(self, *arguments)
        made.append(self)

    monkeypatch.setattr(live.Estimator, "__init__", init)
    yield
    for each in made:
        with each._lock:
            each._waiting.clear()
            thread, predictor, each._predictor = each._thread, each._predictor, None
        if predictor is not None:
            predictor.kill()
            predictor.wait()
        if thread is not None:
            thread.join(60)
            assert not thread.is_alive(), "the page's thread of predictions did not end"
