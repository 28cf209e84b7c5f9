"""Gossip among the members of a list, without a rendezvous: beginnings, deaths, ends, and random storms.

ARCHIPEL_SEEDS=first:last runs other storms than the default ones; a failure names its seed.
"""

import os
import random
from typing import Any

import pytest
from msgspec import to_builtins

from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.protocol.peer import PeerMachine
from archipel.protocol.roster import Roster

from .gossip_rig import Costs, Rig, cut, random_options
from .test_gossip_storms import check

FIRST, LAST = (int(part) for part in os.environ.get("ARCHIPEL_SEEDS", "0:150").split(":"))


class ListRig(Rig):
    """Peers that know each other from a list. `kept`: the rounds of their checkpoints."""

    def __init__(self, options: g.GossipOptions, costs: dict[str, Costs]) -> None:
        self.kept: dict[str, int] = {}
        super().__init__(options, costs)
        self.members = tuple(g.Address(name, f"at-{name}") for name in sorted(costs))

    def rendezvous(self, state: Any = None) -> Any:
        """There is none."""

    def peer(self, name: str, **facts: Any) -> None:
        settings = {"run": {"name": "test", "seed": 0}, "gossip": to_builtins(self.options)}
        life = self.lives.get(name, 0) + 1
        roster = Roster(name, self.members, settings)
        kept = self.kept.get(name, -1)
        machine = PeerMachine(name, f"{name}.{life}", "test", f"at-{name}", kept=kept, roster=roster, **facts)
        self._start(name, machine)
        self.at(self.now, self.handle, name, m.Woke())

    def _link(self, one: str, other: str) -> None:
        pair = frozenset((one, other))
        if one != other and pair not in self.open and self.alive(one) and not self.alive(other):
            self.at(self.now + 1.0, self._link, one, other)  # clients knock for ever
        super()._link(one, other)

    def act(self, name: str, action: m.Action) -> None:
        if isinstance(action, m.Save):
            self.kept[name] = action.round
        super().act(name, action)

    def run(self, until: float = 2000.0) -> "ListRig":
        while self.heap and self.heap[0][0] <= until:
            if self.machines and set(self.machines) == set(self.finished) == set(self.costs):
                break  # before clients that knock for ever
            self.run_one()
        return self

    def machine(self, name: str) -> PeerMachine:
        machine = self.machines[name]
        assert isinstance(machine, PeerMachine)
        return machine

    def accepted(self) -> dict[str, str]:
        """Return who took which mean."""
        return {name: action.digest for _, name, action in self.actions(g.Accept)}

    @staticmethod
    def answer(action: m.Action) -> m.Event | None:
        if isinstance(action, g.Average):  # a digest that tells one mean from another
            return g.Averaged(action.attempt, f"{action.attempt}:{','.join(action.members)}", {})
        return Rig.answer(action)


def listed(n: int = 4, **options: Any) -> ListRig:
    """Return a rig with peers p-0, p-1 ... that have not started."""
    planned = {"rounds": 6, "local_steps": 3, **options}
    return ListRig(g.GossipOptions(peers=n, **planned), {f"p-{i}": Costs() for i in range(n)})


def begin(rig: ListRig, *names: str) -> None:
    for name in names or list(rig.costs):
        rig.peer(name)


def run_until_sent(rig: ListRig, kind: type) -> None:
    """Go on until the first message of a kind has left."""
    while not any(isinstance(action.message, kind) for _, _, action in rig.actions(m.Send)):
        rig.run_one()


def kill(rig: ListRig, name: str) -> None:
    if name in rig.machines and name not in rig.finished:
        machine = rig.machine(name)
        rig.drawn[name] = (machine.shard, machine.position + machine.tokens)
        rig.kill(name)


def revive(rig: ListRig, name: str) -> None:
    if name not in rig.machines:
        shard, position = rig.drawn.get(name, (-1, -1))
        rig.peer(name, shard=shard, position=position)


# ---- beginnings ----


def test_all_begin_with_the_first_ones_weights_and_end_with_one_mean() -> None:
    rig = listed()
    begin(rig)
    rig.run()
    sent = [action for _, _, action in rig.actions(m.Send)]
    assert {action.to for action in sent if isinstance(action.message, g.Clone)} == {"p-0"}
    assert all(finish.complete for finish in rig.finished.values()) and len(rig.finished) == 4
    assert len(set(rig.accepted().values())) == 1 and set(rig.accepted()) == set(rig.costs)
    mixed = [action for _, _, action in rig.actions(g.Mix)]
    assert len(mixed) == 4 * 6 and all(len(action.workers) == 2 for action in mixed)


def test_a_list_of_one_trains_alone() -> None:
    rig = listed(1)
    begin(rig)
    rig.run()
    assert rig.finished["p-0"].complete and len(rig.actions(g.Mix)) == 6


def test_who_never_comes_is_waited_for_at_the_start_and_then_skipped() -> None:
    rig = listed(start_s_max=20.0)
    begin(rig, "p-1", "p-2", "p-3")
    rig.run(until=1000.0)
    assert min(t for t, _, _ in rig.actions(m.Resume)) == pytest.approx(20.0, abs=1.0)
    assert set(rig.finished) == {"p-1", "p-2", "p-3"}
    assert len(set(rig.accepted().values())) == 1


def test_who_comes_late_clones_who_is_furthest() -> None:
    rig = listed(start_s_max=5.0, rounds=20)
    begin(rig, "p-1", "p-2", "p-3")
    rig.at(60.0, rig.peer, "p-0")
    rig.run(until=1000.0)
    [adopted] = rig.actions(g.Adopt, "p-0")
    assert adopted[2].round > 2
    assert any(action.workers for _, _, action in rig.actions(g.Mix, "p-0"))
    assert set(rig.accepted()) == set(rig.costs) and len(set(rig.accepted().values())) == 1


def test_a_group_that_comes_back_from_checkpoints_goes_on_from_the_newest() -> None:
    rig = listed(rounds=8)
    rig.kept = {"p-0": 2, "p-1": 4, "p-2": 4, "p-3": -1}
    begin(rig)
    rig.run()
    assert {name: action.round for _, name, action in rig.actions(g.Adopt)} == {"p-0": 4, "p-3": 4, "p-2": 4}
    assert {action.round for _, _, action in rig.actions(g.Offer)} == {4, 5, 6, 7}


def test_another_list_is_named_and_not_trained_with() -> None:
    rig = listed(2, start_s_max=5.0)
    begin(rig, "p-0")
    rig.members = (*rig.members, g.Address("p-2", "at-p-2"))
    begin(rig, "p-1")
    rig.run(until=1000.0)
    notices = [action.text for _, _, action in rig.actions(m.Notice)]
    assert any("give all members the same file" in text for text in notices)
    assert not any(action.workers for _, _, action in rig.actions(g.Mix))
    assert rig.finished["p-0"].complete and rig.finished["p-1"].complete  # and it holds up no end


def test_one_that_was_there_before_and_finds_nobody_waits_for_somebody() -> None:
    rig = listed(2, start_s_max=5.0)
    rig.peer("p-1", shard=1, position=500)
    rig.run(until=100.0)
    assert not rig.actions(m.Prepare)
    assert any("leave them out of [members]" in action.text for _, _, action in rig.actions(m.Notice))
    begin(rig, "p-0")
    rig.run(until=1000.0)
    assert set(rig.accepted()) == {"p-0", "p-1"}


# ---- deaths and ends ----


def test_one_that_is_killed_comes_back_with_the_state_of_another() -> None:
    rig = listed(rounds=20)
    begin(rig)
    rig.at(30.0, kill, rig, "p-2")
    rig.at(50.0, revive, rig, "p-2")
    rig.run()
    adopted = [action for t, _, action in rig.actions(g.Adopt, "p-2") if t > 50]
    assert len(adopted) == 1 and adopted[0].round > 3
    assert set(rig.accepted()) == set(rig.costs) and len(set(rig.accepted().values())) == 1


def test_one_that_dies_at_the_end_is_waited_for_no_longer_than_the_lease() -> None:
    rig = listed(lease_s=5.0)
    begin(rig)
    rig.run(until=10.0)
    kill(rig, "p-0")  # who would make the mean
    rig.run(until=1000.0)
    writers = {action.to for _, _, action in rig.actions(m.Send) if isinstance(action.message, g.Final)}
    assert writers == {"p-1"}
    assert set(rig.finished) == {"p-1", "p-2", "p-3"} and len(set(rig.accepted().values())) == 1


def test_the_writer_dies_while_it_makes_the_mean() -> None:
    rig = listed(lease_s=5.0)
    rig.costs = {name: Costs(1.0, 30.0) for name in rig.costs}
    begin(rig)
    run_until_sent(rig, g.Final)
    kill(rig, "p-0")
    rig.run(until=10_000.0)
    assert set(rig.finished) == {"p-1", "p-2", "p-3"}
    means = rig.accepted()
    assert set(means) == {"p-1", "p-2", "p-3"}
    assert [mean.partition(":")[2] for mean in set(means.values())] == ["p-1,p-2,p-3"]


def test_one_cut_off_while_the_mean_is_on_its_way_is_sent_it_again() -> None:
    rig = listed(2, lease_s=20.0)
    rig.costs = {name: Costs(1.0, 5.0) for name in rig.costs}
    begin(rig)
    run_until_sent(rig, g.Mean)
    made_at = rig.now
    cut(rig, "p-0", "p-1")
    rig.at(made_at + 15.0, rig._link, "p-0", "p-1")
    rig.run(until=1000.0)
    sent = [t for t, _, action in rig.actions(m.Send) if isinstance(action.message, g.Mean)]
    assert len(sent) == 2 and sent[1] >= made_at + 15.0
    assert set(rig.accepted()) == {"p-0", "p-1"} and len(set(rig.accepted().values())) == 1


def test_one_cut_off_for_good_holds_up_the_writer_for_no_longer_than_the_lease() -> None:
    rig = listed(2, lease_s=20.0, start_s_max=500.0)
    rig.costs = {name: Costs(1.0, 5.0) for name in rig.costs}
    begin(rig)
    run_until_sent(rig, g.Mean)
    made_at = rig.now
    cut(rig, "p-0", "p-1")
    while "p-0" not in rig.finished:
        rig.run_one()
    assert rig.now == pytest.approx(made_at + 20.0, abs=0.1) and rig.finished["p-0"].complete


def test_one_that_dies_on_the_way_to_the_mean_and_comes_back_takes_part_anew() -> None:
    rig = listed(3, lease_s=20.0)
    rig.costs = {name: Costs(1.0, 10.0) for name in rig.costs}
    begin(rig)
    run_until_sent(rig, g.Final)
    kill(rig, "p-2")
    rig.at(rig.now + 5.0, revive, rig, "p-2")
    rig.run(until=1000.0)
    assert set(rig.accepted()) == set(rig.costs) and len(set(rig.accepted().values())) == 1
    [mean] = set(rig.accepted().values())
    assert mean.endswith(":p-0,p-1,p-2")


def test_one_stopped_by_hand_is_not_waited_for() -> None:
    rig = listed(rounds=10, lease_s=50.0)
    begin(rig)
    rig.at(20.0, rig.handle, "p-3", m.StopRequested("SIGTERM"))
    rig.run(until=1000.0)
    assert set(rig.accepted()) == {"p-0", "p-1", "p-2"}
    assert rig.now < 200


# ---- storms ----


def storm(seed: int) -> ListRig:
    """Return a rig whose faults are scheduled; each is over by the time the run must end."""
    rng = random.Random(seed)
    n = rng.randint(1, 7)
    rig = stormy(rng, n)
    for number in range(n):
        rig.at(rng.choice([0.0, rng.uniform(0, 30)]), revive, rig, f"p-{number}")
    horizon = rig.options.rounds * (rig.options.local_steps + 2.0)
    for _ in range(rng.randint(0, 6)):
        fault(rig, rng, rng.uniform(1.0, horizon), 30.0)
    return rig


def storm_at_the_end(seed: int) -> ListRig:
    """Return a rig whose first peer has just reached the end, with faults in the 40 seconds from there, each
    shorter than the lease."""
    rng = random.Random(1_000_000 + seed)
    n = rng.randint(2, 5)
    rig = stormy(rng, n, rounds=3)
    begin(rig)
    run_until_sent(rig, g.AtEnd)
    for _ in range(rng.randint(1, 4)):
        fault(rig, rng, rig.now + rng.uniform(0.0, 40.0), 12.0)
    return rig


def stormy(rng: random.Random, n: int, **fixed: int) -> ListRig:
    """Return a rig of n peers with options and costs drawn."""
    options = random_options(
        rng,
        n,
        start_s_max=rng.choice([40.0, 60.0]),
        lease_s=rng.choice([15.0, 40.0]),
        checkpoint_rounds=rng.choice([0, 2, 5]),
        **fixed,
    )
    costs = {f"p-{i}": Costs(rng.uniform(0.5, 2.0), rng.choice([0.1, 1.0, 8.0])) for i in range(n)}
    return ListRig(options, costs)


def fault(rig: ListRig, rng: random.Random, at: float, dead_s_max: float) -> None:
    """Kill a peer and bring it back, or cut a line and mend it."""
    n = len(rig.costs)
    victim = f"p-{rng.randrange(n)}"
    if rng.random() < 0.5:
        rig.at(at, kill, rig, victim)
        rig.at(at + rng.uniform(0.5, dead_s_max), revive, rig, victim)
    else:
        other = f"p-{rng.randrange(n)}"
        rig.at(at, cut, rig, victim, other)
        rig.at(at + rng.uniform(0.1, 12.0), rig._link, victim, other)


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_storm_passes(seed: int) -> None:
    passes(storm(seed), seed)


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_storm_at_the_end_passes(seed: int) -> None:
    passes(storm_at_the_end(seed), seed)


def passes(rig: ListRig, seed: int) -> None:
    """Assert that all come to the end, and that all who have a mean have the same."""
    rig.run()
    remedy = f"ARCHIPEL_SEEDS={seed}:{seed + 1} pytest {__file__}"
    check(rig)
    late = came_after_the_end(rig)
    assert set(rig.finished) == set(rig.costs) - late, remedy
    means = rig.accepted()
    complete = {name for name, finish in rig.finished.items() if finish.complete}
    assert complete <= set(means), (remedy, means)  # others heard: it is over; one had it, and died
    knew = {name for name in complete if began(rig)[name] < first_end(rig)}
    assert len({means[name] for name in knew}) == 1 or a_writer_died_with_the_mean(rig), (remedy, means)


def began(rig: ListRig) -> dict[str, float]:
    """Return when each one's last process began."""
    return {name: t for t, name, action in rig.actions(g.Know)}


def first_end(rig: ListRig) -> float:
    """Return when the first one left with the mean. Who begins anew after that may find nobody who knows."""
    return min(t for t, _, action in rig.actions(m.Finish) if action.complete)


def a_writer_died_with_the_mean(rig: ListRig) -> bool:
    """Return whether one made the mean and began anew: who had it by then may be gone, or out of reach."""
    return any(t < began(rig)[name] for t, name, _ in rig.actions(g.Average))


def came_after_the_end(rig: ListRig) -> set[str]:
    """Return who began anew when all others had gone: it finds nobody, and waits."""
    ended = max(t for t, _, _ in rig.actions(m.Finish))
    return {name for name, t in began(rig).items() if t > ended and name not in rig.finished}
