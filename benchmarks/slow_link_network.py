"""The lines of `slow_link.py`: a network of one's own for each worker with a rate each way, or a relay.

`Namespaces` (Linux, root): every worker has a network namespace and a pair of virtual Ethernet devices to a
bridge, which is in a namespace too; `tbf` holds both ends of the pair to the worker's rate. The centre
(rendezvous or syncer) is on the same bridge and is not held, as in the simulator. `Relays`, where that is
not permitted: `runtime.relay.Relay` stands before every peer, or before the centre once for each learner. A
relay's rate is that of a connection, not of a line: two transfers at once (2-peer) do not share it.

Invariant: `close` leaves nothing behind, also after half a start.
"""

import contextlib
import os
import socket
import subprocess
from typing import Protocol

from archipel.runtime.relay import Relay

PAYLOAD_SHARE = 1448 / 1514  # of the bytes that tbf counts: a full frame has 66 bytes of headers
BURST_BYTES = 16_000  # what tbf lets pass at once: ten frames
QUEUE_S = 0.05  # of the slowest line: longer, and handshakes stand behind models for long
CENTRE = "centre"


class Lines(Protocol):
    """The network as a run's launcher needs it."""

    @property
    def kind(self) -> str: ...

    def command(self, worker: str) -> list[str]:
        """Return what to put before a worker's command."""
        ...

    def listen(self, worker: str) -> str:
        """Return the "host:port" a worker listens at; port 0: any."""
        ...

    def advertise(self, worker: str) -> str:
        """Return where others reach a peer, if that is not where it listens."""
        ...

    def to_centre(self, worker: str, address: str, *, payloads: bool) -> str:
        """Return what a worker dials to reach the centre at `address`. payloads: they pass this way."""
        ...

    def close(self) -> None: ...


class Namespaces:
    """Namespaces, a bridge and token buckets."""

    kind = "network namespaces, tbf"

    def __init__(self, rates: dict[str, float]) -> None:
        """rates: payload bytes a second of each worker's line, each way."""
        self._tag = f"archipel-{os.getpid()}"
        self._made: list[str] = []
        self._numbers = {name: number for number, name in enumerate([CENTRE, *rates], start=1)}
        try:
            self._add(self._hub)
            _ip("-n", self._hub, "link", "add", "bridge0", "type", "bridge")
            _ip("-n", self._hub, "link", "set", "bridge0", "up")
            for name in self._numbers:
                self._plug(name)
            for name, bytes_per_s in rates.items():
                self._hold(name, bytes_per_s)
        except BaseException:
            self.close()
            raise

    @property
    def _hub(self) -> str:
        return f"{self._tag}-hub"

    def _namespace(self, worker: str) -> str:
        return f"{self._tag}-{worker}"

    def _port(self, worker: str) -> str:
        return f"port{self._numbers[worker]}"

    def _host(self, worker: str) -> str:
        return f"10.77.0.{self._numbers[worker]}"

    def _add(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._made.append(namespace)

    def _plug(self, worker: str) -> None:
        """Connect a worker's namespace to the bridge."""
        own, port = self._namespace(worker), self._port(worker)
        self._add(own)
        _ip("-n", own, "link", "add", "up0", "type", "veth", "peer", "name", port, "netns", self._hub)
        _ip("-n", self._hub, "link", "set", port, "master", "bridge0", "up")
        _ip("-n", own, "addr", "add", f"{self._host(worker)}/24", "dev", "up0")
        _ip("-n", own, "link", "set", "up0", "up")
        _ip("-n", own, "link", "set", "lo", "up")

    def _hold(self, worker: str, bytes_per_s: float) -> None:
        """Hold both directions of a worker's line to a rate."""
        bits = f"{8 * bytes_per_s / PAYLOAD_SHARE:.0f}bit"
        bucket = ["tbf", "rate", bits, "burst", str(BURST_BYTES), "latency", f"{1e3 * QUEUE_S:.0f}ms"]
        for namespace, device in ((self._namespace(worker), "up0"), (self._hub, self._port(worker))):
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)

    def command(self, worker: str) -> list[str]:
        return ["ip", "netns", "exec", self._namespace(worker)]

    def listen(self, worker: str) -> str:
        return f"{self._host(worker)}:0"

    def advertise(self, worker: str) -> str:
        return ""

    def to_centre(self, worker: str, address: str, *, payloads: bool) -> str:
        return address

    def close(self) -> None:
        for namespace in self._made:
            with contextlib.suppress(OSError):
                _ip("netns", "del", namespace)
        self._made.clear()


class Relays:
    """Relays on this machine's loopback."""

    kind = "relays"

    def __init__(self, rates: dict[str, float]) -> None:
        """rates: bytes a second of each worker's connections, each way."""
        self._rates = rates
        self._ports = {name: _free_port() for name in rates}
        self._relays: list[Relay] = []

    def command(self, worker: str) -> list[str]:
        return []

    def listen(self, worker: str) -> str:
        return f"127.0.0.1:{self._ports.get(worker, 0)}"

    def advertise(self, worker: str) -> str:
        return self._relayed(worker, self.listen(worker))

    def to_centre(self, worker: str, address: str, *, payloads: bool) -> str:
        return self._relayed(worker, address) if payloads else address

    def _relayed(self, worker: str, target: str) -> str:
        relay = Relay(target)
        address = relay.start()
        relay.throttle(self._rates[worker])
        self._relays.append(relay)
        return address

    def close(self) -> None:
        for relay in self._relays:
            relay.stop()


def lines(rates: dict[str, float], *, relays: bool = False) -> Lines:
    """Return namespaces if they are permitted and not declined, else relays."""
    if relays:
        return Relays(rates)
    try:
        return Namespaces(rates)
    except OSError as error:
        print(f"no namespaces ({error}): relays instead", flush=True)
        return Relays(rates)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    """Run a command. OSError with its words if it fails, or is not there."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
