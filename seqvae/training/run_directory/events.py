"""events.jsonl: what happened to a run, one line each, and on the console what it survived.

In: an event, the step, and what there is to say. Out: a line that anybody can read at any time. The posterior's verdicts stand in
the same file; the monitor writes them itself.
"""

import logging
from pathlib import Path
from typing import Any

from seqvae.json_lines import JsonLines
from seqvae.reports.run_files import EVENTS, utc_now

MOST_TOLD = 100
"""Of one kind: what goes wrong at every other step for days shall not fill a disk."""

_log = logging.getLogger(__name__)


class RunEvents:
    """Of one run. Only the first process writes; the others say nothing, either."""

    def __init__(self, directory: Path, *, writes: bool = True) -> None:
        self._lines = JsonLines(directory / EVENTS) if writes else None
        self._told: dict[str, int] = {}

    def note(self, event: str, step: int, **fields: Any) -> None:
        """Write `time`, `step`, `event` and whatever else there is to say, in types of JSON."""
        if self._lines is not None:
            self._lines.append({"time": utc_now(), "step": step, "event": event, **fields})

    def survived(self, event: str, step: int, said: str, **fields: Any) -> None:
        """Note what did not end the run, and say it."""
        told = self._told[event] = self._told.get(event, 0) + 1
        if told > MOST_TOLD:
            return
        self.note(event, step, said=said, **fields)
        if self._lines is not None:
            more = " (the last time that this is said)" if told == MOST_TOLD else ""
            _log.warning("step %s: %s%s", f"{step:,}", said, more)

    def finish(self) -> None:
        """Raise an error where lines still wait that cannot be written."""
        if self._lines is not None:
            self._lines.finish()
