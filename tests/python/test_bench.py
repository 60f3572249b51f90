"""The end-to-end benchmarks still run: the smallest model, one pair. No times are looked at."""

import os
import pathlib
import shutil
import subprocess
import sys

SPEED = pathlib.Path(__file__).parents[2] / "bench/e2e/speed.py"


def speed(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SPEED), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_speed_writes_a_report_and_leaves_nothing_on_the_disk(nvme, tmp_path):
    row = "nothing" if shutil.which("fio") else "ram"
    out = tmp_path / "report.md"
    run = speed("--nvme", nvme, "--size", "2M", "--rows", row, "--pairs", 1, "--steps", 2, "--out", out)
    assert run.returncode == 0, run.stdout + run.stderr
    report = out.read_text()
    assert report == run.stdout.removesuffix("\n")
    row = next(line for line in report.splitlines() if line.startswith("| 2M, 1 x 64 |"))
    assert "| the same |" in row
    assert os.listdir(nvme) == []


def test_speed_names_the_rows_that_there_are(nvme):
    run = speed("--nvme", nvme, "--rows", "ram,everything")
    assert run.returncode == 2
    assert "there is no everything; there are ram, states, nothing" in run.stderr
