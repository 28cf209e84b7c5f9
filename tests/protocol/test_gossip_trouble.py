"""Gossip when several things go wrong at once: nobody mixes in fresh weights, waits for ever or is counted
twice."""

import math

import pytest

from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.protocol.rendezvous import RendezvousMachine

from .gossip_rig import SCHEMA, Costs, Rig, cut
from .test_gossip_storms import kill_rendezvous
from .test_peer import mixes, rendezvous


class SlowRig(Rig):
    """Preparing, and what carries a whole model at the end or a state, takes as long as is said here."""

    prepare_s = 0.0
    state_s: float | None = None
    mean_s: float | None = None

    def act(self, name: str, action: m.Action) -> None:
        if isinstance(action, m.Prepare) and self.prepare_s:
            self.at(self.now + self.prepare_s, self._prepared, name, self.lives[name])
            return
        if isinstance(action, m.Send) and frozenset((name, action.to)) in self.open:
            takes_s = {g.State: self.state_s, g.Mean: self.mean_s}.get(type(action.message))
            if takes_s is not None:
                lives = self.lives[name], self.lives[action.to]
                self.at(self.now + takes_s, self._deliver, name, action.to, action.message, lives)
                return
        super().act(name, action)

    def _prepared(self, name: str, life: int) -> None:
        if self.lives[name] == life:
            self.handle(name, m.Prepared(SCHEMA))


def rig_of(n: int, costs: dict[str, Costs] | None = None, **options: object) -> SlowRig:
    planned = {"rounds": 20, "local_steps": 3, **options}
    known = {f"p-{number}": Costs() for number in range(n)} | (costs or {})
    rig = SlowRig(g.GossipOptions(peers=n, **planned), known)  # type: ignore[arg-type]
    for name in known:
        rig.peer(name)
    return rig


def settle(rig: Rig, for_s: float) -> None:
    """Go on for a while, also after the rendezvous has finished."""
    until = rig.now + for_s
    while rig.heap and rig.heap[0][0] <= until:
        rig.run_one()


@pytest.mark.parametrize("away_s", [1.0, 7.0])  # within the lease, and beyond it
def test_a_peer_without_a_state_waits_for_one_when_all_lose_the_rendezvous(away_s: float) -> None:
    rig = rig_of(4, rounds=40)
    rig.run(until=50.0)
    rig.state_s = 30.0
    rig.kill("p-1")
    rig.at(60.0, rig.peer, "p-1")
    rig.run(until=70.0)
    for name in rig.costs:
        cut(rig, name, g.RENDEZVOUS)
    for name, later in (("p-1", 0.0), ("p-0", 0.4), ("p-2", 0.5), ("p-3", 0.6)):
        rig.at(70.0 + away_s + later, rig._link, name, g.RENDEZVOUS)
    rig.run()
    adopted = [t for t, _, _ in rig.actions(g.Adopt, "p-1") if t > 60]
    first_mixed = min(t for t, _, a in rig.actions(g.Mix) if t > 60 and "p-1" in a.workers)
    assert adopted and adopted[0] < first_mixed


def test_a_run_whose_peers_have_all_lost_their_state_says_that_it_begins_anew() -> None:
    rig = rig_of(2, rounds=12, lease_s=5.0, start_s_max=20.0)
    rig.run(until=30.0)
    for name in rig.costs:
        rig.kill(name)
        rig.at(40.0, rig.peer, name)
    rig.run()
    assert rig.finished[g.RENDEZVOUS].complete
    begun = [t for t, _, a in rig.actions(m.Notice) if "goes on with the first weights" in a.text]
    assert len(begun) == 1 and begun[0] == pytest.approx(50.0, abs=1.0)


def test_a_rendezvous_that_was_restarted_ends_nothing_before_all_are_back() -> None:
    slow = {f"p-{number}": Costs(2.5, 0.2) for number in (1, 2, 3)}
    rig = rig_of(4, {"p-0": Costs(1.0, 0.2), **slow}, rounds=10, adapt=False, timeout_s_max=2.0)
    while rig.machines["p-0"].state != "concluding":
        rig.run_one()
    state = rendezvous(rig).snapshot()
    rig.kill(g.RENDEZVOUS)
    back_at = rig.now + 2.0
    rig.at(back_at, rig.rendezvous, state)
    for number, name in enumerate(rig.costs):
        rig.at(back_at + 0.1 + 0.5 * number, rig._link, name, g.RENDEZVOUS)
    rig.run()
    named = {a.message.members for _, _, a in rig.actions(m.Send) if isinstance(a.message, g.Conclude)}
    assert named == {("p-0", "p-1", "p-2", "p-3")}
    assert all(finish.complete for finish in rig.finished.values())


def test_who_does_not_come_back_to_a_restarted_rendezvous_holds_up_no_end() -> None:
    rig = rig_of(3, rounds=10, start_s_max=15.0)
    rig.run(until=30.0)
    rig.at(30.0, kill_rendezvous, rig, 2.0)
    rig.at(31.0, rig.kill, "p-2")
    rig.run()
    assert {name for name, finish in rig.finished.items() if finish.complete} == {"p-0", "p-1", g.RENDEZVOUS}


def test_a_mean_that_takes_longer_than_the_start_reaches_all() -> None:
    rig = rig_of(3, rounds=4, start_s_max=20.0, timeout_s_max=60.0)
    rig.costs = {name: Costs(1.0, 10.0) for name in rig.costs}
    rig.mean_s = 60.0
    rig.run()
    settle(rig, 500.0)
    assert len(rig.finished) == 4 and all(finish.complete for finish in rig.finished.values())


def test_a_writer_that_dies_with_the_mean_leaves_nobody_waiting() -> None:
    rig = rig_of(3, rounds=4)
    rig.mean_s = 1000.0
    while rendezvous(rig).concluded is None:
        rig.run_one()
    rig.kill("p-0")
    rig.run()
    settle(rig, 500.0)
    assert set(rig.finished) == {"p-1", "p-2", g.RENDEZVOUS}
    assert not rig.finished["p-1"].complete and not rig.finished["p-2"].complete


def test_a_member_the_rendezvous_lost_during_the_end_hears_that_it_is_over() -> None:
    rig = rig_of(3, {"p-1": Costs(1.0, 12.0)}, rounds=4, lease_s=5.0)
    while rendezvous(rig).concluding is None:
        rig.run_one()
    cut(rig, "p-2", g.RENDEZVOUS)
    rig.at(rig.now + 6.0, rig._link, "p-2", g.RENDEZVOUS)
    rig.run()
    settle(rig, 500.0)
    assert len(rig.finished) == 4


def test_one_that_was_lost_just_before_the_end_hears_that_it_is_over() -> None:
    rig = rig_of(3, rounds=4, lease_s=2.0)
    while rig.machines["p-2"].round < 3:
        rig.run_one()
    cut(rig, "p-2", g.RENDEZVOUS)
    while rendezvous(rig).concluded is None:
        rig.run_one()
    rig.at(rig.now + 8.0, rig._link, "p-2", g.RENDEZVOUS)
    rig.run()
    settle(rig, 500.0)
    assert len(rig.finished) == 4


def test_tokens_are_counted_once_when_a_line_and_then_the_rendezvous_break() -> None:
    rig = rig_of(3, lease_s=2.0)
    rig.at(20.0, cut, rig, "p-1", g.RENDEZVOUS)
    rig.at(27.0, rig._link, "p-1", g.RENDEZVOUS)
    rig.at(50.0, kill_rendezvous, rig, 3.0)
    rig.run()
    assert rendezvous(rig).positions == {name: 10 * rig.steps[name] for name in rig.costs}


def test_a_hung_trainer_behind_a_live_line_does_not_hold_up_the_end() -> None:
    rig = rig_of(4, rounds=10, timeout_s_max=5.0, start_s_max=60.0)
    rig.run(until=20.0)
    rig.costs["p-2"] = Costs(math.inf)
    rig.run(until=2000.0)
    assert rig.finished[g.RENDEZVOUS].complete and set(rig.finished) == {"p-0", "p-1", "p-3", g.RENDEZVOUS}
    assert any("gave up peer=p-2" in a.text for _, _, a in rig.actions(m.Notice))
    assert rendezvous(rig).ledger.closes()


def test_a_slow_peer_is_waited_for_at_the_end() -> None:
    rig = rig_of(3, {"p-2": Costs(40.0)}, rounds=6, adapt=False, timeout_s_max=3.0, start_s_max=20.0)
    rig.run()
    assert all(finish.complete for finish in rig.finished.values()) and len(rig.finished) == 4


@pytest.mark.parametrize("how", ["line", "rendezvous"])
def test_tokens_are_counted_once_whoever_was_away(how: str) -> None:
    rig = rig_of(3, lease_s=5.0)
    if how == "line":
        for at in (20.0, 40.0, 60.0):
            rig.at(at, cut, rig, "p-1", g.RENDEZVOUS)
            rig.at(at + 7.0, rig._link, "p-1", g.RENDEZVOUS)
    else:
        rig.at(20.0, kill_rendezvous, rig, 3.0)
        rig.at(50.0, kill_rendezvous, rig, 3.0)
    rig.run()
    read = {name: 10 * rig.steps[name] for name in rig.costs}
    table = rendezvous(rig).ledger.table()
    assert {name: fates["consumed"] for name, fates in table["per_learner"].items()} == read
    assert rendezvous(rig).positions == read
    assert rendezvous(rig).ledger.closes() and not table["tail_unknown"]


def test_a_root_that_dies_before_it_is_ready_leaves_a_group_that_begins() -> None:
    rig = SlowRig(g.GossipOptions(peers=3, rounds=20, local_steps=3), {})
    rig.prepare_s = 20.0
    rig.costs = {f"p-{number}": Costs() for number in range(3)}
    for number, name in enumerate(rig.costs):
        rig.at(float(number), rig.peer, name)
    rig.at(10.0, rig.kill, "p-0")
    rig.at(40.0, rig.peer, "p-0")
    rig.run(until=2000.0)
    assert rig.finished[g.RENDEZVOUS].complete and set(mixes(rig, "p-0"))


def test_a_large_state_is_asked_for_once() -> None:
    rig = rig_of(6, rounds=400)
    rig.run(until=50.0)
    rig.state_s = 400.0
    rig.kill("p-1")
    rig.at(60.0, rig.peer, "p-1")
    rig.run(until=800.0)
    asked = [t for t, _, a in rig.actions(m.Send, "p-1") if isinstance(a.message, g.Clone) and t > 55]
    assert len(asked) == 1 and [t for t, _, _ in rig.actions(g.Adopt, "p-1") if t > 55]


def test_a_state_that_was_lost_is_asked_for_again() -> None:
    rig = rig_of(4, rounds=400)
    rig.run(until=50.0)
    rig.state_s = math.inf
    rig.kill("p-1")
    rig.at(60.0, rig.peer, "p-1")
    rig.run(until=100.0)
    rig.state_s = 1.0
    rig.run(until=1000.0)
    assert [t for t, _, _ in rig.actions(g.Adopt, "p-1") if t > 600]


def test_a_distance_that_is_no_number_does_not_silence_the_alarm() -> None:
    machine = rendezvous(rig_of(2))
    for number, distance in enumerate((1.0, 2.0, math.nan, 4.0)):
        for _ in range(2):
            machine.consensus.take(g.Report(number, 0, "merged", 1, 1.0, 0.0, 0.0, distance, 100.0), 2)
        machine.consensus.close(number)
    assert machine.consensus.rising == 2


def enrolled(machine: RendezvousMachine, name: str, **facts: object) -> g.Admitted:
    """Let a peer enrol; return what it is told."""
    known = {"run": "", "incarnation": f"{name}.1", "address": f"at-{name}", **facts}
    actions = machine.handle(1.0, m.Received(name, g.Enrol(**known)))  # type: ignore[arg-type]
    [admitted] = [a.message for a in actions if isinstance(a, m.Send) and isinstance(a.message, g.Admitted)]
    return admitted


def test_a_shard_left_behind_goes_to_a_newcomer_where_its_data_stopped() -> None:
    machine = RendezvousMachine("test", g.GossipOptions(peers=2), {}, shards=2)
    enrolled(machine, "one")
    enrolled(machine, "two")
    machine.handle(2.0, m.Received("one", m.Leave(500)))
    admitted = enrolled(machine, "three", shard=0, position=9000)  # of a run before this one
    assert (admitted.shard, admitted.position) == (0, 500)


@pytest.mark.parametrize(("round_", "position"), [(-1, 0), (7, 900)])
def test_a_journal_of_an_older_run_is_not_taken_for_this_runs(round_: int, position: int) -> None:
    machine = RendezvousMachine("test", g.GossipOptions(peers=2), {}, shards=2)
    told = enrolled(machine, "p-0", shard=0, position=900, round=round_, kept=round_ >= 0)
    assert told.position == position and machine.ledger.closes()
