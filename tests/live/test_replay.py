"""Replays of a live run through a storm: bit for bit, also when the replay itself is killed on its way."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from archipel.protocol import messages as m
from archipel.tape.follow import starts
from archipel.tape.tape import read, workers

from .conftest import Rig

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def stormy(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Any:
    """A run whose syncer and a learner were killed, and whose other learner has a batch of its own."""
    rig = Rig(tmp_path_factory.mktemp("stormy"), tokens)
    # Nobody runs ahead of the other or of a missing syncer: all that is stepped is stepped again in replay.
    pace = {"quorum": 2, "quorum_live": True, "max_lead_steps": 8}
    rig.write(sync={"checkpoint_rounds": 4, "silence_s": 4.0, "heartbeat_s": 0.5, **pace})
    syncer, victim = rig.syncer(), rig.learner(0)
    rig.learner(1, "--set", "data.batch=24", "--set", "optimizer.accumulate=3")
    rig.wait(lambda: rig.folds("learner-0") >= 2 and rig.folds("learner-1") >= 2, "both take part")
    rig.going(9)
    syncer.signal(signal.SIGKILL)
    syncer.exit_code()
    syncer = rig.syncer("--resume", name="syncer-2")
    rig.going(6)
    victim.signal(signal.SIGKILL)
    victim.exit_code()
    rig.going(4)
    rig.learner(0)
    folds = rig.folds("learner-0")
    rig.wait(lambda: rig.folds("learner-0") >= folds + 3, "the victim is back")
    syncer.signal(signal.SIGTERM)
    syncer.exit_code()
    yield rig
    rig.end()


def replayed(rig: Rig, *argv: str) -> dict[str, Any]:
    """Run `archipel replay --json` to its end; return what it says."""
    worker = rig.archipel(f"replay-{len(rig.workers)}", "replay", str(rig.out), "--json", *argv)
    worker.exit_code(200.0)
    return json.loads(worker.output.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.timeout(400)
def test_a_killed_syncer_a_killed_learner_and_a_batch_of_ones_own_replay_bit_for_bit(stormy: Rig) -> None:
    begun = starts(stormy.out)
    assert len(begun) == 2 and sum(begun[1].versions) > 0, "it was resumed from a checkpoint on its way"
    steps = {
        record.event.tokens
        for file in workers(stormy.out)
        for record in read(file.path)
        if isinstance(record.event, m.StepCompleted)
    }
    assert steps == {64 * 32, 24 * 32}
    found = replayed(stormy)
    assert found["equal"] and found["conditions"] == [] and found["first_difference"] is None, found
    assert found["digest"] == found["recorded_digest"] == stormy.facts()["digest"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_replay_that_is_killed_and_interrupted_goes_on_to_the_same_bits(stormy: Rig) -> None:
    kept = stormy.out / "replay"
    command = ["replay", str(stormy.out), "--save-every", "0.1"]
    doomed = stormy.archipel("killed", *command)
    stormy.wait(lambda: list(kept.glob("step-*")), "it has kept something", alive=doomed)
    doomed.signal(signal.SIGKILL)
    doomed.exit_code()
    before = newest(kept)
    interrupted = stormy.archipel("interrupted", *command, "--resume")
    stormy.wait(lambda: newest(kept) > before, "it has gone on", alive=interrupted)
    interrupted.signal(signal.SIGINT)
    assert interrupted.exit_code() == 1
    assert f"it goes on from {kept} with --resume" in interrupted.output
    found = replayed(stormy, "--resume")
    assert found["resumed_at"] > before > 0 and not kept.exists()
    assert found["equal"] and found["digest"] == stormy.facts()["digest"], found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_replay_of_gossip_that_is_killed_and_interrupted_goes_on_to_the_same_bits(rig: Rig) -> None:
    rig.write(
        gossip={"peers": 3, "rounds": 40, "local_steps": 4, "checkpoint_rounds": 8},
        data={"batch": 8},
        sim={"compute": "tensors"},
    )
    storm = ["--set", "sim.weather={kill_s=60.0, mean_for_s=4.0}", "--out", str(rig.out)]
    simulated = rig.archipel("simulated", "simulate", str(rig.config), *storm)
    assert simulated.exit_code() == 0, simulated.output
    whole = replayed(rig)
    kept = rig.folder / "kept"
    command = ["replay", str(rig.out), "--work", str(kept), "--save-every", "0"]
    doomed = rig.archipel("killed", *command)
    rig.wait(lambda: newest(kept) > 10, "it has kept something", alive=doomed)
    doomed.signal(signal.SIGKILL)
    doomed.exit_code()
    before = newest(kept)
    interrupted = rig.archipel("interrupted", *command, "--resume")
    rig.wait(lambda: newest(kept) > before, "it has gone on", alive=interrupted)
    interrupted.signal(signal.SIGTERM)
    assert interrupted.exit_code() == 1
    assert f"it goes on from {kept} with --resume" in interrupted.output
    found = replayed(rig, "--work", str(kept), "--resume")
    assert found["resumed_at"] > before > 0 and not kept.exists()
    own = {"resumed_at": 0, "seconds": 0}
    assert found["equal"] and {**found, **own} == {**whole, **own}


def newest(folder: Path) -> int:
    """Return how many records the newest state in a folder has taken; 0 if there is none."""
    return max((int(path.name[5:]) for path in folder.glob("step-?????????")), default=0)
