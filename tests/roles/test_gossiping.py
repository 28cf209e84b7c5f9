"""Gossip with tensors in virtual time: it learns, is DiLoCo on complete graphs, keeps its mean, survives."""

from pathlib import Path

import msgspec
import pytest
import torch

from archipel.cli import main
from archipel.config import load
from archipel.errors import ConfigError
from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.roles.gossiping import LocalPeer, fitted, gossip_virtually, options_of
from archipel.roles.simulation import train_virtually
from archipel.sim.gossip_scenario import GossipRun, simulate

torch.set_num_threads(1)

SMALL = [
    "model.width=16", "model.layers=1", "model.heads=2", "data.sequence=16", "data.batch=4",
    "evaluate.every_rounds=4", "evaluate.batches=1", "sim.link={bytes_per_s=1e5}",
]  # fmt: skip
GOSSIP = [*SMALL, "gossip.peers=3", "gossip.rounds=8", "gossip.local_steps=4"]
STORM = ["sim.weather={kill_s=60.0, freeze_s=60.0, partition_s=60.0, syncer_kill_s=60.0, mean_for_s=5.0}"]


def test_a_calm_run_learns_and_says_so_in_four_figures():
    config = load(None, GOSSIP)
    outcome, figures = gossip_virtually(config, config.sim)
    assert outcome.complete and [point["round"] for point in figures.points] == [0, 4, 8]
    first, last = figures.points[0], figures.points[-1]
    assert last["loss"] < 0.9 * first["loss"] and last["peers"] == 3
    assert last["worst"] >= last["mean"] and 0 < last["consensus_error"] < 0.1
    concluded = outcome.witness.concluded
    assert concluded is not None
    assert concluded.figures["val_loss_mean_model"] == pytest.approx(last["loss"], rel=1e-6)
    assert concluded.figures["val_loss_worst"] == pytest.approx(last["worst"], rel=1e-6)


@pytest.mark.parametrize(("n", "scheme"), [(2, "one_peer"), (3, "complete"), (3, "two_peer")])
def test_complete_graphs_are_diloco_as_the_syncer_does_it(n, scheme):
    same = [*SMALL, "optimizer.schedule=constant", "optimizer.warmup_steps=0", "sim.link={bytes_per_s=1e9}"]
    diloco = load(None, [
        *same, f"sync.learners={n}", f"sync.quorum={n}", "sync.steps=32", "sync.fragments=1",
        "sync.interval_steps=4", "sync.overlap_steps=0", "sync.merge=average", "sync.outer_lr=0.7",
        "sync.outer_momentum=0.7", "sync.push_codec=float32",
    ])  # fmt: skip
    gossip = load(None, [
        *same, f"gossip.peers={n}", "gossip.rounds=8", "gossip.local_steps=4", f"gossip.scheme={scheme}",
        "gossip.outer_lr=0.7", "gossip.outer_momentum=0.7", "gossip.adapt=false",
    ])  # fmt: skip
    _, losses = train_virtually(diloco, diloco.sim)
    outcome, figures = gossip_virtually(gossip, gossip.sim)
    assert losses.outer.states[0].version == 8
    port = outcome.engine.desks["peer-1"].port
    assert isinstance(port, LocalPeer)
    torch.testing.assert_close(port.state.anchor, losses.outer.states[0].weights, atol=2e-6, rtol=0)
    last = figures.points[-1]
    assert last["consensus_error"] < 1e-6
    assert last["loss"] == pytest.approx(losses.points[-1]["loss"], abs=1e-5)
    assert last["loss"] < figures.points[0]["loss"]


def test_the_mean_moves_by_the_drifts_alone_though_models_come_late(tmp_path: Path):
    """η = 1, γ = 0: what exchanges add to one peer they take from another, in time or later."""
    (tmp_path / "plan.toml").write_text(
        '[[fault]]\nkind="slow"\nworker="peer-1"\nat_s=30.0\nfor_s=40.0\nfactor=4.0\n'
    )
    config, corpus = fitted(load(None, [
        *SMALL, "gossip.peers=4", "gossip.rounds=24", "gossip.local_steps=3", "gossip.scheme=one_peer",
        "gossip.outer_lr=1.0", "gossip.outer_momentum=0.0", "gossip.adapt=false", "gossip.timeout_s_min=1.0",
        "gossip.timeout_s_max=4.0", f"sim.faults={tmp_path / 'plan.toml'}",
    ]))  # fmt: skip
    ports: dict[str, LocalPeer] = {}
    drifts: list[torch.Tensor] = []
    begins: dict[str, torch.Tensor] = {}
    ends: dict[str, torch.Tensor] = {}

    def make_port(name: str) -> LocalPeer:
        ports[name] = LocalPeer(config, corpus)
        return ports[name]

    def watch(worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        for action in actions:
            state = ports[worker].state if isinstance(action, g.Offer | g.Submit | m.Resume) else None
            if state is not None and isinstance(action, m.Resume):
                begins.setdefault(worker, state.anchor.double())
            elif state is not None and isinstance(action, g.Offer):
                drifts.append(state.reached().double() - state.anchor.double())
            elif state is not None:
                on_its_way = 0.0 if state.owed is None else state.owed.double()  # of what was rounds late
                ends[worker] = state.anchor.double() + on_its_way

    run = GossipRun(options_of(config), config.sim, make_port=make_port, rows=config.data.batch)
    outcome = simulate(run, watch=watch)
    assert outcome.complete and len(outcome.witness.late) > 3 and outcome.witness.one_sided() == []
    moved = sum(ends.values()) - sum(begins.values())
    assert float(sum(drifts).norm()) > 1.0
    torch.testing.assert_close(moved / 4, sum(drifts) / 4, atol=1e-5, rtol=0)


def test_a_killed_peer_comes_back_as_a_clone_and_all_end_with_one_mean(tmp_path: Path):
    (tmp_path / "plan.toml").write_text('[[fault]]\nkind="kill"\nworker="peer-2"\nat_s=12.0\nfor_s=8.0\n')
    config = load(None, [*GOSSIP, "gossip.rounds=12", f"sim.faults={tmp_path / 'plan.toml'}"])
    adopted: list[str] = []

    def watch(worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        if isinstance(event, g.Adopted) and now > 12.0:
            adopted.append(worker)

    outcome, figures = gossip_virtually(config, config.sim, watch=watch)
    outcome.witness.check_end()
    assert outcome.complete and adopted == ["peer-2"] and len(outcome.witness.accepted) == 3
    assert figures.points[-1]["loss"] < 0.9 * figures.points[0]["loss"]


def test_one_seed_gives_one_tape_and_the_same_figures_under_a_storm(tmp_path: Path):
    config = load(None, [*GOSSIP, *STORM])
    first, figures = gossip_virtually(config, config.sim, seed=4, folder=tmp_path / "a")
    second, again = gossip_virtually(config, config.sim, seed=4, folder=tmp_path / "b")
    assert first.complete and first.plan.fault and first.engine.rendezvous.ledger.closes()
    assert first.tape_digest == second.tape_digest and figures.points == again.points
    other, _ = gossip_virtually(config, config.sim, seed=5, folder=tmp_path / "c")
    assert other.tape_digest != first.tape_digest


def test_bf16_offers_halve_the_bytes():
    """Two peers, eight rounds; clones and the final models travel whole whatever the codec."""
    sent = {}
    for codec in ("float32", "bf16"):
        config = load(None, [*GOSSIP, "gossip.peers=2", "gossip.scheme=one_peer", f"gossip.codec={codec}"])
        outcome, figures = gossip_virtually(config, config.sim)
        sent[codec] = outcome.figures()["sent_bytes"]
        assert figures.points[-1]["loss"] < 0.9 * figures.points[0]["loss"]
        concluded = outcome.witness.concluded
    assert concluded is not None
    assert sent["float32"] - sent["bf16"] == 2 * 8 * concluded.figures["model_bytes"] / 2


def test_a_configuration_without_gossip_is_refused():
    with pytest.raises(ConfigError, match=r"no section \[gossip\]"):
        options_of(load(None, SMALL))


@pytest.mark.parametrize("compute", ["costs", "tensors"])
def test_simulate_runs_a_file_with_gossip(compute: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    overrides = [argument for text in (*GOSSIP, f"sim.compute={compute}") for argument in ("--set", text)]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *overrides, "--out", str(tmp_path / "run"), "--json", "/dev/null"])
    assert ended.value.code == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert found["complete"] and found["rounds"] == 8 and found["tape_digest"]
    assert ("losses" in found) == ((tmp_path / "run" / "metrics.jsonl").exists()) == (compute == "tensors")
