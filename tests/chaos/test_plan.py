"""Fault plans are values: read with clear refusals, drawn from nothing but their seed, played in order."""

import re
from pathlib import Path

import pytest

from archipel.chaos.plan import Fault, Plan, Weather, draw, load, play
from archipel.errors import ConfigError


class Notes:
    """A target that writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def __getattr__(self, name: str):
        return lambda *arguments: self.asked.append((name, *arguments))


def write(folder: Path, text: str) -> Path:
    path = folder / "storm.toml"
    path.write_text(text)
    return path


def test_a_plan_is_sorted_by_time(tmp_path: Path) -> None:
    text = (
        '[[fault]]\nkind="kill"\nworker="a"\nat_s=5\n[[fault]]\nkind="freeze"\nworker="b"\nat_s=1\nfor_s=2\n'
    )
    assert [fault.worker for fault in load(write(tmp_path, text)).fault] == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[fault]]\nkind="burn"\nworker="a"\nat_s=1\n', "not a fault plan"),
        ('[[fault]]\nkind="kill"\nworker="a"\nat_s=-1\n', "must be finite and not negative"),
        ('[[fault]]\nkind="slow"\nworker="a"\nat_s=1\nfactor=0\n', "factor=0.0 must be positive"),
        ('[[fault]]\nkind="slow"\nworker="a"\nat_s=1\n', "factor=1.0 changes nothing: 3.0 makes a step"),
        ('[[fault]]\nkind="slow"\nworker="syncer"\nat_s=1\nfactor=2\n', "a syncer can be killed or stopped"),
        ('[[fault]]\nkind="kill"\nworker="a"\nat_s=1\ncolour="red"\n', "colour"),
        ("[[fault\n", "not a fault plan"),
    ],
)
def test_a_broken_plan_is_refused_with_its_rule(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(write(tmp_path, text))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load("nowhere.toml")


def test_a_killed_learner_is_restarted_and_a_syncer_resumed() -> None:
    notes = Notes()
    play(
        Plan((Fault("kill", "a", 1.0, 2.0), Fault("stop", "syncer", 4.0, 1.0), Fault("kill", "b", 9.0))),
        notes,
    )
    ends = [("kill", "a", 1.0), ("restart", "a", 3.0), ("stop", "syncer", 4.0), ("resume_syncer", 5.0)]
    assert notes.asked == [*ends, ("kill", "b", 9.0)]


def test_drawing_is_a_function_of_its_arguments() -> None:
    weather = Weather(kill_s=50.0, slow_s=30.0, partition_s=40.0, syncer_kill_s=100.0)
    assert draw(7, ["a", "b"], 300.0, weather) == draw(7, ["a", "b"], 300.0, weather)
    assert draw(7, ["a", "b"], 300.0, weather) != draw(8, ["a", "b"], 300.0, weather)


def test_faults_come_as_often_as_the_weather_says() -> None:
    plan = draw(1, [f"w{i}" for i in range(50)], 10_000.0, Weather(kill_s=100.0, mean_for_s=10.0))
    expected = 50 * 10_000 / 110
    assert 0.95 * expected < len(plan.fault) < 1.05 * expected


def test_a_worker_that_is_down_does_not_go_down_again() -> None:
    plan = draw(3, ["a"], 1_000.0, Weather(kill_s=5.0, mean_for_s=10.0))
    for first, second in zip(plan.fault, plan.fault[1:], strict=False):
        assert first.until_s <= second.at_s


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_bytes(b"\x80\x81")
    with pytest.raises(ConfigError, match="is not a fault plan: byte 0 is no UTF-8 text"):
        load(tmp_path / "faults.toml")
