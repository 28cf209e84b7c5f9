"""The learner's machine, message by message. Two fragments: 1 is due at odd ticks, 0 at even ones, unless
said."""

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import to_builtins

from archipel.protocol import messages as m
from archipel.protocol.learner import LearnerMachine
from archipel.protocol.schedule import SyncOptions

SCHEMA = (m.TensorSpec("w", (1,)),)


@dataclass
class Bench:
    """A learner under test; its compute port copies what it was asked to."""

    learner: LearnerMachine
    sync: SyncOptions
    now: float = 0.0
    copying: tuple[int, ...] = ()
    steps: int = 0

    def tell(self, event: m.Event, after_s: float = 0.0) -> list[m.Action]:
        self.now += after_s
        actions = self.learner.handle(self.now, event)
        for action in actions:
            if isinstance(action, m.Copy):
                self.copying = action.fragments
        return actions

    def hear(self, message: m.AnyMessage, after_s: float = 0.0) -> list[m.Action]:
        return self.tell(m.Received(m.SYNCER, message), after_s)

    def step(self, after_s: float = 0.0) -> list[m.Action]:
        self.steps += 1
        return self.tell(m.StepCompleted(self.steps, 100, 1.0, self.copying), after_s)

    def welcome(self, *follow: int, **given: Any) -> list[m.Action]:
        fields = {"epoch": 1, "shard": 0, "position": 0, "tick": 0, "versions": (0,) * self.sync.fragments,
                  "settings": {"sync": to_builtins(self.sync)}, **given}  # fmt: skip
        return self.hear(m.Welcome("run", follow=follow, **fields))

    def land(self, fragment: int, version: int, tick: int = 0) -> list[m.Action]:
        """An update arrives and is applied at this boundary."""
        self.hear(m.Update(fragment, version, tick))
        return self.tell(m.Applied(fragment, version, self.steps))


def fresh(role: str = "learner", **sync: Any) -> Bench:
    options = SyncOptions(**{"fragments": 2, "interval_steps": 2, "overlap_steps": 1, **sync})
    return Bench(LearnerMachine("L-0", "a", "run", role=role), options)


def running(**sync: Any) -> Bench:
    made = fresh(**sync)
    made.tell(m.Connected(m.SYNCER))
    made.welcome()
    made.tell(m.Prepared(SCHEMA))
    fragments = range(made.sync.fragments)
    made.welcome(*fragments)
    for fragment in fragments:
        made.land(fragment, 0)
    assert made.learner.state == "running"
    return made


def sent(actions: list[m.Action], kind: type) -> list[Any]:
    return [
        action.message
        for action in actions
        if isinstance(action, m.Send) and isinstance(action.message, kind)
    ]


def only(actions: list[m.Action], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


# ---- joining ----


def test_a_first_contact_asks_for_settings_then_joins_with_the_model() -> None:
    made = fresh()
    [first] = sent(made.tell(m.Connected(m.SYNCER)), m.Join)
    assert first.schema == () and first.shard == -1
    [prepare] = only(made.welcome(shard=3, position=50), m.Prepare)
    assert (prepare.shard, prepare.position) == (3, 50)
    [second] = sent(made.tell(m.Prepared(SCHEMA)), m.Join)
    assert second.schema == SCHEMA and (second.shard, second.position) == (3, 50)


def test_it_resumes_once_the_last_fragment_has_landed() -> None:
    # faults.md row 06: no step, so no report, on weights that are not the run's.
    made = fresh()
    made.tell(m.Connected(m.SYNCER))
    made.welcome()
    made.tell(m.Prepared(SCHEMA))
    assert not only(made.welcome(0, 1), m.Resume)
    assert not only(made.land(1, 0), m.Resume)
    assert only(made.land(0, 0), m.Resume)


def test_a_step_before_adoption_is_a_bug_of_the_host() -> None:
    made = fresh()
    made.tell(m.Connected(m.SYNCER))
    with pytest.raises(AssertionError, match="before the model was adopted"):
        made.step()


def test_an_update_that_overtakes_its_welcome_counts() -> None:
    made = fresh()
    made.tell(m.Connected(m.SYNCER))
    made.welcome()
    made.tell(m.Prepared(SCHEMA))
    made.land(0, 4)
    made.welcome(0, 1, versions=(4, 4))
    assert only(made.land(1, 4), m.Resume)


def test_a_channel_that_breaks_while_the_model_is_built_is_no_matter() -> None:
    made = fresh()
    made.tell(m.Connected(m.SYNCER))
    made.welcome()
    made.tell(m.Disconnected(m.SYNCER))
    assert not sent(made.tell(m.Prepared(SCHEMA)), m.Join)
    [join] = sent(made.tell(m.Connected(m.SYNCER)), m.Join)
    assert join.schema == SCHEMA


def test_a_final_refusal_ends_it_with_the_reason() -> None:
    made = fresh()
    made.tell(m.Connected(m.SYNCER))
    assert only(made.hear(m.Refused("another run", final=True)), m.Finish) == [m.Finish("another run", False)]
    assert made.tell(m.Connected(m.SYNCER)) == []


def test_a_refusal_for_now_hangs_up() -> None:
    made = fresh()
    made.tell(m.Connected(m.SYNCER))
    assert only(made.hear(m.Refused("name taken")), m.Close)
    assert sent(made.tell(m.Connected(m.SYNCER)), m.Join)


def test_settings_it_does_not_know_end_it() -> None:
    made = fresh()
    made.tell(m.Connected(m.SYNCER))
    [finish] = only(made.welcome(settings={"sync": {"new_option": 1}}), m.Finish)
    assert not finish.complete and "new_option" in finish.reason


# ---- steps, copies, pushes ----


def test_every_step_is_reported_and_counted_on_every_fragment() -> None:
    made = running()
    made.step()
    assert sent(made.step(), m.Progress) == [m.Progress(2, 200, 1.0)]
    [leave] = sent(made.tell(m.StopRequested()), m.Leave)
    assert leave == m.Leave(200, (200, 200), "")


def test_what_is_due_next_is_copied_ahead_of_time() -> None:
    assert running(fragments=4, interval_steps=4, overlap_steps=2).copying == (1, 2, 3)  # ticks 1 … τ + 1


def test_a_counted_fragment_is_copied_until_it_is_pushed() -> None:
    made = running(fragments=4, interval_steps=4, overlap_steps=2)
    made.step()
    made.hear(m.TickClosed(1, counted=1))
    assert made.copying == (1, 2, 3, 0)
    made.hear(m.Pull(1, 1, 0))
    made.step()
    assert made.copying == (2, 3, 0)


def test_a_pull_is_answered_at_once_from_the_copy_with_its_counters() -> None:
    made = running()
    made.step()
    made.step()
    assert sent(made.hear(m.Pull(1, 1, 0)), m.Push) == [
        m.Push(1, 1, 0, step=2, steps=2, tokens=200, total=200)
    ]


def test_a_pull_without_a_copy_is_answered_at_the_next_step() -> None:
    made = running(fragments=8, interval_steps=8, overlap_steps=1)
    made.step()
    assert not sent(made.hear(m.Pull(7, 1, 0)), m.Push)
    [push] = sent(made.step(), m.Push)
    assert (push.fragment, push.steps, push.step) == (7, 2, 2)


def test_an_update_resets_the_counters_of_its_fragment_only() -> None:
    made = running()
    made.step()
    [landed] = sent(made.land(1, 1, tick=1), m.Landed)
    assert landed == m.Landed(1, 1, 1, 100)
    made.step()
    [push] = sent(made.hear(m.Pull(1, 3, 1)), m.Push)
    assert (push.base, push.steps, push.tokens, push.total) == (1, 1, 100, 200)
    [push] = sent(made.hear(m.Pull(0, 2, 0)), m.Push)
    assert (push.base, push.steps, push.tokens, push.total) == (0, 2, 200, 200)


def test_a_pull_just_after_an_update_landed_finds_nothing() -> None:
    made = running()
    made.step()
    made.land(1, 1, tick=1)
    actions = made.hear(m.Pull(1, 3, 1))
    assert sent(actions, m.Nothing) == [m.Nothing(1, 3)] and not sent(actions, m.Push)


def test_only_the_newest_steps_copies_are_kept() -> None:
    made = running(fragments=4, interval_steps=4, overlap_steps=1)
    made.step()
    made.hear(m.TickClosed(2))
    made.step()
    assert set(made.learner.snapshots) == {3, 0}


def test_an_update_is_confirmed_on_arrival_and_on_landing() -> None:
    made = running()
    actions = made.hear(m.Update(1, 1, 1))
    assert sent(actions, m.Arrived) == [m.Arrived(1, 1)] and only(actions, m.Apply) == [m.Apply(1, 1)]
    assert not sent(actions, m.Landed)


# ---- a broken channel ----


def test_without_a_channel_it_trains_on_and_tells_all_when_it_is_back() -> None:
    made = running()
    made.step()
    made.tell(m.Disconnected(m.SYNCER, "reset"))
    assert not only(made.step(), m.Send)
    [join] = sent(made.tell(m.Connected(m.SYNCER)), m.Join)
    assert (join.step, join.tokens, join.position, join.versions) == (2, 200, 200, (0, 0))
    assert join.counters == ((2, 200), (2, 200))


def test_what_is_missing_after_an_absence_must_land_before_it_counts() -> None:
    made = running()
    made.tell(m.Disconnected(m.SYNCER))
    made.tell(m.Connected(m.SYNCER))
    made.welcome(1, versions=(0, 9))
    assert made.learner.missing == {1}
    made.land(1, 9)
    assert not made.learner.missing


def test_an_update_from_before_the_break_does_not_count_as_adopted() -> None:
    # The old lineage had reached version 12, the syncer came back at version 10.
    made = running()
    made.hear(m.Update(1, 12, 30))
    made.tell(m.Disconnected(m.SYNCER))
    made.tell(m.Connected(m.SYNCER))
    made.welcome(1, epoch=2, versions=(0, 10))
    made.tell(m.Applied(1, 12, 0))
    assert made.learner.missing == {1}
    made.land(1, 10)
    assert not made.learner.missing


def test_silence_is_broken_by_heartbeats_and_an_alarm_once_a_period() -> None:
    made = running(heartbeat_s=2.0)
    wakes = [wake for _ in range(40) for wake in only(made.step(after_s=0.1), m.Wake)]
    assert len(wakes) <= 3
    assert sent(made.tell(m.Woke(), after_s=2.0), m.Heartbeat)


def test_an_alarm_that_rings_on_time_asks_for_a_later_one() -> None:
    # now = 0.1 + 0.2 rounds: the alarm must move on all the same, or the host spins.
    made = running(heartbeat_s=0.2)
    made.step(after_s=0.1)
    for _ in range(50):
        at = made.learner.alarm_at
        made.now = at
        made.tell(m.Woke())
        assert made.learner.alarm_at > at


# ---- τ = 0, and max_lead ----


def blocking(**sync: Any) -> Bench:
    return running(**{"fragments": 1, "interval_steps": 3, "overlap_steps": 0, **sync})


def at_due_step() -> Bench:
    """τ = 0, H = 3: three steps done, none counted yet, held for the round of tick 3."""
    made = blocking()
    made.step()
    made.step()
    assert only(made.step(), m.Hold)
    return made


def test_at_tau_zero_it_holds_at_the_due_step_with_a_copy_in_hand() -> None:
    made = at_due_step()
    for tick in (1, 2, 3):
        assert not only(made.hear(m.TickClosed(tick, counted=3)), m.Resume)
    assert sent(made.hear(m.Pull(0, 3, 0)), m.Push)
    assert only(made.hear(m.Update(0, 1, 3)), m.Resume)


def test_at_tau_zero_word_that_it_was_not_counted_lets_it_go_on() -> None:
    made = blocking()
    made.step()
    made.hear(m.TickClosed(1, counted=1))
    made.hear(m.TickClosed(2))
    made.hear(m.TickClosed(3))
    assert not only(made.step(), m.Hold)


def test_a_refused_push_is_not_waited_for() -> None:
    made = at_due_step()
    for tick in (1, 2, 3):
        made.hear(m.TickClosed(tick, counted=3))
    made.hear(m.Pull(0, 3, 0))
    assert only(made.hear(m.Refused("not finite", fragment=0)), m.Resume)


def test_an_abandoned_round_is_not_waited_for() -> None:
    made = at_due_step()
    for tick in (1, 2, 3):
        made.hear(m.TickClosed(tick, counted=3))
    assert only(made.hear(m.TickClosed(3, abandoned=0)), m.Resume)


def test_a_restored_count_is_waited_with_again() -> None:
    made = at_due_step()
    for tick in (1, 2, 3):
        made.hear(m.TickClosed(tick, counted=3))
    made.hear(m.TickClosed(3, counted=3, abandoned=0))
    made.hear(m.TickClosed(4, counted=3))
    pulled = made.hear(m.Pull(0, 4, 0))
    assert sent(pulled, m.Push) and only(pulled, m.Hold)
    assert only(made.hear(m.Update(0, 1, 4)), m.Resume)


def test_who_owes_a_push_and_has_no_copy_steps_once_more() -> None:
    made = running(fragments=2, interval_steps=6, overlap_steps=0)
    for _ in range(3):
        made.step()
    assert made.learner.lead.holding
    made.learner.snapshots.clear()
    assert only(made.hear(m.Pull(0, 3, 0)), m.Resume)
    actions = made.step()
    assert sent(actions, m.Push) and only(actions, m.Hold)


def test_max_lead_holds_it_within_its_distance_of_the_last_update() -> None:
    made = running(fragments=2, interval_steps=2, overlap_steps=1, max_lead_steps=2)
    made.step()
    made.step()
    assert only(made.step(), m.Hold)  # tick 1 is due and two steps behind
    assert not only(made.hear(m.TickClosed(1, counted=3)), m.Resume)
    assert only(made.hear(m.Update(1, 1, 1)), m.Resume)
    assert only(made.step(), m.Hold)  # one step a tick from here on


def test_tau_one_and_more_never_waits_without_max_lead() -> None:
    made = running(fragments=1, interval_steps=1, overlap_steps=2)
    assert not any(only(made.step(), m.Hold) for _ in range(50))


# ---- the end ----


def test_done_stops_the_compute_port_then_says_goodbye() -> None:
    made = running()
    made.step()
    assert only(made.hear(m.Done(9, "tick 9 of 9")), m.Stop) == [m.Stop("tick 9 of 9")]
    made.step()
    actions = made.tell(m.StopRequested("tick 9 of 9"))
    assert sent(actions, m.Leave) == [m.Leave(200, (200, 200), "tick 9 of 9")]
    assert only(actions, m.Finish)


def test_done_reaches_a_learner_that_is_still_joining() -> None:
    made = fresh()
    made.tell(m.Connected(m.SYNCER))
    made.welcome()
    assert only(made.hear(m.Done(9)), m.Stop)
    assert sent(made.tell(m.StopRequested()), m.Leave) == [m.Leave(0, (), "")]


def test_done_twice_stops_once() -> None:
    made = running()
    made.hear(m.Done(9))
    assert not only(made.hear(m.Done(9)), m.Stop)


def test_an_observer_leaves_with_the_final_versions_in_hand() -> None:
    made = fresh(role="observer")
    made.tell(m.Connected(m.SYNCER))
    made.welcome()
    made.tell(m.Prepared(SCHEMA))
    made.welcome(0, 1)
    made.land(0, 0)
    made.land(1, 0)
    assert not only(made.hear(m.Done(9, versions=(0, 1))), m.Stop)
    assert only(made.land(1, 1), m.Stop)


def test_an_observer_copies_nothing() -> None:
    made = fresh(role="observer")
    made.tell(m.Connected(m.SYNCER))
    made.welcome()
    made.tell(m.Prepared(SCHEMA))
    made.welcome(0, 1)
    assert not only([*made.land(0, 0), *made.land(1, 0)], m.Copy)


@pytest.mark.parametrize(
    "message", [m.Pull(9, 1, 0), m.Pull(-1, 1, 0), m.Update(9, 1, 1), m.Leave(0), m.Heartbeat()]
)
def test_nonsense_from_the_syncer_is_ignored(message: m.AnyMessage) -> None:
    actions = running().hear(message)
    assert only(actions, m.Notice) and not only(actions, m.Apply) and not sent(actions, m.Push)
