"""The figures of a run, from its tapes alone: goodput, uptime, participation, staleness, grace, tokens.

One code path for live runs and simulated ones. What the syncer counted (tokens by fate, rounds) comes from
its own machine, which decides again along its tape. What learners did comes from their own tapes; of a
learner whose tape is elsewhere (another machine's folder) from what it reported to the syncer.

* goodput: of the learners' time, the share they spent in inner steps that were completed. A learner's time
  runs from its first record to the run's end, or to its goodbye if it left for good; being dead, cut off from
  a start, waiting and standing still are in it. `pace` says when a step stood still.
* uptime: of the time from the first learner's first record to the run's end, the share in which at least one
  learner was in a step that was completed.
* staleness: of every push that was merged, `versions` is how many versions of its fragment were merged
  between the one its outer gradient is relative to and the one it went into; `age_ticks` how many ticks old
  that base was when the result was published (H and a little in a calm run); `flight_ticks` how many ticks
  closed between the pull and the publication, at most the overlap unless something was slow.
* a death: a process that did not end in order, and after which another of the same name began, or nothing
  came for three step times up to the run's end.

Invariants: memory does not grow with the run; the sums are the ledger's.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TapeError
from ..protocol import messages as m
from ..protocol.gossip import RENDEZVOUS
from ..protocol.messages import SYNCER
from ..protocol.quorum import lower_median
from ..tape.record import Record
from .collect import QUIET_S_MIN, Round, Series
from .gossip import Gossip
from .merges import Grace, Staleness
from .pace import STALLED, Cover, Pace, Sample
from .reading import Loss, Process, Reading, losses

DEATHS_SHOWN = 256  # the newest


@dataclass
class Death:
    """One death of a learner's process. Times are the hosts'."""

    worker: str
    died_s: float
    back_s: float | None = None  # first step of the process after it
    merged_s: float | None = None  # first round with it after that


class Figures:
    """Fed all records of a run by time, it has the run's figures in `table`."""

    def __init__(self, reading: Reading) -> None:
        self.series = Series()
        self.paces: dict[str, Pace] = {}
        self.cover = Cover()
        self.staleness = Staleness()
        self.grace = Grace()
        self.gossip = Gossip()
        self.participants: Counter[int] = Counter()  # learners in a round -> rounds
        self.round_s = Sample()
        self.deaths: deque[Death] = deque(maxlen=DEATHS_SHOWN)
        self.died: Counter[str] = Counter()
        self.cuts: Counter[str] = Counter()  # channels lost, as learners saw it
        self.syncer_absent_s = 0.0
        self.started_s: float | None = None  # the syncer's first record, or anybody's without it
        self.end_s = 0.0
        self.reading = reading
        self._own = reading.own_tape
        self._current: dict[str, Process] = {}
        self._reported: dict[str, tuple[str, int, int]] = {}  # of learners without a tape: life, step, tokens
        self._recovering: dict[str, Death] = {}
        self._parting = False

    def take(self, process: Process, record: Record) -> None:
        """Take the next record of a run."""
        worker = process.worker
        if self._current.get(worker) is not process:
            self._begin(process, record)
        if worker == SYNCER:
            self._syncer(record)
        elif worker == RENDEZVOUS:
            self.gossip.rendezvous(record)
        elif process.learns:
            self._learner(process, record)
        if worker in (SYNCER, RENDEZVOUS) or process.learns:
            self.started_s = record.t if self.started_s is None else self.started_s
            self.end_s = max(self.end_s, record.t)

    def _begin(self, process: Process, record: Record) -> None:
        """A process's first record."""
        before = self._current.get(process.worker)
        self._current[process.worker] = process
        if process.worker == SYNCER:
            assert process.header is not None
            self.series.meter.quorum = process.header.settings.get("sync", {}).get("quorum", 1)
            self.series.mirror(process.header)
            self.staleness.restart()
            self._parting = False
            if before is not None:
                self.syncer_absent_s += max(0.0, record.t - (before.last_s or record.t))
        elif process.worker == RENDEZVOUS and process.header is not None:
            self.gossip.begin(process.header)
        elif process.learns:
            if before is not None and not before.ended:
                self._died(process.worker, before.last_s or record.t)
            self._pace(process.worker, record.t).begins(record.t)
            if process.header is not None and process.header.role == "peer":
                self.gossip.peer_begins(process.worker, process.header)

    def _pace(self, worker: str, now: float) -> Pace:
        return self.paces.setdefault(worker, Pace(self.cover, now, now))

    def _died(self, worker: str, at: float) -> None:
        death = Death(worker, at)
        self.died[worker] += 1
        self.deaths.append(death)
        self._recovering[worker] = death
        self.gossip.peer_died(worker)

    # ---- learners ----

    def _learner(self, process: Process, record: Record) -> None:
        pace = self.paces[process.worker]
        pace.heard(record.t)
        self.gossip.peer(process.worker, record)
        match record.event:
            case m.StepCompleted(tokens=tokens, step_s=step_s):
                self._stepped(process.worker, record.t)
                pace.step(record.t, step_s, tokens)
            case m.Disconnected(worker=worker) if worker == SYNCER and not self._parting:
                self.cuts[process.worker] += 1
        if process.ended:
            pace.ends()
            pace.parted_s = None if self._parting or _reached_the_end(process, record) else record.t

    def _stepped(self, worker: str, now: float) -> None:
        death = self._recovering.get(worker)
        if death is not None and death.back_s is None:
            death.back_s = now

    def _report(self, now: float, worker: str, progress: m.Progress) -> None:
        """A learner whose own tape is elsewhere says that it stepped."""
        learner = self.series.learners.get(worker)
        if learner is None or learner.role != "learner":
            return
        pace = self._pace(worker, now)
        life, step, tokens = self._reported.get(worker, (learner.incarnation, 0, 0))
        if life != learner.incarnation:
            if pace.parted_s is None:
                self._died(worker, pace.until_s)
            pace.begins(now - progress.step_s)
            step = tokens = 0
        self._stepped(worker, now)
        if progress.step > step and progress.tokens >= tokens:
            pace.step(now, progress.step_s, progress.tokens - tokens, progress.step - step)
            self._reported[worker] = learner.incarnation, progress.step, progress.tokens

    # ---- the syncer ----

    def _syncer(self, record: Record) -> None:
        merged = self.series.rounds
        self.staleness.take(record)
        try:
            self.series.take(record)
        except (AssertionError, KeyError, IndexError) as error:
            raise TapeError(
                f"record {record.i} of the syncer's tape: its machine cannot follow ({type(error).__name__}: "
                f"{error}); read it with the archipel that wrote it"
            ) from error
        self._parting = self.series.ending
        if self.series.rounds > merged:
            self._closed(self.series.recent[-1])
        match record.event:
            case m.Received(sender=sender, message=m.Progress() as progress) if sender not in self._own:
                self._report(record.t, sender, progress)
            case m.Received(sender=sender, message=m.Leave()) if sender in self.paces:
                if sender not in self._own and not self._parting:
                    self.paces[sender].parted_s = record.t
        for action in record.actions:
            if isinstance(action, m.Tally):
                self.grace.take(action)

    def _closed(self, round_: Round) -> None:
        self.participants[len(round_.weights)] += 1
        self.round_s.add(round_.merged_at - round_.started_at)
        self.staleness.closed(round_, self.series.tick)
        for worker in round_.weights:
            death = self._recovering.get(worker)
            if death is not None and death.back_s is not None:
                death.merged_s = round_.merged_at
                del self._recovering[worker]

    # ---- the end ----

    def end(self) -> None:
        """All records were taken: who was silent to the end is dead."""
        for worker, pace in self.paces.items():
            pace.ends()
            process = self._current.get(worker)
            ended = process.ended if process is not None else pace.parted_s is not None or self._parting
            patience_s = max(STALLED * (pace.step_times.median or 0.0), QUIET_S_MIN)
            if not ended and self.end_s - pace.until_s > patience_s:
                self._died(worker, pace.until_s)

    @property
    def since_s(self) -> float:
        """The first learner's first record; the run's start where no learner came."""
        return min((pace.since_s for pace in self.paces.values()), default=self.started_s or 0.0)

    def goodput(self, workers: list[str] | None = None) -> float | None:
        """Return the share of these learners' time, or all learners', that they were in completed steps."""
        paces = [self.paces[name] for name in (workers if workers is not None else self.paces)]
        time_s = sum(pace.time_s(self.end_s) for pace in paces)
        return sum(pace.stepping_s for pace in paces) / time_s if time_s > 0 else None

    @property
    def uptime(self) -> float | None:
        """Share of the run in which any learner was in a completed step."""
        time_s = self.end_s - self.since_s
        return self.cover.total_s / time_s if time_s > 0 and self.paces else None

    @property
    def step_s(self) -> float | None:
        """Lower median over learners of each one's median step."""
        medians = [pace.step_times.median for pace in self.paces.values()]
        return lower_median([value for value in medians if value is not None])

    @property
    def fates(self) -> dict[str, Any]:
        """The ledger of the syncer or of the rendezvous: tokens by fate."""
        return self.series.fates or self.gossip.fates

    def table(self, loss: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the figures as plain data; `figures_of` describes the keys."""
        series, step_s = self.series, self.step_s
        run_s = self.end_s - (self.started_s or 0.0)
        finished, tokens = series.finished, self.fates
        rounds = series.rounds if series.machine is None else series.machine.rounds_merged
        arrived = tokens.get("merged", 0) + tokens.get("late", 0)
        return {
            "complete": finished.complete if finished is not None else self.gossip.complete,
            "run_s": round(run_s, 6),
            "ticks": series.tick,
            "rounds": rounds or self.gossip.rounds,
            "rounds_redone": series.rounds - rounds,
            "abandoned": series.abandoned,
            "rejected": series.rejected,
            "goodput": _rounded(self.goodput()),
            "uptime": _rounded(self.uptime),
            "time": self._time(),
            "step_s": _rounded(step_s),
            "rounds_per_step": self._rounds_per_step(),
            "participants": self._participants(),
            "grace": self.grace.table(),
            "staleness": self.staleness.table(),
            "round_s": self.round_s.table(),
            "merged_share": _share(arrived, tokens.get("consumed")),
            "tokens": {key: value for key, value in tokens.items() if isinstance(value, int)},
            "learners": {name: self._of_learner(name) for name in sorted(self.paces)},
            "pauses": self._pauses(),
            "bytes": self._bytes(),
            "gossip": self.gossip.table(),
            **self._faults(),
            "loss": loss,
            "damaged": [each.damage for each in self.reading.processes if each.damage],
        }

    def _time(self) -> dict[str, float]:
        paces = self.paces.values()
        spent = {
            "stepping_s": sum(pace.stepping_s for pace in paces),
            "stood_still_s": sum(pace.stood_still_s for pace in paces),
            "absent_s": sum(self._absent_s(name) for name in self.paces),
        }
        learners_s = sum(pace.time_s(self.end_s) for pace in paces)
        spent = {"learners_s": learners_s, **spent, "rest_s": learners_s - sum(spent.values())}
        return {name: round(value, 6) for name, value in spent.items()}

    def _absent_s(self, worker: str) -> float:
        pace = self.paces[worker]
        last = self._recovering.get(worker)
        dead = last is not None and last.back_s is None and last.died_s == pace.until_s
        return pace.lost_s(self.end_s, dead=dead)

    def _rounds_per_step(self) -> float | None:
        time_s = self.end_s - self.since_s
        return round(self.series.tick * self.step_s / time_s, 4) if self.step_s and time_s > 0 else None

    def _participants(self) -> dict[str, Any] | None:
        rounds = self.participants.total()
        if not rounds:
            return None
        mean = sum(learners * count for learners, count in self.participants.items()) / rounds
        return {
            "mean": round(mean, 4),
            "rounds": {str(learners): self.participants[learners] for learners in sorted(self.participants)},
        }

    def _of_learner(self, name: str) -> dict[str, Any]:
        pace, learner = self.paces[name], self.series.learners.get(name)
        fates = self.fates.get("per_learner", {}).get(name)
        share = self.series.merged_share(learner) if learner else None
        if fates and share is None and fates["consumed"]:
            share = (fates["merged"] + fates.get("late", 0)) / fates["consumed"]
        return {
            "goodput": _rounded(self.goodput([name])),
            "steps": pace.steps,
            "tokens": pace.tokens,
            "step_s": _rounded(pace.step_times.median),
            "stood_still_s": _rounded(pace.stood_still_s),
            "absent_s": _rounded(self._absent_s(name)),
            "rounds": learner.rounds if learner else self.gossip.settled[name],
            "merged_share": _rounded(share),
            "fates": fates,
            "deaths": self.died[name],
            "cuts": self.cuts[name] if name in self._own else None,
            "own_tape": name in self._own,
        }

    def _pauses(self) -> dict[str, Any]:
        pause = self.series.pause
        return {
            "longest_s": round(pause.longest_pause_s, 6),
            "at_s": round(pause.at_s - (self.started_s or 0.0), 6) if pause.longest_pause_s else None,
            "step_s": _rounded(pause.step_s),
        }

    def _bytes(self) -> dict[str, int | None] | None:
        sent, received = self.series.bytes_sent, self.series.bytes_received
        return None if sent is None and received is None else {"sent": sent, "received": received}

    def _faults(self) -> dict[str, Any]:
        zero = self.started_s or 0.0
        shown = [
            {
                "worker": death.worker,
                "at_s": round(death.died_s - zero, 6),
                "back_s": _rounded(_after(death.back_s, death.died_s)),
                "merged_s": _rounded(_after(death.merged_s, death.died_s)),
            }
            for death in self.deaths
        ]
        back = [each["back_s"] for each in shown if each["back_s"] is not None]
        return {
            "deaths": self.died.total(),
            "recovered": {"count": len(back), "mean_s": _rounded(sum(back) / len(back))} if back else None,
            "death": shown,
            "cuts": self.cuts.total(),
            "syncer_deaths": max(len(self.reading.syncers) - 1, 0),
            "syncer_absent_s": _rounded(self.syncer_absent_s),
        }


def _reached_the_end(process: Process, record: Record) -> bool:
    """Whether a peer finished with the run; a learner's last word does not tell."""
    complete = any(isinstance(action, m.Finish) and action.complete for action in record.actions)
    return complete and process.header is not None and process.header.role == "peer"


def _after(value: float | None, since: float) -> float | None:
    return None if value is None else value - since


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _share(part: int, whole: int | None) -> float | None:
    return round(part / whole, 6) if whole else None


def read(run_dir: str | Path) -> Figures:
    """Return the figures of a run, all its tapes read. TapeError where there are none."""
    reading = Reading(run_dir)
    figures = Figures(reading)
    for process, record in reading:
        figures.take(process, record)
    figures.end()
    return figures


def figures_of(run_dir: str | Path, targets: Sequence[float] = ()) -> dict[str, Any]:
    """Return the figures of a run as plain data. Times are seconds, shares are of one; None: not known.

    complete; run_s (from the syncer's first record to the end); ticks, rounds (merges that count),
    rounds_redone (after a restart of the syncer), abandoned, rejected (pushes). goodput, uptime. time: what
    goodput is of: learners_s = stepping_s + stood_still_s + absent_s (no process) + rest_s (joining, waiting,
    steps that were never completed). step_s (lower median), rounds_per_step (ticks per such a step).
    participants: mean, rounds (number of learners -> rounds with so many). grace: waited_s (count, mean,
    median, greatest, total), window_mean_s, windows_used_up (ticks). staleness: versions (mean, greatest,
    pushes by age), age_ticks, flight_ticks. round_s: from first pull to publication. merged_share; tokens: by
    fate, summed over fragments. learners: each one's goodput, steps, tokens, step_s, stood_still_s, absent_s,
    rounds, merged_share, fates, deaths, cuts (lost channels), own_tape. pauses: longest_s without a merge
    while a quorum was live, at_s, step_s. bytes: sent, received by the syncer (live runs). gossip: partners
    (mean, exchanges), round_s, wait_s, transfer_s of peers' rounds; late tokens count as merged. deaths,
    recovered (count, mean_s to the first step), death (worker, at_s, back_s and merged_s after it), cuts,
    syncer_deaths, syncer_absent_s. loss: `loss_table`. damaged: what could not be read.
    """
    figures = read(run_dir)
    return figures.table(loss_table(run_dir, figures.started_s or 0.0, targets))


def loss_table(run_dir: str | Path, zero_s: float, targets: Sequence[float] = ()) -> dict[str, Any] | None:
    """Return what the validations of a run say; None where there are none.

    evaluations, first, last, at_s (of the last), best, best_at_s; to_s: for each target the time of the first
    evaluation that is not above it, None if there is none. Times from `zero_s`.
    """
    first: Loss | None = None
    last: Loss | None = None
    best: Loss | None = None
    count = 0
    times: dict[float, float | None] = {target: None for target in targets}
    for each in losses(run_dir):
        first, last, count = first or each, each, count + 1
        best = each if best is None or each.loss < best.loss else best
        for target, at_s in times.items():
            if at_s is None and each.loss <= target:
                times[target] = round(max(0.0, each.time - zero_s), 6)
    if first is None or last is None or best is None:
        return None
    return {
        "evaluations": count,
        "first": first.loss,
        "last": last.loss,
        "at_s": round(max(0.0, last.time - zero_s), 6),
        "best": best.loss,
        "best_at_s": round(max(0.0, best.time - zero_s), 6),
        "to_s": {f"{target:g}": at_s for target, at_s in times.items()},
    }
