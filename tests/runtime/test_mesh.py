"""A mesh: who dials whom, one conversation a pair, both ways over it, and the bytes it counts."""

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from archipel.errors import PayloadError, TransportError
from archipel.protocol.gossip import Address
from archipel.runtime import mesh as mesh_module
from archipel.runtime import wire
from archipel.runtime.mesh import Mesh
from archipel.runtime.transport import Client

from .conftest import BRISK, DEADLINE_S


class Ear:
    """A mesh's sink that remembers."""

    def __init__(self) -> None:
        self.words: list[tuple[Any, ...]] = []
        self.refuse = b""
        self._changed = threading.Condition()

    def _hear(self, *words: Any) -> None:
        with self._changed:
            self.words.append(words)
            self._changed.notify_all()

    def connected(self, worker: str) -> None:
        self._hear("connected", worker)

    def disconnected(self, worker: str, reason: str) -> None:
        self._hear("disconnected", worker)

    def refused(self, worker: str, reason: str, final: bool) -> None:
        self._hear("refused", worker, final)

    def allocate(self, worker: str, message: bytes, length: int) -> memoryview:
        if message == self.refuse:
            raise PayloadError("not now")
        return memoryview(bytearray(length))

    def received(self, worker: str, message: bytes, payload: memoryview | None, seconds: float) -> None:
        self._hear("received", worker, message, None if payload is None else bytes(payload))

    def wait(self, *words: Any, times: int = 1) -> None:
        with self._changed:
            held = self._changed.wait_for(lambda: self.words.count(words) >= times, DEADLINE_S)
        assert held, (words, self.words)


class Town:
    """Meshes by name on this machine."""

    def __init__(self) -> None:
        self.ears: dict[str, Ear] = {}
        self.meshes: dict[str, Mesh] = {}
        self.addresses: dict[str, str] = {}

    def open(self, name: str) -> Mesh:
        ear = self.ears[name] = Ear()
        mesh = self.meshes[name] = Mesh(ear, BRISK, name=name)
        self.addresses[name] = mesh.listen("127.0.0.1:0")
        mesh.start()
        return mesh

    def introduce(self, *names: str) -> None:
        for name in names:
            self.meshes[name].know([Address(n, self.addresses[n]) for n in names if n != name])


@pytest.fixture
def town() -> Iterator[Town]:
    made = Town()
    yield made
    for mesh in made.meshes.values():
        mesh.stop(0.1)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_of_three_each_pair_has_one_connection_and_both_ways_over_it(town: Town) -> None:
    for name in "abc":
        town.open(name)
    town.introduce("a", "b", "c")
    for name in "abc":
        for other in "abc".replace(name, ""):
            town.ears[name].wait("connected", other)
    for name in "abc":
        for other in "abc".replace(name, ""):
            town.meshes[name].send(other, f"{name} to {other}".encode())
            town.meshes[name].send_bulk(other, "Model", b"m", bytes(100))
    for name in "abc":
        for other in "abc".replace(name, ""):
            town.ears[name].wait("received", other, f"{other} to {name}".encode(), None)
            town.ears[name].wait("received", other, b"m", bytes(100))
            assert town.ears[name].words.count(("connected", other)) == 1
            eventually(lambda n=name, o=other: town.meshes[n].tensor_bytes(o) == (100, 100))  # type: ignore[misc]


def test_whoever_moves_is_dialled_at_the_new_address(town: Town) -> None:
    town.open("a")
    town.open("b")
    town.introduce("a", "b")
    town.ears["a"].wait("connected", "b")
    town.meshes["b"].stop(0.1)
    town.ears["a"].wait("disconnected", "b")
    town.open("b")
    town.introduce("a", "b")
    town.ears["b"].wait("connected", "a")
    town.ears["a"].wait("connected", "b", times=2)


def test_who_is_no_member_any_more_is_hung_up_on(town: Town) -> None:
    for name in "abz":
        town.open(name)
    town.meshes["a"].dial("z", town.addresses["z"])
    town.meshes["a"].know([Address("b", town.addresses["b"])], beside="z")
    town.ears["a"].wait("connected", "b")
    town.meshes["a"].know([], beside="z")
    town.ears["a"].wait("disconnected", "b")
    town.ears["a"].wait("connected", "z")
    assert ("disconnected", "z") not in town.ears["a"].words


def test_nobody_is_dialled_for_ever_who_is_not_to_be() -> None:
    ear = Ear()
    mesh = Mesh(ear, replace(BRISK, give_up_s=0.3), name="learner")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    began = time.monotonic()
    mesh.dial("syncer", address)
    ear.wait("refused", "syncer", True)
    assert time.monotonic() - began > 0.3
    mesh.stop(0.1)


def test_who_is_hung_up_on_is_gone_at_once_and_its_line_says_nothing_more(town: Town) -> None:
    mesh = town.open("a")
    town.open("b")
    town.introduce("a", "b")
    town.ears["a"].wait("connected", "b")
    old = mesh._dialled["b"]
    mesh.know([])
    assert town.ears["a"].words[-1] == ("disconnected", "b")
    for late in (old.connected, partial(old.disconnected, "late"), partial(old.received, b"late", None, 0.0)):
        late()
    with pytest.raises(PayloadError, match="hung up"):
        old.allocate(b"late", 10)
    mesh.know([Address("b", town.addresses["b"])])
    town.ears["a"].wait("connected", "b", times=2)
    assert [words[0] for words in town.ears["a"].words] == ["connected", "disconnected", "connected"]


def test_an_address_that_does_not_resolve_yet_is_dialled_when_it_does(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, tried = threading.Event(), threading.Event()
    resolve = wire.resolve

    def slow(host: str, patience_s: float) -> None:
        if not known.is_set():
            tried.set()
            raise TransportError(f"{host} does not resolve")
        resolve(host, patience_s)

    monkeypatch.setattr(wire, "resolve", slow)
    monkeypatch.setattr(mesh_module, "RETRY_S_MIN", 0.02)
    town.open("a")
    town.open("b")
    town.introduce("a", "b")
    assert tried.wait(DEADLINE_S)
    known.set()
    town.ears["a"].wait("connected", "b")


def clients() -> list[Client]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Client]


def test_connections_that_were_hung_up_leave_their_counts_and_nothing_else(town: Town) -> None:
    kept = len(clients())
    mesh = town.open("a")
    town.open("b")
    for times in range(1, 4):
        mesh.know([Address("b", town.addresses["b"])])
        town.ears["a"].wait("connected", "b", times=times)
        mesh.send("b", b"word")
        town.ears["b"].wait("received", "a", b"word", None, times=times)
        mesh.know([])
        town.ears["a"].wait("disconnected", "b", times=times)
    # The threads of a client hold it until it has stopped.
    eventually(lambda: len(clients()) <= kept)
    assert mesh.bytes_out == 3 * len(b"word")


def test_only_payloads_that_were_taken_count_as_sent(town: Town) -> None:
    town.open("a")
    town.open("b")
    town.introduce("a", "b")
    town.ears["a"].wait("connected", "b")
    town.ears["b"].refuse = b"unasked"
    town.meshes["a"].send_bulk("b", "Model", b"unasked", bytes(100))
    town.meshes["a"].send_bulk("b", "Model", b"asked", bytes(10))
    town.ears["b"].wait("received", "a", b"asked", bytes(10))
    eventually(lambda: town.meshes["a"].tensor_bytes("b")[1] > 0)
    assert town.meshes["a"].kind_bytes("Model") == 10
    assert town.meshes["a"].tensor_bytes("b") == (0, 10) and town.meshes["b"].tensor_bytes("a") == (10, 0)


def test_words_for_nobody_are_dropped(town: Town) -> None:
    mesh = town.open("a")
    mesh.send("nobody", b"hello")
    mesh.send_bulk("nobody", "Model", b"m", bytes(10))
    assert mesh.tensor_bytes("nobody") == (0, 0)
