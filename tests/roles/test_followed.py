"""What a replay's ports are made from: what each process's tape says of it."""

from typing import Any

import msgspec
import pytest

from archipel.config import Config, load, settings_of
from archipel.errors import DataError, TapeError
from archipel.protocol import messages as m
from archipel.roles.followed import FollowedLearners, FollowedSyncer
from archipel.roles.local import LocalLearner
from archipel.roles.syncer import initial_weights
from archipel.tape.follow import Start
from archipel.tape.record import Header

SMALL = [
    "sync.fragments=2", "sync.interval_steps=4", "model.width=16", "model.layers=1", "model.heads=2",
    "data.sequence=16", "data.batch=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def config() -> Config:
    """Return a run's configuration, its model fitted to the data."""
    loaded = load(None, SMALL)
    return msgspec.structs.replace(loaded, model=initial_weights(loaded, "")[2])


def made(config: Config, overrides: list[str], environment: dict[str, Any], **settings: Any) -> LocalLearner:
    """Return the port of a learner that said this of itself."""
    schema, _, _ = initial_weights(config, "")
    prepare = m.Prepare(settings_of(config, **settings), 0, 0)
    return FollowedLearners(overrides).make("a.1", prepare, m.Prepared(schema, environment))


def test_micro_batches_are_those_of_the_learners_host(config: Config) -> None:
    with pytest.raises(DataError, match=r"optimizer\.accumulate=5 exceeds"):
        made(config, [], {"accumulate": 5}).step(1, 0)


def test_a_change_of_micro_batches_is_of_all_learners(config: Config) -> None:
    tokens, _ = made(config, ["optimizer.accumulate=2"], {"accumulate": 5}).step(1, 0)
    assert tokens == 64


def test_a_model_of_a_users_own_is_refused(config: Config) -> None:
    prepared = m.Prepared((m.TensorSpec("theirs", (3,)),))
    with pytest.raises(TapeError, match="trained another model"):
        FollowedLearners([]).make("a.1", m.Prepare(settings_of(config), 0, 0), prepared)


def test_other_data_than_the_runs_is_refused_unless_it_is_the_change(config: Config) -> None:
    with pytest.raises(TapeError, match=r"--set data\.path=FILE"):
        made(config, [], {}, data_digest="another")
    assert made(config, ["data.seed=3"], {}, data_digest="another").rows(32) == 2


def test_other_initial_weights_are_the_first_difference(config: Config) -> None:
    header = Header("r", m.SYNCER, m.SYNCER, "1", 0.0, settings_of(config), {"weights": "another"})
    port = FollowedSyncer((Start(header),), [])
    port.start(0)
    assert port.at.first is not None and port.at.first.version == 0
    assert port.at.first.replayed == port.outer.digest()
