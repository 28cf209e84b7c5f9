"""A TCP relay that makes a bad link out of a good one: delay, jitter, rate, partition, half-open, reset.

Stands between a worker and the address it dials, so that live tests meet the links of Decoupled DiLoCo's
setting (far apart, failing) without privileges. It forwards bytes, never looks at them, and works under TLS.

Invariants: bytes of one direction keep their order whatever the jitter; what waits in a partition is
delivered after it, as TCP would by sending again; at most about `HELD_BYTES_MAX` wait, then reading stops.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from archipel.errors import TransportError
from archipel.runtime import wire

READ_BYTES = 1 << 16
HELD_BYTES_MAX = 16 << 20  # read ahead of the link: more than 100 ms at 1 Gbit/s
SLICE_S = 0.02  # of a limited rate: small enough that a change of rate is felt at once
Direction = Literal["to_target", "from_target", "both"]


@dataclass(frozen=True)
class Conditions:
    """What the link is like, each way. They may change at any time and hold for bytes not yet forwarded."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  # uniform, added to the delay; never reorders
    bytes_per_s: float = 0.0  # 0: no limit

    def __post_init__(self) -> None:
        if min(self.delay_s, self.jitter_s, self.bytes_per_s) < 0:
            raise ValueError(f"delay, jitter and rate must not be negative: {self}")


@dataclass(eq=False)
class Pipe:
    """One direction of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    direction: Direction
    held: "asyncio.Queue[tuple[float, bytes]]" = field(
        default_factory=lambda: asyncio.Queue(HELD_BYTES_MAX // READ_BYTES)
    )
    ended: bool = False  # everything up to the end has been forwarded


@dataclass(eq=False)
class Connection:
    """A client and its connection to the target. `silent`: half-open, nothing passes ever again."""

    up: Pipe
    down: Pipe
    silent: bool = False


class Relay:
    """Listens, dials the target for each connection, and forwards under the conditions set."""

    def __init__(self, target: str, *, listen: str = "127.0.0.1:0", seed: int = 0) -> None:
        """`target`: "host:port", dialled anew for each connection. `seed`: of the jitter."""
        self._target = wire.split_address(target, listening=False)
        self._listen = wire.split_address(listen, listening=True)
        self._random = random.Random(seed)
        self._conditions = Conditions()
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusing = False
        self._partitioned: set[Direction] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="archipel-relay", daemon=True)
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Event()  # partition or half-open has changed
        self.bytes_forwarded = 0

    def start(self) -> str:
        """Listen, and return the "host:port" to dial instead of the target."""
        self._thread.start()
        try:
            self._server = self._call(self._open())
        except OSError as error:
            self._end_loop()
            raise TransportError(f"cannot listen on {self._listen}: {error.strerror}") from None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def stop(self) -> None:
        """Reset every connection and release the port."""
        if not self._thread.is_alive():
            return
        self._call(self._close())
        self._end_loop()

    @property
    def connections(self) -> int:
        """Connections under way now, half-open ones included."""
        return len(self._connections)

    def retarget(self, target: str) -> None:
        """Dial another target from the next connection on: a server that came back elsewhere."""
        self._target = wire.split_address(target, listening=False)

    def shape(self, conditions: Conditions) -> None:
        """Set delay, jitter and rate."""
        self._conditions = conditions

    def throttle(self, bytes_per_s: float) -> None:
        """Set only the rate."""
        self._conditions = replace(self._conditions, bytes_per_s=bytes_per_s)

    def partition(self, direction: Direction = "both") -> None:
        """Let nothing pass, in new connections neither, until `heal`. Nobody is told: a route is lost."""
        ways = {"to_target", "from_target"} if direction == "both" else {direction}
        self._call(self._set_partition(self._partitioned | ways))

    def heal(self) -> None:
        """End a partition: what waited passes. Connections that were cut or went silent stay so."""
        self._call(self._set_partition(set()))

    def half_open(self) -> None:
        """Silence the present connections for good, without a word to either side: a peer lost its power."""
        self._call(self._silence())

    def cut(self) -> None:
        """Reset the present connections; new ones pass."""
        self._call(self._reset())

    def refuse(self, refusing: bool = True) -> None:
        """Reset new connections at once, or stop doing so."""
        self._refusing = refusing

    # ---- in the loop's thread ----

    async def _open(self) -> asyncio.Server:
        host, port = self._listen
        return await asyncio.start_server(self._accept, host.strip("[]"), port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _abort(writer)
            return
        host, port = self._target
        try:
            far_reader, far_writer = await asyncio.open_connection(host.strip("[]"), port)
        except OSError:
            _abort(writer)
            return
        connection = Connection(
            up=Pipe(reader, far_writer, "to_target"), down=Pipe(far_reader, writer, "from_target")
        )
        self._connections.add(connection)
        for pipe in (connection.up, connection.down):
            for work in (self._take(pipe), self._give(connection, pipe)):
                self._track(connection, work)

    def _track(self, connection: Connection, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(self._until_broken(connection, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_broken(self, connection: Connection, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except OSError:
            # A reset on one side is a reset on the other, unless nobody may hear of it.
            await self._until_open(connection, connection.up)
            await self._until_open(connection, connection.down)
            self._drop(connection)

    async def _take(self, pipe: Pipe) -> None:
        """Read ahead, stamping each piece with the time it is due. An empty piece is the end."""
        while True:
            piece = await pipe.reader.read(READ_BYTES)
            delay_s = self._conditions.delay_s + self._random.uniform(0.0, self._conditions.jitter_s)
            due = self._loop.time() + delay_s
            await pipe.held.put((due, piece))
            if not piece:
                return

    async def _give(self, connection: Connection, pipe: Pipe) -> None:
        """Forward pieces when they are due, at the rate set, while the link is whole."""
        while True:
            due, piece = await pipe.held.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._until_open(connection, pipe)
            if not piece:
                break
            await self._forward(pipe, piece)
        pipe.ended = True
        if not (connection.up.ended and connection.down.ended):
            pipe.writer.write_eof()
            return
        self._connections.discard(connection)
        connection.up.writer.close()
        connection.down.writer.close()

    async def _forward(self, pipe: Pipe, piece: bytes) -> None:
        while piece:
            rate = self._conditions.bytes_per_s
            size = max(1, int(rate * SLICE_S)) if rate else len(piece)
            part, piece = piece[:size], piece[size:]
            pipe.writer.write(part)
            await pipe.writer.drain()
            self.bytes_forwarded += len(part)
            if rate:
                await asyncio.sleep(len(part) / rate)

    async def _until_open(self, connection: Connection, pipe: Pipe) -> None:
        while connection.silent or pipe.direction in self._partitioned:
            await self._changed.wait()

    async def _set_partition(self, ways: "set[Any]") -> None:
        self._partitioned = ways
        self._tell()

    async def _silence(self) -> None:
        for connection in self._connections:
            connection.silent = True

    def _tell(self) -> None:
        """Wake all who wait for a change, each once."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _reset(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        for pipe in (connection.up, connection.down):
            _abort(pipe.writer)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._reset()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- between threads ----

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._thread.is_alive(), "the relay is not started"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(5.0)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a reset: data under way is lost, as when a process is killed or a router forgets."""
    with contextlib.suppress(OSError):
        on, seconds = 1, 0  # discard and reset
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, seconds)
        )
    writer.transport.abort()
