"""Record a part of a step again: copy its sections, which then wait for the copies of what the originals wait for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from simpletune.estimate.timing.recorder import COMPUTE, Recorder, StreamWork


class RecordedPart:
    """A part of the step that a recorder records.

    Args:
        recorder: the step's recorder, at the beginning of the part.
    """

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._first, *self._before = recorder.begin()
        self._part: list[StreamWork] = []

    def end(self) -> bool:
        """End the part; returns whether it consists of whole sections."""
        sections = self._recorder.sections
        self._part = list(map(_copy, sections[self._first :]))  # the last one may grow
        return [sections[self._first - 1].work, sections[self._first - 1].host] == self._before

    def repeat(self) -> bool:
        """Record the part again after everything recorded so far; returns False if another part would have to come
        next.

        What it waited for from before its beginning is looked up equally far before the repetition, and must be an
        equal section.
        """
        sections = self._recorder.sections
        later = len(sections) - self._first
        events = {each.event: number for number, each in enumerate(sections) if each.event is not None}
        for event in {event for each in self._part for event in (*each.after, *each.host_after)}:
            number = events.get(event)
            if number is not None and number < self._first and not _alike(sections[number], sections[number + later]):
                return False
        for section in self._part:
            copy = _copy(section)
            copy.after = [self._moved(event, events, later) for event in section.after]
            copy.host_after = [self._moved(event, events, later) for event in section.host_after]
            marked = section.event is None or section.stream == COMPUTE  # by the section that waits for it
            copy.event = None if marked else self._recorder.event()
            sections.append(copy)
        return True

    def _moved(self, event: int, events: dict[int, int], later: int) -> int:
        """Map an event of the part to the corresponding event of the repetition."""
        number = events.get(event)
        if number is None:  # an event of an earlier step
            return event
        section = self._recorder.sections[number + later]
        if section.event is None:
            section.event = self._recorder.event()
        return section.event


def _copy(section: StreamWork) -> StreamWork:
    return replace(section, work=Counter(section.work), host=Counter(section.host))


def _alike(one: StreamWork, other: StreamWork) -> bool:
    return (one.stream, one.phase, one.module) == (other.stream, other.phase, other.module)
