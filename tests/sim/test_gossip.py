"""Gossip in virtual time: round times of the specification from the real protocol, faults, storms, tapes."""

from itertools import pairwise
from pathlib import Path

import pytest

from archipel.chaos.plan import Weather
from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.sim.gossip_scenario import GossipOutcome, GossipRun, simulate
from archipel.sim.network import LinkOptions
from archipel.sim.rounds import gossip_round, one_straggler
from archipel.sim.scenario import SimOptions
from archipel.tape.replay import verify

MODEL_BYTES = 1e6
CALM = {"start_s_max": 1e5, "timeout_s_max": 300.0}


def run_of(n: int, sim: dict[str, object] | None = None, seed: int = 0, **options: object) -> GossipRun:
    gossip = {"rounds": 12, "local_steps": 5, "timeout_s_max": 20.0, **options}
    costs = {"tokens": 10, "link": LinkOptions(bytes_per_s=MODEL_BYTES), **(sim or {})}
    return GossipRun(g.GossipOptions(peers=n, **gossip), SimOptions(**costs), seed=seed)  # type: ignore[arg-type]


def with_plan(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return {"faults": str(path)}


def straggler(c: float, r: float, *, adapt: bool = True, rounds: int = 80) -> GossipOutcome:
    """16 peers, H = 30, a model takes c steps over a full line, the last peer has a fraction r of it."""
    link = LinkOptions(latency_s=1e-4, bytes_per_s=MODEL_BYTES / c)
    sim = {"link": link, "slow_link_bytes_per_s": r * link.bytes_per_s}
    return simulate(run_of(16, sim, scheme="one_peer", local_steps=30, rounds=rounds, adapt=adapt, **CALM))


def mixes(outcome: GossipOutcome, name: str) -> dict[int, tuple[str, ...]]:
    return {number: names for _, worker, number, names in outcome.witness.mixed if worker == name}


# ---- round times (specification, section 3) ----


@pytest.mark.parametrize(("c", "r", "round_s", "steps"), [(3, 0.1, 33.0, 3), (1, 0.2, 31.0, 26)])
def test_a_straggler_that_adapts_its_steps_holds_nobody_up(c, r, round_s, steps):
    outcome = straggler(c, r)
    figures = outcome.figures()
    assert outcome.complete and figures["round_s"] == pytest.approx(round_s, rel=0.02)
    assert figures["local_steps"]["peer-15"] in (steps - 1, steps)
    assert all(figures["local_steps"][f"peer-{k}"] == 30 for k in range(15))


@pytest.mark.parametrize(("c", "round_s"), [(3, 33.0), (1, 31.0)])
def test_without_a_straggler_a_round_is_the_steps_and_one_transfer(c, round_s):
    figures = straggler(c, 1.0, rounds=10).figures()
    assert figures["round_s"] == pytest.approx(round_s, rel=0.001) and figures["late_models"] == 0


def test_with_fixed_steps_a_straggler_slows_everybody_but_less_than_the_model_has_it():
    """Nobody waits for its own outgoing model, a slow peer neither: transfers overlap the next steps."""
    link = LinkOptions(latency_s=1e-4, bytes_per_s=MODEL_BYTES / 3)
    sim = {"link": link, "slow_link_bytes_per_s": 0.1 * link.bytes_per_s}
    waiting = {"timeout_s_min": 1e5, "timeout_s_max": 1e5, "suspect_rounds": 10**6, "start_s_max": 1e5}
    run = run_of(16, sim, scheme="one_peer", local_steps=30, rounds=80, adapt=False, **waiting)
    round_s = simulate(run).figures()["round_s"]
    modelled = gossip_round(one_straggler(3, 0.1, adapted=False), rounds=200)
    assert modelled == pytest.approx(60, rel=0.01) and 43.0 < round_s < modelled


def test_a_round_sends_one_model_to_each_partner():
    for scheme, partners in (("one_peer", 1), ("two_peer", 2)):
        figures = simulate(run_of(6, scheme=scheme)).figures()
        copies, final = 5 * 4, 2 * 5  # clones of the first state; models to the writer and the mean back
        assert figures["sent_bytes"] == (6 * 12 * partners + copies + final) * MODEL_BYTES


# ---- faults ----


def test_a_calm_run_merges_all_tokens_and_makes_one_mean():
    outcome = simulate(run_of(5, scheme="two_peer", adapt=False))
    outcome.witness.check_end()
    figures = outcome.figures()
    assert outcome.complete and figures["merged_share"] == 1.0 and figures["one_sided"] == 0
    assert figures["tokens"]["consumed"] == 5 * 12 * 5 * 10 and outcome.engine.rendezvous.ledger.closes()


def test_a_killed_peer_is_skipped_and_comes_back_by_cloning(tmp_path):
    plan = '[[fault]]\nkind="kill"\nworker="peer-2"\nat_s=20.0\nfor_s=30.0\n'
    steps: list[float] = []

    def watch(worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        if worker == "peer-2" and isinstance(event, m.StepCompleted):
            steps.append(now)

    run = run_of(4, with_plan(tmp_path, plan), scheme="two_peer", rounds=20)
    outcome = simulate(run, watch=watch)
    witness, ledger = outcome.witness, outcome.engine.rendezvous.ledger
    witness.check_end()
    assert outcome.complete and set(witness.accepted) == {f"peer-{k}" for k in range(4)}
    while_dead = [names for at, _, _, names in witness.mixed if 22.0 < at < 50.0]
    assert while_dead and not any("peer-2" in names for names in while_dead)
    back = outcome.engine.peer("peer-2")
    assert back.settled > 3 and mixes(outcome, "peer-2")[19]
    assert ledger.closes() and ledger.table()["lost"] > 0
    assert back.position == 10 * sum(at < 20.0 for at in steps)  # what was drawn before is not drawn again


def test_a_frozen_peer_costs_its_partners_at_most_the_timeout_a_round(tmp_path):
    plan = '[[fault]]\nkind="freeze"\nworker="peer-1"\nat_s=20.0\nfor_s=40.0\n'
    outcome = simulate(run_of(4, with_plan(tmp_path, plan), scheme="one_peer", rounds=20, timeout_s_max=6.0))
    assert outcome.complete
    ends = [at for at, worker, _, _ in outcome.witness.mixed if worker == "peer-0"]
    assert max(b - a for a, b in pairwise(ends)) < 5.0 + 6.0 + 1.0


def test_a_partition_that_heals_leaves_one_mean(tmp_path):
    plan = '[[fault]]\nkind="partition"\nworker="peer-3"\nat_s=15.0\nfor_s=25.0\n'
    outcome = simulate(run_of(4, with_plan(tmp_path, plan), scheme="two_peer", rounds=20))
    outcome.witness.check_end()
    assert outcome.complete and outcome.figures()["tokens"]["skipped"] > 0
    assert outcome.engine.rendezvous.ledger.closes()


def test_a_rendezvous_that_dies_holds_no_round_up(tmp_path):
    plan = '[[fault]]\nkind="kill"\nworker="rendezvous"\nat_s=15.0\nfor_s=30.0\n'
    outcome = simulate(run_of(4, with_plan(tmp_path, plan), scheme="two_peer", rounds=20))
    outcome.witness.check_end()
    assert outcome.complete and outcome.engine.epochs == 2
    assert outcome.figures()["tokens"]["skipped"] == 0 and outcome.engine.rendezvous.ledger.closes()


STORM = Weather(
    kill_s=100.0, freeze_s=120.0, slow_s=100.0, partition_s=120.0, syncer_kill_s=150.0, mean_for_s=10.0
)
SCHEMES = ("one_peer", "two_peer", "complete", "static_ring", "one_peer_exponential")


@pytest.mark.parametrize("seed", range(36))
def test_no_storm_breaks_an_invariant(seed):
    """The witness raises at the first record that must not be; see its description."""
    sim = {"weather": STORM, "jitter": 0.1, "speed_spread": 0.4, "slow_link_bytes_per_s": MODEL_BYTES / 3,
           "horizon_s": 5000.0}  # fmt: skip
    run = run_of(
        2 + seed % 6, sim, seed, scheme=SCHEMES[seed % 5], rounds=25, checkpoint_rounds=5 * (seed % 2)
    )
    outcome = simulate(run)
    assert outcome.complete and len(outcome.plan.fault) > 5
    outcome.witness.check_end()
    assert outcome.engine.rendezvous.ledger.closes()


def test_one_seed_gives_one_tape(tmp_path):
    sim = {"weather": STORM, "jitter": 0.1}
    first = simulate(run_of(4, sim, seed=3), folder=tmp_path / "a")
    second = simulate(run_of(4, sim, seed=3), folder=tmp_path / "b")
    other = simulate(run_of(4, sim, seed=4), folder=tmp_path / "c")
    assert first.tape_digest == second.tape_digest != other.tape_digest
    assert first.figures().keys() == second.figures().keys()


def test_decisions_follow_from_the_tapes_alone_through_every_restart(tmp_path):
    outcome = simulate(run_of(4, {"weather": STORM, "jitter": 0.1}, seed=3), folder=tmp_path)
    assert outcome.engine.epochs > 1 and {fault.kind for fault in outcome.plan.fault} >= {"kill", "freeze"}
    found = verify(tmp_path)
    assert found.first_difference is None and found.equal and found.records == outcome.engine.handled
