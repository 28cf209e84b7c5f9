"""Runs in virtual time whose decisions are written down, line by line: scenarios/*.txt.

A script names options, learners and faults, then `---`, then what the syncer decided: ticks with those who
were counted, rounds with those whose pushes were merged, in fold order, and what it told those who watch. The
transcript is compared exactly. If a decision changes on purpose, rewrite them all and read the difference:

    ARCHIPEL_REWRITE_SCENARIOS=1 pytest tests/protocol/test_scenarios.py
"""

import ast
import os
from pathlib import Path
from typing import Any

import pytest

from archipel.protocol import messages as m
from archipel.protocol.schedule import SyncOptions
from archipel.sim.engine import Engine
from archipel.sim.network import LinkOptions
from archipel.sim.ports import EngineOptions, LearnerOptions
from archipel.sim.witness import Witness

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
LINK = LinkOptions.__struct_fields__


def value(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def options(words: list[str]) -> dict[str, Any]:
    return {key: value(text) for key, text in (word.split("=", 1) for word in words)}


def learner(words: list[str]) -> tuple[LearnerOptions, dict[str, Any]]:
    """Split a learner's words into its options and what `Engine.add` takes besides."""
    given = options(words)
    link = {key: given.pop(key) for key in LINK if key in given}
    extra = {key: given.pop(key) for key in ("at", "role") if key in given}
    return LearnerOptions(**given, link=LinkOptions(**link)), extra


class Script:
    """A parsed scenario: `engine` to run, `lines` of its transcript as they come."""

    def __init__(self, text: str) -> None:
        self.head, _, self.expected = text.partition("---\n")
        self.lines: list[str] = []
        self.show = {"ticks", "rounds", "notices"}
        self.until = 1e4
        rows = [line.split("#")[0].split() for line in self.head.splitlines()]
        given: dict[str, dict[str, Any]] = {"sync": {}, "engine": {}}
        for row in rows:
            if row and row[0] in given:
                given[row[0]] |= options(row[1:])
        self.sync = SyncOptions(**given["sync"])
        self.witness = Witness(self.sync)
        self.engine = Engine(self.sync, EngineOptions(**given["engine"]), on_record=self.record)
        for row in rows:
            if row and row[0] not in given:
                getattr(self, f"do_{row[0]}")(row[1:])

    def do_learner(self, words: list[str]) -> None:
        made, extra = learner(words[1:])
        self.engine.add(words[0], made, **extra)

    def do_show(self, words: list[str]) -> None:
        self.show = set(words)

    def do_until(self, words: list[str]) -> None:
        self.until = float(words[0])

    def do_fault(self, words: list[str]) -> None:
        at, what, *rest = words
        name, positional = (rest[0], rest[1:]) if rest else ("", [])
        named = options([word for word in positional if "=" in word])
        plain = [value(word) for word in positional if "=" not in word]
        getattr(self.engine, what)(*([name] if name else []), *plain, at=float(at), **named)

    def record(self, worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        self.witness.record(worker, now, event, actions)
        if worker != m.SYNCER:
            return
        if isinstance(event, m.Merged) and "rounds" in self.show:
            merged = self.witness.merged[-1]
            self.say(now, f"merged {event.fragment} v{event.version}: {' '.join(merged[3])}")
        for action in actions:
            match action:
                case m.Tally() if "ticks" in self.show:
                    waited = f" grace {action.used_s:.2f} of {action.window_s:.2f}" if action.window_s else ""
                    self.say(now, f"tick {action.tick}: {' '.join(action.workers)}{waited}")
                case m.Notice(text=text) if "notices" in self.show:
                    self.say(now, f"says {text}")
                case m.Finish(reason=reason, complete=complete):
                    self.say(now, f"finish {reason} complete={complete}")

    def say(self, now: float, text: str) -> None:
        self.lines.append(f"{now:8.2f}  {text}")

    def run(self) -> str:
        self.engine.run(until=self.until)
        table = self.engine.syncer.ledger.table()
        assert self.engine.syncer.ledger.closes()
        fates = ("consumed", "merged", "overwritten", "absent", "lost", "unmerged")
        self.lines.append(" ".join(["tokens", *(f"{fate}={table[fate]}" for fate in fates)]))
        return "\n".join(self.lines) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_transcript_is_as_written(path: Path) -> None:
    script = Script(path.read_text())
    transcript = script.run()
    if os.environ.get("ARCHIPEL_REWRITE_SCENARIOS"):
        path.write_text(f"{script.head}---\n{transcript}")
    else:
        assert transcript == script.expected


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 10
