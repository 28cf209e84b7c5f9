"""What travels between two hosts: first frames, the framing of bulk transfers, and every limit on them.

The network under DESIGN.md's picture (Decoupled DiLoCo leaves it open). Three streams a worker, on one port:
control (small frames, first in first out both ways), uploads and downloads (bulk). A bulk transfer is a
header frame `{message, length, checksum}` and then chunks that add up to `length` bytes.

Invariants: nothing is unpickled; a declared length is compared with the limit before memory is asked for;
the end of a stream is not the end of a transfer: only `length` bytes with the right xxh3 are.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import xxhash
from msgspec import Struct

from archipel.errors import ConfigError, PayloadError, TransportError
from archipel.protocol.messages import PROTOCOL_VERSION

SERVICE = "archipel.Wire"
CONTROL, UPLOAD, DOWNLOAD = "Control", "Upload", "Download"
TOKEN_KEY = "archipel-token"  # metadata of a bulk stream: the token of the connection it belongs to
NAME_CHARACTERS_MAX = 200
REASON_CHARACTERS_MAX = 1000  # a reason may travel in HTTP/2 trailers, which are limited to 8 KiB
ENVELOPE_BYTES = 1024  # what a header or hello adds to the message inside
SIGN = b""  # a control frame that only says: I live
PAYLOAD_TIMEOUT_S = (
    120.0  # for a sign of life from a connection of payloads: it waits behind megabytes of them
)

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class NetworkOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[network]`: limits of what this end reads and sends, and its patience."""

    chunk_bytes: int = 1 << 20  # of a bulk transfer; larger is not faster, and a stream holds a few of them
    frame_bytes_max: int = 4 << 20  # longest control frame or transfer message; the rest is refused unread
    transfer_bytes_max: int = 8 << 30  # longest payload; refused before memory is asked for
    # Flow-control window of a stream; 0: gRPC follows bandwidth × delay, at about 13 MB an upload. A
    # fixed 1 MiB halves that and costs nothing on a local network, but holds 100 ms to 10 MB/s.
    window_bytes: int = 0
    workers_max: int = 1024  # connections a server holds at once; each costs it about 4 threads
    backlog_frames_max: int = 4096  # control frames waiting for one worker: more, and it is cut off
    keepalive_s: float = 2.0  # signs of life are given, and asked for, this often
    keepalive_timeout_s: float = 3.0  # a connection is cut when one is late by so long
    connect_s_max: float = 5.0  # from the first packet to the server's word on the hello
    resolve_s_max: float = 4.0  # for the address to resolve when a client starts
    backoff_s_min: float = 0.1  # pause before the first reconnection; doubles, with jitter
    backoff_s_max: float = 5.0
    # A learner without its syncer, or a peer without its rendezvous, ends after so long; 0: never.
    give_up_s: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "workers_max",
            "backlog_frames_max",
            "keepalive_s",
            "keepalive_timeout_s",
            "connect_s_max",
        ):
            _require(getattr(self, name) > 0, f"network.{name}={getattr(self, name)} must be positive")
        _require(
            1 << 10 <= self.chunk_bytes <= 64 << 20,
            f"network.chunk_bytes={self.chunk_bytes} must be between 1 KiB and 64 MiB: use 1 MiB",
        )
        _require(
            1 << 10 <= self.frame_bytes_max <= 1 << 30,
            f"network.frame_bytes_max={self.frame_bytes_max} must be between 1 KiB and 1 GiB",
        )
        _require(self.give_up_s >= 0, f"network.give_up_s={self.give_up_s} must not be negative; 0: never")
        _require(self.transfer_bytes_max >= 0, "network.transfer_bytes_max must not be negative")
        _require(0 <= self.window_bytes < 1 << 31, "network.window_bytes must be between 0 and 2^31 - 1")
        _require(
            0 < self.backoff_s_min <= self.backoff_s_max,
            f"network.backoff_s_min={self.backoff_s_min} must be positive and at most "
            f"network.backoff_s_max={self.backoff_s_max}",
        )


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(rule)


def channel_options(
    options: NetworkOptions, *, serving: bool, payloads: bool = False
) -> list[tuple[str, int]]:
    """Return gRPC's arguments: size limits, and keepalive that notices a frozen peer within about 5 s.

    `payloads`: of the connection that carries them. There, and at a server, which cannot tell the two apart,
    keepalive is patient: a ping waits behind what is sent already, on a slow line for longer than any death
    should take. A server watches its clients' signs on the control stream instead.

    `grpc.http2.ping_timeout_ms` is the one that counts (its default is 60 s), and a server must tolerate
    pings as frequent as its clients', or it answers them with GOAWAY.
    """
    message_bytes_max = max(options.chunk_bytes, options.frame_bytes_max) + ENVELOPE_BYTES
    patience_s = max(options.keepalive_timeout_s, PAYLOAD_TIMEOUT_S if serving or payloads else 0.0)
    keepalive_ms, timeout_ms = int(options.keepalive_s * 1000), int(patience_s * 1000)
    chosen = [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if options.window_bytes:
        chosen += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", options.window_bytes)]
    if serving:
        return [
            *chosen,
            ("grpc.http2.min_recv_ping_interval_without_data_ms", keepalive_ms // 2),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", 0),  # two syncers on one port must not share its connections
        ]
    return [
        *chosen,
        ("grpc.min_reconnect_backoff_ms", int(options.connect_s_max * 1000)),  # also its connection timeout
        ("grpc.use_local_subchannel_pool", 1),  # a fresh attempt must not inherit the last one's backoff
        ("grpc.enable_http_proxy", 0),  # nothing reads the environment below the CLI
    ]


# ---- first frames ----


class Hello(Struct, frozen=True):
    """The first control frame of a client. `token`: random, for this connection; bulk streams name it."""

    worker: str
    run: str  # "" accepts whatever run the server serves
    protocol: int
    token: str


class Verdict(Struct, frozen=True):
    """The first control frame of a server. `final`: trying again as you are cannot help."""

    accepted: bool
    reason: str = ""
    final: bool = False


class Receipt(Struct, frozen=True):
    """A server's answer to an upload. An empty reason: it is complete, checked and delivered."""

    reason: str = ""


class Header(Struct, frozen=True):
    """The first frame of a bulk transfer. `checksum`: xxh3_64 of the payload."""

    message: bytes
    length: int
    checksum: int


def encode(value: Struct) -> bytes:
    """Return the value as msgpack."""
    return msgspec.msgpack.encode(value)


def decode(frame: bytes, kind: type[T]) -> T:
    """Return a frame as `kind`. PayloadError if it is not one."""
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        name = kind.__name__
        raise PayloadError(
            f"{len(frame)} bytes are not a {name}: {error}; is the peer an archipel?"
        ) from None


def judge(hello: Hello, run: str) -> Verdict:
    """Return what a server that serves `run` says to a hello, room permitting."""
    name = hello.worker
    if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
        rule = f"a worker's name has 1 to {NAME_CHARACTERS_MAX} printable characters"
        return Verdict(False, f"{rule}, got {name[:NAME_CHARACTERS_MAX]!r}", final=True)
    if hello.protocol != PROTOCOL_VERSION:
        values = f"you speak version {hello.protocol}, this server {PROTOCOL_VERSION}"
        return Verdict(False, f"wire protocol differs: {values}; install one archipel everywhere", final=True)
    if hello.run not in ("", run):
        return Verdict(
            False, f"this server serves run {run!r}, not {hello.run[:80]!r}: check the address", final=True
        )
    if not hello.token:
        return Verdict(False, "the hello has no token", final=True)
    return Verdict(True)


# ---- bulk transfers ----


def checksum(payload: Buffer) -> int:
    """Return xxh3_64 of a contiguous buffer, as headers carry it."""
    return xxhash.xxh3_64_intdigest(payload)


def flat(payload: Any) -> memoryview:
    """Return a contiguous buffer as unsigned bytes, without a copy. PayloadError if it has gaps."""
    view = memoryview(payload)
    if not view.c_contiguous:
        raise PayloadError(f"a payload must be contiguous, got strides {view.strides}: copy it first")
    # A shape with a zero in it cannot be cast, and holds no bytes anyway.
    return view.cast("B") if view.nbytes else memoryview(b"")


def check_frame(frame: bytes, options: NetworkOptions) -> None:
    """Raise TransportError if a message of our own exceeds what the other side would read."""
    if len(frame) > options.frame_bytes_max:
        limit = f"network.frame_bytes_max={options.frame_bytes_max}"
        raise TransportError(
            f"a message of {len(frame)} bytes exceeds {limit}: send it as payload or raise the limit"
        )


def chunks(payload: memoryview, chunk_bytes: int) -> Iterator[bytes]:
    """Yield the payload in order as the bytes objects gRPC wants: one short-lived copy at a time."""
    for start in range(0, payload.nbytes, chunk_bytes):
        yield bytes(payload[start : start + chunk_bytes])


class Incoming:
    """One transfer on its way in: header, then chunks that go straight into the memory its owner gave."""

    def __init__(
        self, frame: bytes, allocate: Callable[[bytes, int], memoryview], options: NetworkOptions
    ) -> None:
        """Check the header and ask `allocate(message, length)` for memory. PayloadError if either refuses."""
        header = decode(frame, Header)
        if len(header.message) > options.frame_bytes_max:
            rule = f"network.frame_bytes_max={options.frame_bytes_max}"
            raise PayloadError(f"a transfer's message of {len(header.message)} bytes exceeds {rule}")
        if not 0 <= header.length <= options.transfer_bytes_max:
            rule = f"network.transfer_bytes_max={options.transfer_bytes_max}"
            raise PayloadError(f"a payload of {header.length} bytes is not between 0 and {rule}")
        self.message = header.message
        self.length = header.length
        self._checksum = header.checksum
        self._payload = flat(allocate(header.message, header.length))
        if self._payload.nbytes != header.length or (header.length and self._payload.readonly):
            given = f"{self._payload.nbytes} bytes, readonly={self._payload.readonly}"
            raise TypeError(f"allocate must return {header.length} writable bytes, it returned {given}")
        self._received = 0
        self._digest = xxhash.xxh3_64()

    @property
    def complete(self) -> bool:
        """As many bytes came in as were declared."""
        return self._received == self.length

    def write(self, chunk: bytes) -> None:
        """Append a chunk. PayloadError if it is empty or exceeds what was declared."""
        end = self._received + len(chunk)
        if end > self.length or not chunk:
            raise PayloadError(f"{len(chunk)} bytes came after {self._received} of {self.length} declared")
        self._payload[self._received : end] = chunk
        self._digest.update(chunk)
        self._received = end

    def finish(self) -> memoryview:
        """Return the payload. PayloadError if bytes are missing or the checksum differs."""
        if not self.complete:
            raise PayloadError(
                f"the transfer ended after {self._received} of {self.length} bytes: it was cut off"
            )
        if self._digest.intdigest() != self._checksum:
            found = f"{self._digest.intdigest():016x}, declared {self._checksum & (1 << 64) - 1:016x}"
            raise PayloadError(
                f"{self.length} bytes have xxh3 {found}: damaged on the way, or changed while sent"
            )
        return self._payload


def check_length(payload: memoryview, options: NetworkOptions) -> None:
    """Raise TransportError if a payload of our own exceeds what the other side would read."""
    if payload.nbytes > options.transfer_bytes_max:
        limit = f"network.transfer_bytes_max={options.transfer_bytes_max}"
        raise TransportError(
            f"a payload of {payload.nbytes} bytes exceeds {limit}: use more fragments or raise it"
        )


# ---- addresses ----


def split_address(address: str, *, listening: bool) -> tuple[str, int]:
    """Return host and port of "host:port" (IPv6 in brackets). Listening, an empty host is all interfaces."""
    host, colon, port = address.rpartition(":")
    if not host and listening:
        host = "0.0.0.0"
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    valid = colon and host and not bare_ipv6 and port.isascii() and port.isdecimal() and int(port) < 1 << 16
    if not valid or (int(port) == 0 and not listening):
        raise TransportError(
            f"{address!r} is not an address: write HOST:PORT, for instance 10.0.0.1:7000 or [::1]:7000"
        )
    return host, int(port)


def resolve(host: str, seconds_max: float) -> None:
    """Raise TransportError unless the name resolves in time; the system itself may take long."""
    answer: list[Exception | None] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(host.strip("[]"), None)
            answer.append(None)
        except (OSError, UnicodeError) as error:
            answer.append(error)

    thread = threading.Thread(target=ask, name="archipel-resolve", daemon=True)
    thread.start()
    thread.join(seconds_max)
    remedy = "check the spelling, or give an IP address"
    if not answer:
        raise TransportError(f"{host!r} did not resolve within {seconds_max} s: {remedy}")
    if answer[0] is not None:
        raise TransportError(f"{host!r} does not resolve ({answer[0]}): {remedy}")


def why_unbound(host: str, port: int) -> str:
    """Return why `host:port` cannot be listened on, with the remedy, by trying it on our own."""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    words = "the system refuses it"
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host.strip("[]"), port))
            trial.listen(1)
    except OSError as error:
        words = error.strerror or str(error)
    remedy = f"stop what listens there (`ss -ltnp 'sport = :{port}'` names it), or listen on another port"
    if "in use" not in words:
        remedy = "listen on an address of this machine, with a port you may use (0 takes a free one)"
    return f"cannot listen on {host}:{port}: {words}; {remedy}"
