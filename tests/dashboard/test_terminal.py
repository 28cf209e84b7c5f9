"""What is shown is readable, complete, and cannot be abused by what came over the network."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from archipel.dashboard.collect import Series
from archipel.dashboard.terminal import LINES_AT_ONCE, View, number, seconds, show, status, summary
from archipel.errors import TapeError
from archipel.protocol import messages as m
from archipel.tape.tape import Header, Record, TapeWriter, tape_path


def script(name: str = "learner-0") -> list[tuple[float, m.Event, list[m.Action]]]:
    """One learner joins, steps, takes part in one round, and is lost."""
    welcome = m.Welcome("run", 1, {}, 0, 0, 0, (0, 0), ())
    tally = m.Tally(7, (name,), 0.5, 0.1, 0.2, 0.45, 0.3)
    push = m.Push(1, 7, 4, 9, 2, 200, 900)
    return [
        (100.0, m.Received(name, m.Join("run", "learner", "a")), [m.Send(name, welcome)]),
        (101.0, m.Received(name, m.Progress(1, 4000, 0.5)), []),
        (102.0, m.Received(name, m.Progress(2, 9000, 0.5)), [tally, m.Send(name, m.Pull(1, 7, 4))]),
        (103.0, m.Received(name, push), [m.Fold(1, name, 2.5, 4)]),
        (104.0, m.Folded(1, name), [m.Merge(1, 5)]),
        (105.0, m.Merged(1, 5), [m.Notice("val_loss=2.5"), m.Notice("no learners", "warning")]),
    ]


def fed(name: str = "learner-0") -> Series:
    series = Series()
    for i, (t, event, actions) in enumerate(script(name)):
        series.take(Record(i, t, event, tuple(actions)))
    return series


def drawn(series: Series, *, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=terminal, _environ={"TERM": "xterm"})
    console.print(show(series))
    return out.getvalue()


def test_the_table_shows_learners_and_the_run() -> None:
    series = fed()
    series.fates = {
        "consumed": 1000,
        "merged": 930,
        "overwritten": 50,
        "absent": 20,
        "lost": 0,
        "unmerged": 0,
    }
    series.bytes_sent, series.bytes_received = 2_500_000, 999
    text = drawn(series)
    for part in ("learner-0", "not stepping", "5k", "tick 7", "val loss 2.500", "live 1", "rounds 1", "1.0"):
        assert part in text
    for part in ("0.3 s of 0.45 s grace", "sent 2.5MB  received 999B", "merged 93 %  overwritten 5 %"):
        assert part in text


def test_an_empty_run_can_be_shown() -> None:
    assert "no round yet" in drawn(Series())
    assert "tick 0" in status(Series())


def test_names_cannot_smuggle_markup_or_escape_codes() -> None:
    series = fed("[red]x[/red]\x1b[2Jy")
    assert "[red]x[/red]·[2Jy" in drawn(series)
    assert "\x1b[2J" not in drawn(series, terminal=True)
    out = io.StringIO()
    series.take(Record(9, 106.0, m.Woke(), (m.Notice("bad \x1b[2J\r\nline"),)))
    with View(series, Console(file=out)) as view:
        view.update(0.0)
    assert "bad ·[2J··line\n" in out.getvalue()


def test_without_a_terminal_there_are_plain_lines_once_each() -> None:
    series, out = fed(), io.StringIO()
    with View(series, Console(file=out, width=20), period_s=5.0) as view:
        for now in (0.0, 1.0, 4.9, 5.0):
            view.update(now)
        lines = out.getvalue().splitlines()
    assert lines[:2] == ["syncer: val_loss=2.5", "syncer: warning: no learners"]
    assert len(lines) == 4 and all(line == status(series) for line in lines[2:])
    assert "\x1b" not in out.getvalue()


def test_a_flood_of_notices_is_cut_and_counted() -> None:
    series, out = Series(), io.StringIO()
    series.take(Record(0, 0.0, m.Woke(), tuple(m.Notice(f"n={i}") for i in range(LINES_AT_ONCE + 30))))
    View(series, Console(file=out)).update(0.0)
    lines = out.getvalue().splitlines()
    assert lines[0] == "… 30 more notices, on the tape"
    assert lines[-2] == f"syncer: n={LINES_AT_ONCE + 29}"


def test_on_a_terminal_the_table_is_redrawn_in_place() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, _environ={"TERM": "xterm"})
    with View(fed(), console) as view:
        view.update(0.0)
    assert "\x1b[" in out.getvalue() and "learner-0" in out.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (950, "950"),
        (999.9, "1k"),
        (12_345, "12.3k"),
        (4.56e6, "4.56M"),
        (0.25, "0.25"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.1234, "0.123 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_times_are_readable(value: float | None, text: str) -> None:
    assert seconds(value) == text


# ---- summary ----


def run_folder(folder: Path) -> Path:
    syncer = TapeWriter(tape_path(folder, "syncer", "s1"), Header("run", "syncer", "syncer", "s1", 0.0))
    for record in script():
        syncer.write(*record)
    syncer.close("tick 7 of 7")
    learner = TapeWriter(tape_path(folder, "learner-0", "a"), Header("run", "learner-0", "learner", "a", 0.0))
    for i in range(3):
        learner.write(10.0 * i, m.StepCompleted(i, 64, 0.1), [])
    return learner.path


def test_the_summary_tells_of_every_worker_and_the_last_rounds(tmp_path: Path) -> None:
    run_folder(tmp_path)
    text = summary(tmp_path)
    lines = [line.split() for line in text.splitlines()]
    assert lines[1][:4] == ["learner-0", "a", "3", "3"] and "20 s" in text and "no end" in text
    assert lines[2][:3] == ["syncer", "s1", "6"] and text.splitlines()[2].endswith("tick 7 of 7")
    assert "1 rounds, 0 abandoned" in text
    assert text.splitlines()[-1].split() == [
        *("7", "1", "5", "5", "s", "3", "s"),
        *("0.3", "s", "of", "0.45", "s", "learner-0", "1.000"),
    ]


def test_the_summary_of_a_damaged_or_torn_tape_says_so(tmp_path: Path) -> None:
    path = run_folder(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert "bytes torn" in summary(tmp_path)
    path.write_bytes(whole.replace(b'"step":1', b'"step":9'))
    text = summary(tmp_path)
    assert "DAMAGED" in text and "line 3" in text and "tick 7 of 7" in text


def test_a_folder_without_tapes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tape").mkdir()
    with pytest.raises(TapeError, match="holds no tape"):
        summary(tmp_path)
