"""A bar on standard error for work over a known number of records; nothing where that is no terminal."""

import sys
import time
from types import TracebackType
from typing import Any

EVERY_S = 0.1


class Bar:
    """Shows records done of all, the tick they have come to, and how long the rest will take."""

    def __init__(self, records: int) -> None:
        self._records, self._shown_at = records, 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Bar":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("records, tick {task.fields[tick]}, left"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def show(self, records: int, tick: int) -> None:
        """Say how far it is; ten times a second at most."""
        now = time.monotonic()
        if self._bar is None or (now - self._shown_at < EVERY_S and records < self._records):
            return
        self._shown_at = now
        if self._task is None:  # what was done before this process is no measure of its speed
            self._task = self._bar.add_task("", total=self._records, completed=records, tick=tick)
        self._bar.update(self._task, completed=records, tick=tick)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
