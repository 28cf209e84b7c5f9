"""What the engine drives: the costs of a worker, its compute port, and its process in virtual time.

A compute port answers during the call what a live one answers later; the engine lets the time pass that it
costs. The port of this page stands for tensors with costs only; `roles.local` has ports that hold them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

from ..protocol import messages as m
from .network import LinkOptions


class LearnerOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What one learner's steps cost."""

    step_s: float = 1.0
    jitter: float = 0.0  # a step's time is uniform within ± this share
    tokens: int = 1000  # per step
    rows: int = 0  # windows in these tokens, of which a step with fewer slices takes fewer; 0: one per token
    prepare_s: float = 0.0  # from settings to a model
    exposed_s: float = 0.0  # communication within a step that no compute hides
    link: LinkOptions = LinkOptions()


class EngineOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What the rest costs."""

    seed: int = 0
    fragment_bytes: float = 1e6
    fold_s: float = 0.0
    merge_s: float = 0.0
    shards: int = 64


class ComputePort(m.Compute, Protocol):
    """`messages.Compute`, and the step. Results are said to the `Said` it was made with, during the call."""

    def step(self, number: int, tick: int, rows: int | None = None) -> tuple[int, tuple[int, ...]]:
        """Take inner step `number`, copy the fragments asked for; return its tokens and what was copied.

        rows: windows of this step where its hardware is not whole; None: a full batch.
        """
        ...


Said = Callable[[m.Event], None]
Record = Callable[[str, float, m.Event, list[m.Action]], None]


def each(records: list[Record]) -> Record:
    """Return what tells all of these, in their order; the list may grow before the first record."""

    def record(worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        for one in records:
            one(worker, now, event, actions)

    return record


class CostPort:
    """Costs stand for tensors: payloads are None, every push is fit, every merge succeeds; a row is a
    token."""

    def __init__(self, said: Said, schema: tuple[m.TensorSpec, ...], tokens: int = 0) -> None:
        self.said = said
        self.schema = schema
        self.tokens = tokens
        self.watched: tuple[int, ...] = ()

    def prepare(self, settings: dict[str, Any], shard: int, position: int) -> None:
        self.said(m.Prepared(self.schema))

    def step(self, number: int, tick: int, rows: int | None = None) -> tuple[int, tuple[int, ...]]:
        return self.tokens if rows is None else rows, self.watched

    def copy(self, fragments: tuple[int, ...]) -> None:
        self.watched = fragments

    def snapshot(self, fragment: int, step: int, *, full: bool) -> Any:
        return None

    def apply(self, fragment: int, version: int, payload: Any) -> None:
        pass

    def fold(self, action: m.Fold, payload: Any) -> None:
        self.said(m.Folded(action.fragment, action.worker))

    def merge(self, fragment: int, version: int) -> None:
        self.said(m.Merged(fragment, version))

    def discard(self, fragment: int) -> None:
        pass

    def payload(self, fragment: int, version: int) -> Any:
        return None

    def save(self, round: int) -> None:
        pass


@dataclass(slots=True)
class Host:
    """One process: a machine, its port, its alarm."""

    name: str
    machine: m.Machine
    port: ComputePort
    life: int  # of this process; what was scheduled for an earlier one is void
    alarm: int = 0  # counts `Wake`s: only the newest rings
    frozen: bool = False
    backlog: list[tuple[m.Event, Any]] = field(default_factory=list)
    finished: m.Finish | None = None
    # A learner's compute (`sim.pace`):
    computes: bool = False  # an observer does not
    allowed: bool = False  # `Resume` came, and no `Hold` since
    stopping: str | None = None
    paused: bool = False
    stepping: bool = False
    steps: int = 0
    tick: int = 0  # that the step's learning rate follows
    compute_s: float = 0.0  # of the step that is on
    step_s: float = 0.0  # that it takes if nothing stands still
    lost: bool = False  # a chip fails in this step
    stopped_until: float = 0.0  # slices are taken out or in
    began_at: float = 0.0
    ends_at: float = 0.0
    left_s: float = 0.0  # of a step that is paused
    run: int = 0  # counts scheduled step ends: only the newest counts
    pending: dict[int, tuple[int, Any]] = field(default_factory=dict)
    # A syncer's compute works one thing after the other:
    busy_until: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether the process runs (or is frozen)."""
        return self.life > 0 and self.finished is None
