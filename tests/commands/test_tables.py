"""The papers' tables without --json: aligned text, and with --json the one line as it was."""

import msgspec
import pytest

from archipel import cli
from archipel.commands import tables
from archipel.sim import bandwidth, goodput, rounds


def archipel(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return ended.value.code


def test_numbers_are_right_and_words_left() -> None:
    shown = tables.aligned(["row", "value", ""], [["a", 1.5, None], ["bcde", None, "x"]])
    assert shown.splitlines() == ["row   value", "a       1.5", "bcde         x"]


def test_round_times_are_printed_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert archipel("simulate", "--paper", "gasloc-rounds") == 0
    heads, first, *_ = capsys.readouterr().out.splitlines()
    assert heads.split() == ["c", "r", "diloco", "fixed", "adapted", "none"]
    assert first.split() == ["3", "0.1", "86.25", "59.996", "33.0", "33.0"]
    assert archipel("simulate", "--paper", "gasloc-rounds", "--json") == 0
    assert msgspec.json.decode(capsys.readouterr().out) == rounds.gasloc_rounds()


def test_the_bandwidth_table_has_the_papers_figures_below_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert archipel("plan", "--paper", "table13") == 0
    heads, ours, papers, *_ = capsys.readouterr().out.splitlines()
    assert heads.split() == ["step_s", "sites", "method", "50%", "75%", "90%", "95%", "99%"]
    assert ours.split() == ["1", "2", "dp", "here", "48.0", "80.0", "102.9", "111.2", "198.0"]
    assert papers.split() == ["1", "2", "dp", "paper", "49", "81", "104", "113", "195"]
    assert archipel("plan", "--paper", "table13", "--json") == 0
    assert msgspec.json.decode(capsys.readouterr().out) == msgspec.to_builtins(bandwidth.table13())


def test_goodput_is_printed_beside_the_papers() -> None:
    shown = tables.table1(goodput.table1(0, failures=100)).splitlines()
    assert "150,000 chips" in shown[0] and "2,400,000 chips" in shown[0]
    assert shown[6].startswith("goodput, M=16") and shown[6].endswith("(86)")
    assert shown[12].startswith("uptime, M=16") and shown[12].endswith("(99)")


def test_what_was_measured_is_printed_beside_the_specification() -> None:
    row = {"setting": "K=1", "figure": "merged", "measured": 0.93, "specification": 0.9, "deviation": 0.03}
    shown = tables.section3({"rows": [row], "seconds": 1.0}).splitlines()
    assert shown[0].split() == ["setting", "figure", "measured", "specification", "deviation"]
    assert shown[1].split() == ["K=1", "merged", "0.93", "0.9", "0.03"]


def test_every_table_has_its_text() -> None:
    offered = cli.parser().parse_args
    for name in ("table1", "section3", "gasloc-rounds"):
        assert offered(["simulate", "--paper", name]).paper in tables.PAPERS
    assert offered(["plan", "--paper", "table13"]).paper in tables.PAPERS
