"""Connections by name: whom a worker dials, who dials it, and one way to send to either.

The network port of DESIGN.md, live, for workers that have more than one other (GASLoC's peers) or just one (a
learner, which dials its syncer and listens for nobody). Of two peers the one whose name sorts first dials;
control frames and payloads go both ways over that one connection.

Invariants: a sink hears of one worker as of any connection: `connected`, what is received, `disconnected`;
what is sent to a worker that is not connected is dropped; payload bytes are counted when they have left.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from archipel.errors import ArchipelError, PayloadError
from archipel.protocol.gossip import Address
from archipel.runtime import wire
from archipel.runtime.security import Security
from archipel.runtime.transport import Client, Server
from archipel.runtime.wire import Buffer, NetworkOptions

log = logging.getLogger(__name__)

RETRY_S_MIN, RETRY_S_MAX = 0.5, 15.0  # pauses between two attempts to start dialling
HANG_UP_S = 1.0  # for words queued to somebody we do not need any more


class MeshSink(Protocol):
    """Who owns a mesh. Called from the transport's threads: be thread-safe, quick, and do not raise."""

    def connected(self, worker: str) -> None: ...

    def disconnected(self, worker: str, reason: str) -> None: ...

    def received(self, worker: str, message: bytes, payload: memoryview | None, seconds: float) -> None: ...

    def allocate(self, worker: str, message: bytes, length: int) -> memoryview:
        """Return `length` writable bytes, or raise PayloadError to refuse."""

    def refused(self, worker: str, reason: str, final: bool) -> None:
        """A worker that we dial does not let us in. `final`: it is not tried again."""


class Mesh:
    """One worker's connections."""

    def __init__(
        self, sink: MeshSink, options: NetworkOptions, *, name: str, security: Security | None = None
    ) -> None:
        self._sink = sink
        self._options = options
        self._name = name
        self._security = security
        self._server: Server | None = None
        self._dialled: dict[str, Outward] = {}
        self._hung_up: list[Client] = []  # until what is queued there has left
        self._past_bytes = [0, 0]  # in, out, of clients that are gone
        self._tensors = Counter[tuple[str, str]]()
        self._kinds = Counter[str]()
        self._lock = threading.Lock()  # of what is counted

    def listen(self, address: str, *, run: str = "") -> str:
        """Take a port for workers of `run`, "" for any; return its "host:port". `start` lets them in."""
        inward = Inward(self, self._sink)
        self._server = Server(inward, self._options, listen=address, run=run, security=self._security)
        return self._server.bind()

    def start(self) -> None:
        """Let those in who dial us."""
        if self._server is not None:
            self._server.start()

    def dial(self, worker: str, address: str) -> None:
        """Connect to the one this worker cannot do without, for as long as `network.give_up_s` says.

        What a person must mend is raised here: see `Client.start`.
        """
        self._line_to(worker, address, give_up_s=self._options.give_up_s).client.start()

    def know(self, members: Iterable[Address], *, beside: str = "") -> None:
        """Keep connections to these; of a pair the name that sorts first dials. `beside`: dialled anyway."""
        ours = {one.name: one.address for one in members if self._name < one.name}
        for worker in [worker for worker in self._dialled if worker not in ours and worker != beside]:
            self._hang_up(worker)
        for worker, address in ours.items():
            if worker not in self._dialled or self._dialled[worker].address != address:
                line = self._line_to(worker, address)
                # In a thread: an address may take seconds to resolve, or never, which is not our fault.
                threading.Thread(target=line.start, daemon=True).start()

    def send(self, worker: str, message: bytes) -> None:
        """Queue a control frame; never blocks."""
        line = self._dialled.get(worker)
        if line is not None:
            line.client.send(message)
        elif self._server is not None:
            self._server.send(worker, message)

    def send_bulk(self, worker: str, kind: str, message: bytes, payload: Buffer) -> None:
        """Queue a payload; never blocks. Of one kind only the newest waits where we were dialled."""
        line = self._dialled.get(worker)
        if line is not None:
            length = wire.flat(payload).nbytes

            def done(complete: bool, reason: str) -> None:
                if complete:
                    self.left(worker, kind, length)
                else:
                    log.warning("event=not_sent worker=%r kind=%s reason=%r", worker, kind, reason)

            line.client.send_bulk(message, payload, done=done)
        elif self._server is not None:
            self._server.send_bulk(worker, kind, message, payload)

    def close(self, worker: str, reason: str) -> None:
        """Cut the connection to a worker; whoever dialled dials again."""
        line = self._dialled.get(worker)
        if line is not None:
            line.client.reconnect(reason)
        elif self._server is not None:
            self._server.close(worker, reason)

    def stop(self, grace_s: float) -> None:
        """Close all; what is queued has `grace_s`."""
        lines, self._dialled = list(self._dialled.values()), {}
        for line in lines:
            line.ended.set()
        self._hung_up += [line.client for line in lines]
        stops = [threading.Thread(target=line.client.stop, args=(grace_s,)) for line in lines]
        for thread in stops:
            thread.start()
        if self._server is not None:
            self._server.stop(grace_s)
        for thread in stops:
            thread.join()

    @property
    def bytes_in(self) -> int:
        """Bytes received since the start, headers of gRPC and TLS left out."""
        with self._lock:
            return self._past_bytes[0] + sum(end.bytes_in for end in self._ends())

    @property
    def bytes_out(self) -> int:
        """Bytes sent since the start."""
        with self._lock:
            return self._past_bytes[1] + sum(end.bytes_out for end in self._ends())

    def tensor_bytes(self, worker: str) -> tuple[int, int]:
        """Return the payload bytes received whole from a worker, and those that left for it."""
        with self._lock:
            return self._tensors[worker, "in"], self._tensors[worker, "out"]

    def kind_bytes(self, kind: str) -> int:
        """Return the payload bytes of a kind that left, for whomever."""
        with self._lock:
            return self._kinds[kind]

    def came(self, worker: str, length: int) -> None:
        """Take note of a payload that came."""
        with self._lock:
            self._tensors[worker, "in"] += length

    def left(self, worker: str, kind: str, length: int) -> None:
        """Take note of a payload that left."""
        with self._lock:
            self._tensors[worker, "out"] += length
            self._kinds[kind] += length

    def _ends(self) -> list[Client | Server]:
        server = [self._server] if self._server is not None else []
        return [*(line.client for line in self._dialled.values()), *self._hung_up, *server]

    def _line_to(self, worker: str, address: str, *, give_up_s: float = 0.0) -> "Outward":
        if worker in self._dialled:
            self._hang_up(worker)
        line = self._dialled[worker] = Outward(self, self._sink, worker, address)
        line.client = Client(
            line,
            self._options,
            address=address,
            worker=self._name,
            run="",
            security=self._security,
            give_up_s=give_up_s,
        )
        return line

    def _hang_up(self, worker: str) -> None:
        line = self._dialled.pop(worker)
        line.hang_up()
        self._hung_up.append(line.client)
        # In a thread of its own: it may wait for the other side, and who asks for this must not.
        threading.Thread(target=self._let_go, args=(line.client,), daemon=True).start()

    def _let_go(self, client: Client) -> None:
        """Close a connection that is not needed any more, and keep its counts: a run may see thousands."""
        client.stop(HANG_UP_S)
        with self._lock:
            if client in self._hung_up:
                self._hung_up.remove(client)
                self._past_bytes[0] += client.bytes_in
                self._past_bytes[1] += client.bytes_out


class Outward:
    """A connection that we dial; its client's sink, until it is hung up."""

    client: Client

    def __init__(self, mesh: Mesh, sink: MeshSink, worker: str, address: str) -> None:
        self.worker, self.address = worker, address
        self._mesh, self._sink = mesh, sink
        self._over = threading.Event()
        self._up = False
        self.ended = threading.Event()  # whoever has not begun to connect by then need not
        self._lock = threading.Lock()  # of both: nothing is said after the last word

    def start(self) -> None:
        """Start connecting, as soon as that is possible: an address may not resolve yet."""
        pause_s, trouble = RETRY_S_MIN, ""
        while not self.ended.is_set():
            try:
                self.client.start()
                return
            except ArchipelError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    log.warning("event=not_dialled worker=%r reason=%r", self.worker, trouble)
            self.ended.wait(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    def hang_up(self) -> None:
        """Say `disconnected` now, and nothing any more: another line to the worker may be open before this
        one is closed."""
        self.ended.set()
        with self._lock:
            self._over.set()
            if self._up:
                self._up = False
                self._sink.disconnected(self.worker, "hung up")

    def connected(self) -> None:
        with self._lock:
            if not self._over.is_set():
                self._up = True
                self._sink.connected(self.worker)

    def disconnected(self, reason: str) -> None:
        with self._lock:
            if self._up:
                self._up = False
                self._sink.disconnected(self.worker, reason)

    def refused(self, reason: str, final: bool) -> None:
        if not self._over.is_set():
            self._sink.refused(self.worker, reason, final)

    def allocate(self, message: bytes, length: int) -> memoryview:
        if self._over.is_set():
            raise PayloadError("the connection was hung up")
        return self._sink.allocate(self.worker, message, length)

    def received(self, message: bytes, payload: memoryview | None, seconds: float) -> None:
        if payload is not None:
            self._mesh.came(self.worker, payload.nbytes)
        with self._lock:
            if not self._over.is_set():
                self._sink.received(self.worker, message, payload, seconds)


class Inward:
    """Those who dial us; the server's sink."""

    def __init__(self, mesh: Mesh, sink: MeshSink) -> None:
        self._mesh, self._sink = mesh, sink

    def connected(self, worker: str) -> None:
        self._sink.connected(worker)

    def disconnected(self, worker: str, reason: str) -> None:
        self._sink.disconnected(worker, reason)

    def allocate(self, worker: str, message: bytes, length: int) -> memoryview:
        return self._sink.allocate(worker, message, length)

    def received(self, worker: str, message: bytes, payload: memoryview | None, seconds: float) -> None:
        if payload is not None:
            self._mesh.came(worker, payload.nbytes)
        self._sink.received(worker, message, payload, seconds)

    def sent(self, worker: str, key: Any, bytes_: int, seconds: float) -> None:
        self._mesh.left(worker, key, bytes_)
