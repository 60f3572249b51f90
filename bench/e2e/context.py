"""What the tables of the speed benchmark share: workers, a folder on the disk, progress."""

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable

from load import Load
from pairs import Pairs, Side, interleave
from report import memory_bytes
from setting import Held, Need, Place, Setting, measure_need
from watch import Used, Watched, Worker

IMPORTS_BYTES = 600 << 20  # of a process that has only imported torch and transformers
WARM_UP = 2  # steps after the first: places are found and orders are known then


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.nvme = tempfile.mkdtemp(prefix="zinf-speed-", dir=args.nvme)
        self._needs: dict[Setting, Need] = {}
        self._plain: tuple[Setting, Worker] | None = None
        self._memory = memory_bytes("MemAvailable")
        self._begin = time.monotonic()
        self._task, self._done, self._tasks = "", 0, 0

    def close(self) -> None:
        self.end_plain()
        shutil.rmtree(self.nvme, ignore_errors=True)

    def task(self, name: str, done: int, tasks: int) -> None:
        self._task, self._done, self._tasks = name, done, tasks
        self.say("begins")

    def say(self, what: str) -> None:
        passed = time.monotonic() - self._begin
        each = passed / 60 / max(1, self._done)
        left = f", about {each * (self._tasks - self._done):.0f} left" if self._done else ""
        print(f"[{self._done + 1}/{self._tasks}, {passed / 60:.1f} min{left}] {self._task}: {what}",
              file=sys.stderr, flush=True)  # fmt: skip

    def need(self, setting: Setting) -> Need:
        if setting not in self._needs:
            self.end_plain()  # it may need the memory
            self.say("what a step needs")
            self._needs[setting] = measure_need(setting, self.nvme)
        return self._needs[setting]

    def plain(self, setting: Setting) -> Worker:
        """PyTorch alone; it stays for the rows of the same setting."""
        if self._plain is None or self._plain[0] != setting:
            self.end_plain()
            self.say("plain PyTorch starts")
            self._plain = setting, warm(Worker("--plain", *setting.arguments()))
        return self._plain[1]

    def fit(self, *processes: Held) -> bool:
        """Whether they live side by side in memory."""
        return sum(held.peak + IMPORTS_BYTES for held in processes) <= self._memory

    def fit_in_turns(self, *processes: Held) -> bool:
        """The same if all but one rest."""
        resting = sum(held.rest + IMPORTS_BYTES for held in processes)
        return resting + max(held.peak - held.rest for held in processes) <= self._memory

    def end_plain(self) -> None:
        if self._plain is not None:
            self._plain[1].close()
            self._plain = None

    def zinf(self, setting: Setting, *arguments: object, **environment: str) -> Worker:
        self.say("zinf starts")
        return warm(Worker(*setting.arguments(), *arguments, environment=environment))

    def load(self, place: Place, need: Need) -> Load:
        """As large as what zinf has on the disk in this place."""
        self.say("fio writes its file")
        return Load(self.nvme, place.stored * need.parameters)

    def interleave(self, reference: Side, candidate: Side) -> Pairs:
        """With as many steps as a while takes."""
        steps = self.args.steps
        if not steps:
            steps = min(20, max(1, math.ceil(self.args.seconds / reference(1).step())))
        return interleave(reference, candidate, self.args.pairs, steps, self.say)

    def single_steps(self, worker: Worker) -> list[Used]:
        """For tables without a reference."""
        self.say(f"{self.args.pairs} steps")
        return [worker.train(1) for _ in range(self.args.pairs)]


def warm(worker: Watched) -> Watched:
    try:
        worker.train(WARM_UP)
    except BaseException:
        worker.close()
        raise
    return worker


class Fresh:
    """Like a worker, but it lives only while it trains: for two that have no room side by side."""

    def __init__(self, parameters: int, start: Callable[[], Watched]):
        self.parameters, self._start = parameters, start
        self.losses: list[float] = []
        self.costs: dict[str, float] = {}
        self.first_seconds = 0.0
        self._worker: Watched | None = None
        self._peak = 0

    def ready(self) -> None:
        self._worker = self._worker or self._start()

    def train(self, steps: int) -> Used:
        self.ready()
        with self._worker as worker:
            used = worker.train(steps)
        self._worker = None
        self.losses, self.costs, self.first_seconds = worker.losses, worker.costs, worker.first_seconds
        self._peak = max(self._peak, worker.peak_bytes())
        return used

    def peak_bytes(self) -> int:
        return self._peak

    def __enter__(self) -> "Fresh":
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker:
            self._worker.close()


def beside(plain: Watched | Fresh, load: Load, place: Place, steps: int) -> Used:
    """Steps of plain PyTorch, while fio moves the bytes of so many steps: done when both are."""
    plain.ready()
    load.start(place.read * plain.parameters * steps, place.written * plain.parameters * steps)
    compute = plain.train(steps)
    moved = load.finish()
    return Used(steps, max(compute.seconds, moved.seconds), compute.cpu_seconds + moved.cpu_seconds,
                moved.bytes_read, moved.bytes_written, compute.machine_seconds)  # fmt: skip
