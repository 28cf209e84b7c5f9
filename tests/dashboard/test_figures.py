"""Figures from tapes: they agree with the engine that made them, and with what one counts by head."""

import json
from pathlib import Path
from typing import Any

import pytest

from archipel import cli
from archipel.chaos.plan import Weather
from archipel.dashboard.figures import figures_of, loss_table
from archipel.protocol import messages as m
from archipel.protocol.gossip import GossipOptions
from archipel.protocol.schedule import SyncOptions
from archipel.sim import gossip_scenario
from archipel.sim.scenario import Outcome, Run, SimOptions, simulate
from archipel.tape.tape import Header, TapeWriter, tape_path

Script = list[tuple[float, m.Event, list[m.Action]]]
SYNC = SyncOptions(steps=100, learners=5, fragments=6, interval_steps=6, checkpoint_rounds=20)


def storm(folder: Path, **options: Any) -> Outcome:
    sim = SimOptions(speed_spread=0.2, jitter=0.1, **options)
    return simulate(Run(SYNC, sim, "storm", 3), folder=folder)


@pytest.fixture(scope="module")
def stormy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    folder = tmp_path_factory.mktemp("storm")
    weather = Weather(
        kill_s=60.0, freeze_s=150.0, slow_s=100.0, partition_s=100.0, syncer_kill_s=90.0, mean_for_s=8.0
    )
    return storm(folder, weather=weather), folder


# ---- agreement with the engine ----


def test_counts_of_a_storm_are_those_of_the_syncers_ledger(stormy: tuple[Outcome, Path]) -> None:
    outcome, folder = stormy
    figures, engine = figures_of(folder), outcome.figures()
    for key in ("complete", "ticks", "rounds", "tokens", "merged_share"):
        assert figures[key] == engine[key], key
    assert figures["participants"]["mean"] == engine["participants"]
    table = outcome.engine.syncer.ledger.table()
    assert {name: each["fates"] for name, each in figures["learners"].items()} == table["per_learner"]
    assert figures["rounds"] + figures["rounds_redone"] == len(outcome.witness.merged)


def test_the_fates_of_a_storms_tokens_add_up(stormy: tuple[Outcome, Path]) -> None:
    tokens = figures_of(stormy[1])["tokens"]
    assert tokens["consumed"] == sum(count for fate, count in tokens.items() if fate != "consumed") > 0


def test_times_of_a_storm_are_the_engines_but_for_steps_that_were_frozen(
    stormy: tuple[Outcome, Path],
) -> None:
    outcome, folder = stormy
    figures, engine = figures_of(folder), outcome.figures()
    assert figures["run_s"] == pytest.approx(engine["virtual_s"], abs=1e-5)
    assert figures["goodput"] == pytest.approx(engine["goodput"], abs=0.02)
    assert figures["uptime"] == pytest.approx(engine["uptime"], abs=0.02)
    assert figures["time"]["stood_still_s"] > 10
    assert figures["time"]["learners_s"] == pytest.approx(
        sum(value for name, value in figures["time"].items() if name != "learners_s"), abs=1e-5
    )


def test_every_death_of_a_storm_is_seen(stormy: tuple[Outcome, Path]) -> None:
    outcome, folder = stormy
    kills = [f for f in outcome.plan.fault if f.kind == "kill" and f.at_s < outcome.engine.now]
    figures = figures_of(folder)
    assert figures["deaths"] + figures["syncer_deaths"] == len(kills) > 5
    assert figures["syncer_deaths"] == sum(f.worker == m.SYNCER for f in kills) > 0
    assert figures["recovered"]["count"] > 0 and len(figures["death"]) == figures["deaths"]


def test_goodput_without_frozen_steps_is_the_engines(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        "\n".join(
            f'[[fault]]\nkind = "{kind}"\nworker = "{worker}"\nat_s = {at}\nfor_s = {length}\nfactor = 4.0'
            for kind, worker, at, length in [
                ("kill", "learner-0", 20.3, 15),
                ("slow", "learner-1", 10.1, 40),
                ("partition", "learner-2", 30.2, 20),
                ("kill", "syncer", 60.7, 5),
                ("kill", "learner-4", 70.4, 0),
            ]
        )
    )
    outcome = storm(tmp_path, faults=str(plan))
    figures, engine = figures_of(tmp_path), outcome.figures()
    assert figures["goodput"] == pytest.approx(engine["goodput"], abs=2e-6)
    assert figures["uptime"] == pytest.approx(engine["uptime"], abs=2e-6)
    assert figures["time"]["stood_still_s"] == 0
    assert figures["deaths"] == 2 and figures["syncer_deaths"] == 1
    assert figures["learners"]["learner-4"]["absent_s"] > 25
    assert figures["rounds_per_step"] == pytest.approx(engine["rounds_per_step"], rel=0.05)


def test_waiting_for_all_shows_as_lost_goodput(tmp_path: Path) -> None:
    waiting = SyncOptions(
        steps=40, learners=3, quorum=3, fragments=4, interval_steps=4, overlap_steps=1, max_lead_steps=1
    )
    outcome = simulate(Run(waiting, SimOptions(slow_learner=2.0)), folder=tmp_path)
    figures = figures_of(tmp_path)
    assert figures["goodput"] == pytest.approx(outcome.figures()["goodput"], abs=1e-5)
    assert figures["goodput"] < 0.8 and figures["participants"]["rounds"] == {"3": 40}


def test_a_gossip_runs_figures_are_those_of_its_rendezvous(tmp_path: Path) -> None:
    options = GossipOptions(peers=4, rounds=12, local_steps=10)
    weather = Weather(kill_s=200.0, partition_s=300.0, mean_for_s=10.0)
    sim = SimOptions(jitter=0.1, speed_spread=0.2, weather=weather)
    outcome = gossip_scenario.simulate(gossip_scenario.GossipRun(options, sim, seed=1), folder=tmp_path)
    figures, engine = figures_of(tmp_path), outcome.figures()
    for key in ("complete", "rounds", "tokens", "merged_share"):
        assert figures[key] == engine[key], key
    assert figures["goodput"] == pytest.approx(engine["goodput"], abs=0.01)
    settled = sum(peer["rounds"] for peer in figures["learners"].values())
    assert settled == sum(figures["gossip"]["partners"]["exchanges"].values()) == len(outcome.witness.mixed)
    assert figures["gossip"]["round_s"]["median"] > 10
    for path in (tmp_path / "tape").glob("rendezvous*"):
        path.unlink()
    alone = figures_of(tmp_path)  # as of a run whose members stand in a list
    differ = {fate for fate, count in figures["tokens"].items() if alone["tokens"][fate] != count}
    assert differ <= {"unmerged", "lost"}  # a tape knows the last step of a process; who lost it, not always
    assert alone["rounds"] == figures["rounds"] and alone["tokens"]["merged"] > 0


# ---- without the learners' tapes ----


def test_the_syncers_tape_alone_tells_nearly_the_same(stormy: tuple[Outcome, Path], tmp_path: Path) -> None:
    whole = figures_of(stormy[1])
    (tmp_path / "tape").mkdir()
    for path in (stormy[1] / "tape").glob("syncer*"):
        (tmp_path / "tape" / path.name).symlink_to(path)
    alone = figures_of(tmp_path)
    for key in ("ticks", "rounds", "tokens", "staleness", "grace", "participants", "syncer_deaths"):
        assert alone[key] == whole[key], key
    assert alone["goodput"] == pytest.approx(whole["goodput"], abs=0.06)
    assert abs(alone["deaths"] - whole["deaths"]) <= 3
    assert not any(learner["own_tape"] for learner in alone["learners"].values())


# ---- by head ----


def write(folder: Path, worker: str, incarnation: str, script: Script, role: str = "learner") -> TapeWriter:
    header = Header("run", worker, role, incarnation, script[0][0])
    writer = TapeWriter(tape_path(folder, worker, incarnation), header)
    for record in script:
        writer.write(*record)
    return writer


def steps(first: float, count: int) -> Script:
    return [(first + i, m.StepCompleted(i, 100, 1.0), []) for i in range(count)]


def test_a_learner_that_was_dead_for_a_while_is_told_by_its_tapes(tmp_path: Path) -> None:
    write(tmp_path, "learner-0", "a", [(100.0, m.Connected("syncer"), []), *steps(101.0, 10)])
    late = [(120.0, m.Connected("syncer"), []), *steps(121.0, 9)]
    write(tmp_path, "learner-0", "b", [*late, (130.0, m.StopRequested(), [m.Finish("done")])])
    figures = figures_of(tmp_path)
    assert figures["time"] == {
        "learners_s": 30.0,
        "stepping_s": 19.0,
        "stood_still_s": 0.0,
        "absent_s": 10.0,
        "rest_s": 1.0,
    }
    assert figures["goodput"] == figures["uptime"] == round(19 / 30, 6)
    assert figures["death"] == [{"worker": "learner-0", "at_s": 10.0, "back_s": 11.0, "merged_s": None}]


def test_a_learner_that_never_came_back_is_absent_to_the_end(tmp_path: Path) -> None:
    write(tmp_path, "learner-0", "a", steps(0.0, 11))
    write(tmp_path, "learner-1", "a", [*steps(0.0, 21), (20.0, m.StopRequested(), [m.Finish("done")])])
    figures = figures_of(tmp_path)
    assert figures["deaths"] == 1 and figures["learners"]["learner-0"]["absent_s"] == 10


def test_an_orderly_goodbye_is_no_death(tmp_path: Path) -> None:
    write(tmp_path, "learner-0", "a", [*steps(0.0, 11), (11.0, m.StopRequested(), [m.Finish("SIGTERM")])])
    write(tmp_path, "learner-1", "a", [*steps(0.0, 21), (20.0, m.StopRequested(), [m.Finish("done")])])
    figures = figures_of(tmp_path)
    assert figures["deaths"] == 0 and figures["time"]["learners_s"] == 31


def round_of(tick: int, at: float, base: int, version: int) -> Script:
    tally = m.Tally(tick, ("a",), 1.0, 0.1, 0.2, 0.5, 0.5 if tick == 2 else 0.25)
    push = m.Push(0, tick, base, 9, 2, 200, 900)
    return [
        (at, m.Woke(), [tally, m.Send("a", m.Pull(0, tick, version - 1))]),
        (at + 1, m.Received("a", push), [m.Fold(0, "a", 1.0, base)]),
        (at + 2, m.Merged(0, version), []),
    ]


def test_ages_of_pushes_and_waits_of_ticks_are_counted(tmp_path: Path) -> None:
    script = [*round_of(2, 0.0, 0, 1), *round_of(4, 10.0, 1, 2), *round_of(6, 20.0, 1, 3)]
    script[-1:] = [(22.0, m.Woke(), [m.Tally(7, ("a",), 1.0, 0.1, 0.2, 0.5, 0.0)]), script[-1]]
    write(tmp_path, "syncer", "s", script, role="syncer")
    figures = figures_of(tmp_path)
    assert figures["staleness"] == {
        "versions": {"mean": 0.333333, "greatest": 1, "pushes": {"0": 2, "1": 1}},
        "age_ticks": {"count": 3, "mean": 3.0, "median": 2, "greatest": 5},
        "flight_ticks": {"count": 3, "mean": 0.333333, "median": 0, "greatest": 1},
    }
    assert figures["grace"]["waited_s"]["total"] == 1.0
    assert (figures["grace"]["window_mean_s"], figures["grace"]["windows_used_up"]) == (0.5, 1)
    assert figures["round_s"]["mean"] == 2


# ---- losses ----


def test_the_time_to_a_loss_is_that_of_the_first_evaluation_at_or_below_it(tmp_path: Path) -> None:
    lines = [{"time": 100.0 + at, "kind": "validation", "round": at, "loss": loss}
             for at, loss in ((-1, 5.0), (10, 3.0), (20, 2.0), (30, 2.5))]  # fmt: skip
    lines.insert(1, {"time": 101.0, "kind": "train", "loss": 0.1})
    texts = [json.dumps(line, separators=(",", ":")) for line in lines]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*texts, '{"time":1,"kind":"validation","lo']))
    assert loss_table(tmp_path, 100.0, [3.0, 2.2, 1.0]) == {
        "evaluations": 4,
        "first": 5.0,
        "last": 2.5,
        "at_s": 30.0,
        "best": 2.0,
        "best_at_s": 20.0,
        "to_s": {"3": 10.0, "2.2": 20.0, "1": None},
    }
    assert loss_table(tmp_path / "nowhere", 0.0) is None


# ---- what is wrong with a run ----


def test_a_damaged_tape_is_used_up_to_its_damage(tmp_path: Path) -> None:
    path = write(tmp_path, "learner-0", "a", steps(0.0, 11)).path
    path.write_bytes(path.read_bytes().replace(b'"step":7', b'"step":8'))
    figures = figures_of(tmp_path)
    assert figures["learners"]["learner-0"]["steps"] == 7
    assert len(figures["damaged"]) == 1 and "checksum" in figures["damaged"][0]


# ---- the command ----


def test_the_command_ends_with_the_figures_as_json(
    stormy: tuple[Outcome, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["tape", str(stormy[1]), "--json", "--loss", "2.5"])
    assert ended.value.code == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures == json.loads(json.dumps(figures_of(stormy[1], [2.5])))


def test_the_command_shows_the_figures_to_people(
    stormy: tuple[Outcome, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tape", str(stormy[1])])
    text = capsys.readouterr().out
    figures = figures_of(stormy[1])
    assert f"goodput {100 * figures['goodput']:.1f} %" in text
    assert f"deaths of learners {figures['deaths']}" in text
    assert f"{figures['participants']['mean']:.1f} learners per round" in text
