"""Who is taken in, with which shard, position and weights; who is turned away, and why."""

import pytest

from archipel.protocol import messages as m
from archipel.protocol.ledger import Ledger
from archipel.protocol.membership import Member, Roster, choose_shard, schema_difference
from archipel.protocol.schedule import SyncOptions

SCHEMA = (m.TensorSpec("w", (2, 3)), m.TensorSpec("mean", (3,), "buffer"))


def roster(**sync: object) -> Roster:
    options = SyncOptions(**{"fragments": 2, "interval_steps": 2, "overlap_steps": 1, **sync})  # type: ignore[arg-type]
    return Roster("run", options, SCHEMA, {"sync": {}}, 4, {}, Ledger(2), [3, 3], [6, 5], fork=[0, 0])


def join(**given: object) -> m.Join:
    return m.Join(**{"run": "run", "role": "learner", "incarnation": "a", "schema": SCHEMA, **given})  # type: ignore[arg-type]


def answers(actions: list[m.Action]) -> list[m.Message]:
    return [action.message for action in actions if isinstance(action, m.Send)]


def welcome_of(actions: list[m.Action]) -> m.Welcome:
    [welcome] = [message for message in answers(actions) if isinstance(message, m.Welcome)]
    return welcome


# ---- refusals ----


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"run": "other"}, "run 'other', this syncer serves 'run'"),
        ({"protocol": 99}, "protocol version 99, the run speaks 1"),
        ({"schema": (m.TensorSpec("w", (2, 4)), SCHEMA[1])}, r"shape \(2, 4\) here, \(2, 3\) in the run"),
        ({"schema": (SCHEMA[0],)}, r"missing here: \['mean'\]"),
        ({"schema": (SCHEMA[0], m.TensorSpec("mean", (3,)))}, "is a parameter here, a buffer in the run"),
        ({"versions": (1,)}, "1 versions, the run has 2 fragments"),
        ({"counters": ((1, 1),)}, "1 counters, the run has 2 fragments"),
        ({"tokens": -5}, "impossible counts"),
        ({"position": 2**60}, "impossible counts"),
        ({"counters": ((1, 5), (1, 5)), "step": 1, "tokens": 4}, "counters of fragments exceed"),
    ],
)
def test_a_refusal_says_what_differs_and_changes_nothing(given: dict[str, object], says: str) -> None:
    # faults.md section H: two runs on one port, and configuration drift.
    ours = roster()
    [refusal] = answers(ours.join(0.0, 6, "L-0", join(**given)))
    assert isinstance(refusal, m.Refused) and refusal.final
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(refusal.reason)
    assert not ours.members and not ours.taken and not ours.ledger.accounts


def test_an_empty_run_name_accepts_whatever_is_served() -> None:
    assert welcome_of(roster().join(0.0, 6, "L-0", join(run=""))).run == "run"


# ---- shards and positions ----


def test_a_name_takes_the_shard_it_ends_in_and_keeps_it() -> None:
    assert choose_shard("L-2", -1, {}, 4) == 2
    assert choose_shard("L-2", -1, {"L-2": 3}, 4) == 3
    assert choose_shard("L-2", -1, {"x": 2}, 4) == 0
    assert choose_shard("L-9", -1, {}, 4) == 0
    assert choose_shard("L-0", 3, {}, 4) == 3
    assert choose_shard("L-9", -1, {str(i): i for i in range(4)}, 4) is None


def test_without_a_free_shard_a_learner_is_refused_and_an_observer_is_not() -> None:
    ours = roster()
    for i in range(4):
        ours.join(0.0, 6, f"L-{i}", join())
    [refusal] = answers(ours.join(0.0, 6, "L-9", join()))
    assert isinstance(refusal, m.Refused) and "raise data.shards" in refusal.reason
    assert welcome_of(ours.join(0.0, 6, "watch", join(role="observer"))).shard == -1


def test_names_that_come_and_go_do_not_use_the_shards_up() -> None:
    ours = roster()
    for i in range(20):
        name = f"host-{i:06x}x"
        assert welcome_of(ours.join(float(i), 6, name, join())).shard == i % 4
        ours.members[name].connected = False
    assert len(ours.taken) == 4 and ours.ledger.closes()


def test_a_shard_left_behind_goes_on_where_its_data_stopped() -> None:
    ours = roster()
    for i, now in enumerate((3.0, 1.0, 2.0, 0.0)):
        ours.join(now, 6, f"L-{i}", join())
    for name in ("L-0", "L-1", "L-2"):
        ours.members[name].connected = False
    ours.positions["L-1"] = 700
    actions = ours.join(9.0, 6, "new", join(shard=1, position=900))  # of a run of its own, long ago
    assert (welcome_of(actions).shard, welcome_of(actions).position) == (1, 700)
    assert m.Notice("handed over shard=1 from=L-1 to=new position=700") in actions
    assert ours.positions["new"] == 700 and "L-1" not in ours.positions
    assert ours.ledger.fates("new")["lost"] == 0
    # Who comes back finds its own taken and is given the next.
    assert welcome_of(ours.join(10.0, 6, "L-1", join(incarnation="b", shard=1, position=720))).shard == 2
    assert sorted(ours.taken.values()) == [0, 1, 2, 3] and ours.ledger.closes()


def test_after_a_resumption_names_that_stayed_away_give_first() -> None:
    ours = roster()
    ours.taken = {str(i): i for i in range(4)}
    ours.join(0.0, 6, "0", join())
    assert welcome_of(ours.join(0.0, 6, "new", join())).shard == 1


def test_a_returning_name_goes_on_where_its_data_stopped() -> None:
    ours = roster()
    ours.join(0.0, 6, "L-0", join())
    ours.positions["L-0"] = 700
    ours.ledger.reported("L-0", 700)
    assert welcome_of(ours.join(1.0, 6, "L-0", join(incarnation="b"))).position == 700


def test_a_position_beyond_the_last_report_is_lost_with_the_dead_incarnation() -> None:
    ours = roster()
    ours.join(0.0, 6, "L-0", join())
    ours.positions["L-0"] = 700
    ours.ledger.reported("L-0", 700)
    welcome = welcome_of(ours.join(1.0, 6, "L-0", join(incarnation="b", shard=0, position=750)))
    assert welcome.position == 750
    assert ours.ledger.fates("L-0")["lost"] == 2 * 750  # of both fragments
    assert not ours.ledger.table()["tail_unknown"]


def test_a_position_in_another_shard_says_nothing() -> None:
    ours = roster()
    ours.taken["L-0"] = 2
    assert welcome_of(ours.join(0.0, 6, "L-0", join(shard=1, position=900))).position == 0


@pytest.mark.parametrize("incarnation", ["a", "b"])
def test_a_journal_of_an_older_run_says_nothing(incarnation: str) -> None:
    # Nor at the second call: it may have come back before it was told where to start.
    ours, old = roster(), {"schema": (), "shard": 0, "position": 900}
    assert welcome_of(ours.join(0.0, 0, "L-0", join(**old))).position == 0
    assert welcome_of(ours.join(1.0, 0, "L-0", join(incarnation=incarnation, **old))).position == 0
    assert ours.ledger.table()["lost"] == 0 and ours.ledger.closes()


def test_what_was_drawn_and_never_reported_counts_once_it_has_joined() -> None:
    ours = roster()
    ours.join(0.0, 6, "L-0", join(shard=0, position=0))
    welcome = welcome_of(ours.join(1.0, 6, "L-0", join(incarnation="b", schema=(), shard=0, position=40)))
    assert welcome.position == 40
    assert ours.ledger.fates("L-0")["lost"] == 2 * 40


def test_a_resumed_syncer_believes_a_position_it_does_not_know() -> None:
    ours = roster()
    ours.epoch, ours.fork = 2, [3, 3]
    assert welcome_of(ours.join(0.0, 6, "L-0", join(schema=(), shard=0, position=900))).position == 900


def test_a_later_epoch_that_begins_with_the_first_weights_begins_with_the_first_data() -> None:
    # Its folder is an older run's, or the syncer before it died without a checkpoint.
    ours = roster()
    ours.epoch, ours.fork = 2, [0, 0]
    assert welcome_of(ours.join(0.0, 6, "L-0", join(schema=(), shard=0, position=900))).position == 0


@pytest.mark.parametrize("tokens", [0, 100])
def test_a_learner_that_was_told_its_position_keeps_it(tokens: int) -> None:
    # By a syncer that died before it wrote a checkpoint which knows of it: seed 572 of the random schedules.
    ours = roster()
    assert welcome_of(ours.join(0.0, 6, "L-0", join(shard=0, tokens=tokens, position=900))).position == 900


# ---- what follows ----


def test_without_a_schema_only_the_settings_come() -> None:
    # faults.md row 06: nothing to step on yet, nothing to count.
    ours = roster()
    [welcome] = answers(ours.join(0.0, 6, "L-0", join(schema=())))
    assert isinstance(welcome, m.Welcome) and welcome.follow == ()
    assert not ours.members["L-0"].live


def test_a_new_worker_gets_every_fragment() -> None:
    ours = roster()
    sent = answers(ours.join(0.0, 6, "L-0", join()))
    assert welcome_of(ours.join(0.0, 6, "L-0", join())).follow == (0, 1)
    assert [(u.fragment, u.version) for u in sent if isinstance(u, m.Update)] == [(0, 3), (1, 3)]
    assert not ours.members["L-0"].live


def test_a_returning_worker_gets_what_it_missed() -> None:
    ours = roster()
    welcome = welcome_of(ours.join(0.0, 6, "L-0", join(epoch=1, versions=(3, 2), step=4, tokens=9)))
    assert welcome.follow == (1,)


def test_who_holds_everything_is_live_at_once() -> None:
    ours = roster()
    ours.join(0.0, 6, "L-0", join(epoch=1, versions=(3, 3), step=4, tokens=9))
    assert ours.members["L-0"].live


def test_versions_of_a_lost_lineage_are_replaced() -> None:
    # faults.md section H: a second lineage is not silently merged; here the syncer came back at version 3.
    ours = roster()
    ours.epoch, ours.fork = 2, [3, 3]
    ours.versions[:] = [4, 4]
    held = {"step": 4, "tokens": 9}
    assert welcome_of(ours.join(0.0, 8, "L-0", join(epoch=1, versions=(4, 4), **held))).follow == (0, 1)
    assert welcome_of(ours.join(0.0, 8, "L-0", join(epoch=2, versions=(4, 4), **held))).follow == ()
    ours.versions[:] = [3, 3]
    assert welcome_of(ours.join(0.0, 8, "L-0", join(epoch=1, versions=(3, 3), **held))).follow == ()
    assert welcome_of(ours.join(0.0, 8, "L-0", join(epoch=0, versions=(3, 3), **held))).follow == (0, 1)


def test_at_tau_zero_steps_since_the_last_round_count_less_the_ticks_that_did() -> None:
    ours = roster(overlap_steps=0, fragments=2, interval_steps=30)
    ours.published[:] = [30, 45]
    returning = join(epoch=1, versions=(3, 3), step=52, tokens=52, counters=((22, 22), (7, 7)))
    assert (
        welcome_of(ours.join(0.0, 48, "L-0", returning)).credit == 4
    )  # 7 steps since tick 45, 3 ticks closed


def test_an_observer_never_counts_and_has_no_account() -> None:
    ours = roster()
    ours.join(0.0, 6, "watch", join(role="observer", epoch=1, versions=(3, 3)))
    assert not ours.members["watch"].live
    assert not ours.ledger.accounts and not ours.taken


def test_schema_difference_ignores_order() -> None:
    assert schema_difference(SCHEMA, SCHEMA[::-1]) == ""


def test_a_member_is_settled_once_its_merged_push_was_answered() -> None:
    member = Member("L-0", "learner", "a", 0, 0, merged_into={1: 4}, landed={1: 3})
    assert member.settled(0) and not member.settled(1)
    member.landed[1] = 4
    assert member.settled(1)
