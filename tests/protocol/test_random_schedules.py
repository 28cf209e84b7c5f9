"""Random options, random faults: whatever happens, nothing forbidden does, and once the faults stop the run
ends.

The witness checks every record (no round without a quorum, no step or report before a full model, monotone
versions, nothing folded twice …). Here: the run ends, the ledger closes and agrees with the data positions,
nobody starves. A failing seed names itself; `ARCHIPEL_SEEDS=3000:9000 pytest
tests/protocol/test_random_schedules.py` tries others.
"""

import os
import random

import pytest

from archipel.protocol.schedule import SyncOptions
from archipel.sim.engine import Engine
from archipel.sim.network import LinkOptions
from archipel.sim.ports import EngineOptions, LearnerOptions
from archipel.sim.witness import Witness

FIRST, LAST = map(int, os.environ.get("ARCHIPEL_SEEDS", "0:2000").split(":"))
CHUNK = 100
STORM_S = 20.0  # faults begin within this time
CALM_AT = 36.0  # the last fault is over: whoever is still dead is started again
TURN_S = 60.0  # after this, nobody is slow any more because of faults


def random_options(rng: random.Random) -> SyncOptions:
    learners = rng.randint(1, 5)
    interval = rng.randint(1, 8)
    fragments = rng.randint(1, interval)
    overlap = rng.choice([0, 1, 2, 3])
    if fragments == interval:
        overlap = min(overlap, interval - 1)  # P = H ≤ τ is a configuration error
    return SyncOptions(
        steps=rng.randint(5, 40),
        learners=learners,
        quorum=rng.randint(1, learners),
        quorum_live=rng.random() < 0.2,
        fragments=fragments,
        interval_steps=interval,
        overlap_steps=overlap,
        grace=rng.random() < 0.7,
        max_lead_steps=rng.choice([None, None, overlap, 1, 3]) if overlap else None,
        pulls_max=rng.choice([1, 2, 4]),
        pull_deadline_s=rng.choice([3.0, 20.0]),
        silence_s=8.0,
        heartbeat_s=1.0,
        checkpoint_rounds=rng.choice([1, 3, 200]),
    )


def random_learner(rng: random.Random) -> LearnerOptions:
    link = LinkOptions(latency_s=rng.choice([0.001, 0.05, 0.4]), bytes_per_s=rng.choice([1e9, 1e6]))
    return LearnerOptions(
        step_s=rng.choice([0.5, 1.0, 1.2, 4.0]),
        jitter=rng.choice([0.0, 0.1]),
        prepare_s=rng.choice([0.0, 0.5]),
        tokens=100,
        link=link,
    )


def break_something(rng: random.Random, engine: Engine, names: list[str]) -> None:
    name, at = rng.choice(names), rng.uniform(0, STORM_S)
    until = at + rng.choice([0.1, 1.0, 3.0, 6.0, 15.0])
    match rng.choice(
        ["kill", "stop", "pause", "freeze", "partition", "slow", "syncer killed", "syncer stopped"]
    ):
        case "kill":
            engine.kill(name, at)
            engine.restart(name, until)
        case "stop":
            engine.stop(name, at)
            engine.restart(name, until)
        case "pause":
            engine.pause(name, at, until)
        case "freeze":
            engine.freeze(name, at, until)
        case "partition":
            engine.partition(name, at, until)
        case "slow":
            engine.slow(name, 4.0, at, until)
        case "syncer killed":
            engine.kill("syncer", at)
            engine.resume_syncer(until)
        case "syncer stopped":
            engine.stop("syncer", at)
            engine.resume_syncer(until)


def storm(seed: int) -> tuple[Engine, Witness]:
    rng = random.Random(seed)
    sync = random_options(rng)
    witness = Witness(sync)
    costs = EngineOptions(
        seed=seed,
        fragment_bytes=rng.choice([1e3, 1e6]),
        fold_s=rng.choice([0.0, 0.01]),
        merge_s=rng.choice([0.0, 0.05]),
    )
    engine = Engine(sync, costs, on_record=witness.record)
    names = [f"L-{i}" for i in range(sync.learners)]
    for name in names:
        engine.add(name, random_learner(rng), at=rng.choice([0.0, 0.0, rng.uniform(0, 10)]))
    if rng.random() < 0.2:
        engine.add("watch", role="observer")
    for _ in range(rng.randint(0, 6)):
        break_something(rng, engine, names)
    for name in names:
        engine.restart(name, CALM_AT)
    engine.resume_syncer(CALM_AT)
    return engine, witness


def call_back(engine: Engine) -> None:
    """A stop that waited for the end of a very long step came after everybody was to be back."""
    for name, host in engine.hosts.items():
        if name != "syncer" and engine.roles[name] == "learner" and host.finished and not host.machine.done:  # type: ignore[attr-defined]
            engine.restart(name, engine.now)


def check_tokens(engine: Engine) -> None:
    ledger = engine.syncer.ledger
    assert ledger.closes()
    for name, (_, drawn) in engine.journal.items():
        account = ledger.accounts.get(name)
        if account is None:
            continue  # the syncer was over before it came
        assert account.consumed + account.current <= drawn, f"{name}: more consumed than drawn"
        member = engine.syncer.members.get(name)
        if member is not None and member.left and not account.tail_unknown and engine.hosts[name].finished:
            assert account.consumed == drawn, f"{name}: consumed {account.consumed}, drawn {drawn}"


def check_turns(engine: Engine, witness: Witness) -> None:
    """Whoever steps is counted; only at τ = 0 with K < M may the fast leave the slow behind for good."""
    sync = engine.sync
    ticks = [(at, tally) for at, tally in witness.ticks if at > TURN_S]
    if not ticks or (sync.overlap_steps == 0 and sync.quorum < sync.learners):
        return
    for name, options in engine.learners.items():
        if engine.roles[name] == "learner" and ticks[-1][0] - ticks[0][0] > 20 * options.step_s:
            assert any(name in tally.workers for _, tally in ticks), f"{name} starves"


@pytest.mark.parametrize("first", range(FIRST, LAST, CHUNK))
def test_nothing_forbidden_happens_and_the_run_ends(first: int) -> None:
    # faults.md row 16 (joins at every phase), and 02, 04, 06, 09, 12, 14, 15, 19 at random times.
    for seed in range(first, min(first + CHUNK, LAST)):
        engine, witness = storm(seed)
        try:
            engine.run(until=2 * CALM_AT)
            call_back(engine)
            engine.run(until=1500.0, events=200_000)
            finished = engine.hosts["syncer"].finished
            assert finished is not None and finished.complete, f"no end: tick {engine.syncer.tick}"
            check_tokens(engine)
            check_turns(engine, witness)
        except Exception as error:
            raise AssertionError(f"seed {seed} at {engine.now:.3f} s: {error!r}") from error


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [storm(7) for _ in range(2)]
    for engine, _ in runs:
        engine.run(until=1500.0)
    assert runs[0][1].ticks == runs[1][1].ticks
    assert runs[0][1].notices == runs[1][1].notices
