"""Runs the worker in a process of its own and watches its memory from outside."""

import json
import os
import subprocess
import sys
import threading
import time

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
MIB = 1 << 20


def run(*arguments: object, before=None, log=subprocess.DEVNULL) -> dict:
    """What it printed, with the exit code and the most anonymous and shared memory that was seen.

    before: called in the new process, before Python starts in it.
    """
    command = [sys.executable, WORKER, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, preexec_fn=before, text=True)
    peak = [0]
    watcher = threading.Thread(target=_watch, args=(process, peak))
    watcher.start()
    output, _ = process.communicate()
    watcher.join()
    lines = output.splitlines()
    result = json.loads(lines[-1]) if lines else {"error": "Killed", "message": f"exit {process.returncode}"}
    return {**result, "exit": process.returncode, "peak": peak[0]}


def _watch(process: subprocess.Popen, peak: list[int]) -> None:
    path = f"/proc/{process.pid}/status"
    while process.poll() is None:
        try:
            with open(path) as file:
                fields = dict(line.split(":", 1) for line in file)
            used = sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
        except (OSError, KeyError):  # it has ended
            return
        peak[0] = max(peak[0], used)
        time.sleep(0.005)
