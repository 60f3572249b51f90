"""Scripts that run as several ranks, each a process of its own."""

import concurrent.futures
import os
import socket
import subprocess
import sys
import tempfile

TIMEOUT = 300  # seconds; only for hangs


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """Processes of one group, started as torchrun would."""

    def __init__(self, count, script, *arguments):
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count),
                  "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}  # fmt: skip
        self._script = tempfile.NamedTemporaryFile("w", suffix=".py")
        self._script.write(script)
        self._script.flush()
        command = [sys.executable, self._script.name, *map(str, arguments)]
        self.processes = [
            subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(count)
        ]  # fmt: skip

    def outputs(self):
        """(exit code, what it said) of every rank, read at once: one could wait for a full pipe."""

        def read(process):
            out, err = process.communicate(timeout=TIMEOUT)
            return process.returncode, out + err

        with concurrent.futures.ThreadPoolExecutor(len(self.processes)) as pool:
            return list(pool.map(read, self.processes))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        self._script.close()


def run_ranks(count, script, *arguments):
    """What every rank said; all of them must end well."""
    with Ranks(count, script, *arguments) as ranks:
        ends = ranks.outputs()
    for rank, (code, text) in enumerate(ends):
        assert code == 0, f"rank {rank}: exit {code}\n{text}"
    return [text for _, text in ends]
