"""What a finished run amounted to, from what its processes left behind: figures, tokens by fate."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from .. import config as configuration
from ..dashboard.collect import longest_pause
from ..errors import DataError, WorkerDied
from ..protocol import gossip as g
from ..protocol.ledger import FATES, GOSSIP_FATES
from ..protocol.messages import Received, Tally
from ..tape.record import Record
from ..tape.tape import read, workers
from ..train.data import read_journal

log = logging.getLogger("archipel")

THIN_SHARE = 0.5  # of a learner's tokens: if fewer are merged, a warning


class Losses:
    """The first and the newest validation loss of a run, read from its metrics as they grow."""

    def __init__(self, path: Path) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self._path = path
        self._read = 0  # bytes taken in, up to the end of a line

    def poll(self) -> None:
        """Take in the lines that came since the last call."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            if b'"kind":"validation"' in line:
                with contextlib.suppress(msgspec.DecodeError):  # torn by a machine that lost power
                    self._take(msgspec.json.decode(line))

    def _take(self, line: dict[str, Any]) -> None:
        self.last = line["loss"]
        self.first = self.last if self.first is None else self.first


def summarise(out: Path, config: configuration.Config, kills: int) -> dict[str, Any]:
    """Return a finished run's figures, from what its processes left behind."""
    facts = read_facts(out, "syncer")
    pause = longest_pause(records_of(out, "syncer"), config.sync.quorum)
    windows = [
        action.window_s
        for record in records_of(out, "syncer")
        if pause.at_s <= record.t <= pause.at_s + pause.longest_pause_s
        for action in record.actions
        if isinstance(action, Tally)
    ]
    losses = Losses(out / "metrics.jsonl")
    losses.poll()
    tokens = facts.get("tokens", {})
    consumed = consumed_by_data(out, facts, config.sync.fragments)
    return {
        "complete": facts.get("complete", False),
        "rounds": facts.get("rounds", pause.rounds),
        "val_loss_first": losses.first,
        "val_loss_last": losses.last,
        "learners": config.sync.learners,
        "kills": kills,
        "longest_pause_s": round(pause.longest_pause_s, 4),
        "grace_cap_s": round(max(windows, default=0.0), 4),
        "step_s": pause.pause_step_s or pause.step_s,
        "tokens": {"consumed": consumed, **{fate: tokens.get(fate, 0) for fate in FATES}},
        "tokens_per_learner": tokens.get("per_learner", {}),
        "tokens_per_fragment": tokens.get("per_fragment", []),
        "tail_unknown": tokens.get("tail_unknown", {}),
        "digest": facts.get("digest", ""),
        "warnings": thin_shares(tokens.get("per_learner", {})),
        "run_dir": str(out),
    }


def summarise_gossip(out: Path, config: configuration.Config, kills: int) -> dict[str, Any]:
    """Return a finished gossip run's figures. Bytes are payloads of offers that left, of a peer and round."""
    facts = read_facts(out, g.RENDEZVOUS)
    losses = Losses(out / "metrics.jsonl")
    losses.poll()
    paces = Paces()
    for record in records_of(out, g.RENDEZVOUS):
        paces.take(record)
    peers = [msgspec.json.decode(path.read_bytes()) for path in sorted((out / "peers").glob("*.json"))]
    settled = sum(peer["settled"] for peer in peers)
    tokens, figures = facts.get("tokens", {}), facts.get("figures", {})
    consumed = consumed_by_data(out, facts, 1)
    return {
        "complete": facts.get("complete", False),
        "rounds": facts.get("rounds", 0),
        "val_loss_first": losses.first,
        "val_loss_last": figures.get("val_loss_mean_model"),
        "learners": config.gossip.peers if config.gossip else 0,
        "kills": kills,
        "longest_pause_s": round(paces.longest_s, 4),
        "longest_wait_s": round(paces.longest_wait_s, 4),
        "step_s": median(paces.steps) if paces.steps else None,
        "val_loss_mean_model": figures.get("val_loss_mean_model"),
        "val_loss_worst": figures.get("val_loss_worst"),
        "consensus_error": figures.get("consensus_error"),
        "bytes_per_round": round(sum(peer["model_bytes_sent"] for peer in peers) / settled) if settled else 0,
        "model_bytes": figures.get("model_bytes"),
        "tokens": {"consumed": consumed, **{fate: tokens.get(fate, 0) for fate in GOSSIP_FATES}},
        "tokens_per_learner": tokens.get("per_learner", {}),
        "tail_unknown": tokens.get("tail_unknown", {}),
        "digest": facts.get("digest", ""),
        "digests": {peer["name"]: peer["digest"] for peer in peers},
        "warnings": [],
        "run_dir": str(out),
    }


class Paces:
    """How long peers took from one settled round to the next, by the rendezvous' tape."""

    def __init__(self) -> None:
        self.longest_s = 0.0  # between two rounds that one process settled
        self.longest_wait_s = 0.0
        self.steps: list[float] = []
        self._last: dict[str, tuple[str, float]] = {}  # peer -> incarnation, when
        self._incarnations: dict[str, str] = {}

    def take(self, record: Record) -> None:
        """Take the next record of the rendezvous."""
        match record.event:
            case Received(sender=sender, message=g.Enrol(incarnation=incarnation)):
                self._incarnations[sender] = incarnation
            case Received(sender=sender, message=g.Report() as report) if report.fate != "late":
                incarnation = self._incarnations.get(sender, "")
                before, at_s = self._last.get(sender, ("", 0.0))
                if before == incarnation:
                    self.longest_s = max(self.longest_s, record.t - at_s)
                self._last[sender] = incarnation, record.t
                self.longest_wait_s = max(self.longest_wait_s, report.wait_s)
                self.steps.append(report.step_s)


def thin_shares(per_learner: dict[str, dict[str, int]]) -> list[str]:
    """Return a warning for each learner less than half of whose tokens were merged (section 3)."""
    return [
        f"{name}: {fates['merged'] / fates['consumed']:.0%} of its tokens were merged: it is slow beside "
        "the others; give it a smaller data.batch"
        for name, fates in per_learner.items()
        if fates["consumed"] and fates["merged"] < THIN_SHARE * fates["consumed"]
    ]


def records_of(out: Path, center: str) -> Iterator[Record]:
    """Yield what the run's syncers, or its rendezvous, recorded."""
    return (record for file in workers(out) if file.worker == center for record in read(file.path))


def read_facts(out: Path, center: str) -> dict[str, Any]:
    """Return what the run's syncer or rendezvous left when it ended."""
    path = out / f"{center}.json"
    if not path.exists():
        raise WorkerDied(
            f"the {center} left no result: see {out}/logs/{center}.log; --resume goes on from its checkpoint"
        )
    facts: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return facts


def consumed_by_data(out: Path, facts: dict[str, Any], fragments: int) -> int:
    """Return the tokens that the learners' data streams drew, once per fragment, by their journals.

    A learner that died and never came back may have drawn more than it reported: that is added to its lost
    tokens.
    """
    drawn = 0
    tokens = facts.get("tokens", {})
    for path in sorted((out / "journal").glob("*.bin")):
        try:
            entry = read_journal(path)
        except DataError as error:
            log.warning("left out of the sum reason=%r", str(error))
            continue
        drawn += entry.position
        unseen = entry.position - facts.get("positions", {}).get(path.stem, 0)
        if unseen > 0 and path.stem in tokens.get("tail_unknown", {}):
            _add_lost(tokens, path.stem, unseen)
    return drawn * fragments


def _add_lost(tokens: dict[str, Any], worker: str, tail: int) -> None:
    """A dead learner drew `tail` tokens after its last report: they are lost, on every fragment."""
    tokens["tail_unknown"].pop(worker)
    for row in tokens["per_fragment"]:
        row["lost"] += tail
    share = tail * len(tokens["per_fragment"])
    tokens["lost"] += share
    tokens["per_learner"][worker]["lost"] += share
    tokens["per_learner"][worker]["consumed"] += share


def closes(summary: dict[str, Any]) -> bool:
    """Return whether every token that was drawn has a fate."""
    tokens = summary["tokens"]
    return bool(tokens["consumed"] == sum(count for fate, count in tokens.items() if fate != "consumed"))
