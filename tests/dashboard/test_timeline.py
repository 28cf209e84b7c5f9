"""The window that is drawn, and what is in it, counted by head."""

from pathlib import Path

import pytest

from archipel.chaos.plan import Weather
from archipel.dashboard.timeline import Landed, Merging, Pushed, Scene, Step, Ticked, scene_of, window_of
from archipel.errors import ConfigError
from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.protocol.schedule import SyncOptions
from archipel.sim.scenario import Outcome, Run, SimOptions, simulate
from archipel.tape.tape import Header, TapeWriter, tape_path

Script = list[tuple[float, m.Event, list[m.Action]]]


def write(folder: Path, worker: str, incarnation: str, script: Script, role: str = "learner") -> None:
    header = Header("run", worker, role, incarnation, script[0][0])
    writer = TapeWriter(tape_path(folder, worker, incarnation), header)
    for record in script:
        writer.write(*record)
    writer.close()


def steps(first: float, count: int) -> Script:
    return [(first + i, m.StepCompleted(i, 100, 1.0), []) for i in range(count)]


def round_script(at: float) -> Script:
    """Tick 7 closes, fragment 1 is pulled from both learners, one of them is folded."""
    tally = m.Tally(7, ("a", "b"), 1.0, 0.0, 0.0, 0.5, 0.25)
    pulls: list[m.Action] = [m.Send(name, m.Pull(1, 7, 4)) for name in ("a", "b")]
    push = m.Push(1, 7, 4, 9, 2, 200, 900)
    return [
        (at, m.Woke(), [tally, *pulls]),
        (at + 0.2, m.Received("a", push), [m.Fold(1, "a", 2.0, 4)]),
        (at + 0.3, m.Merged(1, 5), []),
    ]


def pushes(at: float) -> m.Action:
    return m.Send(m.SYNCER, m.Push(1, 7, 4, 9, 2, 200, 900))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two learners of 1 s steps from 100 s on; `a` is pushed and merged at 105, `b` pushed in vain."""
    for name in ("a", "b"):
        pulled = (105.1, m.Received(m.SYNCER, m.Pull(1, 7, 4)), [pushes(105.1)])
        landed = (105.5, m.Applied(1, 5, 5), [])
        script = [*steps(101.0, 5), pulled, landed, *steps(106.0, 5)]
        write(tmp_path, name, "x", script if name == "a" else [*script[:6], *script[7:]])
    write(tmp_path, m.SYNCER, "s", [(100.0, m.Woke(), []), *round_script(105.0)], role="syncer")
    return tmp_path


# ---- what is in the window ----


def test_a_window_holds_steps_pushes_landings_ticks_and_rounds(run: Path) -> None:
    scene = scene_of(run, window_of(run))
    a, b = scene.rows
    assert (a.worker, b.worker) == ("a", "b")
    assert a.steps[0] == Step(100.0, 100.0, 101.0) and len(a.steps) == scene.crowd == 10
    assert a.pushed == [Pushed(105.1, 1, True)] and b.pushed == [Pushed(105.1, 1, False)]
    assert a.landed == [Landed(105.5, 1)] and b.landed == []
    assert scene.ticks == [Ticked(7, 105.0, 0.25, 0.5)]
    assert scene.rounds == [Merging(1, 7, 105.0, 105.3, 5, ("a",))]


def test_what_lies_outside_the_window_is_left_out(run: Path) -> None:
    scene = scene_of(run, window_of(run, "1.5", "3.5"))
    assert [step.end for step in scene.rows[0].steps] == [102.0, 103.0, 104.0]
    assert not (scene.rows[0].pushed or scene.ticks or scene.rounds)


def test_a_step_that_stood_still_is_told_from_its_neighbours(tmp_path: Path) -> None:
    script: Script = [*steps(1.0, 3), (13.0, m.StepCompleted(4, 100, 10.0), []), *steps(14.0, 3)]
    write(tmp_path, "a", "x", script)
    scene = scene_of(tmp_path, window_of(tmp_path, "0", "16"))
    assert scene.rows[0].steps[3] == Step(3.0, 12.0, 13.0)


def test_a_dead_learner_is_absent_until_its_next_process(tmp_path: Path) -> None:
    write(tmp_path, "a", "x", steps(1.0, 5))
    write(tmp_path, "a", "y", [(12.0, m.Connected(m.SYNCER), []), *steps(13.0, 5)])
    row = scene_of(tmp_path, window_of(tmp_path)).rows[0]
    assert (row.died, row.absent) == ([5.0], [(5.0, 12.0)])


def test_a_learner_that_ended_in_order_did_not_die(tmp_path: Path) -> None:
    write(tmp_path, "a", "x", [*steps(1.0, 5), (5.5, m.StopRequested(), [m.Finish("SIGTERM")])])
    write(tmp_path, "b", "x", steps(1.0, 20))
    a, b = scene_of(tmp_path, window_of(tmp_path)).rows
    assert (a.died, a.absent) == ([], [(5.5, 20.0)]) and not (b.died or b.absent)


def test_learners_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("learner-10", "learner-9", "learner-1"):
        write(tmp_path, name, "x", steps(1.0, 3))
    scene = scene_of(tmp_path, window_of(tmp_path))
    assert [row.worker for row in scene.rows] == ["learner-1", "learner-9", "learner-10"]


def test_a_gossip_run_shows_models_sent_and_rounds_settled(tmp_path: Path) -> None:
    offered = (5.5, g.Offered(0), [m.Send("q", g.Model(0))])
    settled = (6.0, g.Mixed(0), [])
    write(tmp_path, "p", "x", [*steps(1.0, 5), offered, settled, *steps(7.0, 3)], role="peer")
    scene = scene_of(tmp_path, window_of(tmp_path))
    assert scene.gossip and not (scene.ticks or scene.rounds)
    assert scene.rows[0].pushed == [Pushed(5.5, 0, True)] and scene.rows[0].landed == [Landed(6.0, 0)]


# ---- which window ----


@pytest.mark.parametrize(
    ("since", "until", "window"),
    [("2", "4.5", (102.0, 104.5)), ("2s", "7t", (102.0, 105.0)), ("", "3", (100.0, 103.0))],
)
def test_moments_are_seconds_or_ticks(run: Path, since: str, until: str, window: tuple[float, float]) -> None:
    found = window_of(run, since, until)
    assert (found.start, found.end) == window
    assert (found.zero, found.whole_s) == (100.0, 10.0)


@pytest.mark.parametrize(
    ("since", "until", "words"),
    [
        ("soon", "", "'soon' is neither seconds"),
        ("1.5t", "", "'1.5t' is neither seconds"),
        ("5", "2", "--from below --to"),
        ("20", "", "no window"),
        ("99t", "", "tick 99 did not close"),
    ],
)
def test_a_moment_that_is_none_is_refused(run: Path, since: str, until: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        window_of(run, since, until)


def test_a_long_run_is_shown_around_its_first_fault(tmp_path: Path) -> None:
    write(tmp_path, "a", "x", steps(1.0, 200))
    write(tmp_path, m.SYNCER, "s", [(80.0, m.Disconnected("a"), [])], role="syncer")
    window = window_of(tmp_path)
    assert (window.start, window.end) == (74.0, 98.0)


# ---- a simulated storm ----


@pytest.fixture(scope="module")
def stormy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    folder = tmp_path_factory.mktemp("storm")
    sync = SyncOptions(steps=60, learners=4, fragments=6, interval_steps=6)
    sim = SimOptions(jitter=0.1, weather=Weather(kill_s=40.0, slow_s=60.0, mean_for_s=6.0))
    return simulate(Run(sync, sim, "storm", 1), folder=folder), folder


def whole(folder: Path) -> Scene:
    whole_s = window_of(folder, "0").whole_s
    return scene_of(folder, window_of(folder, "0", f"{whole_s}"))


def test_a_storms_ticks_rounds_and_steps_are_all_there(stormy: tuple[Outcome, Path]) -> None:
    outcome, folder = stormy
    scene = whole(folder)
    assert [tick.tick for tick in scene.ticks] == list(range(1, 61))
    merged = [each for each in scene.rounds if each.version > 0]
    assert [(each.end, each.fragment, each.workers) for each in merged] == [
        (at, fragment, tuple(workers)) for at, fragment, _, workers in outcome.witness.merged
    ]
    pushed = sum(each.merged for row in scene.rows for each in row.pushed)
    assert pushed == sum(len(each.workers) for each in merged)
    assert sum(len(row.died) for row in scene.rows) > 0


def test_without_their_own_tapes_learners_are_drawn_from_their_reports(
    stormy: tuple[Outcome, Path], tmp_path: Path
) -> None:
    (tmp_path / "tape").mkdir()
    for path in (stormy[1] / "tape").glob("syncer*"):
        (tmp_path / "tape" / path.name).symlink_to(path)
    own, told = whole(stormy[1]), whole(tmp_path)
    assert [row.worker for row in told.rows] == [row.worker for row in own.rows]
    for mine, theirs in zip(own.rows, told.rows, strict=True):
        assert abs(len(mine.steps) - len(theirs.steps)) <= 4
        assert abs(len(mine.died) - len(theirs.died)) <= 1
    assert told.rounds == own.rounds and told.ticks == own.ticks
