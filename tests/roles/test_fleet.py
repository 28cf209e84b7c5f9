"""A run on one machine, summed up from what its processes left."""

import json
from pathlib import Path

from archipel.roles.summary import Losses, closes, consumed_by_data, thin_shares
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
