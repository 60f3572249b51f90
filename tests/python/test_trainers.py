"""Trainers of others write and resume checkpoints with a host_memory of a quarter of the model."""

import subprocess
import sys
from pathlib import Path

import pytest

TRAINERS = Path(__file__).with_name("trainers.py")


@pytest.mark.parametrize("how", ["hugging-face", "lightning"])
def test_a_resumed_run_has_the_losses_of_one_without_interruption(nvme, tmp_path, how):
    run = subprocess.run(
        [sys.executable, TRAINERS, how, tmp_path, nvme], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines() if line.startswith(("managed ", "plain "))]
    losses = {"managed": {}, "plain": {}}
    for name, step, loss in rows:
        losses[name][step] = loss
    assert list(losses["plain"]) == ["1", "2", "3", "4"]
    assert losses["managed"] == losses["plain"]
