"""Peers whose run has its members in the file and no rendezvous: one is killed, all end with one mean."""

import signal
import socket

import msgspec
import pytest

from archipel.dashboard.figures import figures_of
from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.roles.followed_peers import replay_gossip
from archipel.tape.replay import verify

from .conftest import Rig, Worker
from .test_gossip import going, own_loop, settled

pytestmark = pytest.mark.live
NAMES = ["p-0", "p-1", "p-2"]


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def peer(rig: Rig, name: str) -> Worker:
    return rig.archipel(name, "peer", str(rig.config), "--name", name, "--out", str(rig.out))


def test_a_list_of_members_needs_no_rendezvous(rig: Rig) -> None:
    members = {name: f"127.0.0.1:{port}" for name, port in zip(NAMES, free_ports(3), strict=True)}
    gossip = {"peers": 3, "rounds": 90, "local_steps": 8, "timeout_s_max": 3.0, "lease_s": 30.0}
    rig.write(gossip=gossip, members=members, data={"batch": 8}, optimizer={"warmup_steps": 10})
    workers = {name: peer(rig, name) for name in NAMES}
    rig.wait(lambda: all(settled(rig, name) >= 2 for name in NAMES), "all peers settle rounds", 90.0)
    workers["p-1"].signal(signal.SIGKILL, group=True)
    workers["p-1"].exit_code()
    open_tokens = 0  # of the round that it died in
    for record in rig.records("p-1"):
        if isinstance(record.event, g.Mixed):
            open_tokens = 0
        elif isinstance(record.event, m.StepCompleted):
            open_tokens += record.event.tokens
    going(rig, ["p-0", "p-2"], 3)
    workers["p-1"] = peer(rig, "p-1")
    assert [worker.exit_code(150.0) for worker in workers.values()] == [0] * 3
    said = [msgspec.json.decode((rig.out / "peers" / f"{name}.json").read_bytes()) for name in NAMES]
    assert len({each["digest"] for each in said}) == 1 and all(each["round"] == 90 for each in said)
    adopted = [record.event for record in rig.records("p-1") if isinstance(record.event, g.Adopted)]
    assert adopted[-1].round > 3  # the state of one that had gone on
    tokens = figures_of(rig.out)["tokens"]
    assert tokens["consumed"] == sum(value for fate, value in tokens.items() if fate != "consumed")
    assert tokens["merged"] + tokens["late"] > 0.5 * tokens["consumed"]
    assert (
        open_tokens <= tokens["lost"] <= open_tokens + 8 * 8 * 32
    )  # and what it read for a step it never took
    assert verify(rig.out).equal
    again = replay_gossip(rig.out, [])
    assert again.equal and again.compared > 100, again


def test_a_name_that_is_not_in_the_list_is_refused(rig: Rig) -> None:
    rig.write(gossip={"peers": 2}, members={"a": "127.0.0.1:7001", "b": "127.0.0.1:7002"})
    worker = peer(rig, "c")
    assert worker.exit_code() != 0
    assert "'c' is not in [members] (a, b): give --name" in worker.output


def test_own_loop_finds_the_others_in_the_list(rig: Rig) -> None:
    script = own_loop(rig, "members")
    members = {name: f"127.0.0.1:{port}" for name, port in zip("ab", free_ports(2), strict=True)}
    rig.write(gossip={"peers": 2, "rounds": 6, "local_steps": 10, "scheme": "one_peer"}, members=members)
    workers = [rig.start(n, str(script), n, str(rig.config), str(rig.out / n)) for n in "ab"]
    assert [worker.exit_code() for worker in workers] == [0, 0]
    ends = [worker.output.splitlines()[-1].split() for worker in workers]
    assert [end[2:4] for end in ends] == [["6", "0"], ["6", "1"]] and ends[0][-1] == ends[1][-1]
    assert figures_of(rig.out / "b")["complete"]


def test_an_address_to_be_told_is_refused_where_the_list_says_it(rig: Rig) -> None:
    rig.write(gossip={"peers": 2}, members={"a": "127.0.0.1:7001", "b": "127.0.0.1:7002"})
    argv = ["--name", "a", "--out", str(rig.out), "--advertise", "10.0.0.1:7001"]
    worker = rig.archipel("a", "peer", str(rig.config), *argv)
    assert worker.exit_code() != 0
    assert "--advertise 10.0.0.1:7001 goes with a rendezvous" in worker.output
