"""What many disks and an overlapped network give: ranks whose ways are made slow.

    python bench/e2e/bandwidth.py --nvme DIRECTORY [--rows disks,network] [--out bench/reports]

disks: every rank may read so many bytes per second from its disk (a blkio control group each), and a forward
pass fetches the model: 1/N of it comes from each rank's disk. network: the loopback device is made slow (tc),
and two ranks train with and without gathering ahead. Needs root; Linux with blkio groups, and tc.
"""

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from context import warm
from models import SIZES
from pairs import interleave, spread
from ranks import PORT, Group, variables
from report import Report, Section, report_path
from watch import Worker

BLKIO = "/sys/fs/cgroup/blkio"
MB = 10**6


def say(what: str) -> None:
    print(f"[{time.monotonic() - BEGIN:.0f} s] {what}", file=sys.stderr, flush=True)


class SlowDisk:
    """A control group whose processes read from a disk at a rate."""

    def __init__(self, name: str, directory: str, rate: int):
        self._folder = os.path.join(BLKIO, name)
        os.makedirs(self._folder, exist_ok=True)
        device = os.stat(directory).st_dev
        self._write("blkio.throttle.read_bps_device", f"{os.major(device)}:{os.minor(device)} {rate}")

    def take(self, pid: int) -> None:
        self._write("cgroup.procs", str(pid))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a process may be about to end
            os.rmdir(self._folder)

    def _write(self, name: str, text: str) -> None:
        with open(os.path.join(self._folder, name), "w") as file:
            file.write(text)


@contextlib.contextmanager
def slow_network(rate: int) -> Iterator[None]:
    """Of the loopback device, in bytes per second."""
    queue = ["tc", "qdisc"]
    limit = ["tbf", "rate", f"{8 * rate}bit", "burst", "4mb", "limit", "16mb"]
    subprocess.run([*queue, "add", "dev", "lo", "root", *limit], check=True)
    try:
        yield
    finally:
        subprocess.run([*queue, "del", "dev", "lo", "root"], check=True)


def group(ranks: int, port: int, *arguments: object, **environment: str) -> Group:
    return Group([
        lambda rank=rank: Worker(*arguments, environment={**variables(rank, ranks, port), **environment})
        for rank in range(ranks)])  # fmt: skip


def measure_disks(args: argparse.Namespace, folder: str) -> Section:
    table = Section(
        f"A disk per rank ({args.size})",
        f"A forward pass over {args.forward_tokens} tokens with weights on NVMe, which every rank's process "
        f"may read at {args.disk_rate / MB:.0f} MB/s (a blkio control group each; one disk is behind them). "
        "Medians (least-most) of passes, numbers of ranks in turn.",
        ("ranks", "s per pass", "of one rank's", "1/N", "MB/s, all disks"))  # fmt: skip
    arguments = ["--size", args.size, "--batch", 1, "--tokens", args.forward_tokens, "--threads", 1,
                 "--forward", "--away", "--nvme", folder]  # fmt: skip
    groups: dict[int, Group] = {}
    disks: list[SlowDisk] = []
    try:
        for ranks in args.ranks:
            say(f"{ranks} ranks start")
            groups[ranks] = warm(group(ranks, PORT + 20 + ranks, *arguments))
            for rank, worker in enumerate(groups[ranks].workers):
                disks.append(SlowDisk(f"zinf-{os.getpid()}-{ranks}-{rank}", folder, args.disk_rate))
                disks[-1].take(worker.pid())
        seconds: dict[int, list[float]] = {ranks: [] for ranks in args.ranks}
        for turn in range(args.pairs):
            say(f"turn {turn + 1} of {args.pairs}")
            for ranks, each in groups.items():
                seconds[ranks].append(each.train(1).seconds)
    finally:
        for each in groups.values():
            each.close()
        for disk in disks:
            disk.close()
    size = 4 * sum(parameter.numel() for parameter in SIZES[args.size].make().parameters())
    alone = statistics.median(seconds[args.ranks[0]])
    for ranks, taken in seconds.items():
        middle = statistics.median(taken)
        ratios = [mine / one for mine, one in zip(taken, seconds[args.ranks[0]], strict=True)]
        table.rows.append([str(ranks), spread(taken), spread(ratios, 3), f"{args.ranks[0] / ranks:.3f}",
                           f"{size / middle / MB:.0f}"])  # fmt: skip
    say(f"one rank takes {alone:.2f} s")
    return table


def measure_network(args: argparse.Namespace) -> Section:
    table = Section(
        f"A slow network ({args.size}, 2 ranks, {args.batch} x {args.tokens} each)",
        f"The loopback device carries {args.network_rate / MB:.0f} MB/s in all. Training in memory, stage 3, "
        '`update="backward"`, one thread per rank, with and without gathering ahead (`ZINF_PREFETCH=0`). '
        "Medians (least-most) of interleaved pairs. The bytes of a step are three times the weights.",
        ("network", "s/step ahead", "s/step without", "without / ahead", "its bytes alone, s"))  # fmt: skip
    arguments = ["--size", args.size, "--batch", args.batch, "--tokens", args.tokens, "--threads", 1,
                 "--update", "backward"]  # fmt: skip
    size = 4 * sum(parameter.numel() for parameter in SIZES[args.size].make().parameters())
    say("two groups start")
    with (warm(group(2, PORT + 40, *arguments)) as ahead,
          warm(group(2, PORT + 44, *arguments, ZINF_PREFETCH="0")) as without):  # fmt: skip
        for rate in (0, args.network_rate):
            with slow_network(rate) if rate else contextlib.nullcontext():
                pairs = interleave(ahead.train, without.train, args.pairs, args.steps, say)
            name, alone = ("slow", f"{3 * size / rate:.2f}") if rate else ("as it is", "")
            times = [
                statistics.median(used.step() for used in side) for side in (pairs.reference, pairs.candidate)
            ]
            table.rows.append([name, f"{times[0]:.2f}", f"{times[1]:.2f}", spread(pairs.ratios(), 3), alone])
            say(f"{name}: without / ahead {spread(pairs.ratios(), 3)}")
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", required=True, help="a directory on the disk to use")
    parser.add_argument("--rows", default="disks,network")
    parser.add_argument("--size", choices=SIZES, default="153M")
    parser.add_argument("--ranks", default="1,2,4", help="of the table of disks")
    parser.add_argument("--disk-rate", type=float, default=50 * MB, help="bytes per second and rank")
    parser.add_argument("--network-rate", type=float, default=800 * MB, help="bytes per second")
    parser.add_argument("--forward-tokens", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of a side of a pair")
    parser.add_argument("--out", help="a file for the report, or a directory for one")
    args = parser.parse_args()
    args.rows = args.rows.split(",")
    args.ranks = [int(ranks) for ranks in args.ranks.split(",")]
    args.disk_rate, args.network_rate = int(args.disk_rate), int(args.network_rate)
    args.out = report_path(args.out, "bandwidth")
    return args


def check_machine(rows: list[str]) -> None:
    if os.geteuid() != 0:
        sys.exit("bandwidth.py needs root: it limits disks and the loopback device")
    if "disks" in rows and not os.path.exists(os.path.join(BLKIO, "cgroup.procs")):
        sys.exit(f"there are no blkio control groups ({BLKIO}): leave out --rows disks")
    if "network" in rows and not shutil.which("tc"):
        sys.exit("tc is missing (package iproute2): install it, or leave out --rows network")


def main() -> None:
    args = arguments()
    check_machine(args.rows)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    report = Report("Bandwidth of ranks", args.out)
    folder = tempfile.mkdtemp(prefix="zinf-bandwidth-", dir=args.nvme)
    try:
        if "disks" in args.rows:
            report.sections.append(measure_disks(args, folder))
            report.write()
        if "network" in args.rows:
            report.sections.append(measure_network(args))
            report.write()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(report.text())


BEGIN = time.monotonic()
if __name__ == "__main__":
    main()
