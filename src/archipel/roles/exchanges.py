"""A gossip peer's tensors in its trainer: what the machine in the courier asks for, done between two steps.

The half of `roles.trainer` that a peer adds to it (GASLoC). The mathematics is `train.gossip`; here payloads
pass through shared memory, states go to disk, and the final model leaves for the user.

Invariants: an action is carried out in the order asked and answered in it; a checkpoint is written from
copies, by a thread, so that no round waits for a disk.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import CheckpointError, PayloadError
from ..protocol import gossip as g
from ..protocol import messages as m
from ..runtime import checkpoint, frames
from ..runtime.lending import Lender, borrow
from ..runtime.shared import Channel
from ..train.gossip import PeerState

log = logging.getLogger("archipel")

OFFERS_KEPT = 1  # unused stretches; while one is on its way to a slow partner another is made
STATE = "state"


class Exchanges:
    """The tensors of one peer. Set `optimizer`, `evaluate` and `finished` before `open`."""

    def __init__(self, checkpoints: Path, run: str, *, keep: int = 2) -> None:
        """checkpoints: folder of this peer's own. run: identity they must have; "": any."""
        self.optimizer: torch.optim.Optimizer | None = None
        self.evaluate: Callable[[], float] | None = None
        # Called with the run's result, whole tensors by name, by the one peer that made it.
        self.finished: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None
        self.options = g.GossipOptions()
        self.round = 0
        self._checkpoints, self._run, self._keep = checkpoints, run, keep
        self._found: checkpoint.Checkpoint | None = None
        self._writing: threading.Thread | None = None
        self._lender = Lender(OFFERS_KEPT)
        self._channel: Channel | None = None
        self._state: PeerState | None = None

    def find(self) -> int:
        """Return the round of the newest valid checkpoint, which `open` starts from; -1 without one."""
        self._found = checkpoint.load_newest(self._checkpoints, run=self._run or None)
        return -1 if self._found is None else self._found.step

    # ---- what a trainer asks ----

    @property
    def paced(self) -> bool:
        """A peer may have to wait after any step."""
        return True

    @property
    def takes_word_before_steps(self) -> bool:
        """What is asked for during a step is done after the step is reported, as the tape has it."""
        return False

    def settle(self, settings: dict[str, Any]) -> None:
        """Take over the run's settings."""
        self.options = g.gossip_of(settings)
        self._run = self._run or str(settings.get("run", {}).get("name", ""))

    def open(self, channel: Channel, model: nn.Module, environment: dict[str, Any]) -> None:
        """Take the model in, or the checkpoint found, and say that it is ready."""
        self._channel = channel
        self._state = state = PeerState(model, self.optimizer, self.options, self.evaluate)
        if self._found is not None:
            try:
                self.round = state.restore(self._found.arrays(STATE), self._found.state)
            except PayloadError as error:
                raise CheckpointError(f"{self._found.path}: {error}; name another --out") from None
        self._say(frames.Ready(state.schema, environment=environment))

    def copies(self) -> tuple[tuple[int, int], ...]:
        """A step is done; nothing is copied for it."""
        assert self._state is not None
        self._state.steps += 1
        return ()

    def take(self, frame: frames.Frame) -> None:
        """Do what is asked, and answer."""
        match frame:
            case frames.Asked(action=action, stretch=stretch):
                self._ask(action, stretch)
            case frames.Free(slot=number):
                self._lender.free(number)

    def land(self, step: int) -> None:
        """Nothing waits for a step's end: what was asked is done when it is heard."""

    def close(self) -> None:
        """Wait for the disk, and let go of the shared memory."""
        if self._writing is not None:
            self._writing.join()
        self._lender.close()

    # ---- actions ----

    def _ask(self, action: Any, stretch: frames.Stretch | None) -> None:
        assert self._state is not None and self._channel is not None
        if isinstance(action, m.Save):
            self._save(action.round)
            return
        payload = None if stretch is None else borrow(self._channel, stretch)
        event = self._state.act(action, payload)
        del payload
        if stretch is not None:
            self._say(frames.Free(stretch.number))
        match event:
            case g.Mixed(round=number):
                self.round = number + 1
            case g.Adopted(round=number, reason=""):
                self.round = number
        if isinstance(action, g.Accept) and stretch is None:
            self.finished(self._state.tensors())
        if event is not None:
            self._answer(event)

    def _answer(self, event: Any) -> None:
        assert self._state is not None
        answered = _carrier(event)
        payload = None if answered is None else self._state.payload(*answered)
        if payload is None:
            self._say(frames.Answered(event))
            return
        filled = self._lender.take(payload.nbytes, once=not isinstance(event, g.Offered))
        filled[:] = payload.view(np.uint8)
        stretch, descriptor = self._lender.lend(filled)
        self._say(frames.Answered(event, stretch), [descriptor])

    def _say(self, frame: frames.Frame, descriptors: list[int] | None = None) -> None:
        assert self._channel is not None
        self._channel.send(frames.encode(frame), descriptors or ())

    # ---- checkpoints ----

    def _save(self, number: int) -> None:
        assert self._state is not None
        if self._writing is not None and self._writing.is_alive():
            log.warning("checkpoint left out round=%d reason='the last one is still being written'", number)
            return
        arrays = {name: np.array(array) for name, array in self._state.arrays().items()}
        facts = self._state.facts(number)
        self._writing = threading.Thread(target=self._write, args=(number, arrays, facts), daemon=True)
        self._writing.start()

    def _write(self, number: int, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
        try:
            checkpoint.save(self._checkpoints, number, {STATE: arrays}, facts, run=self._run, keep=self._keep)
        except CheckpointError as error:
            log.error("%s", error)  # training goes on; the older checkpoints are as they were


def _carrier(event: Any) -> tuple[str, m.Message] | None:
    """Return (receiver, message) of what carries the payload that an event announces, if any does."""
    match event:
        case g.Offered(round=number):
            return "", g.Model(number)
        case g.Captured(round=number, worker=worker):
            return worker, g.State(number, 0)
        case g.Submitted(attempt=attempt):
            return "", g.Final(attempt)
        case g.Averaged(attempt=attempt, digest=digest):
            return "", g.Mean(digest, attempt)
        case _:
            return None
