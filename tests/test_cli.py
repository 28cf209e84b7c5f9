"""The command line: help without torch, errors in one line, exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from archipel import cli
from archipel.commands import files
from archipel.errors import ArchipelError

COMMANDS = [
    "demo", "train", "syncer", "learner", "evaluator", "data", "score", "tape", "draw", "certs", "replay"
]  # fmt: skip


def run(*arguments: str) -> int | str | None:
    """Run a command in this process and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return ended.value.code


def test_help_names_every_command_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom archipel import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as end: print('code', end.code, 'torch' in sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "code 0 False"
    assert set(COMMANDS) <= set(shown.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert f"archipel {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nowhere.toml"], "nowhere.toml: No such file or directory"),
        (["syncer", "nowhere.toml"], "nowhere.toml: No such file or directory"),
        (["tape", "nowhere"], "nowhere"),
        (["learner", "{empty}", "--syncer", "nonsense", "--out", "{folder}/o"], "nonsense"),
        (["learner", "{empty}", "--syncer", "a:1", "--name", "x/y"], "worker name 'x/y'"),
        (["learner", "{empty}", "--syncer", "a:1", "--name", "syncer"], "worker name 'syncer'"),
        (["train", "{empty}", "--set", "sync.fragments=30"], "use at most 24"),
        (["data", "prepare", "{folder}/none.txt", "{folder}/out.bin"], "none.txt"),
        (["plan", "--set", "other.x=3"], "[other] has no meaning here: only [plan] is read"),
        (["syncer", "{empty}", "--init", "{empty}", "--out", "{folder}/o"], "give a file written by"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)  # fmt: skip
def test_what_a_person_can_mend_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.toml").write_text("")
    places = {"empty": str(tmp_path / "empty.toml"), "folder": str(tmp_path)}
    assert run(*(argument.format(**places) for argument in arguments)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("archipel: ")]
    assert len(lines) == 1 and words in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["learner", "x.toml", "--syncer", "a:1", "--device", "gpu"], "'gpu' is no device: use cpu, cuda or"),
        (["score", "run", "q.jsonl", "--device", "cuda:x"], "'cuda:x' is no device: use cpu, cuda or cuda:N"),
        (
            ["learner", "x.toml", "--syncer", "a:1", "--threads", "-1"],
            "'-1' is not a whole number of 0 or more",
        ),
        (["peer", "x.toml", "--nice", "-1"], "'-1' is not a whole number of 0 or more"),
        (
            ["simulate", "x.toml", "--seeds", "0:2", "--cores", "-1"],
            "'-1' is not a whole number of 0 or more",
        ),
        (["data", "prepare", "a", "b", "--train-bpe", "-5"], "'-5' is not a whole number of 0 or more"),
        (
            ["data", "prepare", "a", "b", "--train-bpe", "9"],
            "9 entries are too few: 256 bytes and a separator",
        ),
        (["tape", "run", "--rounds", "-1"], "'-1' is not a whole number of 0 or more"),
        (["replay", "run", "--save-every", "nan"], "'nan' is not a number of seconds of 0 or more"),
        (["draw", "bandwidth", "--step-s", "0"], "'0' is not a number of seconds above 0"),
        (["draw", "bandwidth", "--sites", "0"], "'0' is not a whole number of 1 or more"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_an_argument_that_is_no_such_value_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_a_list_beside_a_rendezvous_is_said_not_to_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = '[gossip]\npeers = 2\n[members]\na = "h:1"\nb = "i:1"\n'
    (tmp_path / "run.toml").write_text(text)
    there = ["--rendezvous", "nonsense", "--name", "a", "--out", str(tmp_path / "out")]
    assert run("peer", str(tmp_path / "run.toml"), *there) == 2
    assert "[members] is not used: with --rendezvous=nonsense that one names them" in caplog.text


@pytest.mark.parametrize("command", ["train", "plan", "simulate"])
def test_a_file_that_is_no_text_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_bytes(b"# \xff\n")
    assert run(command, str(tmp_path / "run.toml")) == 2
    assert "run.toml is not TOML: byte 2 is no UTF-8 text" in capsys.readouterr().err


def test_unknown_command_is_refused() -> None:
    assert run("no-such-command") == 2


def test_interrupt_and_error_have_their_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: BaseException):
        def command(_: object) -> int:
            raise error

        return command

    monkeypatch.setattr(files, "_tape", raising(KeyboardInterrupt()))
    assert run("tape", "x") == 130
    monkeypatch.setattr(files, "_tape", raising(ArchipelError("a reason")))
    assert run("tape", "x") == 2


def test_certificates_are_made_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("certs", str(tmp_path / "tls"), "--host", "10.0.0.1") == 0
    listed = capsys.readouterr().out.split()
    assert {Path(path).name for path in listed} >= {"ca.pem", "syncer.pem", "learner.pem"}
    assert all(Path(path).exists() for path in listed)


def test_text_becomes_a_token_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 10)
    assert run("data", "prepare", str(tmp_path / "a.txt"), str(tmp_path / "a.bin")) == 0
    assert "vocabulary" in capsys.readouterr().out and (tmp_path / "a.bin").exists()


def test_a_source_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.txt"
    source.write_text("some text\n")
    (tmp_path / "same.txt").symlink_to(source)
    for read, written in ((source, source), (tmp_path, source), (source, tmp_path / "same.txt")):
        assert run("data", "prepare", str(read), str(written)) == 2
        assert f"{written} would be overwritten" in capsys.readouterr().err
    assert source.read_text() == "some text\n"
    (tmp_path / "b.bin.json").write_text("{}")
    assert run("data", "prepare", str(tmp_path / "b.bin.json"), str(tmp_path / "b.bin")) == 2
    assert "b.bin.json would be overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "warned"),
    [
        ("Grüße aus Köln, sagte er\n".encode(), False),
        ("Grüße aus Köln, sagte er\n".encode("latin-1") + b"and so on" * 10, False),
        ("Grüße".encode("utf-16"), True),
        (bytes(range(256)) * 10, True),
    ],
    ids=["utf-8", "latin-1", "utf-16", "binary"],
)
def test_text_that_is_none_is_warned_of(
    content: bytes, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert run("data", "prepare", str(tmp_path / "a.txt"), str(tmp_path / "a.bin")) == 0
    assert ("a.txt is hardly UTF-8 text" in caplog.text) == warned


def test_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run.toml").write_text("")
    assert run("syncer", str(tmp_path / "run.toml"), "--out", str(tmp_path / "file" / "run")) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"archipel: {tmp_path / 'file'}")
