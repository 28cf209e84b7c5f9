"""The relay makes the bad links of the live tests, so it is itself tested with plain sockets."""

import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from archipel.errors import TransportError
from archipel.runtime.relay import Conditions, Relay

DEADLINE_S = 10.0


class Echo:
    """A server that sends back what it gets, closes what is closed, and counts connections."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.accepted: list[socket.socket] = []
        self.ended = threading.Semaphore(0)
        self.got_b = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.accepted.append(connection)
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        try:
            with connection:
                while piece := connection.recv(1 << 16):
                    if b"b" in piece:
                        self.got_b.set()
                    connection.sendall(piece)
        except OSError:
            pass
        self.ended.release()

    def close(self) -> None:
        self.listener.close()
        for connection in self.accepted:
            connection.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def relay(echo: Echo) -> Iterator[Relay]:
    one = Relay(echo.address, seed=7)
    one.start_address = one.start()  # type: ignore[attr-defined]
    yield one
    one.stop()


def dial(relay: Any) -> socket.socket:
    host, port = relay.start_address.split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def receive(connection: socket.socket, length: int) -> bytes:
    got = b""
    while len(got) < length:
        piece = connection.recv(length - len(got))
        assert piece, f"closed after {got!r}"
        got += piece
    return got


def silent(connection: socket.socket, seconds: float = 0.2) -> bool:
    return not select.select([connection], [], [], seconds)[0]


def test_bytes_pass_whole_and_in_order_both_ways(relay: Relay) -> None:
    sent = bytes(range(256)) * 8000
    with dial(relay) as connection:
        threading.Thread(target=connection.sendall, args=(sent,), daemon=True).start()
        assert receive(connection, len(sent)) == sent
    assert relay.bytes_forwarded >= 2 * len(sent)


def test_the_end_of_one_side_reaches_the_other_behind_its_bytes(relay: Relay, echo: Echo) -> None:
    with dial(relay) as connection:
        connection.sendall(b"last words")
        connection.shutdown(socket.SHUT_WR)
        assert receive(connection, 10) == b"last words"
        assert connection.recv(1) == b""
    assert echo.ended.acquire(timeout=DEADLINE_S)


def test_delay_holds_each_way(relay: Relay) -> None:
    relay.shape(Conditions(delay_s=0.1))
    with dial(relay) as connection:
        began = time.monotonic()
        connection.sendall(b"x")
        receive(connection, 1)
        assert time.monotonic() - began >= 0.2


def test_jitter_never_reorders(relay: Relay) -> None:
    relay.shape(Conditions(jitter_s=0.01))
    with dial(relay) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(100):
            connection.sendall(bytes([i]))
        assert receive(connection, 100) == bytes(range(100))


def test_rate_bounds_bytes_per_second(relay: Relay) -> None:
    relay.throttle(200_000)
    with dial(relay) as connection:
        began = time.monotonic()
        connection.sendall(bytes(60_000))
        receive(connection, 60_000)
        assert time.monotonic() - began >= 0.25


def test_a_partition_holds_bytes_and_healing_delivers_them(relay: Relay) -> None:
    with dial(relay) as connection:
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"
        relay.partition()
        connection.sendall(b"b")
        assert silent(connection)
        relay.heal()
        assert receive(connection, 1) == b"b"


@pytest.mark.parametrize(("direction", "reaches"), [("to_target", False), ("from_target", True)])
def test_a_partition_may_be_one_way(direction: Any, reaches: bool, relay: Relay, echo: Echo) -> None:
    with dial(relay) as connection:
        connection.sendall(b"a")
        receive(connection, 1)
        relay.partition(direction)
        connection.sendall(b"b")
        assert silent(connection)
        assert echo.got_b.wait(DEADLINE_S if reaches else 0.0) is reaches


def test_a_new_connection_in_a_partition_waits_too(relay: Relay) -> None:
    relay.partition()
    with dial(relay) as connection:
        connection.sendall(b"a")
        assert silent(connection)
        relay.heal()
        assert receive(connection, 1) == b"a"


def test_half_open_silences_the_present_connection_and_neither_side_hears_of_it(
    relay: Relay, echo: Echo
) -> None:
    with dial(relay) as old:
        old.sendall(b"a")
        receive(old, 1)
        relay.half_open()
        old.sendall(b"b")
        with dial(relay) as new:
            new.sendall(b"c")
            assert receive(new, 1) == b"c"
        relay.heal()
        assert silent(old)
    assert echo.ended.acquire(timeout=DEADLINE_S)  # the new one's
    assert not echo.ended.acquire(timeout=0.2)  # the old one has closed, and the target does not know
    assert relay.connections == 1


def test_cut_resets_both_sides_and_new_connections_pass(relay: Relay, echo: Echo) -> None:
    with dial(relay) as old:
        old.sendall(b"a")
        receive(old, 1)
        relay.cut()
        with pytest.raises(ConnectionResetError):
            old.recv(1)
        assert echo.ended.acquire(timeout=DEADLINE_S)
        with dial(relay) as new:
            new.sendall(b"b")
            assert receive(new, 1) == b"b"


def test_refusing_resets_new_connections_only(relay: Relay) -> None:
    with dial(relay) as old:
        old.sendall(b"a")
        receive(old, 1)
        relay.refuse()
        with (
            pytest.raises(ConnectionResetError),
            dial(relay) as new,
        ):  # on some days dialling already hears of it
            new.recv(1)
        old.sendall(b"b")
        assert receive(old, 1) == b"b"
        relay.refuse(False)
        with dial(relay) as new:
            new.sendall(b"c")
            assert receive(new, 1) == b"c"


def test_a_target_that_is_gone_resets_the_dialler_and_retarget_mends_it(relay: Relay, echo: Echo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    relay.retarget(gone)
    with pytest.raises(ConnectionResetError), dial(relay) as connection:
        connection.recv(1)
    relay.retarget(echo.address)
    with dial(relay) as connection:
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"


def test_stop_frees_the_port_and_leaves_no_thread(echo: Echo) -> None:
    before = threading.active_count()
    relay = Relay(echo.address)
    address = relay.start()
    relay.stop()
    relay.stop()
    assert threading.active_count() == before
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))):
        pass


def test_a_port_in_use_and_bad_conditions_are_refused(echo: Echo) -> None:
    with pytest.raises(TransportError, match="in use"):
        Relay(echo.address, listen=echo.address).start()
    with pytest.raises(ValueError, match="negative"):
        Conditions(delay_s=-1)
