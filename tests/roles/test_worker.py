"""What a learner adopts from the run, what stays its own, and what it refuses to train on."""

import json
import signal
import types
from pathlib import Path

import msgspec
import pytest
import torch

from archipel import config as configuration
from archipel.errors import ConfigError, DataError
from archipel.roles.learner import Learner
from archipel.roles.worker import Metrics, StopFlag, agreed, correct, device_of, load_data, noted
from archipel.train import corpus, data


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text("a line of text\n" * 500)
    corpus.prepare(str(folder / "text.txt"), folder / "tokens.bin")
    return folder / "tokens.bin"


def test_settings_of_the_run_are_adopted_and_what_is_local_stays() -> None:
    run = configuration.load(
        None,
        [
            "sync.steps=77",
            "model.width=128",
            "optimizer.lr=0.5",
            "data.sequence=64",
            "run.seed=3",
            "data.path=/there",
        ],
    )
    ours = configuration.load(
        None, ["data.batch=2", "data.path=/here", "optimizer.accumulate=2", "run.out=mine", "sync.steps=5"]
    )
    found = agreed(ours, configuration.settings_of(run, data_digest="x"))
    assert (found.sync.steps, found.model.width, found.optimizer.lr, found.data.sequence) == (
        77,
        128,
        0.5,
        64,
    )
    assert (found.data.batch, found.data.path, found.optimizer.accumulate, found.run.out) == (
        2,
        "/here",
        2,
        "mine",
    )
    without = agreed(
        msgspec.structs.replace(ours, data=configuration.Config().data), configuration.settings_of(run)
    )
    assert without.data.path == "/there"


def test_other_data_than_the_runs_is_refused_with_both_digests(tokens: Path) -> None:
    config = configuration.load(None, [f"data.path={tokens}", "model.vocabulary=256"])
    digest = corpus.open_tokens(tokens).header.digest
    assert load_data(config, {"data_digest": digest}).digest == digest
    assert load_data(config, {}).digest == digest
    with pytest.raises(DataError, match=f"{digest}, the run's abc: .*data.path"):
        load_data(config, {"data_digest": "abc"})


def test_data_with_more_entries_than_the_model_is_refused(tokens: Path) -> None:
    config = configuration.load(None, [f"data.path={tokens}", "model.vocabulary=100"])
    with pytest.raises(DataError, match="256 entries, the run's model 100"):
        load_data(config, {})


def test_first_signal_asks_to_stop_and_the_second_acts_as_ever() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = StopFlag()
        assert stop() == ""
        signal.raise_signal(signal.SIGINT)
        assert stop() == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_metrics_are_whole_lines_at_most_one_a_second(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", types.SimpleNamespace(name="a", tick=3))
    for step in range(100):
        metrics.note(step, 1.5, 10)
    metrics.write(kind="validation", loss=2.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["train", "validation"]
    assert lines[0]["worker"] == "a" and lines[0]["tick"] == 3


def test_learner_without_a_name_gets_one_of_its_own(tmp_path: Path) -> None:
    names = {Learner(None, None, syncer="h:1", out=tmp_path).name for _ in range(3)}  # type: ignore[arg-type]
    assert len(names) == 3


def test_a_journal_tells_where_the_data_stopped(tmp_path: Path) -> None:
    assert noted(tmp_path / "j") == []
    data.Journal(tmp_path / "j", 3, 900)
    assert noted(tmp_path / "j") == ["--shard", "3", "--position", "900"]


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 24], ids=["empty", "short", "negative"])
def test_an_unusable_journal_is_named_and_bars_nobody(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "j").write_bytes(content)
    assert noted(tmp_path / "j") == []
    assert str(tmp_path / "j") in caplog.text
    correct(tmp_path / "j", 0, 40)
    assert noted(tmp_path / "j") == ["--shard", "0", "--position", "40"]


def test_a_journal_is_corrected_before_any_data_is_read(tmp_path: Path) -> None:
    data.Journal(tmp_path / "j", 3, 900)  # of an older run
    correct(tmp_path / "j", 0, 40)
    assert data.read_journal(tmp_path / "j") == (0, 40, 0)


def test_a_worker_that_keeps_no_journal_is_not_given_one(tmp_path: Path) -> None:
    correct(tmp_path / "j", 0, 40)
    assert not (tmp_path / "j").exists()


def test_a_device_that_is_not_there_is_refused() -> None:
    assert device_of("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no GPU"):
            device_of("cuda:3")


@pytest.mark.gpu
def test_gpus_are_dealt_out_in_turn() -> None:
    assert device_of(f"cuda:{torch.cuda.device_count()}") == torch.device("cuda", 0)
