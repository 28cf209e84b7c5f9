"""A run on one machine, summed up from what its processes left."""

import json
from pathlib import Path

from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.roles.summary import Losses, Paces, closes, consumed_by_data, thin_shares
from archipel.tape.record import Record
from archipel.train.data import JOURNAL


def test_losses_are_read_as_they_grow_and_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = Losses(path)
    losses.poll()
    assert (losses.first, losses.last) == (None, None)

    def line(kind: str, loss: float) -> str:
        return json.dumps({"kind": kind, "loss": loss}, separators=(",", ":")) + "\n"

    path.write_text(line("validation", 5.0) + line("train", 9.0) + line("validation", 3.0)[:12])
    losses.poll()
    assert (losses.first, losses.last) == (5.0, 5.0)
    path.write_text(line("validation", 5.0) + line("train", 9.0) + line("validation", 3.0) + "torn\n")
    losses.poll()
    assert (losses.first, losses.last) == (5.0, 3.0)


def journal(out: Path, name: str, position: int) -> None:
    (out / "journal").mkdir(exist_ok=True)
    (out / "journal" / f"{name}.bin").write_bytes(JOURNAL.pack(0, position, 0))


def facts() -> dict:
    row = {"merged": 40, "overwritten": 0, "absent": 0, "lost": 5, "unmerged": 0}
    return {
        "positions": {"a": 20, "b": 25},
        "tokens": {
            "lost": 10,
            "per_fragment": [dict(row), dict(row)],
            "per_learner": {"a": {"consumed": 40, "lost": 0}, "b": {"consumed": 50, "lost": 10}},
            "tail_unknown": {"b": 1},
        },
    }


def test_tail_of_a_learner_that_never_came_back_is_lost_by_its_journal(tmp_path: Path) -> None:
    journal(tmp_path, "a", 20)
    journal(tmp_path, "b", 28)
    found = facts()
    assert consumed_by_data(tmp_path, found, 2) == 2 * 48
    tokens = found["tokens"]
    assert tokens["lost"] == 10 + 2 * 3 and tokens["tail_unknown"] == {}
    assert [row["lost"] for row in tokens["per_fragment"]] == [8, 8]
    assert tokens["per_learner"]["b"] == {"consumed": 56, "lost": 16}


def test_reported_tokens_are_not_counted_again(tmp_path: Path) -> None:
    journal(tmp_path, "a", 20)
    journal(tmp_path, "b", 25)
    found = facts()
    assert consumed_by_data(tmp_path, found, 2) == 90
    assert found["tokens"]["lost"] == 10


def test_sums_close_or_do_not() -> None:
    fates = {"merged": 1, "overwritten": 2, "absent": 3, "lost": 4, "unmerged": 5}
    assert closes({"tokens": {"consumed": 15, **fates}})
    assert not closes({"tokens": {"consumed": 16, **fates}})


def test_a_learner_that_kept_less_than_half_is_warned_of() -> None:
    fates = {
        "fast": {"consumed": 100, "merged": 90},
        "slow": {"consumed": 100, "merged": 31},
        "idle": {"consumed": 0},
    }
    (warning,) = thin_shares(fates)
    assert warning.startswith("slow: 31%") and "data.batch" in warning


def test_a_peers_longest_pause_is_within_one_process_and_late_words_end_none() -> None:
    paces = Paces()

    def hear(t: float, sender: str, message: m.Message) -> None:
        paces.take(Record(0, t, m.Received(sender, message)))  # type: ignore[arg-type]

    def report(number: int, fate: g.Fate = "merged") -> g.Report:
        return g.Report(number, 10, fate, 4, step_s=0.5, transfer_s=0.1, wait_s=0.25 * number)

    hear(0.0, "a", g.Enrol("run", "a1", "x"))
    hear(1.0, "a", report(0))
    hear(3.0, "a", report(1))
    hear(3.5, "a", report(0, "late"))
    hear(90.0, "a", g.Enrol("run", "a2", "x"))  # died and came back: that is no pause of a process
    hear(95.0, "a", report(7))
    hear(96.0, "a", report(8))
    assert (paces.longest_s, paces.longest_wait_s, paces.steps) == (2.0, 2.0, [0.5] * 4)
