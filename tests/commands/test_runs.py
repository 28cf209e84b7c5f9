"""Commands that start whole runs: what they refuse before anything is started."""

from pathlib import Path

import pytest

from archipel.cli import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gossip", "--learners", "5"], "--learners 5 does not apply: the gossip demo has four peers"),
        (["--gossip", "--ticks", "9"], "--ticks 9 does not apply: the gossip demo has four peers"),
        (["--rounds", "3"], "--rounds 3 does not apply: the demo with a syncer is as long as --ticks says"),
    ],
)
def test_a_demo_refuses_an_option_of_the_other_one(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments, "--out", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
