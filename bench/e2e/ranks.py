"""How fast several ranks train, beside FSDP2 and DeepSpeed ZeRO-3, and beside compute and gloo alone.

    python bench/e2e/ranks.py [--size 124M] [--ranks 2] [--out bench/reports]

All of it in float32 over gloo on this machine, one thread per rank. The rivals take part where
ZINF_DEEPSPEED_PYTHON (a Python that has DeepSpeed) and ZINF_PEERS (a script that trains with them) are set.
"""

import argparse
import concurrent.futures
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from context import warm
from models import SIZES
from pairs import Pairs, interleave, spread
from report import ROOT, Report, Section, report_path
from rivals import Script
from setting import GB
from watch import Used, Watched, Worker

RIVALS = {"fsdp2": "FSDP2", "ds_none": "DeepSpeed ZeRO-3"}
PORT = 29600
MPI_ALONE = os.path.join(ROOT, "build/release/bench/micro/mpi_alone")


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip


class Group:
    """Workers that train together."""

    def __init__(self, starts: Sequence[Callable[[], Watched]]):
        self._pool = concurrent.futures.ThreadPoolExecutor(len(starts))
        self.workers = list(self._pool.map(lambda start: start(), starts))

    def train(self, steps: int) -> Used:
        """As long as the slowest, with the CPU of all."""
        each = list(self._pool.map(lambda worker: worker.train(steps), self.workers))
        return Used(steps, max(used.seconds for used in each), sum(used.cpu_seconds for used in each),
                    0, 0, each[0].machine_seconds)  # fmt: skip

    def peak_bytes(self) -> int:
        return max(worker.peak_bytes() for worker in self.workers)

    def close(self) -> None:
        list(self._pool.map(lambda worker: worker.close(), self.workers))  # each waits for the others
        self._pool.shutdown()

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Anew:
    """Lives only while it trains: for two that have no room side by side."""

    def __init__(self, start: Callable[[], Watched | Group]):
        self._start, self._peak = start, 0

    def train(self, steps: int) -> Used:
        with self._start() as side:
            used = side.train(steps)
            self._peak = max(self._peak, side.peak_bytes())
        return used

    def peak_bytes(self) -> int:
        return self._peak


class ScriptGroup(Script):
    """The rivals' script as several ranks, of which the first tells of steps."""

    def __init__(self, command: list[str], folder: str, ranks: int):
        self._others = [
            subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             env=self.environment(rank, ranks))
            for rank in range(1, ranks)
        ]  # fmt: skip
        super().__init__(command, folder, self.environment(0, ranks))

    @staticmethod
    def environment(rank: int, ranks: int) -> dict[str, str]:
        return {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            **variables(rank, ranks, PORT + 7),
        }

    def _signal(self, number: int) -> None:
        super()._signal(number)
        for other in self._others:
            other.send_signal(number)

    def _end(self) -> None:
        super()._end()
        for other in self._others:
            other.kill()
            other.wait()


class RankBench:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.folder = tempfile.mkdtemp(prefix="zinf-ranks-")
        self._begin = time.monotonic()
        self.table = Section(
            f"{args.size}, {args.ranks} ranks, {args.batch} x {args.tokens} each",
            "Float32, gloo, one thread per rank. Ratios are medians (least-most) of interleaved pairs of "
            "steps: the other side's processes are stopped or wait meanwhile. Peaks are anonymous and shared "
            "memory of the largest rank, with imports. Compute alone: as many processes with plain PyTorch, "
            "each for itself. gloo alone, MPI alone: all-gather of the weights twice, gradients' slices to "
            "their keepers once, nothing else.",
            ("beside", "its s/step", "zinf s/step", "ratio", "its peak GB", "zinf's peak GB",
             "others' CPU"))  # fmt: skip

    def say(self, what: str) -> None:
        print(f"[{(time.monotonic() - self._begin) / 60:.1f} min] {what}", file=sys.stderr, flush=True)

    def arguments(self) -> list[object]:
        args = self.args
        return ["--size", args.size, "--batch", args.batch, "--tokens", args.tokens, "--threads", 1]

    def zinf(self) -> Group:
        self.say("zinf starts")
        ranks = self.args.ranks
        return warm(Group([
            lambda rank=rank: Worker(*self.arguments(), "--update", "backward", "--stage", self.args.stage,
                                     environment=variables(rank, ranks, PORT))
            for rank in range(ranks)]))  # fmt: skip

    def compute(self) -> Group:
        self.say("plain PyTorch starts")
        alone = {"OMP_NUM_THREADS": "1"}
        start = lambda: Worker(*self.arguments(), "--plain", environment=alone)  # noqa: E731
        return warm(Group([start] * self.args.ranks))

    def rival(self, system: str) -> Watched:
        self.say(f"{RIVALS[system]} starts")
        args, model = self.args, SIZES[self.args.size]
        command = [args.deepspeed_python, os.path.abspath(args.peers), "--system", system, "--dtype", "fp32",
                   "--batch", args.batch, "--seq", args.tokens, "--steps", 10**6, "--warmup", 2,
                   "--embd", model.width, "--layers", model.layers, "--heads", model.heads,
                   "--vocab", model.vocabulary, "--clip", 0.0, "--swap", self.folder]  # fmt: skip
        return warm(ScriptGroup(list(map(str, command)), self.folder, args.ranks))

    def compare(self, name: str, start: Callable[[], Watched | Group]) -> None:
        if self.args.anew:
            self._compare(name, Anew(start), Anew(self.zinf))
            return
        with start() as other, self.zinf() as zinf:
            self._compare(name, other, zinf)

    def _compare(self, name: str, other: "Watched | Group | Anew", zinf: "Group | Anew") -> None:
        pairs = interleave(other.train, zinf.train, self.args.pairs, self.args.steps, self.say)
        self.table.rows.append([
            name, f"{_median(pairs.reference):.2f}", f"{_median(pairs.candidate):.2f}",
            spread(pairs.ratios(), 3), f"{other.peak_bytes() / GB:.2f}", f"{zinf.peak_bytes() / GB:.2f}",
            _others(pairs)])  # fmt: skip
        self.say(f"{name}: ratio {spread(pairs.ratios())}")

    def gloo(self, parameters: int) -> None:
        self.say("gloo alone")
        ranks = self.args.ranks
        script = os.path.join(os.path.dirname(__file__), "gloo_alone.py")
        processes = [
            subprocess.Popen([sys.executable, script, str(4 * parameters)], text=True, stdout=subprocess.PIPE,
                             env={**os.environ, **variables(rank, ranks, PORT + 9)})
            for rank in range(ranks)
        ]  # fmt: skip
        said = [process.communicate()[0] for process in processes]
        self._add_alone("gloo alone", said[0])

    def mpi(self, parameters: int) -> None:
        self.say("MPI alone")
        if not os.path.exists(MPI_ALONE) or not shutil.which("mpirun"):
            self._add_alone("MPI alone", "not built here")
            return
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", self.args.ranks, MPI_ALONE,
                   4 * parameters]  # fmt: skip
        done = subprocess.run(list(map(str, command)), text=True, stdout=subprocess.PIPE, check=False)
        self._add_alone("MPI alone", done.stdout)

    def _add_alone(self, name: str, said: str) -> None:
        self.table.rows.append([name, said.strip() or "failed", "", "", "", "", ""])


def _median(results: Sequence[Used]) -> float:
    return statistics.median(used.step() for used in results)


def _others(pairs: Pairs) -> str:
    return f"{statistics.median(pairs.others()):.0%}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="124M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of a side of a pair")
    parser.add_argument("--anew", action="store_true", help="start for every pair: where memory is short")
    parser.add_argument("--beside", default="fsdp2,ds_none,compute,gloo,mpi")
    parser.add_argument("--deepspeed-python", default=os.environ.get("ZINF_DEEPSPEED_PYTHON"))
    parser.add_argument("--peers", default=os.environ.get("ZINF_PEERS"))
    parser.add_argument("--out", help="a file for the report, or a directory for one")
    args = parser.parse_args()
    args.out = report_path(args.out, "ranks")
    return args


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    bench = RankBench(args)
    report = Report("Several ranks", args.out, [bench.table])
    parameters = sum(p.numel() for p in SIZES[args.size].make().parameters())
    try:
        for name in args.beside.split(","):
            if name == "gloo":
                bench.gloo(parameters)
            elif name == "mpi":
                bench.mpi(parameters)
            elif name == "compute":
                bench.compare("compute alone", bench.compute)
            elif args.deepspeed_python and args.peers:
                bench.compare(RIVALS[name], lambda name=name: bench.rival(name))
            else:
                report.remarks.append(
                    f"Without {RIVALS[name]}: --deepspeed-python and --peers were not given."
                )
            report.write()
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)
    print(report.text())


if __name__ == "__main__":
    main()
