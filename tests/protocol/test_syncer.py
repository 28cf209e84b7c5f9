"""The syncer's machine, message by message. Two learners, two fragments: fragment 1 is due at odd ticks, 0 at
even."""

from dataclasses import dataclass, field

import pytest

from archipel.protocol import messages as m
from archipel.protocol.schedule import SyncOptions
from archipel.protocol.syncer import SyncerMachine

SCHEMA = (m.TensorSpec("w", (1,)),)


@dataclass
class Bench:
    """A syncer under test, and what its learners would have in hand."""

    syncer: SyncerMachine
    now: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)

    def tell(self, event: m.Event, after_s: float = 0.0) -> list[m.Action]:
        self.now += after_s
        return self.syncer.handle(self.now, event)

    def hear(self, sender: str, message: m.AnyMessage, after_s: float = 0.0) -> list[m.Action]:
        return self.tell(m.Received(sender, message), after_s)

    def enter(self, name: str) -> None:
        versions = tuple(self.syncer.versions)
        self.steps[name] = 0
        self.hear(name, m.Join("run", "learner", "a", SCHEMA))
        for fragment, version in enumerate(versions):
            self.hear(name, m.Landed(fragment, version, 0, 0))

    def step(self, name: str, after_s: float = 0.0) -> list[m.Action]:
        self.steps[name] += 1
        return self.hear(name, m.Progress(self.steps[name], 100 * self.steps[name], 1.0), after_s)

    def push(self, name: str, fragment: int = 1, **given: int) -> list[m.Action]:
        """Answer a pull with everything since the start."""
        step = self.steps[name]
        fields = {"tick": self.syncer.tick, "base": 0, "step": step, "steps": step,
                  "tokens": 100 * step, "total": 100 * step, **given}  # fmt: skip
        return self.hear(name, m.Push(fragment, **fields))


def bench(*names: str, **sync: object) -> Bench:
    options = SyncOptions(**{"steps": 100, "quorum": len(names) or 1, "fragments": 2, "interval_steps": 2,
                             "overlap_steps": 1, **sync})  # type: ignore[arg-type]  # fmt: skip
    made = Bench(SyncerMachine("run", options, SCHEMA, {"sync": {}}))
    made.tell(m.Woke())
    for name in names:
        made.enter(name)
    return made


def sent(actions: list[m.Action], kind: type, to: str | None = None) -> list[m.AnyMessage]:
    return [a.message for a in actions
            if isinstance(a, m.Send) and isinstance(a.message, kind) and to in (None, a.to)]  # fmt: skip


def only(actions: list[m.Action], kind: type) -> list[m.Action]:
    return [action for action in actions if isinstance(action, kind)]


def in_round(**sync: object) -> Bench:
    """Both learners have stepped once, tick 1 is closed, both are asked for fragment 1."""
    made = bench("L-0", "L-1", **sync)
    made.step("L-0")
    closed = made.step("L-1")
    assert len(sent(closed, m.Pull)) == 2
    return made


def memory(made: Bench) -> object:
    """What a refused message must leave as it is."""
    syncer = made.syncer
    rounds = {p: (list(r.pulling), dict(r.folding), dict(r.folded)) for p, r in syncer.rounds.flying.items()}
    counted = {name: (x.step, x.tokens, x.credit, dict(x.merged_into)) for name, x in syncer.members.items()}
    return syncer.tick, list(syncer.versions), rounds, counted, syncer.ledger.table()


# ---- a round ----


def test_a_round_from_report_to_update() -> None:
    made = in_round()
    assert only(made.push("L-0"), m.Fold) == [m.Fold(1, "L-0", 10_000.0, 0)]
    made.push("L-1")
    assert only(made.tell(m.Folded(1, "L-0")), m.Merge) == []
    assert only(made.tell(m.Folded(1, "L-1")), m.Merge) == [m.Merge(1, 1)]
    published = made.tell(m.Merged(1, 1))
    assert sent(published, m.Update, "L-0") == [m.Update(1, 1, 1, 100)]
    assert made.syncer.versions == [0, 1]


def test_learners_outside_the_round_are_sent_the_update_too() -> None:
    made = bench("L-0", "L-1", quorum=1, grace=False)
    made.step("L-0")
    made.push("L-0")
    made.tell(m.Folded(1, "L-0"))
    assert sent(made.tell(m.Merged(1, 1)), m.Update, "L-1") == [m.Update(1, 1, 1, 0)]


def test_the_next_tick_waits_while_the_overlap_is_full() -> None:
    made = in_round()
    made.step("L-0")
    assert not only(made.step("L-1"), m.Tally)
    for name in ("L-0", "L-1"):
        made.push(name, step=1, steps=1, tokens=100, total=100)
        made.tell(m.Folded(1, name))
    assert [tally.tick for tally in only(made.tell(m.Merged(1, 1)), m.Tally)] == [2]


def test_no_more_pushes_are_asked_for_than_allowed() -> None:
    names = [f"L-{i}" for i in range(5)]
    made = bench(*names, pulls_max=2)
    closed = [action for name in names for action in made.step(name)]
    assert [pull.fragment for pull in sent(closed, m.Pull)] == [1, 1]
    assert len(sent(made.push("L-0"), m.Pull)) == 0  # it is still being folded
    assert len(sent(made.tell(m.Folded(1, "L-0")), m.Pull)) == 1


def test_an_accumulated_step_counts_once() -> None:
    # τ ≥ 1: five steps in hand are one report; τ = 0 below counts each of them.
    made = bench("L-0", "L-1", fragments=1, interval_steps=50)
    for _ in range(5):
        made.step("L-0")
    ticks = [tally.tick for _ in range(5) for tally in only(made.step("L-1"), m.Tally)]
    assert ticks == [1]


def test_at_tau_zero_every_step_counts_once() -> None:
    made = bench("L-0", "L-1", fragments=1, interval_steps=50, overlap_steps=0)
    for _ in range(5):
        made.step("L-0")
    ticks = [tally.tick for _ in range(6) for tally in only(made.step("L-1"), m.Tally)]
    assert ticks == [1, 2, 3, 4, 5]


# ---- refusals: nothing changes ----


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tick": 7}, "not asked for"),
        ({"base": 3}, "base version 3 is ahead"),
        ({"steps": 0}, "impossible counters"),
        ({"tokens": 0}, "impossible counters"),
        ({"steps": 2}, "impossible counters"),
        ({"tokens": 200}, "impossible counters"),
        ({"total": 2**53}, "impossible counters"),
        ({"tokens": -100}, "impossible counters"),
    ],
)
def test_unusable_pushes_are_refused_with_a_reason(given: dict[str, int], says: str) -> None:
    made = in_round()
    ledger = made.syncer.ledger.table()
    [refusal] = sent(made.push("L-0", **given), m.Refused)
    assert isinstance(refusal, m.Refused) and says in refusal.reason and refusal.fragment == 1
    assert made.syncer.ledger.table() == ledger
    assert not made.syncer.rounds.flying[1].folding


def test_a_counter_that_runs_ahead_is_resynchronised_and_the_round_goes_on() -> None:
    # faults.md row 09: base +3 is refused with a reason, the right version is sent, nobody stalls.
    made = in_round()
    made.push("L-1")
    made.tell(m.Folded(1, "L-1"))
    actions = made.push("L-0", base=3)
    assert sent(actions, m.Update, "L-0") == [m.Update(1, 0, 0)]
    assert only(actions, m.Merge) == [m.Merge(1, 1)]


def test_a_replayed_push_is_counted_once() -> None:
    # faults.md row 83.
    made = in_round()
    made.push("L-0")
    before = memory(made)
    assert not only(made.push("L-0"), m.Fold)
    made.tell(m.Folded(1, "L-0"))
    assert not only(made.push("L-0"), m.Fold)
    assert before[0] == made.syncer.tick and made.syncer.ledger.table() == before[-1]  # type: ignore[index]


def test_a_push_nobody_asked_for_changes_nothing() -> None:
    made = bench("L-0", "L-1")
    made.step("L-0")
    before = memory(made)
    assert sent(made.push("L-0"), m.Refused)
    assert memory(made) == before


def test_a_push_after_its_round_is_over_changes_nothing() -> None:
    # faults.md row 11: late, never mixed with the wrong base.
    made = in_round(pull_deadline_s=5.0)
    made.push("L-1")
    made.tell(m.Folded(1, "L-1"))
    assert only(made.tell(m.Woke(), after_s=5.0), m.Merge)
    made.tell(m.Merged(1, 1))
    before = memory(made)
    assert sent(made.push("L-0", tick=1), m.Refused)
    assert memory(made) == before


def test_weights_in_full_are_asked_for_when_the_base_is_forgotten() -> None:
    made = in_round()
    made.syncer.versions[1] = 2
    [pull] = sent(made.push("L-0", base=0), m.Pull)
    assert isinstance(pull, m.Pull) and pull.full
    assert sent(made.push("L-0", base=0), m.Refused)  # not in full: not what was asked for
    [fold] = only(made.push("L-0", base=0, full=True), m.Fold)
    assert isinstance(fold, m.Fold) and fold.full


@pytest.mark.parametrize(
    "message",
    [
        m.Progress(1, 100, 1.0),
        m.Push(1, 1, 0, 1, 1, 100, 100),
        m.Arrived(1, 1),
        m.Landed(1, 1, 1, 100),
        m.Leave(100, (100, 100)),
        m.Nothing(1, 1),
    ],
)
def test_messages_of_strangers_change_nothing(message: m.AnyMessage) -> None:
    made = in_round()
    before = memory(made)
    assert only(made.hear("stranger", message), m.Notice)
    assert memory(made) == before


@pytest.mark.parametrize(
    "message",
    [
        m.Progress(1, 100, 1.0),  # again
        m.Progress(2, 50, 1.0),
        m.Progress(2, 2**53, 1.0),
        m.Progress(2, 200, float("nan")),
        m.Progress(2, 200, -1.0),
        m.Landed(7, 1, 1, 100),
        m.Landed(-1, 1, 1, 100),
        m.Landed(1, 1, 1, 5000),
        m.Landed(1, 1, 1, -1),
        m.Leave(5, (5, 5)),
        m.Welcome("run", 1, {}, 0, 0, 0, (), ()),
        m.Done(1),
    ],
)
def test_impossible_claims_of_members_change_nothing(message: m.AnyMessage) -> None:
    made = in_round()
    before = memory(made)
    assert only(made.hear("L-0", message), m.Notice)
    assert memory(made) == before


def test_a_leave_with_the_wrong_number_of_counters_still_closes() -> None:
    made = in_round()
    made.hear("L-0", m.Leave(100, (100, 100, 100)))
    assert made.syncer.ledger.closes()


@pytest.mark.parametrize("message", [m.Progress(1, 10, 1.0), m.Push(1, 1, 0, 1, 1, 10, 10), m.Arrived(1, 0)])
def test_an_observer_is_never_counted(message: m.AnyMessage) -> None:
    made = in_round()
    made.hear("watch", m.Join("run", "observer", "o", SCHEMA))
    before = memory(made)
    made.hear("watch", message)
    assert memory(made) == before


def test_an_observers_landings_and_goodbye_leave_the_ledger_alone() -> None:
    made = in_round()
    made.hear("watch", m.Join("run", "observer", "o", SCHEMA))
    ledger = made.syncer.ledger.table()
    made.hear("watch", m.Landed(0, 0, 0, 0))
    made.hear("watch", m.Leave(0))
    assert made.syncer.ledger.table() == ledger


# ---- those who do not make it ----


def test_a_rejected_push_leaves_the_round_to_the_others() -> None:
    # faults.md row 49: NaN, Inf, overflow found by the compute port.
    made = in_round()
    made.push("L-0")
    made.push("L-1")
    actions = made.tell(m.Rejected(1, "L-0", "tensor 'w' is not finite"))
    [refusal] = sent(actions, m.Refused, "L-0")
    assert isinstance(refusal, m.Refused) and "not finite" in refusal.reason
    assert only(made.tell(m.Folded(1, "L-1")), m.Merge)
    assert made.syncer.ledger.fates("L-0")["merged"] == 0


def test_a_round_without_a_usable_push_waits_for_new_steps() -> None:
    made = in_round()
    for name in ("L-0", "L-1"):
        made.push(name)
    made.tell(m.Rejected(1, "L-0", "not finite"))
    actions = made.tell(m.Rejected(1, "L-1", "not finite"))
    assert only(actions, m.Discard) == [m.Discard(1)]
    assert not only(actions, m.Tally)  # not again with the same steps
    assert made.syncer.versions == [0, 0]
    made.step("L-0")
    again = made.step("L-1")
    assert sorted(pull.fragment for pull in sent(again, m.Pull, "L-0")) == [
        0,
        1,
    ]  # what is due, and what is owed


def test_a_merge_that_fails_changes_nothing_and_is_tried_again() -> None:
    # faults.md row 49, second half, and the yeto row of section H: finite pushes whose sum is not.
    made = in_round()
    before = made.syncer.ledger.table()
    for name in ("L-0", "L-1"):
        made.push(name)
        made.tell(m.Folded(1, name))
    actions = made.tell(m.MergeFailed(1, "the sum overflows"))
    assert only(actions, m.Discard) and not only(actions, m.Tally)
    assert made.syncer.versions == [0, 0]
    assert made.syncer.ledger.table() == before
    assert len(sent(actions, m.TickClosed)) == 2  # told not to wait for an update


def test_a_learner_with_nothing_to_push_is_left_out() -> None:
    made = in_round()
    made.push("L-1")
    made.tell(m.Folded(1, "L-1"))
    assert only(made.hear("L-0", m.Nothing(1, 1)), m.Merge) == [m.Merge(1, 1)]


def test_participants_lost_on_the_way_count_again() -> None:
    made = bench("L-0", quorum=1, pull_deadline_s=5.0)
    made.step("L-0")
    actions = made.tell(m.Woke(), after_s=5.0)
    [tally] = only(actions, m.Tally)
    assert isinstance(tally, m.Tally) and tally.workers == ("L-0",)
    assert {pull.fragment for pull in sent(actions, m.Pull)} >= {1}


def test_one_instant_never_sees_the_same_round_twice() -> None:
    made = bench("L-0", quorum=1, pull_deadline_s=5.0)
    made.step("L-0")
    for _ in range(5):
        actions = made.tell(m.Woke(), after_s=400.0)
        made.hear("L-0", m.Heartbeat())
        assert len(only(actions, m.Tally)) <= 1


def test_a_dead_participant_is_dropped_on_the_reset() -> None:
    # faults.md rows 05 and 12.
    made = in_round()
    made.push("L-1")
    made.tell(m.Folded(1, "L-1"))
    assert only(made.tell(m.Disconnected("L-0", "reset")), m.Merge) == [m.Merge(1, 1)]


def test_a_dead_learner_is_not_asked_by_its_other_round() -> None:
    made = bench(
        "L-0", "L-1", quorum=1, grace=False, pulls_max=1, overlap_steps=2, fragments=3, interval_steps=3
    )
    made.step("L-0")
    made.step("L-0")
    assert len(made.syncer.rounds.flying) == 2
    assert sent(made.tell(m.Disconnected("L-0", "reset")), m.Pull, "L-0") == []


def test_silence_ends_a_membership() -> None:
    made = bench("L-0", "L-1", silence_s=15.0)
    made.hear("L-1", m.Heartbeat(), after_s=14.0)
    assert not only(made.tell(m.Woke(), after_s=0.9), m.Close)
    assert only(made.tell(m.Woke(), after_s=0.1), m.Close) == [m.Close("L-0", "silent")]
    assert [member.name for member in made.syncer.live] == ["L-1"]


def test_a_reconnection_voids_what_was_asked_on_the_old_channel() -> None:
    made = in_round()
    made.push("L-1")
    made.tell(m.Folded(1, "L-1"))
    back = m.Join("run", "learner", "a", SCHEMA, 1, (0, 0), 1, 100, 0, 100, ((1, 100), (1, 100)))
    assert only(made.hear("L-0", back), m.Merge) == [m.Merge(1, 1)]


# ---- waiting, and the end ----


def test_too_few_learners_are_told_once() -> None:
    # faults.md row 14.
    made = bench("L-0", quorum=2)
    assert made.syncer.said == "waiting for learners live=1 quorum=2"
    assert not only(made.step("L-0"), m.Notice)


def test_with_quorum_live_those_who_are_left_go_on() -> None:
    made = bench("L-0", "L-1", quorum=2, quorum_live=True)
    made.tell(m.Disconnected("L-1"))
    assert only(made.step("L-0"), m.Tally)


def test_without_any_learner_it_saves_and_says_so() -> None:
    # faults.md row 15.
    made = bench("L-0")
    actions = made.tell(m.Disconnected("L-0"))
    assert only(actions, m.Save) and m.Notice("no learners", "warning") in actions


def test_it_ends_by_option_when_nobody_comes_back() -> None:
    made = bench("L-0", idle_exit_s=60.0)
    made.tell(m.Disconnected("L-0"))
    assert only(made.tell(m.Woke(), after_s=15.0), m.Wake) == [m.Wake(60.0)]
    assert only(made.tell(m.Woke(), after_s=45.0), m.Finish) == [m.Finish("no learners", complete=False)]


def test_a_quiet_run_needs_few_alarms() -> None:
    made = bench("L-0", "L-1", quorum=2)
    wakes = [wake for _ in range(200) for wake in only(made.step("L-0", after_s=0.01), m.Wake)]
    assert len(wakes) <= 3


def run_out(made: Bench) -> list[m.Action]:
    """Take the learner through the last tick of a run of one tick."""
    made.step("L-0")
    made.push("L-0")
    made.tell(m.Folded(1, "L-0"))
    return made.tell(m.Merged(1, 1))


def test_after_the_last_tick_everybody_is_told() -> None:
    made = bench("L-0", steps=1)
    [done] = sent(run_out(made), m.Done)
    assert isinstance(done, m.Done) and done.versions == (0, 1)
    [finish] = only(made.hear("L-0", m.Leave(100, (100, 100))), m.Finish)
    assert isinstance(finish, m.Finish) and finish.complete
    assert made.syncer.ledger.closes()


def test_learners_that_never_say_goodbye_are_waited_for_only_so_long() -> None:
    made = bench("L-0", steps=1)
    run_out(made)
    assert only(made.tell(m.Woke(), after_s=10.0), m.Finish)


def test_who_joins_while_the_run_ends_is_told_so() -> None:
    made = bench("L-0", steps=1)
    run_out(made)
    assert sent(made.hear("L-1", m.Join("run", "learner", "b")), m.Done, "L-1")


def test_the_last_tick_collects_again_for_what_it_owes_but_not_for_ever() -> None:
    made = bench("L-0", steps=1)
    ticks = []
    for _ in range(10):
        ticks += [tally.tick for tally in only(made.step("L-0"), m.Tally)]
        if made.syncer.phase != "running":
            break
        made.push("L-0", step=made.steps["L-0"])
        ticks += [t.tick for t in only(made.tell(m.Rejected(1, "L-0", "not finite")), m.Tally)]
    assert ticks == [1, 1, 1, 1] and made.syncer.phase == "parting"


def test_an_orderly_stop_saves() -> None:
    made = in_round()
    actions = made.tell(m.StopRequested("signal"))
    assert actions == [m.Save(0), m.Finish("signal", complete=False)]
    assert made.step("L-0") == []


# ---- what outlives the process ----


def test_rounds_in_flight_are_owed_after_a_restart_and_their_pushes_forgotten() -> None:
    made = in_round()
    made.push("L-0")
    state = made.syncer.state()
    assert state.owed == [1]
    assert state.ledger.fates("L-0")["merged"] == 0
    assert made.syncer.ledger.fates("L-0")["merged"] == 100  # the copy only


def test_a_restored_syncer_begins_a_new_epoch_and_saves_it_first() -> None:
    made = in_round()
    again = SyncerMachine("run", made.syncer.options, SCHEMA, {"sync": {}})
    again.restore(made.syncer.state())
    assert again.epoch == 2 and again.tick == 1
    assert again.handle(100.0, m.Woke())[0] == m.Save(0)


def test_a_finished_run_is_not_resumed() -> None:
    # faults.md row 33, the machine's part.
    made = bench("L-0", steps=1)
    run_out(made)
    again = SyncerMachine("run", made.syncer.options, SCHEMA, {"sync": {}})
    again.restore(made.syncer.state())
    assert only(again.handle(100.0, m.Woke()), m.Finish)
