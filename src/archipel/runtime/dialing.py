"""The connecting end of the transport: outwards only, so that a learner works behind NAT, and again for ever.

See `transport` for the picture and the promises, `wire` for the frames.
"""

import logging
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import grpc

from archipel.errors import PayloadError, SecurityError
from archipel.protocol.messages import PROTOCOL_VERSION
from archipel.runtime import security as certificates
from archipel.runtime import wire
from archipel.runtime.line import Line, Traffic, Transfer, guard
from archipel.runtime.security import Security
from archipel.runtime.wire import Buffer, NetworkOptions

log = logging.getLogger(__name__)

JOIN_S = 5.0  # for threads to notice that their stream is gone


class ClientSink(Protocol):
    """Who owns a client. Called from the transport's threads: be thread-safe, quick, and do not raise."""

    def connected(self) -> None: ...

    def disconnected(self, reason: str) -> None: ...

    def received(self, message: bytes, payload: memoryview | None, seconds: float) -> None: ...

    def allocate(self, message: bytes, length: int) -> memoryview:
        """Return `length` writable bytes, or raise PayloadError: then the transfer is thrown away."""

    def refused(self, reason: str, final: bool) -> None:
        """We may not come in (said once for each new reason). `final`: the client has stopped trying."""


@dataclass(eq=False)
class Upload:
    """A payload waiting for its turn, and the connection it was meant for."""

    link: "Link | None"
    message: bytes
    payload: memoryview
    done: Callable[[bool, str], None] | None


@dataclass(eq=False)
class Link:
    """One attempt at a connection, as the client sees it: two of TCP, so that words pass payloads."""

    channel: grpc.Channel
    bulk: grpc.Channel  # what one connection has taken of a payload would stand before control frames
    line: Line
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    call: Any = None  # the control stream
    over: threading.Event = field(default_factory=threading.Event)  # the control stream has ended

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((wire.TOKEN_KEY, self.token),)

    def cut(self, reason: str) -> None:
        """End the connection from our side."""
        self.line.reason = self.line.reason or reason
        self.line.finish()
        self.call.cancel()

    def close(self) -> None:
        """Let go of both connections, and of what is on its way."""
        self.bulk.close()
        self.channel.close()


class Client:
    """The connecting end: a learner's network. It connects outwards only, and for ever."""

    def __init__(
        self,
        sink: ClientSink,
        options: NetworkOptions,
        *,
        address: str,
        worker: str,
        run: str,
        security: Security | None = None,
        give_up_s: float = 0.0,
    ) -> None:
        """`address`: "host:port" of the server. `run`: its identity, "" for whatever it serves.

        give_up_s: without a connection for so long it stops trying; 0: never.
        """
        self._give_up_s = give_up_s
        self._sink = sink
        self._options = options
        self._address = address
        self._worker = worker
        self._run = run
        self._security = security
        self._traffic = Traffic()
        self._link: Link | None = None  # the live one
        self._attempt: Link | None = None  # the one that may become live
        self._uploads: queue.SimpleQueue[Upload | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # nothing enters the queue of uploads behind its end
        self._connecting = threading.Thread(target=self._keep_connected, name="archipel-client", daemon=True)
        self._uploading = threading.Thread(target=self._upload_all, name="archipel-uploads", daemon=True)
        self.dropped = 0  # control frames given while not connected
        self.trouble = ""  # why the last attempt or connection failed

    @property
    def bytes_in(self) -> int:
        """Bytes received since the start."""
        return self._traffic.total()[0]

    @property
    def bytes_out(self) -> int:
        """Bytes sent since the start."""
        return self._traffic.total()[1]

    def start(self) -> None:
        """Start connecting, in the background, for as long as it takes.

        What a person must mend is raised here: TransportError for an address that does not resolve within
        `resolve_s_max`, SecurityError for certificates that cannot work. Later, either is one more failed
        attempt.
        """
        host, _ = wire.split_address(self._address, listening=False)
        wire.resolve(host, self._options.resolve_s_max)
        if self._security is not None:
            self._security.check()
        self._uploading.start()
        self._connecting.start()  # last: once it runs, `stop` waits for both

    def send(self, message: bytes) -> None:
        """Queue a control frame; never blocks. Dropped and counted when not connected."""
        wire.check_frame(message, self._options)
        link = self._link
        if link is None:
            self.dropped += 1
        elif link.line.put(message):
            self._traffic.add("", bytes_out=len(message))
        else:
            link.cut(f"{self._options.backlog_frames_max} control frames wait unread")

    def send_bulk(
        self, message: bytes, payload: Buffer, *, done: Callable[[bool, str], None] | None = None
    ) -> None:
        """Queue an upload; never blocks. One goes at a time, in order, over this connection or not at all.

        done(complete, reason) is called once, from a thread of the transport (the caller's after `stop`);
        until then the buffer must not change.
        """
        wire.check_frame(message, self._options)
        view = wire.flat(payload)
        wire.check_length(view, self._options)
        upload = Upload(self._link, message, view, done)
        with self._lock:
            if not self._stopping.is_set():
                self._uploads.put(upload)
                return
        self._finish(upload, "the client is stopped")

    def reconnect(self, reason: str) -> None:
        """Hang up. The sink hears of it, and the next attempt follows after the usual pause."""
        link = self._link
        if link is not None:
            link.cut(reason)

    def stop(self, grace_s: float = 2.0) -> None:
        """Let what is queued leave for at most `grace_s`, then disconnect. Not from a sink's callback."""
        deadline = time.monotonic() + grace_s
        self._end_uploads()
        if self._connecting.ident is None:
            return
        link = self._link
        if link is not None:
            self._uploading.join(max(0.0, deadline - time.monotonic()))
            link.line.finish()
            self._connecting.join(max(0.0, deadline - time.monotonic()))
        attempt = self._attempt
        if attempt is not None and self._connecting.is_alive():
            attempt.cut("the client stops")
        self._connecting.join(JOIN_S)
        self._uploading.join(JOIN_S)

    # ---- the connection ----

    def _keep_connected(self) -> None:
        pause_s, since = self._options.backoff_s_min, time.monotonic()
        while not self._stopping.is_set():
            accepted, over = self._connect()
            if over:
                break
            now = time.monotonic()
            since = now if accepted else since
            if self._give_up_s and now - since > self._give_up_s:
                reason = f"no connection for network.give_up_s={self._give_up_s:g} s: {self.trouble}"
                self._fail(reason, refused=True, final=True)
                break
            pause_s = (
                self._options.backoff_s_min if accepted else min(2 * pause_s, self._options.backoff_s_max)
            )
            # Learners that lost their syncer together must not come back together.
            self._stopping.wait(pause_s * random.uniform(0.5, 1.0))
        self._end_uploads()

    def _end_uploads(self) -> None:
        """Let nothing more into the queue, and let its thread end behind what is there."""
        with self._lock:
            self._stopping.set()
            self._uploads.put(None)

    def _connect(self) -> tuple[bool, bool]:
        """Make one connection and serve it to its end. Return (it was accepted, it is time to give up)."""
        try:
            line = Line(self._options.backlog_frames_max)
            link = Link(self._channel(), self._channel(payloads=True), line)
        except SecurityError as error:
            self._fail(str(error), refused=True)
            return False, False
        accepted, code, reason = False, None, ""
        try:
            verdict = self._greet(link)
            accepted = verdict.accepted
            if not accepted:
                self._fail(verdict.reason, refused=True, final=verdict.final)
                return False, verdict.final
            self._serve(link)
            reason = "the server closed the connection"
        except (grpc.RpcError, PayloadError) as error:
            code, reason = _code(error), link.line.reason or _words(error)
        except Exception as error:  # whatever it is, a learner goes on trying
            log.exception("event=connection_failed address=%s", self._address)
            reason = f"the connection failed: {error!r}"
        finally:
            self._link = self._attempt = None
            link.line.close(self._sink.disconnected, reason)
            link.close()
        if code is grpc.StatusCode.ALREADY_EXISTS:
            self._fail(f"{reason}: is this worker running twice?", refused=True, final=True)
            return accepted, True
        advice = certificates.explain(reason, secured=self._security is not None) if not accepted else None
        self._fail(advice or reason, refused=advice is not None)
        return accepted, False

    def _channel(self, *, payloads: bool = False) -> grpc.Channel:
        options = wire.channel_options(self._options, serving=False, payloads=payloads)
        if self._security is None:
            return grpc.insecure_channel(self._address, options)
        return grpc.secure_channel(self._address, self._security.channel_credentials(), options)

    def _greet(self, link: Link) -> wire.Verdict:
        """Say hello and return the server's verdict. RpcError or PayloadError if none comes in time."""
        link.line.put(wire.encode(wire.Hello(self._worker, self._run, PROTOCOL_VERSION, link.token)))
        control = link.channel.stream_stream(f"/{wire.SERVICE}/{wire.CONTROL}")
        link.call = control(link.line.frames(self._options.keepalive_s))
        self._attempt = link
        patience = threading.Timer(self._options.connect_s_max, link.cut, ["no answer to the hello"])
        patience.daemon = True
        patience.start()
        if self._stopping.is_set():
            link.cut("the client stops")
        try:
            return wire.decode(next(link.call, b""), wire.Verdict)
        finally:
            patience.cancel()

    def _serve(self, link: Link) -> None:
        """Deliver what comes in until the control stream ends. RpcError if it ends badly."""
        self.trouble = ""
        download = threading.Thread(
            target=self._download_all, args=(link,), name="archipel-download", daemon=True
        )
        link.line.open(partial(self._opened, link))
        download.start()
        try:
            for frame in link.call:
                self._traffic.add("", bytes_in=len(frame))
                link.line.tell(self._sink.received, frame, None, 0.0)
        finally:
            self._link = None
            link.over.set()
            link.close()
            download.join(JOIN_S)

    def _opened(self, link: Link) -> None:
        self._link = link
        log.info("event=connected address=%s worker=%r", self._address, self._worker)
        self._sink.connected()

    def _fail(self, reason: str, *, refused: bool = False, final: bool = False) -> None:
        """Remember why we are not connected, and say so once for each new reason."""
        news = reason != self.trouble
        self.trouble = reason
        if self._stopping.is_set() or not (news or final):
            return
        log.warning("event=not_connected address=%s final=%s reason=%r", self._address, final, reason)
        if refused:
            guard(self._sink.refused, reason, final)

    # ---- bulk ----

    def _upload_all(self) -> None:
        while (upload := self._uploads.get()) is not None:
            self._finish(upload, self._upload(upload))

    def _upload(self, upload: Upload) -> str:
        """Send one payload, and return why it did not arrive, or an empty string."""
        link = upload.link
        if link is None or not link.line.live:
            return "not connected"
        stream = link.bulk.stream_unary(f"/{wire.SERVICE}/{wire.UPLOAD}")
        try:
            answer = stream(self._frames(upload), metadata=link.metadata)
            return wire.decode(answer, wire.Receipt).reason
        except (grpc.RpcError, PayloadError, ValueError) as error:  # ValueError: the channel is closed
            reason = link.line.reason or _words(error)
            if link.line.live and not self._stopping.is_set():
                # Refusals come as receipts. This one may have been lost on its own, and nobody would ask
                # for it again: both sides hear that the connection is gone.
                link.cut(f"an upload failed: {reason}")
            return reason

    def _frames(self, upload: Upload) -> Iterator[bytes]:
        yield Transfer(None, upload.message, upload.payload, None).header()
        for chunk in wire.chunks(upload.payload, self._options.chunk_bytes):
            yield chunk
            self._traffic.add("", bytes_out=len(chunk))

    def _finish(self, upload: Upload, reason: str) -> None:
        if upload.done is not None:
            guard(upload.done, not reason, reason)

    def _download_all(self, link: Link) -> None:
        """Receive transfers until the connection ends; end it if this stream fails alone."""
        reason = "the server ended the download stream"
        try:
            stream = link.bulk.unary_stream(f"/{wire.SERVICE}/{wire.DOWNLOAD}")
            frames = stream(b"", metadata=link.metadata)
            while (header := next(frames, None)) is not None:
                self._download(link, header, frames)
        except (grpc.RpcError, PayloadError, ValueError) as error:
            reason = f"a download failed: {_words(error)}"
        except Exception as error:
            log.exception("event=download_failed")
            reason = f"a download failed: {error!r}"
        # Both streams end together when the connection does, and the control stream knows why.
        if not link.over.wait(1.0):
            link.cut(reason)

    def _download(self, link: Link, header: bytes, frames: Iterator[bytes]) -> None:
        """Receive one transfer. PayloadError if it is damaged: then what follows cannot be trusted either."""
        began = time.monotonic()
        try:
            incoming = wire.Incoming(header, self._sink.allocate, self._options)
        except PayloadError as error:
            log.warning("event=download_refused reason=%r", str(error))
            self._skip(wire.decode(header, wire.Header).length, frames)
            return
        while not incoming.complete:
            chunk = next(frames, b"")
            incoming.write(chunk)
            self._traffic.add("", bytes_in=len(chunk))
        payload = incoming.finish()
        link.line.tell(self._sink.received, incoming.message, payload, time.monotonic() - began)

    def _skip(self, length: int, frames: Iterator[bytes]) -> None:
        while length > 0:
            chunk = next(frames, b"")
            if not chunk:
                raise PayloadError(f"the stream ended {length} bytes before its transfer")
            length -= len(chunk)
            self._traffic.add("", bytes_in=len(chunk))


def _code(error: Exception) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.Call) else None


def _words(error: Exception) -> str:
    """Return what an error says, in one line."""
    words = (error.details() or str(error.code())) if isinstance(error, grpc.Call) else str(error)
    return " ".join(words.split()) or repr(error)
