"""The training process's half of a worker: weights change at one known line (DESIGN.md, section 1).

`Trainer.step` is all that runs in a user's loop. It touches shared memory and one local socket, never the
network: at the end of an inner step it copies the fragments that can be asked for next, says that the step is
done, lets the updates land that wait, and returns. A learner waits only where the run's settings say so
(τ = 0, `max_lead_steps`), a gossip peer at the end of each round; meanwhile it does what its courier asks.

Invariants: a snapshot is taken before anything is applied; where a step may have to be waited after, it is:
the courier has then said so before the next one begins. What a peer is asked to do is done between the report
of one step and the start of the next, as its tape has it.
"""

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import JoinRefused, WorkerDied
from ..runtime import frames
from ..runtime.launch import spawn_courier
from ..runtime.shared import Channel

POLL_S = 0.5  # how often a trainer that waits looks whether it was asked to stop
SAY_S = 10.0  # how often a trainer that cannot begin yet says so
CLOSE_S = 10.0  # for a courier to deliver its goodbye

log = logging.getLogger("archipel")


def _never() -> str:
    return ""


class Half(Protocol):
    """The tensors of one kind of worker: a learner's `Fragments`, a peer's `Exchanges`."""

    @property
    def paced(self) -> bool:
        """Whether the courier may ask to wait after a step, and so must be heard after each."""
        ...

    @property
    def takes_word_before_steps(self) -> bool:
        """Whether frames may be taken in between the end of a step and its report."""
        ...

    def settle(self, settings: dict[str, Any]) -> None: ...

    def open(self, channel: Channel, model: nn.Module, environment: dict[str, Any]) -> None: ...

    def copies(self) -> tuple[tuple[int, int], ...]: ...

    def take(self, frame: frames.Frame) -> None: ...

    def land(self, step: int) -> None: ...

    def close(self) -> None: ...


class Trainer:
    """One worker's trainer, with its courier process."""

    def __init__(
        self,
        courier_arguments: list[str],
        half: Half,
        *,
        stopped: Callable[[], str] = _never,
        env: dict[str, str] | None = None,
    ) -> None:
        """Start the courier; it connects and joins in the background. Arguments: see `roles.courier`.

        stopped: asked at every step and while waiting; a reason ends this worker's part.
        """
        self._stopped = stopped
        self._channel, theirs = Channel.pair()
        self._courier: subprocess.Popen[bytes] = spawn_courier(courier_arguments, theirs, env=env)
        self.half = half
        self.build: frames.Build | None = None
        self.tick = 0
        self.step_count = 0
        self.done = False
        self._closed = False
        self.reason = ""
        self._holding = True  # until the run's weights are adopted
        self._settled = 0  # newest step whose consequences the courier has told us
        self._began = self._resumed_at = time.perf_counter()
        self._said_at = self._began

    # ---- joining ----

    def settings(self) -> dict[str, Any]:
        """Wait for the syncer's settings; {} when stopped before. JoinRefused if it will not have us."""
        while self.build is None and self._goes_on():
            self._receive(POLL_S)
            self._say("the run's settings")
        if self.build is None:
            return {}
        self.half.settle(self.build.settings)
        return self.build.settings

    def adopt(self, model: nn.Module, environment: dict[str, Any] | None = None) -> None:
        """Join with the model's schema, and take over the run's weights.

        environment: what else, beside torch and its threads, a replay of this learner must know.
        """
        known = {**_environment(model), **(environment or {})}
        try:
            self.half.open(self._channel, model, known)
        except WorkerDied:
            raise self._last_words() from None
        while self._holding and self._goes_on():
            self._receive(POLL_S)
            self._land()
            self._say("the run's weights")
        self._resumed_at = time.perf_counter()

    def _say(self, what: str) -> None:
        now = time.perf_counter()
        if now - self._said_at >= SAY_S:
            self._said_at = now
            log.warning("waiting for=%r waited_s=%.0f (the courier's lines say why)", what, now - self._began)

    # ---- training ----

    def step(self, tokens: int) -> None:
        """Report one inner step over `tokens` tokens; let what has come land. See the module's description.

        Once `done`, nothing is reported any more.
        """
        if self.done:
            return
        step_s = time.perf_counter() - self._resumed_at
        tick = self.tick  # what the step's learning rate followed
        if self.half.takes_word_before_steps:
            self._receive(0.0)
        self.step_count += 1
        self._tell(frames.Stepped(self.step_count, tokens, step_s, self.half.copies(), tick))
        self._land()
        while self._goes_on() and (self._holding or self._unsettled()):
            self._receive(POLL_S)
            self._land()
        self._resumed_at = time.perf_counter()

    def _unsettled(self) -> bool:
        """Whether the courier may still say that this step is one to wait after, or to copy the next at."""
        return self.half.paced and self._settled < self.step_count

    def wait(self, timeout_s: float) -> None:
        """Let updates land for a while without training (an observer's life)."""
        if self._goes_on():
            self._receive(timeout_s)
            self._land()

    def close(self, reason: str) -> None:
        """Say goodbye in order, and wait for the courier to end. Twice is once."""
        if self._closed:
            return
        self._closed = True
        try:
            self._channel.send(frames.encode(frames.Ended(reason or self.reason)))
            self._courier.wait(timeout=CLOSE_S)
        except (WorkerDied, subprocess.TimeoutExpired):
            self._courier.kill()
            self._courier.wait()
        self._channel.close()
        self.half.close()

    def _goes_on(self) -> bool:
        """Return whether this worker's part is not over; a request to stop ends it."""
        if not self.done and (reason := self._stopped()):
            self.done, self.reason = True, reason
        return not self.done

    def _land(self) -> None:
        try:
            self.half.land(self.step_count)
        except WorkerDied:
            raise self._last_words() from None

    # ---- the courier ----

    def _tell(self, frame: frames.Frame) -> None:
        try:
            self._channel.send(frames.encode(frame))
        except WorkerDied:
            raise self._last_words() from None

    def _last_words(self) -> WorkerDied:
        """Return the error of a courier that is gone, unless its last words are one themselves."""
        self._receive(0.0)
        return self._died()

    def _receive(self, timeout_s: float) -> None:
        try:
            received = self._channel.receive(timeout_s)
        except WorkerDied:
            if self.done:
                return
            raise self._died() from None
        try:
            for data in received:
                self._note(frames.decode(data))
        except WorkerDied:  # while an answer was being said
            if not self.done:
                raise self._last_words() from None

    def _note(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Build():
                self.build = frame
            case frames.Pace(hold=hold):
                self._holding = hold
            case frames.Settled(step=step):
                self._settled = step
            case frames.News(tick=tick):
                self.tick = tick
            case frames.Halt(reason=reason, complete=complete):
                self.done, self.reason = True, reason
                if not complete:
                    raise JoinRefused(f"this worker cannot take part in the run: {reason}")
            case _:
                self.half.take(frame)

    def _died(self) -> WorkerDied:
        try:
            code: int | None = self._courier.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            code = None
        how = "its channel closed" if code is None else f"signal {-code}" if code < 0 else f"exit {code}"
        return WorkerDied(
            f"the courier process {self._courier.pid} of this worker is gone ({how}): "
            "without it nothing is reported; see its log above and start the worker again"
        )


def _environment(model: nn.Module) -> dict[str, Any]:
    """Return what could change a bit of an inner step's result."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    if "transformers" in sys.modules:
        found["transformers"] = str(sys.modules["transformers"].__version__)
    return found
