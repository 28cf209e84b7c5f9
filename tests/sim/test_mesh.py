"""Lines of peers: what a transfer takes, who is held up by a narrow line, and what a cut does."""

from archipel.protocol import messages as m
from archipel.sim.mesh import Mesh
from archipel.sim.network import LinkOptions, Parcel


def mesh(**rates: float) -> Mesh:
    return Mesh({name: LinkOptions(latency_s=0.01, bytes_per_s=rate) for name, rate in rates.items()})


def transfer(net: Mesh, now: float, sender: str, receiver: str, nbytes: float) -> float:
    begins, left = net.leaves(now, sender, nbytes)
    return net.arrives(begins, receiver, nbytes, left)


def parcel(net: Mesh, sender: str, receiver: str) -> Parcel:
    return Parcel(sender, receiver, m.Heartbeat(), None, net.between(sender, receiver).number)


def test_a_transfer_takes_what_the_narrower_line_takes() -> None:
    assert transfer(mesh(a=100.0, b=100.0), 5.0, "a", "b", 300.0) == 8.0
    assert transfer(mesh(a=100.0, b=10.0), 0.0, "a", "b", 300.0) == 30.0
    assert transfer(mesh(a=10.0, b=100.0), 0.0, "a", "b", 300.0) == 30.0


def test_both_directions_of_a_line_are_used_at_once() -> None:
    net = mesh(a=10.0, b=100.0)
    assert transfer(net, 0.0, "a", "b", 100.0) == 10.0
    assert transfer(net, 0.0, "b", "a", 100.0) == 10.0


def test_an_uplink_serves_in_order_and_a_fast_one_is_free_although_the_receiver_is_slow() -> None:
    net = mesh(a=100.0, b=10.0, c=100.0)
    assert transfer(net, 0.0, "a", "b", 100.0) == 10.0
    assert transfer(net, 0.0, "a", "c", 100.0) == 2.0


def test_a_downlink_takes_one_payload_after_the_other() -> None:
    net = mesh(a=100.0, b=100.0, c=10.0)
    assert transfer(net, 0.0, "a", "c", 100.0) == 10.0
    assert transfer(net, 3.0, "b", "c", 100.0) == 20.0


def test_nothing_overtakes_within_a_direction_and_kind() -> None:
    net = mesh(a=1.0, b=1.0)
    net.connect("a", "b")
    one = parcel(net, "a", "b")
    assert net.in_order(one, bulk=False, at=5.0) == 5.0
    assert net.in_order(one, bulk=False, at=4.0) == 5.0
    assert net.in_order(one, bulk=True, at=4.0) == 4.0
    assert net.in_order(parcel(net, "b", "a"), bulk=False, at=1.0) == 1.0


def test_what_is_under_way_is_lost_with_its_connection_and_held_at_a_cut() -> None:
    net = mesh(a=1.0, b=1.0)
    net.connect("a", "b")
    old = parcel(net, "a", "b")
    assert net.passes(old)
    assert net.lose("b", "a") and not net.lose("a", "b") and not net.passes(old)
    net.connect("b", "a")
    assert not net.passes(old)
    new = parcel(net, "a", "b")
    net.cut.add("b")
    assert not net.passes(new) and net.between("a", "b").held == [new]


def test_connections_of_a_worker_come_by_name() -> None:
    net = mesh(a=1.0, b=1.0, c=1.0)
    net.connect("c", "b")
    net.connect("a", "b")
    net.connect("a", "c")
    net.lose("a", "c")
    assert [other for other, _ in net.of("b")] == ["a", "c"] and [other for other, _ in net.of("c")] == ["b"]
