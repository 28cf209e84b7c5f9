"""Gossip under random storms: kills, broken links, slow links and steps, a rendezvous that dies.

ARCHIPEL_SEEDS=first:last runs others than the default ones; a failure names its seed.
"""

import os
import random

import pytest

from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.protocol.peer import PeerMachine
from archipel.protocol.rendezvous import RendezvousMachine

from .gossip_rig import Costs, Rig, cut, random_options

FIRST, LAST = (int(part) for part in os.environ.get("ARCHIPEL_SEEDS", "0:150").split(":"))


def storm(seed: int) -> Rig:
    """Return a rig whose faults are scheduled; each is over by the time the run must end."""
    rng = random.Random(seed)
    n = rng.randint(1, 7)
    options = random_options(
        rng,
        n,
        start_s_max=rng.choice([5.0, 60.0]),
        lease_s=rng.choice([0.5, 5.0]),
    )
    costs = {f"p-{i}": Costs(rng.uniform(0.5, 2.0), rng.choice([0.1, 1.0, 8.0])) for i in range(n)}
    rig = Rig(options, costs)
    for number in range(n):
        rig.at(rng.choice([0.0, rng.uniform(0, 30)]), revive, rig, f"p-{number}")
    horizon = options.rounds * (options.local_steps + 2.0)
    for _ in range(rng.randint(0, 6)):
        victim, at = f"p-{rng.randrange(n)}", rng.uniform(1.0, horizon)
        if rng.random() < 0.5:
            rig.at(at, kill, rig, victim)
            rig.at(at + rng.uniform(0.5, 30.0), revive, rig, victim)
        else:
            other = rng.choice([g.RENDEZVOUS, f"p-{rng.randrange(n)}"])
            rig.at(at, cut, rig, victim, other)
            rig.at(at + rng.uniform(0.1, 12.0), rig._link, victim, other)
    if rng.random() < 0.3:
        at = rng.uniform(1.0, horizon)
        rig.at(at, kill_rendezvous, rig, rng.uniform(0.5, 20.0))
    return rig


def kill(rig: Rig, name: str) -> None:
    machine = rig.machines.get(name)
    if isinstance(machine, PeerMachine) and name not in rig.finished:
        rig.drawn[name] = (machine.shard, machine.position + machine.tokens)
        rig.kill(name)


def revive(rig: Rig, name: str) -> None:
    if name not in rig.machines:
        shard, position = rig.drawn.get(name, (-1, -1))
        rig.peer(name, shard=shard, position=position)


def kill_rendezvous(rig: Rig, for_s: float) -> None:
    if g.RENDEZVOUS in rig.finished:
        return
    machine = rig.machines[g.RENDEZVOUS]
    assert isinstance(machine, RendezvousMachine)
    state = machine.snapshot()
    rig.kill(g.RENDEZVOUS)
    rig.at(rig.now + for_s, rig.rendezvous, state)
    for name in [name for name in rig.costs]:
        rig.at(rig.now + for_s + 0.1, rig._link, name, g.RENDEZVOUS)


def check(rig: Rig) -> None:
    """Assert what must hold of every storm."""
    offered: dict[tuple[str, int], float] = {}
    rounds: dict[str, int] = {}
    sent: set[tuple[str, str, int]] = set()
    for t, name, event, actions in rig.log:
        if any(isinstance(action, m.Prepare) for action in actions):
            rounds[name] = -1  # a new process
        if isinstance(event, g.Offered):
            assert event.round > rounds[name], f"{name} makes round {event.round} twice"
            rounds[name] = event.round
            offered[name, event.round] = t
        for action in actions:
            if isinstance(action, m.Send) and isinstance(action.message, g.Model):
                sent.add((name, action.to, action.message.round))
            if isinstance(action, g.Mix):
                assert t - offered[name, action.round] <= rig.options.timeout_s_max + 1e-6
                assert sum(action.weights) < 1 + 1e-9 and len(set(action.workers)) == len(action.workers)
                assert all((other, name, action.round) in sent for other in action.workers)


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_storm_passes(seed: int) -> None:
    rig = storm(seed).run(until=1e5)
    remedy = f"ARCHIPEL_SEEDS={seed}:{seed + 1} pytest {__file__}"
    check(rig)
    finish = rig.finished.get(g.RENDEZVOUS)
    assert finish is not None and finish.complete, remedy
    machine = rig.machines[g.RENDEZVOUS]
    assert isinstance(machine, RendezvousMachine) and machine.ledger.closes(), remedy
    assert machine.ledger.table()["consumed"] <= rig.tokens, remedy
