"""fio beside a training process: the bytes that a step must move at least, moved as well as fio can."""

import contextlib
import json
import os
import subprocess
import tempfile
import time

from watch import MIB, Used, WorkerError, io_counters

OPTIONS = ("--ioengine=io_uring", "--direct=1", "--bs=1M", "--iodepth=8", "--thread=1", "--fixedbufs=1",
           "--registerfiles=1", "--scramble_buffers=0", "--output-format=json")  # fmt: skip


class Load:
    """A file that is read and overwritten, by a read and a write job of their own.

    Two jobs are faster than a mixed one (2.7 GB/s, 2.1), which makes the reference harder. Each goes through
    the file as often as its bytes take.
    """

    def __init__(self, directory: str, file_bytes: int):
        self._size = max(16, -(-file_bytes // MIB))
        handle, self._path = tempfile.mkstemp(prefix="zinf-load-", dir=directory)
        os.close(handle)
        self._process: subprocess.Popen | None = None
        self.cpu_seconds, self.bytes = 0.0, 0  # in sum
        try:
            self._process = self._start([*self._job("write", self._size)])
            self.finish()
        except BaseException:
            self.close()
            raise

    def start(self, read: int, written: int) -> None:
        """Returns when the first bytes move."""
        jobs = [*self._job("read", -(-read // MIB)), *self._job("write", -(-written // MIB))]
        self._process = self._start(jobs)
        with contextlib.suppress(OSError):  # it has ended
            while self._process.poll() is None and not any(io_counters(self._process.pid)):
                time.sleep(0.001)

    def finish(self) -> Used:
        """Waits; fio's own start and end are not in the seconds."""
        output, _ = self._process.communicate()
        if self._process.returncode:
            raise WorkerError(f"fio failed with exit code {self._process.returncode}")
        jobs = json.loads(output)["jobs"]
        sides = [(job, job[direction]) for job in jobs for direction in ("read", "write")]
        used = Used(
            steps=1,
            seconds=max(side["runtime"] for _, side in sides) / 1e3,
            cpu_seconds=sum(s["runtime"] / 1e3 * (job["usr_cpu"] + job["sys_cpu"]) / 100 for job, s in sides),
            bytes_read=sum(job["read"]["io_bytes"] for job in jobs),
            bytes_written=sum(job["write"]["io_bytes"] for job in jobs),
        )
        self.cpu_seconds += used.cpu_seconds
        self.bytes += used.bytes_read + used.bytes_written
        return used

    def close(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        os.unlink(self._path)

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _job(self, direction: str, mebibytes: int) -> tuple[str, ...]:
        return (f"--name={direction}", f"--filename={self._path}", f"--rw={direction}",
                f"--size={self._size}M", f"--io_size={mebibytes}M")  # fmt: skip

    def _start(self, jobs: list[str]) -> subprocess.Popen:
        return subprocess.Popen(["fio", *OPTIONS, *jobs], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                text=True)  # fmt: skip
