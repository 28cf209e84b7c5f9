"""How fast does a round move its bytes? The whole way against blocking sockets, in one run.

    python benchmarks/transport.py [--rounds 9] [--senders 8] [--megabytes 64]

A real syncer process, synthetic learners in few processes (`senders.py`), fragments of 64 MB. A round is
everything between "each learner has completed a step" and "the merged update has landed at each": reports,
tick, pulls, encoding, uploads, checks, folding, the outer step, updates, decoding. The reference
(`sockets.py`) moves the same bytes over as many connections from as many processes under the same
encryption, and does nothing else. Rounds of both alternate, so that drift of the machine hits both; the
numbers are medians. The phases come from the syncer's own tape.

Prints a block for each codec and kind of connection, and last `transport: ratio (limit 0.6)`: the rate of
float32 rounds under mutual TLS over that of the sockets.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import sockets
from senders import Crowd, Load, Syncer, cpu_s

from archipel.numerics import codec
from archipel.protocol import messages as m
from archipel.protocol.schedule import SyncOptions
from archipel.runtime.security import make_authority
from archipel.tape import tape

LIMIT = 0.6
PHASES = {
    "collect": "tick closed to last push in: pull, encode, upload, receive; folds run beside it",
    "fold": "last push in to last one folded",
    "merge": "outer step, checks, digest",
    "update": "merged to last update arrived: send, receive",
    "land": "last arrived to last landed: decode",
}
KINDS = (  # push codec, update codec, with TLS
    ("float32", "float32", True),
    ("float32", "float32", False),
    ("bf16", "float32", True),
    ("int4", "bf16", True),
)


@dataclass
class Measured:
    """What one kind of load came to."""

    ours_s: list[float] = field(default_factory=list)
    reference_s: list[float] = field(default_factory=list)
    ours_cpu_s: float = 0.0
    reference_cpu_s: float = 0.0
    syncer_cpu_s: float = 0.0
    coding_s: tuple[float, float] = (0.0, 0.0)  # encode, decode, of all senders and rounds
    phases: dict[str, float] = field(default_factory=dict)  # median seconds
    fold_s: float = 0.0  # median of one fold

    @property
    def ratio(self) -> float:
        """Our rate over the sockets'."""
        return statistics.median(self.reference_s) / statistics.median(self.ours_s)


def sizes_of(load: Load) -> sockets.Sizes:
    """Return the bytes of a load's round and connection."""
    block = SyncOptions().codec_block
    return sockets.Sizes(
        upload=codec.encoded_bytes(load.push_codec, load.numel, block),
        download=codec.encoded_bytes(load.update_codec, load.numel, block),
        connections=load.senders,
        tls=load.tls,
    )


def measure(load: Load, rounds: int, folder: Path) -> Measured:
    """Run rounds of ours and of the reference in turn."""
    measured = Measured()
    syncer = Syncer(load, folder)
    crowd = server = None
    try:
        crowd = Crowd(load, syncer.address, folder)
        sizes = sizes_of(load)
        server = sockets.Server(sizes)
        crowd.call(sockets.connect, server.port, sizes, load.senders // load.processes)
        alternate(measured, crowd, (syncer.process.pid, server.process.pid), rounds, warm_rounds(load))
    finally:
        for part in (crowd, server, syncer):
            if part is not None:
                part.stop()
    read_tape(measured, syncer.out, load)
    return measured


def warm_rounds(load: Load) -> int:
    """Return the rounds after which the syncer's memory is all there: it keeps two versions of each."""
    return 2 * load.fragments


def alternate(measured: Measured, crowd: Crowd, servers: tuple[int, int], rounds: int, warm: int) -> None:
    """Let ours and the sockets take turns, after a few rounds of each that do not count."""
    syncer, server = servers
    workers = [process.pid for process in crowd.processes]
    crowd.rounds(warm)
    crowd.call(sockets.one_round)
    coded = crowd.times()
    for _ in range(rounds):
        before = [cpu_s(pid) for pid in (syncer, server, *workers)]
        measured.ours_s.append(crowd.rounds(1))
        between = [cpu_s(pid) for pid in (syncer, server, *workers)]
        began = time.perf_counter()
        crowd.call(sockets.one_round)
        measured.reference_s.append(time.perf_counter() - began)
        after = [cpu_s(pid) for pid in (syncer, server, *workers)]
        measured.ours_cpu_s += sum(between) - sum(before)
        measured.syncer_cpu_s += between[0] - before[0]
        measured.reference_cpu_s += sum(after) - sum(between)
    encode_s, decode_s = crowd.times()
    measured.coding_s = (encode_s - coded[0], decode_s - coded[1])


# ---- where the time goes ----


def read_tape(measured: Measured, out: Path, load: Load) -> None:
    """Take the phases of a round from what the syncer recorded."""
    found: list[dict[str, float]] = []
    folds: list[float] = []
    closed = pushed = folded = merged = arrived = 0.0
    counts = {"arrived": 0, "landed": 0}
    for record in tape.read(out):
        event, now = record.event, record.t
        if any(isinstance(action, m.Tally) for action in record.actions):
            closed, counts = now, {"arrived": 0, "landed": 0}
        match event:
            case m.Received(message=m.Push()):
                pushed = now
            case m.Folded():
                folds.append(now - max(pushed, folded))
                folded = now
            case m.Merged():
                merged = now
            case m.Received(message=m.Arrived()):
                counts["arrived"] += 1
                arrived = now
            case m.Received(message=m.Landed()) if closed:
                counts["landed"] += 1
                if counts["landed"] == load.senders:
                    spans = (
                        pushed - closed,
                        folded - pushed,
                        merged - folded,
                        arrived - merged,
                        now - arrived,
                    )
                    found.append(dict(zip(PHASES, spans, strict=True)))
    counted = found[warm_rounds(load) :]
    measured.phases = {name: statistics.median(spans[name] for spans in counted) for name in PHASES}
    measured.fold_s = statistics.median(folds)


def report(load: Load, measured: Measured) -> None:
    """Print one kind of load."""
    sizes = sizes_of(load)
    moved = load.senders * (sizes.upload + sizes.download)
    rounds = len(measured.ours_s)
    ours, reference = statistics.median(measured.ours_s), statistics.median(measured.reference_s)
    kind = "mutual TLS" if load.tls else "plain"
    print(f"push {load.push_codec}, update {load.update_codec}, {kind}: {moved / 1e6:.0f} MB a round")
    for name, seconds, used_s in (
        ("round", ours, measured.ours_cpu_s),
        ("sockets", reference, measured.reference_cpu_s),
    ):
        print(
            f"  {name}: {seconds:.3f} s, {moved / seconds / 1e9:.2f} GB/s, "
            f"{used_s / (rounds * moved / 1e9):.2f} CPU s/GB"
        )
    encode_s, decode_s = (seconds / rounds for seconds in measured.coding_s)
    print(
        f"  CPU of a round: syncer {measured.syncer_cpu_s / rounds:.2f} s, senders "
        f"{(measured.ours_cpu_s - measured.syncer_cpu_s) / rounds:.2f} s "
        f"(encoding {encode_s:.2f} s, decoding {decode_s:.2f} s on the clock); "
        f"one fold {1e3 * measured.fold_s:.0f} ms"
    )
    whole = sum(measured.phases.values())
    for name, seconds in measured.phases.items():
        print(f"  {100 * seconds / whole:3.0f} % {name:8}{seconds:.3f} s  {PHASES[name]}")
    print(f"  ratio {measured.ratio:.3f}", flush=True)


def parse() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="of each kind that count")
    parser.add_argument("--senders", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2, help="the senders are spread over so many")
    parser.add_argument("--megabytes", type=float, default=64.0, help="of a fragment, in float32")
    parser.add_argument("--fragments", type=int, default=3)
    parser.add_argument("--only-tls", action="store_true", help="float32 under TLS only")
    parser.add_argument("--quick", action="store_true", help="small and few: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.megabytes = 2, min(options.megabytes, 1.0)
    if options.senders % options.processes:
        parser.error(
            f"--senders {options.senders} is not a multiple of --processes {options.processes}: "
            "the sockets have as many connections in each process"
        )
    return options


def main() -> None:
    options = parse()
    load = Load(int(options.megabytes * 2**20), options.fragments, options.senders, options.processes)
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_authority(folder / "tls")
        for number, (push, update, secured) in enumerate(KINDS[: 1 if options.only_tls else None]):
            tls = str(folder / "tls") if secured else ""
            kind = replace(load, push_codec=push, update_codec=update, tls=tls)
            measured = measure(kind, options.rounds, folder / str(number))
            report(kind, measured)
            ratios.append(measured.ratio)
    print(f"transport: {ratios[0]:.3f} (limit {LIMIT})")


if __name__ == "__main__":
    main()
