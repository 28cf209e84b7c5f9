"""The courier process: a learner's network, clock, tape and heartbeats, beside its trainer.

`python -m archipel.roles.courier --fd N --parent PID ...`, started by `roles.trainer`. It imports no torch,
so that it starts fast and a long inner step starves nobody; it dies with its trainer, and the trainer notices
when it dies.
"""

import argparse
import contextlib
import logging
import os
import platform
import secrets
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ArchipelError, PayloadError, WorkerDied
from ..numerics import codec
from ..protocol import messages as m
from ..protocol.learner import LearnerMachine
from ..runtime import frames
from ..runtime.courier import CourierCompute
from ..runtime.dialing import Client
from ..runtime.host import Host, decode_envelope
from ..runtime.launch import die_with_parent
from ..runtime.security import load
from ..runtime.shared import Channel
from ..runtime.wire import NetworkOptions
from ..tape.replay import seed_of
from ..tape.tape import Header, TapeWriter, tape_path

log = logging.getLogger("archipel")

LOOK_S = 1.0  # how often to look for frames that the kernel had no room for
PARTING_S = 5.0  # for goodbyes to leave and for the trainer to close


class Courier:
    """The network's sink and the host's port of one learner."""

    def __init__(self, channel: Channel, arguments: argparse.Namespace) -> None:
        incarnation = secrets.token_hex(4)
        machine = LearnerMachine(
            name=arguments.name,
            incarnation=incarnation,
            run=arguments.run,
            shard=arguments.shard,
            position=arguments.position,
            role=arguments.role,
        )
        header = Header(
            run=arguments.run,
            worker=arguments.name,
            role=arguments.role,
            incarnation=incarnation,
            started=time.time(),
            settings=seed_of(machine),
            environment={"python": platform.python_version(), "host": platform.node(), "pid": os.getpid()},
        )
        tape = TapeWriter(tape_path(Path(arguments.out), arguments.name, incarnation), header)
        self.machine = machine
        self.channel = channel
        self.tape = tape
        self.host = Host(machine, self, tape, name=arguments.name)
        self.compute = CourierCompute(channel, self._happened)
        security = load(arguments.tls, _certificate(arguments)) if arguments.tls else None
        options = msgspec.json.decode(arguments.network, type=NetworkOptions)
        self.client = Client(
            self, options, address=arguments.syncer, worker=arguments.name, run="", security=security
        )
        self._told_tick = -1

    # ---- the network's words, from its threads ----

    def connected(self) -> None:
        self.host.post(m.Connected(m.SYNCER))

    def disconnected(self, reason: str) -> None:
        self.host.post(m.Disconnected(m.SYNCER, reason))

    def refused(self, reason: str, final: bool) -> None:
        if final:
            self.host.post(m.Received(m.SYNCER, m.Refused(reason, final=True)))
        else:
            log.warning("not admitted yet reason=%r", reason)

    def allocate(self, message: bytes, length: int) -> memoryview:
        update = decode_envelope(message).message
        layout, options = self.compute.layout, self.compute.options
        if (
            not isinstance(update, m.Update)
            or layout is None
            or not 0 <= update.fragment < len(layout.numels)
        ):
            raise PayloadError(f"a payload of {length} bytes nobody waits for")
        numel = layout.numels[update.fragment]
        expected = codec.encoded_bytes(options.update_codec, numel, options.codec_block)
        if length != expected:
            raise PayloadError(
                f"update of fragment {update.fragment}: {length} bytes, {expected} expected "
                f"({numel} elements as {options.update_codec})"
            )
        return memoryview(self.compute.buffers.take(length))

    def received(self, message: bytes, payload: memoryview | None, seconds: float) -> None:
        try:
            self.host.deliver(m.SYNCER, message, payload)
        except PayloadError as error:
            log.warning("ignored message reason=%r", str(error))

    # ---- what the host wants done ----

    def send(self, to: str, message: m.Message, envelope: bytes) -> None:
        if isinstance(message, m.Push):
            self.client.send_bulk(envelope, self.compute.payload(message), done=self._pushed)
        else:
            self.client.send(envelope)

    def _pushed(self, complete: bool, reason: str) -> None:
        if not complete:
            log.warning("push failed reason=%r", reason)

    def act(self, action: m.Action, payload: Any | None) -> None:
        if isinstance(action, m.Close):
            self.client.reconnect(action.reason)
            return
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
        self.client.start()
        finish = self.host.run(self.tell_tick)
        self._say_goodbye(finish)
        self.client.stop(PARTING_S)
        self.tape.close(finish.reason)
        self.compute.close()

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
            # A trainer that goes without a word is a learner that died: the syncer must not read a goodbye.
            log.error("the trainer is gone step=%d", self.machine.step)
            self.tape.close("trainer died")
            os._exit(1)
        finally:
            drained.set()


def _certificate(arguments: argparse.Namespace) -> str:
    """Return whose certificate to show: the worker's own, or the one that learners share."""
    return arguments.name if (Path(arguments.tls) / f"{arguments.name}.pem").exists() else "learner"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a courier process."""
    parser = argparse.ArgumentParser(prog="archipel-courier", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="our end of the channel to the trainer")
    parser.add_argument("--parent", type=int, required=True, help="the trainer's process")
    parser.add_argument("--name", required=True)
    parser.add_argument("--role", choices=["learner", "observer"], default="learner")
    parser.add_argument("--syncer", required=True, help="host:port")
    parser.add_argument("--run", default="", help="the run expected there")
    parser.add_argument("--out", required=True, help="run folder; the tape goes there")
    parser.add_argument("--tls", default="", help="folder of certificates")
    parser.add_argument("--shard", type=int, default=-1)
    parser.add_argument("--position", type=int, default=-1)
    parser.add_argument("--network", default="{}", help="network options as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    """Run until the learner's part is over."""
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
