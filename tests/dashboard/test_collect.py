"""What people watch follows from the tape alone, in numbers one can check by head."""

from typing import Any

import pytest

from archipel.dashboard.collect import RECENT, Series, longest_pause, words
from archipel.protocol import messages as m
from archipel.protocol.schedule import SyncOptions
from archipel.protocol.syncer import SyncerMachine
from archipel.tape.tape import Record

Script = list[tuple[float, m.Event, list[m.Action]]]


def records(script: Script) -> list[Record]:
    return [Record(i, t, event, tuple(actions)) for i, (t, event, actions) in enumerate(script)]


def joined(t: float, name: str, incarnation: str = "a", fragments: int = 2) -> tuple[Any, ...]:
    welcome = m.Welcome("run", 1, {}, 0, 0, 0, (0,) * fragments, ())
    return t, m.Received(name, m.Join("run", "learner", incarnation)), [m.Send(name, welcome)]


def step(t: float, name: str, number: int, step_s: float = 0.5, tokens: int | None = None) -> tuple[Any, ...]:
    total = number * 100 if tokens is None else tokens
    return t, m.Received(name, m.Progress(number, total, step_s)), []


def merged(t: float, fragment: int = 0, version: int = 1) -> tuple[Any, ...]:
    return t, m.Merged(fragment, version), []


def gone(t: float, name: str) -> tuple[Any, ...]:
    return t, m.Disconnected(name), []


def fed(script: Script) -> Series:
    series = Series()
    series.take_all(records(script))
    return series


# ---- pauses ----


def test_the_longest_gap_between_rounds_counts() -> None:
    script = [joined(0, "a"), step(1, "a", 1), merged(2), merged(5), step(5.5, "a", 2, 0.75), merged(6)]
    pause = longest_pause(records(script), quorum=1)
    assert (pause.longest_pause_s, pause.at_s, pause.rounds) == (3, 2, 3)
    assert (pause.step_s, pause.pause_step_s) == (0.625, None)


def test_a_gap_in_which_the_quorum_was_not_live_does_not_count() -> None:
    script = [joined(0, "a"), joined(0, "b"), step(1, "a", 1), step(1, "b", 1), merged(2), merged(3)]
    script += [gone(4, "b"), joined(5, "b", "x"), step(6, "b", 1), merged(60), merged(62)]
    assert longest_pause(records(script), quorum=2).longest_pause_s == 2
    assert longest_pause(records(script), quorum=1).longest_pause_s == 57


def test_gaps_may_count_only_from_when_all_learners_are_there() -> None:
    script = [joined(0, "a"), step(1, "a", 1), merged(2), merged(50), joined(51, "b"), step(52, "b", 1)]
    script += [merged(53), merged(55), gone(56, "b"), merged(60)]
    assert longest_pause(records(script), quorum=1).longest_pause_s == 48
    assert longest_pause(records(script), quorum=1, learners=2).longest_pause_s == 5


def test_a_learner_is_live_only_from_its_first_report() -> None:
    script = [joined(0, "a"), merged(1), step(2, "a", 1), merged(11), merged(13)]
    assert longest_pause(records(script), quorum=1).longest_pause_s == 2


@pytest.mark.parametrize(
    "end",
    [
        (20, m.Received("a", m.Leave(100)), []),
        (20, m.Woke(), [m.Close("a", "silent")]),
        joined(20, "a", "b"),
    ],
    ids=["leave", "close", "joined again"],
)
def test_a_learner_that_ended_is_not_live(end: Any) -> None:
    script = [joined(0, "a"), step(1, "a", 1), merged(10), end, merged(30)]
    assert longest_pause(records(script), quorum=1).longest_pause_s == 0


def test_reports_of_workers_never_welcomed_make_no_quorum() -> None:
    script = [step(0, "stranger", 1), merged(1), merged(9)]
    assert longest_pause(records(script), quorum=1).longest_pause_s == 0


def test_no_gap_reaches_from_one_tape_into_the_next() -> None:
    first = records([joined(0, "a"), step(1, "a", 1), merged(2), merged(3)])
    second = records([joined(50, "a"), step(51, "a", 1), merged(52)])
    pause = longest_pause([*first, *second], quorum=1)
    assert (pause.longest_pause_s, pause.rounds) == (1, 3)


def test_the_step_time_of_the_pause_is_that_of_steps_within_it() -> None:
    script = [joined(0, "a"), step(1, "a", 1, 0.1), merged(2)]
    script += [step(3, "a", 2, 5.0), merged(9), step(9.5, "a", 3, 0.1), merged(10)]
    pause = longest_pause(records(script), quorum=1)
    assert (pause.pause_step_s, pause.step_s) == (5.0, 0.1)


# ---- learners ----


def test_a_killed_learner_is_gone_and_comes_back_with_its_tokens_kept() -> None:
    script = [joined(0, "a", "x"), step(1, "a", 3), gone(2, "a")]
    assert (fed(script).learners["a"].state, fed(script).kills) == ("gone", 1)
    learner = fed([*script, joined(3, "a", "y"), step(4, "a", 1)]).learners["a"]
    assert (learner.state, learner.steps, learner.tokens_total) == ("live", 1, 400)


def test_the_same_process_coming_back_was_no_kill() -> None:
    script = [joined(0, "a", "x"), step(1, "a", 3), gone(2, "a"), joined(3, "a", "x"), step(4, "a", 5)]
    series = fed(script)
    assert (series.kills, series.learners["a"].tokens_total) == (0, 500)


def test_a_learner_that_said_goodbye_or_outlived_the_run_was_no_kill() -> None:
    left: Script = [joined(0, "a"), (1, m.Received("a", m.Leave(700)), []), gone(2, "a")]
    done: Script = [joined(0, "a"), (1, m.Woke(), [m.Send("a", m.Done(5))]), gone(2, "a")]
    assert (fed(left).kills, fed(left).learners["a"].state, fed(left).learners["a"].tokens) == (
        0,
        "left",
        700,
    )
    assert fed(done).kills == 0


def test_a_new_process_without_a_lost_channel_before_it_counts_as_a_kill() -> None:
    assert fed([joined(0, "a", "x"), step(1, "a", 1), joined(2, "a", "y")]).kills == 1


def test_a_refused_join_leaves_no_trace() -> None:
    refused = m.Send("a", m.Refused("another run", final=True))
    script = [joined(0, "a", "x"), step(1, "a", 1)]
    script += [(2, m.Received("a", m.Join("other", "learner", "y")), [refused])]
    script += [(3, m.Received("b", m.Join("other", "learner", "z")), [refused]), gone(4, "b")]
    series = fed(script)
    assert (series.learners["a"].state, list(series.learners), series.kills) == ("live", ["a"], 0)


def test_a_learner_without_a_step_for_three_medians_is_not_stepping() -> None:
    script = [joined(0, "a"), joined(0, "b"), step(1, "a", 1), step(1, "b", 1)]
    script += [step(2 + i, "a", 2 + i) for i in range(4)]
    series = fed(script)
    assert [series.state(learner) for learner in series.learners.values()] == ["live", "not stepping"]


def test_tokens_per_second_are_those_of_the_last_half_minute() -> None:
    script = [joined(0, "a")] + [step(float(t), "a", t) for t in range(1, 101)]
    script += [step(100.0 + t, "a", 100 + t, tokens=10_000 + 500 * t) for t in range(1, 61)]
    assert fed(script).learners["a"].tokens_per_s == 500


def test_a_report_that_goes_back_is_not_believed() -> None:
    learner = fed([joined(0, "a"), step(1, "a", 5), step(2, "a", 4), step(3, "a", 6, tokens=1)]).learners["a"]
    assert (learner.steps, learner.tokens) == (5, 500)


# ---- rounds ----


def round_script(tick: int, start: float) -> Script:
    pulls: list[m.Action] = [m.Send(name, m.Pull(1, tick, 4)) for name in ("a", "b")]
    tally = m.Tally(tick, ("a", "b"), 0.5, 0.1, 0.2, 0.45, 0.3)
    script: Script = [(start, m.Woke(), [tally, *pulls])]
    for i, name in enumerate(("b", "a")):
        push = m.Push(1, tick, 4, 9, 2, 200, 900)
        script += [(start + 1 + i, m.Received(name, push), [m.Fold(1, name, 3.0 - i, 4)])]
        script += [(start + 1.5 + i, m.Folded(1, name), [])]
    return [*script, (start + 3, m.Merged(1, 5), [])]


def test_a_round_tells_who_took_part_with_which_weight_and_grace() -> None:
    series = fed([joined(0, "a"), joined(0, "b"), step(1, "a", 4), *round_script(7, 10.0)])
    (closed,) = series.recent
    assert (closed.tick, closed.fragment, closed.version) == (7, 1, 5)
    assert list(closed.weights.items()) == [("b", 3.0), ("a", 2.0)]
    assert closed.tally and (closed.tally.used_s, closed.tally.window_s) == (0.3, 0.45)
    assert closed.merged_at - closed.started_at == 3
    assert series.merged_share(series.learners["a"]) == 200 / (2 * 400)


def test_the_ledgers_fates_take_precedence_over_pushes() -> None:
    series = fed([joined(0, "a"), step(1, "a", 4)])
    series.fates = {"per_learner": {"a": {"consumed": 800, "merged": 600}}}
    assert series.merged_share(series.learners["a"]) == 0.75


def test_a_discarded_round_and_a_rejected_push_count_for_nothing() -> None:
    script = round_script(3, 0.0)
    rejected: Script = [*script[:2], (1.2, m.Rejected(1, "b", "NaN"), []), *script[3:]]
    assert [list(each.weights) for each in fed(rejected).recent] == [["a"]]
    discarded = fed([*script[:-1], (9.0, m.MergeFailed(1, "NaN"), [m.Discard(1)])])
    assert (discarded.rounds, discarded.abandoned, list(discarded.recent)) == (0, 1, [])


# ---- notices, memory, other tapes ----


def test_words_of_a_notice_are_read_with_and_without_quotes() -> None:
    text = "refused push worker=a reason='no step since x=1' n=-1.5 note=\"it's\" empty="
    said = {"worker": "a", "reason": "no step since x=1", "n": "-1.5", "note": "it's", "empty": ""}
    assert words(text) == ("refused push", said)
    assert words("no learners") == ("no learners", {})


def test_losses_and_bytes_come_from_notices() -> None:
    notices = [
        m.Notice("val_loss=3.5"),
        m.Notice("val_loss=2.5 tick=4"),
        m.Notice("val_loss=bad bytes_sent=12"),
    ]
    series = fed([(0.0, m.Woke(), list(notices))])
    assert (series.val_loss_first, series.val_loss, series.bytes_sent) == (3.5, 2.5, 12)


def test_memory_does_not_grow_with_the_run() -> None:
    series = Series()
    for i in range(5 * RECENT):
        loud = [m.Notice(f"n={i}"), m.Send("a", m.Pull(0, i, i))]
        series.take(Record(2 * i + 1, float(i), m.Received("x", m.Push(i, 1, 0, 1, 1, 1, 1)), tuple(loud)))
        series.take(Record(2 * i + 2, float(i), m.Merged(0, i)))
    assert len(series.recent) == len(series.lines) == RECENT
    assert series.line_count == series.rounds == 5 * RECENT
    assert not series._flying and len(series._pushes) <= 1


def test_a_learners_own_tape_will_do_without_a_syncers() -> None:
    series = Series()
    for i in range(1, 4):
        series.take(Record(i, float(i), m.StepCompleted(i, 64, 0.5)), "learner-0")
    learner = series.learners["learner-0"]
    assert (learner.steps, learner.tokens, learner.tokens_per_s) == (3, 192, 64)


def test_what_the_real_machine_decides_is_understood() -> None:
    """Two learners and the syncer's own machine, until ten rounds are merged."""
    options = SyncOptions(steps=10, learners=2, fragments=2, interval_steps=2, overlap_steps=1)
    schema = (m.TensorSpec("w", (4,)), m.TensorSpec("v", (4,)))
    machine = SyncerMachine("run", options, schema)
    tape: list[Record] = []
    waiting: list[m.Event] = []
    steps = {"a": 0, "b": 0}
    landed = {(name, p): 0 for name in steps for p in (0, 1)}  # step at which the last update came down

    def tell(event: m.Event) -> None:
        actions = machine.handle(float(len(tape)), event)
        tape.append(Record(len(tape), float(len(tape)), event, tuple(actions)))
        for action in actions:
            match action:
                case m.Send(to=to, message=m.Pull(fragment=p, tick=tick, version=version)):
                    own = steps[to] - landed[to, p]
                    push = m.Push(p, tick, version, steps[to], own, 100 * own, 100 * steps[to])
                    waiting.append(m.Received(to, push))
                case m.Send(to=to, message=m.Update(fragment=p, version=version)):
                    landed[to, p] = steps[to]
                    waiting.append(m.Received(to, m.Landed(p, version, steps[to], 100 * steps[to])))
                case m.Fold(fragment=p, worker=worker):
                    waiting.append(m.Folded(p, worker))
                case m.Merge(fragment=p, version=version):
                    waiting.append(m.Merged(p, version))

    for name in steps:
        tell(m.Connected(name))
        tell(m.Received(name, m.Join("run", "learner", name, schema=schema, versions=(0, 0))))
    while machine.phase == "running" and len(tape) < 1000:
        for name, step_number in list(steps.items()):
            steps[name] += 1
            tell(m.Received(name, m.Progress(step_number + 1, 100 * (step_number + 1), 0.5)))
            while waiting:
                tell(waiting.pop(0))
    series = Series()
    series.take_all(tape)
    assert series.rounds == machine.rounds_merged > 5 and series.tick == machine.tick
    assert {name for each in series.recent for name in each.weights} == {"a", "b"}
    assert all(each.tally for each in series.recent)
    table = machine.ledger.table()["per_learner"]
    shares = {name: series.merged_share(each) for name, each in series.learners.items()}
    assert shares == {name: table[name]["merged"] / table[name]["consumed"] for name in table}
    assert longest_pause(tape, quorum=2).rounds == series.rounds
