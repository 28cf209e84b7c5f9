"""The bar: how far it is, on a terminal; nothing elsewhere."""

import io

import pytest

from archipel.commands.progress import Bar


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_records_and_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Bar(200) as bar:
        bar.show(50, 3)
        bar.show(200, 17)
    assert "200/200" in terminal.getvalue() and "tick 17" in terminal.getvalue()


def test_a_file_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with Bar(200) as bar:
        bar.show(200, 17)
    assert file.getvalue() == ""
