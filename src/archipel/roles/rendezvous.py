"""The rendezvous process of a gossip run: its machine, a port that peers dial, and a few kilobytes on disk.

It carries no weights and no tensor (GASLoC's peers have all of them). When it dies, peers go on with the view
they have; started again with `--resume`, it knows epochs, shards and the ledger, and peers enrol anew.
"""

import logging
import os
import platform
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import msgspec

from .. import config as configuration
from ..errors import CheckpointError, ConfigError, DataError, PayloadError
from ..protocol import gossip as g
from ..protocol import messages as m
from ..protocol.enrolled import RendezvousState
from ..protocol.rendezvous import RendezvousMachine
from ..runtime import checkpoint, security
from ..runtime.host import Host
from ..runtime.mesh import Mesh
from ..tape.replay import seed_of
from ..tape.tape import Header, TapeWriter, tape_path
from ..train import data
from ..train.options import ModelOptions, fit
from .syncer import Opening, data_digest, leave_address, seeded

log = logging.getLogger("archipel")

KEEP = 2  # states on disk
PARTING_S = 2.0  # for last words to leave


class RendezvousRole:
    """The network's sink and the host's port of the rendezvous."""

    def __init__(self, machine: RendezvousMachine, tape: TapeWriter, directory: Path, saves: int) -> None:
        """saves: states written so far, which number them."""
        self.machine = machine
        self.tape = tape
        self.host = Host(machine, self, tape, name=g.RENDEZVOUS)
        self.mesh: Mesh | None = None
        self._directory = directory
        self._saves = saves

    # ---- the network's words, from its threads ----

    def connected(self, worker: str) -> None:
        self.host.post(m.Connected(worker))

    def disconnected(self, worker: str, reason: str) -> None:
        self.host.post(m.Disconnected(worker, reason))

    def refused(self, worker: str, reason: str, final: bool) -> None:
        raise AssertionError("the rendezvous dials nobody")

    def allocate(self, worker: str, message: bytes, length: int) -> memoryview:
        raise PayloadError("a rendezvous takes no tensors: send them to peers")

    def received(self, worker: str, message: bytes, payload: memoryview | None, seconds: float) -> None:
        try:
            self.host.deliver(worker, message, payload)
        except PayloadError as error:
            log.warning("ignored worker=%s reason=%r", worker, str(error))

    # ---- what the host wants done ----

    def send(self, to: str, message: m.Message, envelope: bytes) -> None:
        assert self.mesh is not None
        self.mesh.send(to, envelope)

    def act(self, action: m.Action, payload: Any | None) -> None:
        match action:
            case m.Save():
                self._save()
            case m.Close(worker=worker, reason=reason):
                assert self.mesh is not None
                self.mesh.close(worker, reason)

    def discard(self, payload: Any) -> None:
        pass

    def _save(self) -> None:
        self._saves += 1
        state = msgspec.json.encode(self.machine.snapshot())
        try:
            checkpoint.save(self._directory, self._saves, {}, state, run=self.machine.run, keep=KEEP)
        except CheckpointError as error:
            log.error("%s", error)  # the peers go on, and so do we; the older states are as they were

    def run(self) -> m.Finish:
        """Serve until the machine finishes."""
        assert self.mesh is not None
        self.mesh.start()
        self.host.post(m.Woke())  # the machine's first word, after a restart above all
        finish = self.host.run()
        self.mesh.stop(PARTING_S)
        self.tape.close(finish.reason)
        return finish


def open_rendezvous(config: configuration.Config, opening: Opening) -> RendezvousRole:
    """Return a rendezvous that listens: fresh, or as it was when it last wrote its state."""
    if config.gossip is None:
        raise ConfigError("the configuration has no section [gossip]: add one, or run `archipel syncer`")
    directory = opening.out / "rendezvous"
    found = checkpoint.load_newest(directory, run=config.run.name)
    if found is not None and not opening.resume:
        raise CheckpointError(
            f"{directory} holds the state of a run: --resume goes on with it, another --out starts afresh"
        )
    settings = settings_for(config)
    machine = RendezvousMachine(config.run.name, config.gossip, settings, config.data.shards)
    state = None
    if found is not None:
        state = _state(found)
        machine.restore(_state(found))
        log.info("resumed epoch=%d", machine.epoch)
    incarnation = secrets.token_hex(4)
    header = Header(
        run=config.run.name,
        worker=g.RENDEZVOUS,
        role=g.RENDEZVOUS,
        incarnation=incarnation,
        started=time.time(),
        settings={**settings, **seed_of(machine, state)},
        environment={"python": platform.python_version(), "host": platform.node(), "pid": os.getpid()},
    )
    tape = TapeWriter(tape_path(opening.out, g.RENDEZVOUS, incarnation), header)
    role = RendezvousRole(machine, tape, directory, found.step if found is not None else 0)
    secured = security.load(opening.tls, "peer") if opening.tls else None
    if warning := security.warn_if_open(opening.listen, secured):
        log.warning("%s", warning)
    role.mesh = Mesh(role, config.network, name=g.RENDEZVOUS, security=secured)
    address = role.mesh.listen(opening.listen, run=config.run.name)
    log.info("listening address=%s run=%s", address, config.run.name)
    leave_address(opening.address_file, address)
    return role


def settings_for(config: configuration.Config) -> dict[str, Any]:
    """Return what peers of the built-in model are handed, with what is left to the data in it."""
    config = seeded(config)
    config = msgspec.structs.replace(config, model=_model(config))
    return configuration.settings_of(config, data_digest=data_digest(config, ""))


def _model(config: configuration.Config) -> ModelOptions:
    """Return the model options with what is left to the data; as they are where this host has none."""
    options = config.model
    if options.vocabulary and options.sequence:
        return options
    try:
        return fit(options, config.data, data.load(config.data).vocabulary)
    except DataError as error:
        log.info("no data here, peers must know their model reason=%r", str(error))
        return options


def _state(found: checkpoint.Checkpoint) -> RendezvousState:
    try:
        return msgspec.json.decode(found.state, type=RendezvousState)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{found.path}: its state does not fit this release: {error}") from None


def serve(config: configuration.Config, opening: Opening) -> m.Finish:
    """Run a rendezvous to its end; SIGTERM and Ctrl-C stop the run. Leaves `rendezvous.json`."""
    opening.out.mkdir(parents=True, exist_ok=True)
    with checkpoint.lease(opening.out):
        role = open_rendezvous(config, opening)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _: role.host.post(m.StopRequested(signal.Signals(n).name)))
        finish = role.run()
        _conclude(role.machine, opening.out, finish)
    return finish


def _conclude(machine: RendezvousMachine, out: Path, finish: m.Finish) -> None:
    concluded = machine.concluded
    facts = {
        "reason": finish.reason,
        "complete": finish.complete,
        "rounds": machine.closed_round + 1,
        "epoch": machine.epoch,
        "digest": concluded.digest if concluded else "",
        "figures": concluded.figures if concluded else {},
        "tokens": machine.ledger.table(),
        "ledger_closes": machine.ledger.closes(),
        "positions": machine.positions,
    }
    path = out / "rendezvous.json"
    path.with_suffix(".tmp").write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1))
    path.with_suffix(".tmp").rename(path)
