"""Peers that exchange models over sockets: bytes, a peer and a rendezvous that are killed, one end."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.roles.followed_peers import replay_gossip
from archipel.tape.replay import verify

from .conftest import Rig, Worker

pytestmark = pytest.mark.live

GOSSIP = {
    "peers": 4,
    "rounds": 1_000_000,
    "local_steps": 8,
    "timeout_s_max": 3.0,
    "lease_s": 2.0,
    "checkpoint_rounds": 4,
}
PEERS = [f"peer-{number}" for number in range(4)]


def rendezvous(rig: Rig, *argv: str) -> Worker:
    """Start a rendezvous, where the last one listened if there was one."""
    file = rig.folder / "address"
    file.unlink(missing_ok=True)
    where = ["--listen", rig.address or "127.0.0.1:0", "--address-file", str(file), "--out", str(rig.out)]
    worker = rig.archipel(g.RENDEZVOUS, "rendezvous", str(rig.config), *where, *argv)
    rig.wait(file.exists, "the rendezvous listens", alive=worker)
    rig.address = file.read_text()
    return worker


def peer(rig: Rig, name: str, *argv: str) -> Worker:
    to = ["--rendezvous", rig.address, "--name", name, "--out", str(rig.out)]
    return rig.archipel(name, "peer", str(rig.config), *to, *argv)


def settled(rig: Rig, name: str) -> int:
    """Return the newest round a peer has settled, -1 before the first."""
    rounds = [record.event.round for record in rig.records(name) if isinstance(record.event, g.Mixed)]
    return rounds[-1] if rounds else -1


def mixes(rig: Rig, name: str) -> list[g.Mix]:
    return [a for record in rig.records(name) for a in record.actions if isinstance(a, g.Mix)]


def going(rig: Rig, names: list[str], rounds: int) -> None:
    """Wait until each of them has settled so many more rounds."""
    goals = {name: settled(rig, name) + rounds for name in names}
    rig.wait(lambda: all(settled(rig, n) >= goal for n, goal in goals.items()), f"{rounds} more rounds")


def facts_of(rig: Rig, name: str) -> dict[str, Any]:
    return msgspec.json.decode((rig.out / "peers" / f"{name}.json").read_bytes())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Iterator[tuple[Rig, dict[str, Worker]]]:
    """A rendezvous and four peers that go on while the tests of this file come and go."""
    rig = Rig(tmp_path_factory.mktemp("gossip"), tokens)
    rig.write(gossip=GOSSIP, data={"batch": 8}, optimizer={"warmup_steps": 10})
    workers = {g.RENDEZVOUS: rendezvous(rig), **{name: peer(rig, name) for name in PEERS}}
    rig.wait(lambda: all(settled(rig, name) >= 3 for name in PEERS), "all peers settle rounds", 90.0)
    yield rig, workers
    rig.end()


def test_peers_meet_and_pairs_agree(busy: tuple[Rig, dict[str, Worker]]) -> None:
    rig, _ = busy
    met = {name: {mix.round: mix.workers for mix in mixes(rig, name)} for name in PEERS}
    rounds = set.intersection(*(set(by_round) for by_round in met.values()))
    full = [n for n in rounds if all(len(met[name][n]) == 2 for name in PEERS)]
    assert full  # two partners each, the scheme's
    for number in full:
        assert all(name in met[other][number] for name in PEERS for other in met[name][number])


def test_a_killed_peer_is_skipped_and_comes_back_by_cloning(busy: tuple[Rig, dict[str, Worker]]) -> None:
    rig, workers = busy
    others = PEERS[:3]
    workers["peer-3"].signal(signal.SIGKILL, group=True)
    workers["peer-3"].exit_code()
    going(rig, others, 4)
    longest = max(record.event.message.wait_s for record in rig.records(g.RENDEZVOUS) if is_report(record))
    assert longest < GOSSIP["timeout_s_max"] + 2.0  # a round waits no longer, on a machine however busy
    rig.wait(lambda: rig.said("lost peer=peer-3", g.RENDEZVOUS), "the rendezvous gives it up")
    tapes = len(list((rig.out / "tape").glob("peer-3.*")))
    workers["peer-3"] = peer(rig, "peer-3")
    rig.wait(lambda: len(list((rig.out / "tape").glob("peer-3.*"))) > tapes, "a new process of peer-3")
    going(rig, PEERS, 3)
    events = [record.event for record in rig.records("peer-3")]
    [adopted] = [event for event in events if isinstance(event, g.Adopted)][-1:]
    assert adopted.round > 0 and not adopted.reason
    rig.wait(
        lambda: any("peer-3" in mix.workers for mix in mixes(rig, "peer-0")[-4:]), "it is mixed in again"
    )


def is_report(record: Any) -> bool:
    return isinstance(record.event, m.Received) and isinstance(record.event.message, g.Report)


def test_peers_go_on_without_the_rendezvous_and_enrol_when_it_is_back(
    busy: tuple[Rig, dict[str, Worker]],
) -> None:
    rig, workers = busy
    workers[g.RENDEZVOUS].signal(signal.SIGKILL, group=True)
    workers[g.RENDEZVOUS].exit_code()
    going(rig, PEERS, 4)
    before = len(rig.records(g.RENDEZVOUS))
    workers[g.RENDEZVOUS] = rendezvous(rig, "--resume")
    rig.wait(lambda: reports_since(rig, before) >= set(PEERS), "all report again")
    assert all(worker.process.poll() is None for worker in workers.values())


def reports_since(rig: Rig, start: int) -> set[str]:
    return {record.event.sender for record in rig.records(g.RENDEZVOUS)[start:] if is_report(record)}


def test_every_decision_on_the_tapes_follows_from_its_events(busy: tuple[Rig, dict[str, Worker]]) -> None:
    rig, workers = busy
    workers[g.RENDEZVOUS].signal(signal.SIGTERM)
    assert [workers[name].exit_code() for name in PEERS] == [0] * 4
    assert workers[g.RENDEZVOUS].exit_code() == 1  # stopped before its end
    found = verify(rig.out)
    assert found.equal and found.records > 1000, found.first_difference
    facts = msgspec.json.decode((rig.out / "rendezvous.json").read_bytes())
    assert facts["ledger_closes"] and facts["tokens"]["lost"] > 0
    again = replay_gossip(rig.out, [])  # peers killed, cloned, late: every tensor comes out as it did
    assert again.first_difference is None and again.compared > 100 and again.conditions == []


@pytest.mark.parametrize(("scheme", "partners"), [("one_peer", 1), ("two_peer", 2)])  # of as many others
def test_a_run_ends_with_one_model_and_each_round_cost_its_offers(
    rig: Rig, scheme: str, partners: int
) -> None:
    # A model of 0.5 MB, so that handshakes weigh nothing beside it.
    calm = {"rounds": 6, "local_steps": 4, "timeout_s_min": 20.0, "timeout_s_max": 30.0, "adapt": False}
    names = PEERS[: partners + 1]
    gossip = {**GOSSIP, **calm, "scheme": scheme, "peers": len(names)}
    rig.write(gossip=gossip, model={"width": 96, "layers": 2}, data={"batch": 2})
    whole = [rendezvous(rig), *(peer(rig, name) for name in names)]
    assert {worker.exit_code(90.0) for worker in whole} == {0}
    facts = msgspec.json.decode((rig.out / "rendezvous.json").read_bytes())
    assert facts["complete"] and facts["ledger_closes"] and facts["rounds"] == 6
    assert {facts_of(rig, name)["digest"] for name in names} == {facts["digest"]}
    assert facts["tokens"]["merged"] == facts["tokens"]["consumed"] == len(names) * 6 * 4 * 2 * 32
    size = facts["figures"]["model_bytes"]
    for name in names:
        own = facts_of(rig, name)
        assert own["model_bytes_sent"] == 6 * partners * size
        ends = own["state_bytes_sent"] + own["end_bytes_sent"]
        assert own["bytes_out"] - ends == pytest.approx(6 * partners * size, rel=0.01)
    assert (rig.out / "model" / "model.safetensors").exists()
    assert facts["figures"]["val_loss_mean_model"] < facts["figures"]["val_loss_worst"] + 0.1


def own_loop(rig: Rig, home: str, *, resume: bool = False) -> Path:
    """Return a user's script around `archipel.Peer`: NAME, then a rendezvous's address or a list's file as
    `home` says, then the folder to keep things in."""
    script = rig.folder / "own.py"
    script.write_text(
        "import sys, torch, archipel\n"
        "torch.manual_seed(ord(sys.argv[1]))\n"  # weights of their own: the second clones the first
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)\n"
        "where = {'name': sys.argv[1], 'out': sys.argv[3]}\n"
        f"where |= {{'{home}': sys.argv[2], 'resume': {resume}}}\n"
        "with archipel.Peer(model, optimizer, **where) as peer:\n"
        "    print('begins at', peer.round, 'tick', peer.tick, flush=True)\n"
        "    while not peer.done:\n"
        "        inputs = torch.randn(8, 4)\n"
        "        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()\n"
        "        loss.backward(); optimizer.step(); optimizer.zero_grad()\n"
        "        peer.step(tokens=8)\n"
        "print(f'ends at {peer.round} {peer.shard} {loss.item():.4f} {model.weight.sum().item():.6f}')\n"
    )
    return script


def test_own_loop_in_plain_python_gossips_and_a_group_resumes(rig: Rig) -> None:
    script = own_loop(rig, "rendezvous", resume=True)
    rig.write(gossip={**GOSSIP, "peers": 2, "rounds": 40, "local_steps": 20, "scheme": "one_peer"})
    first = [rendezvous(rig), *(rig.start(n, str(script), n, rig.address, str(rig.out)) for n in "ab")]
    rig.wait(lambda: all(list((rig.out / "checkpoints" / n).glob("step-*")) for n in "ab"), "checkpoints")
    for worker in first:
        worker.signal(signal.SIGKILL, group=True)
        worker.exit_code()
    kept = [max(int(p.name[5:]) for p in (rig.out / "checkpoints" / n).glob("step-*")) for n in "ab"]
    again = [
        rendezvous(rig, "--resume"),
        *(rig.start(n, str(script), n, rig.address, str(rig.out)) for n in "ab"),
    ]
    assert [worker.exit_code() for worker in again] == [0] * 3
    said = [worker.output.splitlines() for worker in again[1:]]
    begins = [int(line.split()[2]) for lines in said for line in lines if line.startswith("begins at")][1::2]
    # Whoever is back first starts from its checkpoint, and the other becomes its clone.
    assert min(begins) in kept and min(begins) > 0
    ends = [lines[-1].split() for lines in said]
    assert [end[2] for end in ends] == ["40", "40"] and ends[0][-1] == ends[1][-1]
    assert float(ends[0][-1]) == pytest.approx(4.0, abs=0.5)
    assert {end[3] for end in ends} == {"0", "1"}
    assert (rig.out / "model" / "weights.safetensors").exists()
