"""What both ends of a connection share: frames to send, payloads to send, word to the owner, and counts.

A part of the transport (DESIGN.md's network port, live). Invariants: a line tells its owner `connected`, then
everything else, then `disconnected`, each of the two once; frames leave in the order they were put; of the
payloads of one key only the newest waits.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from archipel.runtime import wire

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Line:
    """Frames to send, and word to the sink in the right order."""

    backlog_frames_max: int
    live: bool = False
    reason: str = ""  # why it ended: the first to know says so
    _frames: "queue.SimpleQueue[bytes | None]" = field(default_factory=queue.SimpleQueue)
    # Reentrant, and held while the sink is told something: so nothing can be said after `disconnected`.
    _telling: threading.RLock = field(default_factory=threading.RLock)

    def open(self, tell: Callable[[], None]) -> None:
        """Begin: tell the sink `connected`."""
        with self._telling:
            self.live = True
            guard(tell)

    def tell(self, tell: Callable[..., None], *words: Any) -> bool:
        """Tell the sink something, and return whether the connection was still there to say it."""
        with self._telling:
            if self.live:
                guard(tell, *words)
            return self.live

    def close(self, tell: Callable[[str], None], reason: str) -> None:
        """End, once: tell the sink `disconnected` with the first reason known."""
        with self._telling:
            if self.live:
                self.live = False
                self.reason = self.reason or reason
                guard(tell, self.reason)
        self.finish()

    def put(self, frame: bytes) -> bool:
        """Queue a frame. False if too many wait already: the other side does not read."""
        if self._frames.qsize() >= self.backlog_frames_max:
            return False
        self._frames.put(frame)
        return True

    def finish(self) -> None:
        """Let `frames` end behind what is queued now."""
        self._frames.put(None)

    def frames(self, sign_s: float | None = None) -> Iterator[bytes]:
        """Yield queued frames, waiting for more, until `finish`; a sign of life after each pause so long."""
        while True:
            try:
                frame = self._frames.get(timeout=sign_s)
            except queue.Empty:
                frame = wire.SIGN
            if frame is None:
                return
            yield frame


@dataclass(frozen=True, eq=False)
class Transfer:
    """A payload on its way to one worker."""

    key: Any
    message: bytes
    payload: memoryview
    checksum: int | None

    def header(self) -> bytes:
        """Return the first frame, hashing the payload if nobody has yet."""
        digest = wire.checksum(self.payload) if self.checksum is None else self.checksum
        return wire.encode(wire.Header(self.message, self.payload.nbytes, digest))


class Outbox:
    """Transfers waiting for one worker, by key: a newer one takes the place of one that has not started."""

    def __init__(self) -> None:
        self._waiting: dict[Any, Transfer] = {}  # keeps the order in which keys came
        self._changed = threading.Condition()
        self._closed = False

    def put(self, transfer: Transfer) -> None:
        with self._changed:
            if not self._closed:
                self._waiting[transfer.key] = transfer
                self._changed.notify()

    def take(self) -> Transfer | None:
        """Wait for the oldest key's transfer and return it; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return self._waiting.pop(next(iter(self._waiting))) if self._waiting else None

    def close(self) -> None:
        """Drop what waits and let `take` return None."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()


class Threads(futures.Executor):
    """A daemon thread for each task: streams last as long as connections, a pool could reuse nothing.

    `submit` never raises, for gRPC would stop serving: with no thread to be had, the future fails.
    """

    def __init__(self) -> None:
        self._alive: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "futures.Future[Any]":
        future: futures.Future[Any] = futures.Future()
        work = partial(fn, *args, **kwargs)
        thread = threading.Thread(target=self._run, args=(future, work), name="archipel-stream", daemon=True)
        with self._lock:
            self._alive.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._alive.discard(thread)
            log.error("event=no_thread alive=%d reason=%r", len(self._alive), str(error))
            future.set_exception(error)
        return future

    def join(self, timeout_s: float) -> None:
        """Wait for all to end."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            alive = list(self._alive)
        for thread in alive:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, future: "futures.Future[Any]", work: Callable[[], Any]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                self._alive.discard(threading.current_thread())


class Traffic:
    """Bytes in and out, in all and by worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in: Counter[str] = Counter()
        self._out: Counter[str] = Counter()

    def add(self, worker: str, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        with self._lock:
            self._in[worker] += bytes_in
            self._out[worker] += bytes_out

    def of(self, worker: str) -> tuple[int, int]:
        """Return (in, out) of one worker."""
        with self._lock:
            return self._in[worker], self._out[worker]

    def total(self) -> tuple[int, int]:
        """Return (in, out) of all workers."""
        with self._lock:
            return self._in.total(), self._out.total()


def guard(tell: Callable[..., None], *words: Any) -> None:
    """Call a sink. Its failures are logged: they must not end the stream of another worker, nor go unseen."""
    try:
        tell(*words)
    except Exception:
        log.exception("event=sink_failed call=%r", tell)
