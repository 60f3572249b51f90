"""Runs workers in processes of their own and watches them from outside."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
MIB = 1 << 20
QUIET_SECONDS = 0.05  # a process that moves nothing for so long has moved all
TICKS = os.sysconf("SC_CLK_TCK")


def run(*arguments: object, before=None, log=subprocess.DEVNULL) -> dict:
    """What it printed, with the exit code and the most anonymous and shared memory that was seen.

    before: called in the new process, before Python starts in it.
    """
    command = [sys.executable, WORKER, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, preexec_fn=before, text=True)
    peak = [0]
    watcher = threading.Thread(target=_watch, args=(process, peak, 0.005))
    watcher.start()
    output, _ = process.communicate()
    watcher.join()
    lines = output.splitlines()
    result = json.loads(lines[-1]) if lines else {"error": "Killed", "message": f"exit {process.returncode}"}
    return {**result, "exit": process.returncode, "peak": peak[0]}


class WorkerError(Exception):
    """A process that was started said that it failed, or ended without a word."""


@dataclass(frozen=True)
class Used:
    """What some steps took, seen from outside."""

    steps: int
    seconds: float
    cpu_seconds: float = 0
    bytes_read: int = 0
    bytes_written: int = 0
    machine_seconds: float = 0  # CPU seconds of all processes, the kernel and other guests meanwhile

    def step(self) -> float:
        return self.seconds / self.steps

    def cpu(self) -> float:
        return self.cpu_seconds / self.steps

    def others(self) -> float:
        """The share of the machine that something else took."""
        return max(0.0, self.machine_seconds - self.cpu_seconds) / (self.seconds * os.cpu_count())


class Watched:
    """A process that trains when told, until it is closed, and waits in between without using the CPU."""

    def __init__(self, command: list[str], **options: object):
        begin = time.monotonic()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, **options
        )
        self._peak = [0]
        self._watcher = threading.Thread(target=_watch, args=(self._process, self._peak, 0.05))
        self._watcher.start()
        self.losses: list[float] = []
        self.costs: dict[str, float] = {}  # what it says of itself
        self._rests = False
        try:
            self.parameters = self._built()
            self.train(1)
        except BaseException:
            self.close()
            raise
        self.first_seconds = time.monotonic() - begin  # from the start to the end of the first step

    def _built(self) -> int:
        """Waits for the model; how many parameters it has."""
        raise NotImplementedError

    def _step(self, steps: int) -> None:
        """Waits for so many steps."""
        raise NotImplementedError

    def _end(self) -> None:
        """Tells the process to end."""
        raise NotImplementedError

    def _rest(self) -> None:
        """Waits until it has given back what it does not use. Not every process can."""

    def ready(self) -> None:
        """It is."""

    def keep_small(self) -> None:
        """From now on it gives unused memory back after each order, when the clock has stopped.

        A step before the clock starts takes that memory again.
        """
        self._rests = True
        self._rest()

    def train(self, steps: int) -> Used:
        """Until the last step is done, and what it writes is written."""
        if self._rests:
            self._step(1)
            self._drained()
        before = self._counters()
        begin = time.monotonic()
        self._step(steps)
        end = self._drained()
        used = [after - was for after, was in zip(self._counters(), before, strict=True)]
        if self._rests:
            self._rest()
        return Used(steps, end - begin, *used)

    def pid(self) -> int:
        return self._process.pid

    def peak_bytes(self) -> int:
        """The most anonymous and shared memory that was seen."""
        return self._peak[0]

    def close(self) -> None:
        self._end()
        self._process.wait()
        self._watcher.join()

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drained(self) -> float:
        """When it last moved bytes, or now."""
        end = time.monotonic()
        seen = self._counters()[1:3]
        quiet = end
        while time.monotonic() - quiet < QUIET_SECONDS:
            time.sleep(0.01)
            moved = self._counters()[1:3]
            if moved != seen:
                seen = moved
                end = quiet = time.monotonic()
        return end

    def _counters(self) -> tuple[float, int, int, float]:
        """CPU seconds, bytes read, bytes written; the machine's CPU seconds."""
        with open(f"/proc/{self._process.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        moved = io_counters(self._process.pid)
        return (int(fields[11]) + int(fields[12])) / TICKS, *moved, _machine_seconds()


class Worker(Watched):
    """worker.py of this folder."""

    def __init__(self, *arguments: object, environment: dict[str, str] | None = None):
        command = [sys.executable, WORKER, "--serve", *map(str, arguments)]
        super().__init__(command, stderr=subprocess.DEVNULL, env={**os.environ, **(environment or {})})

    def _built(self) -> int:
        return self._reply()["parameters"]

    def _step(self, steps: int) -> None:
        reply = self._order(str(steps))
        self.losses += reply["losses"]
        self.costs = reply["costs"]

    def _rest(self) -> None:
        self._order("rest")

    def _end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _order(self, order: str) -> dict:
        with contextlib.suppress(BrokenPipeError):  # the reply says why
            self._process.stdin.write(f"{order}\n")
        return self._reply()

    def _reply(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"the worker ended with exit code {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{reply['error']}: {reply['message']}")
        return reply


def io_counters(pid: int) -> tuple[int, int]:
    """Bytes that a process has read from disks and written to them."""
    with open(f"/proc/{pid}/io") as file:
        fields = dict(line.split(": ") for line in file)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def _machine_seconds() -> float:
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, soft, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft + steal) / TICKS


def _watch(process: subprocess.Popen, peak: list[int], interval: float) -> None:
    path = f"/proc/{process.pid}/status"
    while process.poll() is None:
        try:
            with open(path) as file:
                fields = dict(line.split(":", 1) for line in file)
            used = sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
        except (OSError, KeyError):  # it has ended
            return
        peak[0] = max(peak[0], used)
        time.sleep(interval)
