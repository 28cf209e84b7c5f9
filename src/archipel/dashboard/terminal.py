"""A run on a terminal: a table that lives, plain lines where there is none, the summary of a finished run.

Everything that came over the network (names, reasons, notices) is cleaned before it is shown: no control
characters reach the terminal and nothing is read as markup.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .collect import Learner, Round, Series
from .figures import loss_table, read
from .reading import Process

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
    line says how the run stands; no escape codes. Any series will do that has `lines` and `line_count`, with
    a way to be shown and a way to be said in a line.
    """

    def __init__(
        self,
        series: Any,
        console: Console | None = None,
        *,
        period_s: float = 5.0,
        shown: Callable[[Any], Group] = show,
        said: Callable[[Any], str] = status,
    ) -> None:
        self.series = series
        self._show, self._status = shown, said
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
            self._live.update(self._show(self.series), refresh=True)
            self._live.stop()
        else:
            self._plain()
            self._say(self._status(self.series))

    def update(self, now: float) -> None:
        """Show what is new. now: seconds on any clock that only grows, for the period of plain lines."""
        if self._live:
            self._live.update(self._show(self.series), refresh=True)
            return
        self._plain()
        if self._said_at is None or now - self._said_at >= self.period_s:
            self._said_at = now
            self._say(self._status(self.series))

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


def summary(run_dir: str | Path, rounds: int = 10, targets: Sequence[float] = ()) -> str:
    """Return what the tapes of a run hold: a line per worker process, the run's figures, its last rounds.

    targets: losses to name the time of. A damaged tape is read up to the damage and says so. Raises TapeError
    where there is no tape at all.
    """
    figures = read(run_dir)
    series = figures.series
    lines: list[tuple[str, ...]] = [("worker", "incarnation", "records", "steps", "bytes", "time", "end")]
    lines += [_process_line(process) for process in figures.reading.processes]
    kept = list(series.recent)[-rounds:] if rounds > 0 else []
    last: list[tuple[str, ...]] = [
        ("tick", "fragment", "version", "at", "took", "grace", "who took part, and their weights")
    ]
    last += [_round_line(series, each) for each in kept]
    table = figures.table(loss_table(run_dir, figures.started_s or 0.0, targets))
    rounds_line = _gossip(table) if table["gossip"] else _total(series)
    blocks = [_columns(lines), [rounds_line, *_figures(table)], _learner_lines(table["learners"])]
    return "\n\n".join("\n".join(block) for block in [*blocks, _columns(last) if kept else []] if block)


def _total(series: Series) -> str:
    pause = series.pause
    total = f"{series.rounds} rounds, {series.abandoned} abandoned, {series.rejected} pushes rejected"
    total += f", {series.kills} learners lost, longest pause {seconds(pause.longest_pause_s)}"
    return total + f" at a median step of {seconds(pause.step_s)}"


def _gossip(table: dict[str, Any]) -> str:
    gossip = table["gossip"]
    times = {
        what: seconds((gossip[what] or {}).get("median")) for what in ("round_s", "wait_s", "transfer_s")
    }
    return (
        f"{table['rounds']} rounds, {gossip['partners']['mean']:.2f} partners in a peer's round, which took "
        f"{times['round_s']}, {times['wait_s']} of it waiting and {times['transfer_s']} of transfer (medians)"
    )


def _process_line(process: Process) -> tuple[str, ...]:
    first, last = process.first_s, process.last_s
    time_s = last - first if first is not None and last is not None else None
    counts = str(process.records), str(process.steps) if process.steps else "–"
    name = process.worker, process.file.incarnation
    return *name, *counts, number(process.size, "B"), seconds(time_s), process.end


def _figures(table: dict[str, Any]) -> list[str]:
    """Return the figures of `figures.figures_of` as lines, those that are known."""
    time = table["time"]
    lines = [
        f"goodput {percent(table['goodput'])}: learners' time {seconds(time['learners_s'])}, "
        f"stepping {seconds(time['stepping_s'])}, stood still {seconds(time['stood_still_s'])}, "
        f"absent {seconds(time['absent_s'])}; uptime {percent(table['uptime'])}"
    ]
    if table["participants"]:
        mean = table["participants"]["mean"]
        lines.append(
            f"step {seconds(table['step_s'])}, {number(table['rounds_per_step'])} ticks per step, "
            f"{mean:.1f} learners per round, a round took {seconds(table['round_s']['median'])}"
        )
    if table["grace"]:
        waited = table["grace"]["waited_s"]
        lines.append(
            f"grace: waited {seconds(waited['mean'])} a tick of {seconds(table['grace']['window_mean_s'])} "
            f"granted; {table['grace']['windows_used_up']} of {waited['count']} windows used up"
        )
    if table["staleness"]:
        lines.append(_staleness(table["staleness"]))
    tokens = dict(table["tokens"])
    if consumed := tokens.pop("consumed", 0):
        fates = "  ".join(f"{fate} {share(count / consumed)}" for fate, count in tokens.items())
        lines.append(f"tokens {number(consumed)}: {fates}")
    if table["bytes"]:
        sent, received = (number(table["bytes"][way], "B") for way in ("sent", "received"))
        lines.append(f"the syncer sent {sent}, received {received}")
    return [*lines, *_faults(table), *_loss(table["loss"])]


def percent(value: float | None) -> str:
    """Return a share in percent, to a tenth."""
    return "–" if value is None else f"{100 * value:.1f} %"


def _staleness(staleness: dict[str, Any]) -> str:
    versions, age, flight = (staleness[what] for what in ("versions", "age_ticks", "flight_ticks"))
    behind = f"{number(round(versions['mean'], 3))} versions behind (at most {versions['greatest']})"
    ages = f", {number(age['mean'])} ticks old (at most {age['greatest']:.0f})" if age else ""
    return f"merged pushes were {behind}{ages}, {number(round(flight['mean'], 3))} ticks in flight"


def _faults(table: dict[str, Any]) -> list[str]:
    if not (table["deaths"] or table["cuts"] or table["syncer_deaths"]):
        return []
    back = table["recovered"]
    recovered = f", {back['count']} back after {seconds(back['mean_s'])} on average" if back else ""
    line = f"deaths of learners {table['deaths']}{recovered}; channels lost {table['cuts']}"
    if table["syncer_deaths"]:
        line += f"; deaths of the syncer {table['syncer_deaths']}, absent {seconds(table['syncer_absent_s'])}"
    return [line]


def _loss(loss: dict[str, Any] | None) -> list[str]:
    if loss is None:
        return []
    line = f"validation loss {loss['first']:.3f} to {loss['last']:.3f} in {seconds(loss['at_s'])}"
    line += f", best {loss['best']:.3f}"
    for target, at_s in loss["to_s"].items():
        line += f"; {target} " + ("not reached" if at_s is None else f"after {seconds(at_s)}")
    return [line]


def _learner_lines(learners: dict[str, dict[str, Any]]) -> list[str]:
    if not learners:
        return []
    rows = [("learner", "goodput", "steps", "step", "stood still", "absent", "deaths", "rounds", "merged")]
    for name, each in learners.items():
        times = (seconds(each[what]) for what in ("step_s", "stood_still_s", "absent_s"))
        counts = str(each["deaths"]), str(each["rounds"]), percent(each["merged_share"])
        rows.append((name, percent(each["goodput"]), str(each["steps"]), *times, *counts))
    return _columns(rows)


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
