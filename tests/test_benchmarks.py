"""The benchmarks run, at sizes of no meaning: the last line is a ratio, the limits are those promised."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script: str, *arguments: str) -> list[str]:
    """Return the lines a benchmark printed."""
    ran = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.live
def test_transport_moves_rounds_under_tls_beside_the_sockets():
    lines = run("transport.py", "--quick", "--only-tls", "--senders", "4")
    last = re.fullmatch(r"transport: (\d+\.\d+) \(limit 0\.6\)", lines[-1])
    assert last and float(last[1]) > 0
    # 4 uploads and 4 downloads of 1 MiB, counted for both.
    assert lines[0] == "push float32, update float32, mutual TLS: 8 MB a round"
    shares = [int(line.split()[0]) for line in lines if re.match(r" +\d+ % ", line)]
    assert len(shares) == 5 and 97 <= sum(shares) <= 103


@pytest.mark.live
def test_memory_compares_learners_and_watches_rounds():
    lines = run("memory.py", "--quick", "--learners", "2", "4")
    last = re.fullmatch(r"memory: (\d+\.\d+) \(limit 1\.2\)", lines[-1])
    assert last and 0.5 < float(last[1]) < 2.0
    assert re.fullmatch(r"memory slope: -?\d+\.\d+ MB per 100 merges \(limit 1\.0\)", lines[-2])
    assert sum(line.startswith("M = ") for line in lines) == 2


@pytest.mark.live
@pytest.mark.parametrize("script", ["transport.py", "memory.py"])
def test_help_says_what_is_measured(script):
    assert "Prints" in "\n".join(run(script, "--help"))


def test_events_are_counted_three_ways():
    lines = run("events.py", "--quick")
    last = re.fullmatch(r"events: (\d+\.\d+) \(limit 1\.0\)", lines[-1])
    assert last and float(last[1]) > 0 and len(lines) == 4
