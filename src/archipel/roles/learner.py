"""A learner as a training script sees it: the wrap around a user's loop."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from ..protocol.schedule import SyncOptions
from ..runtime.wire import NetworkOptions
from .fragments import Fragments
from .trainer import Trainer
from .worker import Worker


class Learner:
    """One learner of a run: joins it, and keeps a training loop in step with it without ever blocking it.

        with archipel.Learner(model, optimizer, scheduler=None, syncer="10.0.0.1:7000") as learner:
            for batch in loader:
                loss = model(batch).loss
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                learner.step(tokens=batch.numel())
                if learner.done: break

    Entering waits until the run's settings and weights are adopted, for as long as it takes. A process of its
    own (the courier) does all the networking. Raises JoinRefused when the syncer turns the learner away,
    WorkerDied when the courier is gone.
    """

    def __init__(  # noqa: PLR0913 (each is one thing a user may say, by name)
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any = None,
        *,
        syncer: str,
        name: str = "",
        run: str = "",
        out: str | Path = "out/learner",
        tls: str | Path = "",
        network: NetworkOptions | None = None,
        stopped: Callable[[], str] = lambda: "",
    ) -> None:
        """syncer: "host:port". name: unique in the run; the same name continues its shard of the data.

        run: refuse any other run. out: folder for the tape and, with `archipel.train.data`, the data journal.
        tls: folder made by `archipel certs`. scheduler: a torch scheduler that counts steps; it follows the
        run's tick. stopped: asked while waiting and after each step; a reason makes the learner `done`.
        """
        self.model, self.optimizer = model, optimizer
        self._fragments = Fragments()
        self.worker = Worker(
            self._fragments,
            role="learner",
            home=syncer,
            name=name,
            run=run,
            out=out,
            tls=tls,
            scheduler=scheduler,
            network=network,
            stopped=stopped,
        )

    def __enter__(self) -> "Learner":
        self.worker.enter(self.model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.worker.leave(kind, error)

    def step(self, tokens: int) -> None:
        """Say that an optimizer step over `tokens` tokens is done; let updates land. Never blocks.

        Call it once per optimizer step: with gradient accumulation after the last micro-batch, with their
        sum.
        """
        self.worker.step(tokens)

    @property
    def name(self) -> str:
        """This learner's name in the run."""
        return self.worker.name

    @property
    def journal(self) -> Path:
        """File for a data stream's position."""
        return self.worker.journal

    @property
    def trainer(self) -> Trainer:
        """The half of this learner that lives here."""
        return self.worker.trainer

    @property
    def options(self) -> SyncOptions:
        """The run's synchronisation options."""
        return self._fragments.options

    @property
    def shard(self) -> int:
        """Number of the part of the data this learner reads; nobody else reads it."""
        return self.worker.shard

    @property
    def position(self) -> int:
        """Tokens of the shard that were consumed before this learner started."""
        return self.worker.position

    @property
    def step_count(self) -> int:
        """Inner steps of this learner."""
        return self.worker.step_count

    @property
    def tick(self) -> int:
        """The run's global step, as far as heard: what learning rate schedules follow."""
        return self.worker.tick

    @property
    def round(self) -> int:
        """Merges that the weights held here have been through, over all fragments."""
        return self._fragments.round

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return self.worker.done
