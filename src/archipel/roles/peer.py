"""A gossip peer as a training script sees it, and the process that trains a built-in model (GASLoC)."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..config import Config, load
from ..errors import ConfigError
from ..runtime.wire import NetworkOptions, split_address
from ..train.evaluate import evaluate
from .exchanges import Exchanges
from .listing import member_arguments
from .result import export, save_tensors
from .worker import Metrics, Worker, name_of, train


class Peer:
    """One peer of a gossip run: trains, and exchanges models with others now and then; there is no syncer.

        with archipel.Peer(model, optimizer, scheduler=None, rendezvous="10.0.0.1:7000") as peer:
            for batch in loader:
                loss = model(batch).loss
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                peer.step(tokens=batch.numel())
                if peer.done: break

    Entering waits until the run begins, or until the state of another peer is cloned. `step` returns at once
    but at the end of a round: then it waits for the partners' models, no longer than the timeout. When the
    run is over, every peer's model is the mean of all; the one that made it leaves it in `out`/model. Raises
    JoinRefused when the rendezvous turns the peer away, WorkerDied when the courier is gone.
    """

    def __init__(  # noqa: PLR0913 (each is one thing a user may say, by name)
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        rendezvous: str = "",
        members: str | Path = "",
        listen: str = "",
        advertise: str = "",
        name: str = "",
        run: str = "",
        out: str | Path = "out/peer",
        tls: str | Path = "",
        resume: bool = False,
        network: NetworkOptions | None = None,
        stopped: Callable[[], str] = lambda: "",
        evaluate: Callable[[], float] | None = None,
    ) -> None:
        """rendezvous: "host:port". members: instead of one, the run's TOML file with a section [members].

        listen: where other peers reach this one; ":7001" is all interfaces; "": its address in the list, else
        some port of this host alone.

        advertise: "host:port" that others are told instead, of a gateway that forwards to `listen`.

        resume: start from the newest checkpoint in `out`. evaluate: returns the model's loss on validation
        data, for the figures at the end. The rest: see `Learner`.
        """
        self.model = model
        name = name_of(name)
        listed = load(members) if members else None
        run = run or (listed.run.name if listed is not None else "")
        self._exchanges = exchanges_of(name, out, run)
        self._exchanges.optimizer, self._exchanges.evaluate = optimizer, evaluate
        self._exchanges.finished = self._leave_model
        self.worker = peer_worker(
            self._exchanges,
            listen=listen,
            advertise=advertise,
            resume=resume,
            home=rendezvous,
            listed=listed,
            own_model=True,
            name=name,
            run=run,
            out=out,
            tls=tls,
            scheduler=scheduler,
            network=network,
            stopped=stopped,
        )

    def __enter__(self) -> "Peer":
        self.worker.enter(self.model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.worker.leave(kind, error)

    def _leave_model(self, tensors: dict[str, np.ndarray]) -> None:
        folder = self.worker.out / "model"
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors({n: torch.from_numpy(a) for n, a in tensors.items()}, folder / "weights.safetensors")

    def step(self, tokens: int) -> None:
        """Say that an optimizer step over `tokens` tokens is done. A round's end waits for the partners."""
        self.worker.step(tokens)

    @property
    def name(self) -> str:
        """This peer's name in the run."""
        return self.worker.name

    @property
    def journal(self) -> Path:
        """File for a data stream's position."""
        return self.worker.journal

    @property
    def shard(self) -> int:
        """Number of the part of the data this peer reads; nobody else reads it."""
        return self.worker.shard

    @property
    def position(self) -> int:
        """Tokens of the shard that were consumed before this peer started."""
        return self.worker.position

    @property
    def step_count(self) -> int:
        """Inner steps of this peer."""
        return self.worker.step_count

    @property
    def tick(self) -> int:
        """What learning rate schedules follow: H for each round, and the steps of this one."""
        return self.worker.tick

    @property
    def round(self) -> int:
        """Exchanges that are behind these weights."""
        return self._exchanges.round

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return self.worker.done


def exchanges_of(name: str, out: str | Path, run: str) -> Exchanges:
    """Return the tensors' half of a peer, with a folder of its own for checkpoints."""
    return Exchanges(Path(out) / "checkpoints" / name, run)


def peer_worker(
    half: Exchanges,
    *,
    home: str,
    listed: Config | None,
    listen: str,
    resume: bool,
    advertise: str = "",
    own_model: bool = False,
    **known: Any,
) -> Worker:
    """Return a worker that is a peer. home: of the rendezvous, or `listed`: the run with its members. known:
    as `Worker` takes it."""
    told: list[str] = []
    if bool(home) == (listed is not None):
        raise ConfigError("a peer finds the others by a rendezvous or by a list of members: give one of them")
    if listed is not None and advertise:
        raise ConfigError(
            f"--advertise {advertise} goes with a rendezvous: with a list, [members] says where a peer is "
            "reached; write it there, and give --listen if the peer listens elsewhere"
        )
    if listed is not None:
        listen, told = member_arguments(listed, known["name"], listen, own_model=own_model)
    if advertise:
        split_address(advertise, listening=False)  # an error now, and not at everybody else's
    worker = Worker(half, role="peer", home=home, **known)
    worker.arguments += ["--listen", listen or "127.0.0.1:0", "--advertise", advertise, *told]
    if resume:
        worker.arguments += ["--kept", str(half.find())]
    return worker


def train_peer(config: Config, worker: Worker, half: Exchanges, **how: Any) -> None:
    """Train the run's built-in model as a peer. how: as `worker.train` takes it."""

    def prepare(run: Config, model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Any) -> None:
        batches = list(corpus.validation(config.evaluate.batches, config.evaluate.batch))
        half.optimizer = optimizer
        half.evaluate = lambda: evaluate(model, batches).loss
        half.finished = lambda tensors: export(
            {n: torch.from_numpy(a) for n, a in tensors.items()}, run.model, worker.out / "model", run.data
        )
        metrics = Metrics(worker.out / "metrics.jsonl", worker)
        metrics.write(kind="validation", round=0, tick=0, loss=half.evaluate())

    train(config, worker, prepare=prepare, **how)
