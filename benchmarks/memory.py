"""How much memory does a syncer need, for how many learners, and after how many rounds?

    python benchmarks/memory.py [--megabytes 200] [--rounds 2000]

A real syncer process (`archipel syncer`) and synthetic learners (`senders.py`). First its peak resident
memory, above what importing it takes, with 200 MB of weights in 24 fragments, for M = 2 and M = 16:
every learner pushes and is sent every update. Then its resident memory over 2,000 rounds of a small model:
the slope, over the later three quarters.

Prints the numbers, and last `memory: ratio (limit 1.2)`: the peak for M = 16 over that for M = 2. The slope
has its own line, `memory slope: MB per 100 merges (limit 1.0)`.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from senders import Crowd, Load, Syncer

LIMIT = 1.2
SLOPE_LIMIT_MB = 1.0  # per 100 merges
SAMPLES = 40
IMPORTED = "import archipel.cli, archipel.roles.syncer; print(open('/proc/self/status').read())"


def resident_bytes(status: str, name: str) -> int:
    """Return a field of /proc/PID/status: "VmRSS", or "VmHWM" for the peak."""
    line = next(line for line in status.splitlines() if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])


def status_of(pid: int) -> str:
    """Return /proc/PID/status."""
    return Path(f"/proc/{pid}/status").read_text()


def imported_bytes() -> int:
    """Return what a process holds that has imported a syncer and done nothing."""
    ran = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    return resident_bytes(ran.stdout, "VmHWM")


def peak_bytes(load: Load, rounds: int, folder: Path) -> int:
    """Return a syncer's peak resident memory over some rounds."""
    syncer = Syncer(load, folder)
    crowd = None
    try:
        crowd = Crowd(load, syncer.address, folder)
        crowd.rounds(rounds)
        return resident_bytes(status_of(syncer.process.pid), "VmHWM")
    finally:
        if crowd is not None:
            crowd.stop()
        syncer.stop()


def samples_of(load: Load, rounds: int, folder: Path) -> list[tuple[int, int]]:
    """Return (rounds done, resident bytes) of a syncer as it goes."""
    syncer = Syncer(load, folder)
    crowd, found, done = None, [], 0
    try:
        crowd = Crowd(load, syncer.address, folder)
        for sample in range(1, SAMPLES + 1):
            crowd.rounds(rounds * sample // SAMPLES - done)
            done = rounds * sample // SAMPLES
            found.append((done, resident_bytes(status_of(syncer.process.pid), "VmRSS")))
    finally:
        if crowd is not None:
            crowd.stop()
        syncer.stop()
    return found


def slope_mb(samples: list[tuple[int, int]]) -> float:
    """Return MB per 100 rounds, fitted to the later three quarters: buffers and pools fill before."""
    later = samples[len(samples) // 4 :]
    fitted = statistics.linear_regression([done for done, _ in later], [held for _, held in later])
    return 100 * fitted.slope / 1e6


def parse() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=200.0, help="of weights, in float32")
    parser.add_argument("--fragments", type=int, default=24, help="fewer and larger take more")
    parser.add_argument("--learners", type=int, nargs=2, default=(2, 16), metavar="M", help="to compare")
    parser.add_argument("--push-codec", default="float32", help="float32 needs the most memory")
    parser.add_argument("--rounds", type=int, default=2000, help="of the small model")
    parser.add_argument("--quick", action="store_true", help="small and few: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.megabytes, options.rounds = min(options.megabytes, 12.0), min(options.rounds, 80)
    return options


def main() -> None:
    options = parse()
    imported = imported_bytes()
    print(f"imported: {imported / 1e6:.0f} MB")
    fragment_bytes = int(options.megabytes * 1e6) // options.fragments
    peaks = []
    with tempfile.TemporaryDirectory() as name:
        for count in options.learners:
            load = Load(fragment_bytes, options.fragments, count, 2, push_codec=options.push_codec)
            peak = peak_bytes(load, 3 * options.fragments, Path(name) / f"peak-{count}") - imported
            peaks.append(peak)
            weights = 4 * load.numel * load.fragments
            print(
                f"M = {count}: peak {peak / 1e6:.0f} MB above import, {peak / weights:.2f} times "
                f"{weights / 1e6:.0f} MB of weights in {load.fragments} fragments",
                flush=True,
            )
        small = Load(1 << 16, 4, 4, 2)
        samples = samples_of(small, options.rounds, Path(name) / "small")
    slope = slope_mb(samples)
    print(
        f"{options.rounds} rounds of {small.fragments * small.numel * 4 / 1e6:.2f} MB: "
        f"resident {samples[0][1] / 1e6:.1f} MB after {samples[0][0]}, "
        f"{samples[-1][1] / 1e6:.1f} MB at the end"
    )
    print(f"memory slope: {slope:.3f} MB per 100 merges (limit {SLOPE_LIMIT_MB})")
    print(f"memory: {peaks[1] / peaks[0]:.3f} (limit {LIMIT})")


if __name__ == "__main__":
    main()
