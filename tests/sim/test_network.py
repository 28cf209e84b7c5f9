"""Lanes and channels of the virtual network, by hand-sized numbers."""

import pytest

from archipel.protocol import messages as m
from archipel.sim.network import Channel, Lane, LinkOptions, Parcel

LINK = LinkOptions(latency_s=0.5, bytes_per_s=100.0)


def parcel(connection: int = 1) -> Parcel:
    return Parcel("L-0", "syncer", m.Heartbeat(), None, connection)


@pytest.fixture
def channel() -> Channel:
    made = Channel("L-0", LINK)
    made.connect()
    return made


def test_payloads_take_their_time_one_after_the_other() -> None:
    lane = Lane()
    assert lane.arrival(10.0, 200, LINK) == 12.5  # 2 s on the wire and the latency
    assert lane.arrival(10.0, 100, LINK) == 13.5
    assert lane.arrival(20.0, 100, LINK) == 21.5


def test_control_does_not_wait_for_payloads(channel: Channel) -> None:
    assert channel.send(10.0, parcel(), 1000.0) == 20.5
    assert channel.send(10.0, parcel(), 0.0) == 10.5


def test_what_was_sent_on_a_lost_connection_is_lost(channel: Channel) -> None:
    old = parcel(connection=1)
    channel.lose()
    assert not channel.passes(old)
    channel.connect()
    assert not channel.passes(old)
    assert channel.passes(parcel(connection=2))


def test_a_new_connection_has_empty_lanes(channel: Channel) -> None:
    channel.send(10.0, parcel(), 1000.0)
    channel.lose()
    channel.connect()
    assert channel.send(10.0, parcel(2), 100.0) == 11.5


def test_a_cut_that_heals_only_delays(channel: Channel) -> None:
    first, second = parcel(), parcel()
    channel.cut = True
    assert not channel.passes(first) and not channel.passes(second)
    assert channel.heal() == [first, second]
    assert channel.passes(first)
