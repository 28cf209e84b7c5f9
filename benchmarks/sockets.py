"""The reference of `transport.py`: blocking sockets that move the same bytes, and do nothing else.

One connection and one thread for each sender, in the same number of processes, against one server process. A
round: each sends its upload from a buffer and receives its download into another. Nothing is framed,
checked, merged or copied. With TLS both ends show certificates of the run's authority, and use the cipher
that gRPC uses.
"""

import multiprocessing
import socket
import ssl
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

# gRPC's two ends agree on TLS_AES_128_GCM_SHA256. Python's ssl cannot ask for that of TLS 1.3, where it would
# take the slower AES-256; this is the same record cipher in TLS 1.2.
CIPHER = "ECDHE-ECDSA-AES128-GCM-SHA256"


@dataclass(frozen=True)
class Sizes:
    """Bytes of one round and connection, and how they are protected."""

    upload: int
    download: int
    connections: int
    tls: str = ""


def context_of(sizes: Sizes, *, serving: bool) -> ssl.SSLContext:
    """Return mutual TLS with the authority's certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serving else ssl.PROTOCOL_TLS_CLIENT)
    name, folder = "syncer" if serving else "learner", Path(sizes.tls)
    context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHER)
    return context


def receive_exactly(connection: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer."""
    received = 0
    while received < len(buffer):
        count = connection.recv_into(buffer[received:])
        if not count:
            raise EOFError(f"the connection ended after {received} of {len(buffer)} bytes")
        received += count


# ---- the server ----


def serve(control: Connection, sizes: Sizes) -> None:
    """Run in a process: answer each upload with a download, on every connection, until it ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=sizes.connections)
    context = context_of(sizes, serving=True) if sizes.tls else None
    control.send(listener.getsockname()[1])
    threads = []
    for _ in range(sizes.connections):
        connection, _ = listener.accept()
        threads.append(threading.Thread(target=_answer, args=(connection, context, sizes)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _answer(connection: socket.socket, context: ssl.SSLContext | None, sizes: Sizes) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is not None:
        connection = context.wrap_socket(connection, server_side=True)
    incoming, outgoing = _buffer(sizes.upload), _buffer(sizes.download)
    with connection:
        while True:
            try:
                receive_exactly(connection, incoming)
            except EOFError:
                return
            connection.sendall(outgoing)


def _buffer(length: int) -> memoryview:
    return memoryview(np.full(length, 7, np.uint8)).cast("B")  # written once: its pages are there


class Server:
    """The server's process."""

    def __init__(self, sizes: Sizes) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, sizes), daemon=True)
        self.process.start()
        self.port: int = ours.recv()

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()


# ---- the senders' side ----

_senders: list[tuple[socket.socket, memoryview, memoryview]] = []  # of this process, from `connect` on


def connect(port: int, sizes: Sizes, connections: int) -> None:
    """Open this process's connections, each with its buffers."""
    for _ in range(connections):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sizes.tls:
            connection = context_of(sizes, serving=False).wrap_socket(connection, server_hostname="localhost")
        _senders.append((connection, _buffer(sizes.upload), _buffer(sizes.download)))


def one_round() -> None:
    """Send and receive once on every connection of this process."""

    def exchange(connection: socket.socket, outgoing: memoryview, incoming: memoryview) -> None:
        connection.sendall(outgoing)
        receive_exactly(connection, incoming)

    threads = [threading.Thread(target=exchange, args=sender) for sender in _senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
