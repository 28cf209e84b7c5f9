"""The experiments' cells are configurations that can be run; the table's arithmetic."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "experiments"


def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("experiments_run", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN = runner()
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_configuration_with_a_key_of_its_own(name: str) -> None:
    experiment = RUN.load(name)
    cells = RUN.cells(experiment)
    assert len({RUN.key(cell) for cell in cells}) == len(cells) > 0
    for cell in cells:
        config, _ = RUN.configured(experiment, cell)
        assert config.sync.learners >= 1


@pytest.mark.parametrize("name", NAMES)
def test_what_a_row_is_compared_with_is_a_row(name: str) -> None:
    variants = RUN.load(name)["variant"]
    names = [variant["name"] for variant in variants]
    assert len(names) == len(set(names))
    assert {variant["against"] for variant in variants if "against" in variant} <= set(names)


def test_failing_hardware_gets_the_ticks_its_stops_cost() -> None:
    experiment = RUN.load("03_failures")
    cells = {RUN.key(cell): cell for cell in RUN.cells(experiment)}
    calm, _ = RUN.configured(experiment, cells["Decoupled, no failures · M=8 · seed 0"])
    failing, _ = RUN.configured(experiment, cells["Decoupled, 2.4m chips · M=8 · seed 0"])
    assert failing.sync.steps / calm.sync.steps == pytest.approx(
        1 / 0.80, abs=0.03
    )  # goodput in Table 1: 80 %


def test_data_parallel_is_one_learner_with_the_batch_of_all_that_is_looked_at_as_often() -> None:
    experiment = RUN.load("01_equal_tokens")
    cell = {"variant": experiment["variant"][1], "learners": 8, "seed": 0}
    config, own_every = RUN.configured(experiment, cell)
    assert (config.sync.learners, config.data.batch, own_every) == (1, 16, 120)


def test_time_to_a_loss_lies_between_two_points() -> None:
    points = [{"at_s": 0.0, "loss": 5.0}, {"at_s": 10.0, "loss": 3.0}, {"at_s": 20.0, "loss": 2.0}]
    assert RUN.time_to(points, 3.0) == 10.0
    assert RUN.time_to(points, 2.5) == 15.0
    assert RUN.time_to(points, 1.0) == float("inf")
