"""The courier process: a learner's or peer's network, clock, tape and heartbeats, beside its trainer.

`python -m archipel.roles.courier --fd N --parent PID ...`, started by `roles.trainer`. It imports no torch,
so that it starts fast and a long inner step starves nobody; it dies with its trainer, and the trainer notices
when it dies.
"""

import argparse
import contextlib
import json
import logging
import os
import platform
import secrets
import select
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ..errors import ArchipelError, PayloadError, WorkerDied
from ..protocol import gossip as g
from ..protocol import messages as m
from ..protocol.learner import LearnerMachine
from ..protocol.peer import PeerMachine
from ..protocol.roster import Roster
from ..runtime import frames
from ..runtime.courier import CourierCompute
from ..runtime.host import Host, decode_envelope
from ..runtime.launch import die_with_parent
from ..runtime.mesh import Mesh
from ..runtime.peer import PeerCompute
from ..runtime.security import load
from ..runtime.shared import Channel
from ..runtime.wire import NetworkOptions, split_address
from ..tape.replay import seed_of
from ..tape.tape import Header, TapeWriter, tape_path

log = logging.getLogger("archipel")

LOOK_S = 1.0  # how often to look for frames that the kernel had no room for
PARTING_S = 5.0  # for goodbyes to leave and for the trainer to close
HOMES = {"learner": m.SYNCER, "observer": m.SYNCER, "peer": g.RENDEZVOUS}  # role -> whom it dials first


class Port(Protocol):
    """What a courier asks of the compute port of its kind of worker."""

    def receive(self, frame: frames.Frame) -> None: ...

    def act(self, action: m.Action, payload: Any | None) -> None: ...

    def payload(self, message: m.Message, to: str) -> Any | None: ...

    def room(self, sender: str, message: m.Message, length: int) -> memoryview: ...

    def close(self) -> None: ...


class Courier:
    """The network's sink and the host's port of one worker."""

    def __init__(self, channel: Channel, arguments: argparse.Namespace) -> None:
        security = load(arguments.tls, _certificate(arguments)) if arguments.tls else None
        options = msgspec.json.decode(arguments.network, type=NetworkOptions)
        self.channel = channel
        self.mesh = Mesh(self, options, name=arguments.name, security=security)
        self.home, self.home_address = HOMES[arguments.role], arguments.home
        self.machine = machine = self._machine(arguments)
        header = Header(
            run=arguments.run,
            worker=arguments.name,
            role=arguments.role,
            incarnation=machine.incarnation,
            started=time.time(),
            settings={**_settings(machine), **seed_of(machine)},
            environment={"python": platform.python_version(), "host": platform.node(), "pid": os.getpid()},
        )
        self.tape = TapeWriter(tape_path(Path(arguments.out), arguments.name, machine.incarnation), header)
        self.host = Host(machine, self, self.tape, name=arguments.name)
        self.compute: Port
        if isinstance(machine, PeerMachine):
            self.compute = PeerCompute(channel, machine, self._happened, self.host.call)
        else:
            self.compute = CourierCompute(channel, self._happened)
        self._facts = Path(arguments.out) / "peers" / f"{arguments.name}.json"
        self._told_tick = -1
        self._digest = ""  # of the run's result, once it is taken

    def _machine(self, arguments: argparse.Namespace) -> LearnerMachine | PeerMachine:
        common = {
            "name": arguments.name,
            "incarnation": secrets.token_hex(4),
            "run": arguments.run,
            "shard": arguments.shard,
            "position": arguments.position,
        }
        if arguments.role != "peer":
            return LearnerMachine(**common, role=arguments.role)
        bound = self.mesh.listen(arguments.listen)
        if arguments.members:
            return PeerMachine(**common, kept=arguments.kept, roster=_roster(arguments))
        return PeerMachine(
            **common, address=arguments.advertise or reached_at(bound, arguments.home), kept=arguments.kept
        )

    # ---- the network's words, from its threads ----

    def connected(self, worker: str) -> None:
        self.host.post(m.Connected(worker))

    def disconnected(self, worker: str, reason: str) -> None:
        self.host.post(m.Disconnected(worker, reason))

    def refused(self, worker: str, reason: str, final: bool) -> None:
        if final and worker == self.home:
            self.host.post(m.Received(worker, m.Refused(reason, final=True)))
        else:
            log.warning("not admitted yet by=%s reason=%r", worker, reason)

    def allocate(self, worker: str, message: bytes, length: int) -> memoryview:
        return self.compute.room(worker, decode_envelope(message).message, length)

    def received(self, worker: str, message: bytes, payload: memoryview | None, seconds: float) -> None:
        try:
            self.host.deliver(worker, message, payload)
        except PayloadError as error:
            log.warning("ignored message from=%s reason=%r", worker, str(error))

    # ---- what the host wants done ----

    def send(self, to: str, message: m.Message, envelope: bytes) -> None:
        payload = self.compute.payload(message, to)
        if payload is None:
            self.mesh.send(to, envelope)
        else:
            self.mesh.send_bulk(to, type(message).__name__, envelope, payload)

    def act(self, action: m.Action, payload: Any | None) -> None:
        match action:
            case m.Close(worker=worker, reason=reason):
                self.mesh.close(worker, reason)
            case g.Know(members=members):
                self.mesh.know(members, beside=self.home)
            case _:
                if isinstance(action, g.Accept):
                    self._digest = action.digest
                with contextlib.suppress(WorkerDied):
                    self.compute.act(action, payload)

    def discard(self, payload: Any) -> None:
        pass

    def _happened(self, event: m.Event) -> None:
        self.host.handle(event)
        self.tell_tick()  # before the trainer hears that the step is settled, where it waits for that

    def tell_tick(self) -> None:
        """Keep the trainer's view of the global step current."""
        tick = self.machine.schedule_tick
        if tick != self._told_tick:
            self._told_tick = tick
            with contextlib.suppress(WorkerDied):
                self.channel.send(frames.encode(frames.News(tick)))

    # ---- life ----

    def run(self) -> None:
        """Serve until the machine finishes or the trainer dies."""
        threading.Thread(target=self._listen, name="archipel-channel", daemon=True).start()
        self.mesh.start()
        if self.home_address:
            self.mesh.dial(self.home, self.home_address)
        else:
            self.host.post(m.Woke())  # the machine's first word, where it has a list
        finish = self.host.run(self.tell_tick)
        self._say_goodbye(finish)
        self.mesh.stop(PARTING_S)
        self.tape.close(finish.reason)
        if isinstance(self.machine, PeerMachine):
            self._leave_facts(self.machine)
        self.compute.close()

    def _leave_facts(self, machine: PeerMachine) -> None:
        """Write what went over this peer's sockets, for the run's summary."""
        facts = {
            "name": machine.name,
            "incarnation": machine.incarnation,
            "settled": machine.settled,
            "round": machine.round,
            "tokens": machine.tokens,
            "digest": self._digest,
            "model_bytes_sent": self.mesh.kind_bytes("Model"),
            "state_bytes_sent": self.mesh.kind_bytes("State"),
            "end_bytes_sent": self.mesh.kind_bytes("Final") + self.mesh.kind_bytes("Mean"),
            "bytes_in": self.mesh.bytes_in,
            "bytes_out": self.mesh.bytes_out,
        }
        self._facts.parent.mkdir(exist_ok=True)
        self._facts.with_suffix(".tmp").write_bytes(msgspec.json.encode(facts))
        self._facts.with_suffix(".tmp").rename(self._facts)

    def _say_goodbye(self, finish: m.Finish) -> None:
        with contextlib.suppress(WorkerDied):
            self.channel.send(frames.encode(frames.Halt(finish.reason, finish.complete)))

    def _listen(self) -> None:
        """Call the machine's thread whenever the trainer has said something, or is gone."""
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        drained = threading.Event()
        while self.host.finished is None:
            # A trainer that was frozen may have left us with frames unsent; it may now wait for one of them.
            if not poll.poll(LOOK_S * 1000) and not self.channel.unsent:
                continue
            drained.clear()
            self.host.call(lambda: self._drain(drained))
            drained.wait()

    def _drain(self, drained: threading.Event) -> None:
        try:
            for data in self.channel.receive():
                self.compute.receive(frames.decode(data))
        except WorkerDied:
            # A trainer that goes without a word is a worker that died: nobody must read a goodbye.
            log.error("the trainer is gone step=%d", self.machine.step)
            self.tape.close("trainer died")
            os._exit(1)
        finally:
            drained.set()


def _roster(arguments: argparse.Namespace) -> Roster:
    members = tuple(g.Address(name, at) for name, at in json.loads(arguments.members).items())
    return Roster(arguments.name, members, json.loads(arguments.settings))


def _settings(machine: LearnerMachine | PeerMachine) -> dict[str, Any]:
    """Return the run's settings where the machine has them from the start: a tape must be enough."""
    roster = machine.roster if isinstance(machine, PeerMachine) else None
    return roster.settings if roster is not None else {}


def _certificate(arguments: argparse.Namespace) -> str:
    """Return whose certificate to show: the worker's own, or the one that its like share."""
    shared = "peer" if arguments.role == "peer" else "learner"
    return arguments.name if (Path(arguments.tls) / f"{arguments.name}.pem").exists() else shared


def reached_at(bound: str, home: str) -> str:
    """Return the "host:port" for others; listening on all interfaces, that of the one towards home."""
    host, _, port = bound.rpartition(":")
    if host not in ("0.0.0.0", "[::]"):
        return bound
    family = socket.AF_INET6 if host == "[::]" else socket.AF_INET
    towards, towards_port = split_address(home, listening=False)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((towards.strip("[]"), towards_port))
        found = probe.getsockname()[0]
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a courier process."""
    parser = argparse.ArgumentParser(prog="archipel-courier", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="our end of the channel to the trainer")
    parser.add_argument("--parent", type=int, required=True, help="the trainer's process")
    parser.add_argument("--name", required=True)
    parser.add_argument("--role", choices=list(HOMES), default="learner")
    parser.add_argument("--home", required=True, help="host:port of the syncer, a peer's: of the rendezvous")
    parser.add_argument("--run", default="", help="the run expected there")
    parser.add_argument("--out", required=True, help="run folder; the tape goes there")
    parser.add_argument("--tls", default="", help="folder of certificates")
    parser.add_argument("--shard", type=int, default=-1)
    parser.add_argument("--position", type=int, default=-1)
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port for other peers")
    parser.add_argument("--advertise", default="", help="where they reach it, if not there")
    parser.add_argument("--members", default="", help="a list instead of a home: name to host:port, as JSON")
    parser.add_argument("--settings", default="{}", help="the run's, as JSON, where no home tells them")
    parser.add_argument("--kept", type=int, default=-1, help="round of the checkpoint the trainer holds")
    parser.add_argument("--network", default="{}", help="network options as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    """Run until the worker's part is over."""
    options = parse()
    die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop, and says so
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options.name} courier %(message)s")
    channel = Channel.from_fd(options.fd)
    try:
        Courier(channel, options).run()
    except ArchipelError as error:
        log.error("%s", error)
        with contextlib.suppress(WorkerDied):
            channel.send(frames.encode(frames.Halt(str(error), complete=False)))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
