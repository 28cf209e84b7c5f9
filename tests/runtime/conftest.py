"""A rig for the transport: sinks that remember what they hear, servers, clients and strangers."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import msgspec
import pytest

from archipel.errors import PayloadError
from archipel.protocol.messages import PROTOCOL_VERSION
from archipel.runtime import wire
from archipel.runtime.security import Security
from archipel.runtime.transport import Client, NetworkOptions, Server

DEADLINE_S = 15.0
RUN = "run-1"
BRISK = NetworkOptions(chunk_bytes=64 << 10, backoff_s_min=0.02, backoff_s_max=0.1)
PATIENT = NetworkOptions(  # so patient that only a reset can be noticed before a test's deadline
    chunk_bytes=64 << 10, keepalive_s=60.0, keepalive_timeout_s=60.0, backoff_s_min=0.02, backoff_s_max=0.1
)


class Sink:
    """Remembers all it hears, in order. Serves as either end's sink: a server's words start with a worker."""

    def __init__(self) -> None:
        self.words: list[tuple[Any, ...]] = []
        self.refuse = ""
        self.answer: Callable[..., Any] = lambda *words: None
        self._changed = threading.Condition()

    def _hear(self, *words: Any) -> None:
        with self._changed:
            self.words.append(words)
            self._changed.notify_all()
        self.answer(*words)

    def connected(self, *who: str) -> None:
        self._hear("connected", *who)

    def disconnected(self, *who_and_reason: str) -> None:
        self._hear("disconnected", *who_and_reason)

    def received(self, *what: Any) -> None:
        *who_and_message, payload, seconds = what
        assert seconds >= 0
        self._hear("received", *who_and_message, None if payload is None else bytes(payload))

    def allocate(self, *what: Any) -> memoryview:
        reason, self.refuse = self.refuse, ""
        if reason:
            raise PayloadError(reason)
        self._hear("allocated", what[-1])
        return memoryview(bytearray(what[-1]))

    def sent(self, worker: str, key: Any, bytes_: int, seconds: float) -> None:
        self._hear("sent", worker, key, bytes_)

    def refused(self, reason: str, final: bool) -> None:
        self._hear("refused", reason, final)

    def done(self, complete: bool, reason: str) -> None:
        self._hear("done", complete, reason)

    def said(self, *start: Any) -> list[tuple[Any, ...]]:
        return [words for words in list(self.words) if words[: len(start)] == start]

    def wait(self, *start: Any, count: int = 1) -> tuple[Any, ...]:
        """Wait until words with this start were heard `count` times, and return the last of those."""
        with self._changed:
            heard = self._changed.wait_for(lambda: len(self.said(*start)) >= count, DEADLINE_S)
        assert heard, f"waited for {count} of {start}, heard {self.words}"
        return self.said(*start)[count - 1]


@contextmanager
def serving(
    options: NetworkOptions = BRISK, *, listen: str = "127.0.0.1:0", security: Security | None = None
) -> Iterator[tuple[Server, Sink, str]]:
    sink = Sink()
    server = Server(sink, options, listen=listen, run=RUN, security=security)
    address = server.start()
    try:
        yield server, sink, address
    finally:
        server.stop(grace_s=0.2)


@contextmanager
def client_of(
    address: str, worker: str = "learner-0", *, options: NetworkOptions = BRISK, **more: Any
) -> Iterator[tuple[Client, Sink]]:
    sink = Sink()
    client = Client(sink, options, address=address, worker=worker, **{"run": RUN, **more})
    client.start()
    try:
        yield client, sink
    finally:
        client.stop(grace_s=0.2)


class Stranger:
    """A peer that speaks gRPC and our stream names, and otherwise says what a test likes."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])
        self.later: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.calls: list[Any] = []  # a call that nobody holds is cancelled

    def say(self, *frames: bytes) -> Any:
        """Open a control stream with these frames and leave it open for those put into `later`."""

        def outgoing() -> Iterator[bytes]:
            yield from frames
            yield from iter(self.later.get, None)

        control = self.channel.stream_stream(f"/{wire.SERVICE}/{wire.CONTROL}")
        self.calls.append(control(outgoing(), timeout=DEADLINE_S))
        return self.calls[-1]

    def join(self, worker: str = "stranger", token: str = "token", **changes: Any) -> Any:
        hello = {"worker": worker, "run": RUN, "protocol": PROTOCOL_VERSION, "token": token, **changes}
        return self.say(msgspec.msgpack.encode(hello))

    def upload(self, *frames: bytes, token: str = "token") -> str:
        """Upload these frames and return the server's reason for refusing them."""
        stream = self.channel.stream_unary(f"/{wire.SERVICE}/{wire.UPLOAD}")
        answer = stream(iter(frames), metadata=((wire.TOKEN_KEY, token),), timeout=DEADLINE_S)
        return wire.decode(answer, wire.Receipt).reason

    def close(self) -> None:
        for _ in self.calls:
            self.later.put(None)
        self.channel.close()


@pytest.fixture
def stranger() -> Iterator[Callable[[str], Stranger]]:
    strangers: list[Stranger] = []

    def make(address: str) -> Stranger:
        strangers.append(Stranger(address))
        return strangers[-1]

    yield make
    for one in strangers:
        one.close()


def verdict_of(call: Any) -> wire.Verdict:
    return wire.decode(next(call), wire.Verdict)


def until(holds: Callable[[], bool]) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def header(payload: bytes, **changes: Any) -> bytes:
    fields = {"message": b"m", "length": len(payload), "checksum": wire.checksum(payload), **changes}
    return wire.encode(wire.Header(**fields))
