"""Messages and fragments between hosts: one listening port, three gRPC streams a worker.

The network port of DESIGN.md, live (Decoupled DiLoCo assumes one). Here is the listening end, in `dialing`
the connecting one; `wire` describes streams and frames.

    connecting ── hello, verdict ──▶ connected ── closed · replaced · lost · left ──▶ gone
        ▲  └── refused, unreachable: pause with jitter, unless final                    │
        └──────────────────────────── pause with jitter ────────────────────────────────┘

Invariants, for one worker: a sink hears `connected`, then everything received, then `disconnected`; control
frames come first in first out; a second connection of the same name ends the first before it begins.
Payload bytes are shared, not copied, between workers: a buffer must not change until it is sent.
Payloads have a TCP connection beside that of the control frames, which wait for none on a slow line.

A client gives a sign of life on the control stream in every pause; a server cuts one whose signs stay away.

Threads: gRPC's sync server needs one for each open stream, so a connected worker costs a server three, and a
fourth while it uploads; they are made when needed, are daemons, and end with the stream. No process may fork
once gRPC runs.
"""

import logging
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import grpc

from archipel.errors import PayloadError, TransportError
from archipel.runtime import wire
from archipel.runtime.dialing import Client, ClientSink
from archipel.runtime.line import Line, Outbox, Threads, Traffic, Transfer
from archipel.runtime.security import Security
from archipel.runtime.wire import Buffer, NetworkOptions

__all__ = ["Client", "ClientSink", "NetworkOptions", "Server", "ServerSink"]

log = logging.getLogger(__name__)

JOIN_S = 5.0  # for threads to notice that their stream is gone
STREAMS_PER_WORKER = 3


class ServerSink(Protocol):
    """Who owns a server. Called from the transport's threads: be thread-safe, quick, and do not raise."""

    def connected(self, worker: str) -> None: ...

    def disconnected(self, worker: str, reason: str) -> None: ...

    def received(self, worker: str, message: bytes, payload: memoryview | None, seconds: float) -> None:
        """`payload`: the memory `allocate` gave, complete and checked; None for a control frame."""

    def allocate(self, worker: str, message: bytes, length: int) -> memoryview:
        """Return `length` writable bytes, or raise PayloadError to refuse.

        No word comes if the upload then fails: let the memory go when nobody refers to it.
        """

    def sent(self, worker: str, key: Any, bytes_: int, seconds: float) -> None:
        """A bulk transfer was handed over completely: this worker needs its buffer no more."""


@dataclass(eq=False)
class Session:
    """One accepted connection, as the server sees it."""

    worker: str
    token: str
    line: Line
    context: grpc.ServicerContext
    outbox: Outbox = field(default_factory=Outbox)
    upload: grpc.ServicerContext | None = None  # the one under way
    uploading: threading.Lock = field(default_factory=threading.Lock)  # one upload at a time
    downloading: threading.Lock = field(default_factory=threading.Lock)  # one download stream a connection
    status: grpc.StatusCode = grpc.StatusCode.ABORTED  # of the control stream, if we end it
    heard_at: float = field(default_factory=time.monotonic)  # a sign of life; infinite while it is heard


class Server:
    """The listening end: a syncer's network."""

    def __init__(
        self,
        sink: ServerSink,
        options: NetworkOptions,
        *,
        listen: str,
        run: str,
        security: Security | None = None,
    ) -> None:
        """`listen`: "host:port"; port 0 takes a free one, an empty host all interfaces."""
        self._sink = sink
        self._options = options
        self._listen = listen
        self._run = run
        self._security = security
        self._threads = Threads()
        self._traffic = Traffic()
        self._sessions: dict[str, Session] = {}  # by worker name
        self._tokens: dict[str, Session] = {}
        self._lock = threading.Lock()  # of the two tables; never held while the sink is told
        self._joining = (
            threading.Lock()
        )  # one connection begins at a time, so that names are replaced in order
        self._server: grpc.Server | None = None
        self._bound = ""
        self._stopped = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="archipel-watch", daemon=True)

    @property
    def bytes_in(self) -> int:
        """Bytes received since the start, headers of gRPC and TLS left out."""
        return self._traffic.total()[0]

    @property
    def bytes_out(self) -> int:
        """Bytes sent since the start."""
        return self._traffic.total()[1]

    def bytes_of(self, worker: str) -> tuple[int, int]:
        """Return the bytes received from and sent to a worker name, over all its connections."""
        return self._traffic.of(worker)

    def start(self) -> str:
        """Listen, and return the "host:port" really bound. TransportError if it is taken."""
        address = self._bound or self.bind()
        assert self._server is not None
        self._server.start()
        self._watching.start()
        return address

    def bind(self) -> str:
        """Take the port, and return its "host:port"; whoever connects waits until `start`."""
        host, port = wire.split_address(self._listen, listening=True)
        handlers = {
            wire.CONTROL: grpc.stream_stream_rpc_method_handler(self._control),
            wire.UPLOAD: grpc.stream_unary_rpc_method_handler(self._upload),
            wire.DOWNLOAD: grpc.unary_stream_rpc_method_handler(self._download),
        }
        server = grpc.server(
            self._threads,
            handlers=[grpc.method_handlers_generic_handler(wire.SERVICE, handlers)],
            options=wire.channel_options(self._options, serving=True),
            # A crowd beyond this is turned away by gRPC itself, without a thread.
            maximum_concurrent_rpcs=STREAMS_PER_WORKER * self._options.workers_max + 16,
        )
        try:
            if self._security is None:
                bound = server.add_insecure_port(f"{host}:{port}")
            else:
                bound = server.add_secure_port(f"{host}:{port}", self._security.server_credentials())
        except RuntimeError:
            bound = 0
        if bound == 0:
            server.stop(0)
            raise TransportError(wire.why_unbound(host, port))
        self._server = server
        self._bound = f"{host}:{bound}"
        return self._bound

    def send(self, worker: str, message: bytes) -> None:
        """Queue a control frame; never blocks. Dropped if the worker is gone.

        A worker that lets `backlog_frames_max` of them wait is cut off.
        """
        wire.check_frame(message, self._options)
        session = self._sessions.get(worker)
        if session is not None and not session.line.put(message):
            self._cut(session, f"{self._options.backlog_frames_max} control frames wait unread")

    def send_bulk(
        self, worker: str, key: Any, message: bytes, payload: Buffer, checksum: int | None = None
    ) -> None:
        """Queue a payload; never blocks. It takes the place of one of the same key that has not started.

        checksum: `wire.checksum(payload)`; give it when several workers get the same buffer. The buffer must
        not change until `sent`, or ever if the worker may be gone.
        """
        wire.check_frame(message, self._options)
        view = wire.flat(payload)
        wire.check_length(view, self._options)
        session = self._sessions.get(worker)
        if session is not None:
            session.outbox.put(Transfer(key, message, view, checksum))

    def close(self, worker: str, reason: str) -> None:
        """End a worker's connection behind the frames queued. Its client hears the reason and reconnects."""
        session = self._sessions.get(worker)
        if session is not None:
            self._close(session, reason)

    def stop(self, grace_s: float = 2.0) -> None:
        """Close all connections and the port. What is queued has `grace_s`. Not from a sink's callback."""
        if self._server is None:
            return
        with self._lock:
            sessions = list(self._sessions.values())
        self._stopped.set()
        stopped = self._server.stop(grace_s)
        for session in sessions:
            self._close(session, "the server stops")
        stopped.wait(grace_s + JOIN_S)
        self._threads.join(JOIN_S)
        if self._watching.is_alive():
            self._watching.join(JOIN_S)
        self._server = None

    # ---- streams ----

    def _control(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        hello = self._greet(requests, context)
        if hello is None:
            return
        verdict = wire.judge(hello, self._run)
        session = self._admit(hello, context) if verdict.accepted else None
        if session is None:
            verdict = verdict if not verdict.accepted else self._full(hello)
            log.warning(
                "event=refused worker=%r peer=%s reason=%r", hello.worker, context.peer(), verdict.reason
            )
            yield wire.encode(verdict)
            return
        try:
            reading = self._threads.submit(self._read, session, requests)
            if reading.done() and reading.exception() is not None:
                return
            yield wire.encode(verdict)
            for frame in session.line.frames():
                self._traffic.add(session.worker, bytes_out=len(frame))
                yield frame
            if session.line.reason:
                context.set_code(session.status)
                context.set_details(session.line.reason[: wire.REASON_CHARACTERS_MAX])
        finally:
            self._end(session, "the connection broke")

    def _greet(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> wire.Hello | None:
        """Return the first frame, or None if it does not come in time or is something else."""
        patience = threading.Timer(self._options.connect_s_max, context.cancel)
        patience.daemon = True
        patience.start()
        try:
            return wire.decode(next(requests, b""), wire.Hello)
        except PayloadError as error:
            log.warning("event=refused peer=%s reason=%r", context.peer(), str(error))
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details(str(error)[: wire.REASON_CHARACTERS_MAX])
        except grpc.RpcError:
            log.info("event=no_hello peer=%s", context.peer())
        finally:
            patience.cancel()
        return None

    def _full(self, hello: wire.Hello) -> wire.Verdict:
        if hello.token in self._tokens:
            return wire.Verdict(False, "this token is in use: connect with a new one")
        return wire.Verdict(False, f"network.workers_max={self._options.workers_max} workers are connected")

    def _admit(self, hello: wire.Hello, context: grpc.ServicerContext) -> Session | None:
        """Begin a session, after ending an older one of the same name. None if there is no room."""
        session = Session(hello.worker, hello.token, Line(self._options.backlog_frames_max), context)
        with self._joining:
            with self._lock:
                older = self._sessions.get(hello.worker)
                full = older is None and len(self._sessions) >= self._options.workers_max
                if full or hello.token in self._tokens:
                    return None
                self._sessions[session.worker] = self._tokens[session.token] = session
            if older is not None:
                older.status = grpc.StatusCode.ALREADY_EXISTS
                self._end(older, f"replaced by a newer connection of {hello.worker!r} from {context.peer()}")
            session.line.open(partial(self._sink.connected, session.worker))
        return session

    def _read(self, session: Session, requests: Iterator[bytes]) -> None:
        """Hand over control frames until the stream ends."""
        reason = "the worker closed the connection"
        try:
            for frame in requests:
                if len(frame) > self._options.frame_bytes_max:
                    reason = f"a control frame of {len(frame)} bytes exceeds network.frame_bytes_max"
                    break
                self._traffic.add(session.worker, bytes_in=len(frame))
                session.heard_at = math.inf
                if frame != wire.SIGN and not session.line.tell(
                    self._sink.received, session.worker, frame, None, 0.0
                ):
                    break
                session.heard_at = time.monotonic()
        except grpc.RpcError:
            reason = "the connection broke"
        self._end(session, reason)

    def _upload(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        session = self._session(context)
        if session is None:
            return wire.encode(wire.Receipt("not connected: say hello on the control stream first"))
        if not session.uploading.acquire(blocking=False):
            return wire.encode(wire.Receipt("another upload of this worker is under way: send one at a time"))
        session.upload = context
        try:
            reason = self._receive(session, requests) if session.line.live else "the connection was closed"
        finally:
            session.upload = None
            session.uploading.release()
        if reason:
            log.warning("event=upload_refused worker=%r reason=%r", session.worker, reason)
        return wire.encode(wire.Receipt(reason[: wire.REASON_CHARACTERS_MAX]))

    def _receive(self, session: Session, requests: Iterator[bytes]) -> str:
        """Receive one upload, and return why it was refused, or an empty string."""
        try:
            header = next(requests, b"")
            began = time.monotonic()
            incoming = wire.Incoming(header, partial(self._sink.allocate, session.worker), self._options)
            for chunk in requests:
                if not session.line.live:
                    return "the connection was closed"
                incoming.write(chunk)
                self._traffic.add(session.worker, bytes_in=len(chunk))
            payload = incoming.finish()
        except PayloadError as error:
            return str(error) or "refused"
        except grpc.RpcError:
            return "the connection broke in the middle of an upload"
        except Exception:
            log.exception("event=upload_failed worker=%r", session.worker)
            return "the server failed to take the upload: its log says why"
        seconds = time.monotonic() - began
        told = session.line.tell(self._sink.received, session.worker, incoming.message, payload, seconds)
        return "" if told else "the connection was closed"

    def _download(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        session = self._session(context)
        if session is None or not session.downloading.acquire(blocking=False):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "one download stream for each connection")
            return  # abort raises; this line tells the type checker
        while (transfer := session.outbox.take()) is not None:
            began = time.monotonic()
            yield transfer.header()
            for chunk in wire.chunks(transfer.payload, self._options.chunk_bytes):
                yield chunk
                self._traffic.add(session.worker, bytes_out=len(chunk))
                if not session.line.live:
                    return
            # Being resumed after the last chunk means that gRPC has taken it under flow control.
            seconds = time.monotonic() - began
            session.line.tell(self._sink.sent, session.worker, transfer.key, transfer.payload.nbytes, seconds)

    def _session(self, context: grpc.ServicerContext) -> Session | None:
        """Return the live session a bulk stream belongs to."""
        token = dict(context.invocation_metadata()).get(wire.TOKEN_KEY, "")
        session = self._tokens.get(str(token))
        return session if session is not None and session.line.live else None

    # ---- ends ----

    def _watch(self) -> None:
        """Cut workers whose signs of life stay away, until the server stops."""
        often_s = min(self._options.keepalive_s, self._options.keepalive_timeout_s) / 2
        silence_s_max = self._options.keepalive_s + self._options.keepalive_timeout_s
        looked_at = time.monotonic()
        while not self._stopped.wait(often_s):
            now = time.monotonic()
            asleep_s, looked_at = now - looked_at - often_s, now
            with self._lock:
                sessions = list(self._sessions.values())
            for session in sessions:
                if asleep_s > often_s and session.heard_at < now:
                    session.heard_at = now  # it is we who were away: what was said meanwhile comes now
                if now - session.heard_at > silence_s_max:
                    self._cut(session, f"no sign of life for {silence_s_max:.3g} s")

    def _close(self, session: Session, reason: str) -> None:
        session.line.reason = session.line.reason or reason
        session.line.finish()

    def _cut(self, session: Session, reason: str) -> None:
        session.line.reason = session.line.reason or reason
        session.context.cancel()

    def _end(self, session: Session, reason: str) -> None:
        """Forget a session and tell the sink, once."""
        with self._lock:
            self._tokens.pop(session.token, None)
            if self._sessions.get(session.worker) is session:
                del self._sessions[session.worker]
        session.outbox.close()
        session.line.close(partial(self._sink.disconnected, session.worker), reason)
        upload = session.upload
        if upload is not None:
            upload.cancel()  # its thread may wait for a chunk that never comes
