"""Pictures hold what they were given, whole and in place, and come out the same each time."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from archipel import cli
from archipel.dashboard import pictures
from archipel.dashboard.timeline import (
    Landed,
    Merging,
    Pushed,
    Row,
    Scene,
    Step,
    Ticked,
    Window,
)
from archipel.errors import ConfigError
from archipel.protocol.schedule import SyncOptions
from archipel.sim import baselines
from archipel.sim.scenario import Run, SimOptions, simulate


def scene(step_count: int = 5) -> Scene:
    rows = [
        Row(
            f"learner-{i}",
            steps=[Step(100.0 + j, 100.0 + j, 101.0 + j) for j in range(step_count)],
            pushed=[Pushed(102.0, 0, True), Pushed(103.0, 1, i == 0)],
            landed=[Landed(103.0, 0)],
        )
        for i in range(2)
    ]
    rows[1].steps.append(Step(100.0 + step_count, 108.0 + step_count, 109.0 + step_count))
    rows[1].died, rows[1].absent = [104.0], [(104.0, 105.0)]
    ticks = [Ticked(1, 102.0, 0.4, 0.9), Ticked(2, 103.0, 0.2, 0.9)]
    rounds = [Merging(0, 1, 102.0, 103.5, 1), Merging(1, 2, 103.0, 103.2, 1), Merging(2, 3, 104.0, 104.1, -1)]
    window = Window(100.0, 110.0 + step_count, 100.0, 10.0 + step_count)
    return Scene(window, rows, Row("syncer"), ticks, rounds)


def lines(axes: Any, marker: str) -> list[int]:
    """Return how many points each line with this marker has."""
    return [len(line.get_xdata()) for line in axes.get_lines() if line.get_marker() == marker]


def bars(axes: Any) -> list[int]:
    """Return how many bars each group of bars has."""
    return [len(group.get_paths()) for group in axes.collections]


def legend(figure: Any) -> set[str]:
    return {text.get_text() for text in figure.legends[0].get_texts()}


# ---- the timeline ----


def test_a_timeline_has_a_bar_a_step_and_a_mark_a_push_a_landing_a_death() -> None:
    (axes,) = pictures.timeline(scene()).axes
    assert sum(bars(axes)) == 5 + (6 + 1) + 2 * 2 + 3  # steps, one that stood still, ticks twice, rounds
    assert lines(axes, "^") == [2, 0, 1, 1]  # merged and not, of each learner
    assert lines(axes, "v") == [1, 1]
    assert sum(lines(axes, "X")) == 1
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "learner-0", "learner-1", "syncer: grace", "rounds",
    ]  # fmt: skip


def test_rounds_that_overlap_lie_below_each_other() -> None:
    assert pictures._lanes(scene().rounds) == [0, 1, 0]


def test_the_key_names_what_is_there_and_nothing_else() -> None:
    full = legend(pictures.timeline(scene()))
    assert {"stood still", "died", "absent", "pushed, not merged", "round abandoned"} <= full
    calm = scene()
    calm.rows, calm.rounds = calm.rows[:1], calm.rounds[:2]
    calm.rows[0].pushed.pop()
    assert not {"stood still", "died", "absent", "pushed, not merged", "round abandoned"} & legend(
        pictures.timeline(calm)
    )


def test_a_crowded_timeline_leaves_marks_and_numbers_out() -> None:
    (axes,) = pictures.timeline(scene(pictures.CROWD + 1)).axes
    assert not lines(axes, "^") and not lines(axes, "v") and sum(lines(axes, "X")) == 1
    assert not axes.texts
    assert sum(bars(axes)) > 2 * pictures.CROWD


def test_no_bar_or_mark_lies_outside_the_axes_of_the_key() -> None:
    """The key stands below the axes, not on them."""
    figure = pictures.timeline(scene())
    figure.draw_without_rendering()
    box, axes = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    assert box.y1 <= axes.y0


def test_a_gossip_runs_timeline_has_no_syncer() -> None:
    peers = scene()
    peers.gossip, peers.ticks, peers.rounds = True, [], []
    figure = pictures.timeline(peers)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["learner-0", "learner-1"]
    assert {"model sent", "round settled"} <= legend(figure)
    assert not {"grace used", "round, with its fragment", "update landed"} & legend(figure)


# ---- the others ----


def test_losses_are_drawn_against_the_unit_that_fits() -> None:
    curves = [
        pictures.Curve("a", [0.0, 3600.0, 7200.0], [5.0, 3.0, 2.0]),
        pictures.Curve("b", [0.0, 7200.0], [5.0, 2.2]),
    ]
    (axes,) = pictures.loss(curves).axes
    assert axes.get_xlabel() == "hours from the start of the run"
    assert [list(line.get_xdata()) for line in axes.get_lines()] == [[0, 1, 2], [0, 2]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert axes.get_yscale() == "log"
    assert pictures.loss([pictures.Curve("a", [0.0, 9.0], [3.0, 2.0])]).axes[0].get_yscale() == "linear"


def test_goodput_has_every_row_as_a_line_and_the_papers_as_marks() -> None:
    fleets = pictures.Fleets(
        baselines.TABLE1_CHIPS,
        baselines.PAPER_GOODPUT,
        baselines.PAPER_UPTIME,
        baselines.PAPER_GOODPUT,
        baselines.PAPER_UPTIME,
    )
    figure = pictures.goodput(fleets)
    for axes in figure.axes:
        assert len(axes.get_lines()) == 2 * len(baselines.TABLE1_ROWS)
        assert lines(axes, "o") == [len(baselines.TABLE1_CHIPS)] * len(baselines.TABLE1_ROWS)
    assert set(baselines.TABLE1_ROWS) | {"simulated", "paper, Table 1"} == legend(figure)


def test_bandwidth_has_a_line_a_method_and_marks_where_the_paper_prints_them() -> None:
    demands = [
        pictures.Demand("one", [1.0, 10.0], [0.2, 0.9], [(5.0, 0.75)]),
        pictures.Demand("two", [1.0, 10.0], [0.1, 0.4]),
    ]
    (axes,) = pictures.bandwidth(demands).axes
    assert len(axes.get_lines()) == 3 and lines(axes, "o") == [1]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two", "paper, Table 13"]


def test_an_experiment_has_a_point_a_seed_and_a_panel_a_number_of_learners() -> None:
    variants = [
        pictures.Variant("x", 4, [1.0, 2.0]),
        pictures.Variant("y", 4, [3.0]),
        pictures.Variant("x", 8, [1.5]),
    ]
    four, eight = pictures.experiment(variants, "title").axes
    assert (lines(four, "o"), lines(eight, "o")) == ([2, 1], [1])
    assert [label.get_text() for label in four.get_yticklabels()] == ["x", "y"]


# ---- files ----


@pytest.mark.parametrize("suffix", pictures.SUFFIXES)
def test_the_same_picture_is_the_same_file(suffix: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        pictures.save(pictures.timeline(scene(), "t"), tmp_path / f"{name}{suffix}")
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("a", "b"))
    assert first == second and len(first) > 5000


def test_an_unknown_suffix_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must end in one of \.svg"):
        pictures.check("x.bmp")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[plots\]"'):
        pictures.check("x.svg")


# ---- the commands ----


def draw(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        cli.main(["draw", *arguments])
    return ended.value.code


def test_a_simulated_runs_timeline_is_drawn(tmp_path: Path) -> None:
    sync = SyncOptions(steps=12, learners=2, fragments=3, interval_steps=3)
    simulate(Run(sync, SimOptions()), folder=tmp_path)
    out = tmp_path / "t.svg"
    assert draw("timeline", str(tmp_path), "--out", str(out), "--from", "2t", "--to", "9t") == 0
    assert out.read_text().count("<path") > 50


def test_the_losses_of_two_runs_are_drawn(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        points = [{"time": t, "kind": "validation", "round": t, "loss": 5.0 - t} for t in range(3)]
        texts = [json.dumps(point, separators=(",", ":")) for point in points]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(texts) + "\n")
    out = tmp_path / "loss.png"
    assert draw("loss", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_tables_are_drawn_from_the_simulator(tmp_path: Path) -> None:
    assert draw("goodput", "--failures", "200", "--out", str(tmp_path / "g.pdf")) == 0
    assert draw("bandwidth", "--sites", "2", "--out", str(tmp_path / "b.svg")) == 0
    assert (tmp_path / "g.pdf").read_bytes().startswith(b"%PDF") and (tmp_path / "b.svg").exists()


def test_an_experiments_results_are_drawn(tmp_path: Path) -> None:
    results = {f"x, y · M={m} · seed {s}": {"loss": 1.0 + s} for m in (4, 8) for s in (0, 1)}
    (tmp_path / "r.json").write_text(json.dumps(results, ensure_ascii=False))
    assert draw("experiment", str(tmp_path / "r.json"), "--out", str(tmp_path / "e.svg")) == 0
    assert (tmp_path / "e.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["loss", "{folder}"], "holds no validation losses"),
        (["timeline", "{folder}"], "give the folder of a run"),
        (["experiment", "{folder}/bad.json"], "not a file that experiments/run.py wrote"),
        (["experiment", "{folder}/none.json"], "holds no cell yet"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text('{"a": {"loss": 1}}')
    (tmp_path / "none.json").write_text("{}")
    filled = [argument.format(folder=tmp_path) for argument in arguments]
    assert draw(*filled, "--out", str(tmp_path / "x.svg")) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "x.svg").exists()
