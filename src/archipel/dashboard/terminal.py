"""A run on a terminal: a table that lives, plain lines where there is none, the summary of a finished run.

Everything that came over the network (names, reasons, notices) is cleaned before it is shown: no control
characters reach the terminal and nothing is read as markup.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import TapeError
from ..protocol.messages import SYNCER, StepCompleted
from ..tape.record import Record
from ..tape.tape import TapeFile, TapeTail, segments, workers
from .collect import Learner, Round, Series

FATES = ("merged", "overwritten", "absent", "lost", "unmerged")
LINES_SHOWN = 5
LINES_AT_ONCE = 20  # a flood of notices must not drown the terminal
STYLES = {"live": "green", "not stepping": "yellow", "gone": "red", "joining": "cyan", "left": "dim"}


def clean(text: str) -> str:
    """Return the text on one line, without control characters."""
    return "".join(char if char.isprintable() else "·" for char in text)


def number(value: float | None, unit: str = "") -> str:
    """Return a count or rate in four digits or less: 950, 12.3k, 4.56M; a dash for what is not known."""
    if value is None:
        return "–"
    for letter in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            whole = not letter and float(value).is_integer()
            return f"{value:.0f}{unit}" if whole else f"{value:.3g}{letter}{unit}"
        value /= 1000
    return f"{value:.3g}P{unit}"


def seconds(value: float | None) -> str:
    """Return a time: 0.123 s, 12.3 s, 3 min 20 s, 2 h 05 min."""
    if value is None:
        return "–"
    if value < 120:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def share(value: float | None) -> str:
    """Return a share in percent."""
    return "–" if value is None else f"{100 * value:.0f} %"


# ---- the live view ----


def show(series: Series) -> Group:
    """Return the table of learners, the lines of the run and its newest notices."""
    notices = [Text(clean(f"{line.worker}: {line.text}"), _level(line.level)) for line in series.lines]
    return Group(_learners(series), *map(Text, _run(series)), *notices[-LINES_SHOWN:])


def _level(level: str) -> str:
    return "yellow" if level == "warning" else "dim"


def _learners(series: Series) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("learner", "state", "steps", "tokens/s", "step", "last merge", "merged"):
        table.add_column(head, justify="left" if head in ("learner", "state") else "right")
    for learner in series.learners.values():
        if learner.role == "learner":
            table.add_row(*_row(series, learner))
    return table


def _row(series: Series, learner: Learner) -> list[Text]:
    state = series.state(learner)
    last = learner.last_round
    merge = f"tick {last.tick}, {seconds(series.now - last.merged_at)} ago" if last else "–"
    stepping = state in ("live", "not stepping")
    rate = number(learner.tokens_per_s) if stepping else "–"
    cells = [number(learner.steps), rate, seconds(learner.step_s), merge, share(series.merged_share(learner))]
    return [Text(clean(learner.name)), Text(state, STYLES.get(state, "")), *map(Text, cells)]


def _run(series: Series) -> list[str]:
    """Return what is to say of the run as a whole."""
    first = f"tick {series.tick}  rounds {series.rounds}  live {len(series.live)}"
    if series.val_loss is not None and series.val_loss_first is not None:
        first += f"  val loss {series.val_loss:.3f} (from {series.val_loss_first:.3f})"
    if series.kills:
        first += f"  lost learners {series.kills}"
    quorums = [len(each.weights) for each in list(series.recent)[-24:]]
    second = f"learners per round {sum(quorums) / len(quorums):.1f}" if quorums else "no round yet"
    if series.tally:
        used, window = seconds(series.tally.used_s), seconds(series.tally.window_s)
        second += f"  waited {used} of {window} grace  step {seconds(series.tally.step_s)}"
    second += f"  longest pause {seconds(series.pause.longest_pause_s)}"
    return [first, second, *_amounts(series)]


def _amounts(series: Series) -> list[str]:
    lines = []
    if series.bytes_sent is not None or series.bytes_received is not None:
        sent, received = number(series.bytes_sent, "B"), number(series.bytes_received, "B")
        lines.append(f"sent {sent}  received {received}")
    consumed = series.fates.get("consumed")
    if consumed:
        fates = (f"{fate} {share(series.fates.get(fate, 0) / consumed)}" for fate in FATES)
        lines.append("tokens " + "  ".join(fates))
    return lines


def status(series: Series) -> str:
    """Return the run in one plain line."""
    since = series.now - (series.started_at or 0.0)
    rate = sum(each.tokens_per_s or 0.0 for each in series.live)
    return clean(f"{seconds(since)}  {'  '.join(_run(series))}  tokens/s {number(rate)}")


class View:
    """Shows a series as it grows: `with View(series) as view`, then `view.update(now)` whenever records came.

    On a terminal the table is redrawn in place. Elsewhere every notice is a line, and every `period_s` one
    line says how the run stands; no escape codes.
    """

    def __init__(self, series: Series, console: Console | None = None, *, period_s: float = 5.0) -> None:
        self.series = series
        self.console = console or Console()
        self.period_s = period_s
        self.lines = 0  # of the series, shown so far
        self._said_at: float | None = None
        alive = self.console.is_terminal and not self.console.is_dumb_terminal
        self._live = Live(console=self.console, auto_refresh=False) if alive else None

    def __enter__(self) -> "View":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.update(show(self.series), refresh=True)
            self._live.stop()
        else:
            self._plain()
            self._say(status(self.series))

    def update(self, now: float) -> None:
        """Show what is new. now: seconds on any clock that only grows, for the period of plain lines."""
        if self._live:
            self._live.update(show(self.series), refresh=True)
            return
        self._plain()
        if self._said_at is None or now - self._said_at >= self.period_s:
            self._said_at = now
            self._say(status(self.series))

    def _plain(self) -> None:
        new = self.series.line_count - self.lines
        self.lines = self.series.line_count
        fresh = list(self.series.lines)[-min(new, LINES_AT_ONCE) :] if new else []
        if new > len(fresh):
            self._say(f"… {new - len(fresh)} more notices, on the tape")
        for line in fresh:
            self._say(f"{line.worker}: {'warning: ' if line.level == 'warning' else ''}{line.text}")

    def _say(self, text: str) -> None:
        # Not through rich: it would fold long lines, and a log is read line by line.
        self.console.file.write(clean(text) + "\n")
        self.console.file.flush()


# ---- the summary of a run ----


def summary(run_dir: str | Path, rounds: int = 10) -> str:
    """Return what the tapes of a run hold: a line per worker process, then its last rounds.

    A damaged tape is read up to the damage and says so. Raises TapeError where there is no tape at all.
    """
    files = workers(run_dir)
    if not files:
        raise TapeError(f"{run_dir} holds no tape: has the run started, and is it the run's folder?")
    series = Series()
    lines: list[tuple[str, ...]] = [("worker", "incarnation", "records", "steps", "bytes", "time", "end")]
    lines += [_tape_line(file, series) for file in files]
    kept = list(series.recent)[-rounds:] if rounds > 0 else []
    table: list[tuple[str, ...]] = [
        ("tick", "fragment", "version", "at", "took", "grace", "who took part, and their weights")
    ]
    table += [_round_line(series, each) for each in kept]
    pause = series.pause
    total = f"{series.rounds} rounds, {series.abandoned} abandoned, {series.rejected} pushes rejected"
    total += f", {series.kills} learners lost, longest pause {seconds(pause.longest_pause_s)}"
    total += f" at a median step of {seconds(pause.step_s)}"
    return "\n".join([*_columns(lines), "", total, *(["", *_columns(table)] if kept else [])])


def _tape_line(file: TapeFile, series: Series) -> tuple[str, ...]:
    first: Record | None = None
    last: Record | None = None
    steps, records, end = 0, 0, ""
    try:
        tape = TapeTail(file.path)
        if file.worker == SYNCER and tape.header:
            series.meter.quorum = tape.header.settings.get("sync", {}).get("quorum", 1)
            series.mirror(tape.header)
        for record in tape:
            first, last, records = first or record, record, records + 1
            steps += isinstance(record.event, StepCompleted)
            if file.worker == SYNCER:
                series.take(record)
        end = _end(tape)
    except TapeError as error:
        end = f"DAMAGED: {error}"
    size = sum(part.stat().st_size for part in segments(file.path))
    time_s = last.t - first.t if first and last else None
    step_text = str(steps) if steps else "–"
    return file.worker, file.incarnation, str(records), step_text, number(size, "B"), seconds(time_s), end


def _end(tape: TapeTail) -> str:
    if tape.closed is not None:
        return tape.closed or "closed"
    return f"no end, {tape.torn_bytes} bytes torn" if tape.torn_bytes else "no end: running, or killed"


def _round_line(series: Series, each: Round) -> tuple[str, ...]:
    total = sum(each.weights.values()) or 1.0
    who = ", ".join(f"{name} {weight / total:.3f}" for name, weight in each.weights.items()) or "–"
    tally = each.tally
    grace = f"{seconds(tally.used_s)} of {seconds(tally.window_s)}" if tally else "–"
    at = seconds(each.merged_at - (series.started_at or 0.0))
    took = seconds(each.merged_at - each.started_at)
    return str(each.tick), str(each.fragment), str(each.version), at, took, grace, who


def _columns(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return rows as lines of aligned columns; the last column is as long as it likes."""
    cells = [[clean(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in cells]
