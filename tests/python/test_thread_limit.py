"""A user who may have few threads: an engine works, or says which limit to raise."""

import os
import subprocess
import sys
import tempfile

import pytest

SCRIPT = """
import os, resource, sys
import torch, torch._dynamo, zinf
from torch import nn

def train():
    engine = zinf.Engine(nvme=".", weights="nvme", states="nvme", evict="always")
    with engine.init():
        model = nn.Linear(72, 72)
    optimizer = zinf.AdamW(model.parameters(), lr=1e-3, update="backward")
    for _ in range(2):
        model(torch.ones(3, 72)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.save(f"saved-{os.getpid()}")

def limited(limit):
    if os.getuid() == 0:  # no limit counts for root
        os.setgroups([])
        os.setgid(54321)
        os.setuid(1_000_000 + os.getpid())
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
    try:
        train()
        print(limit, "works", flush=True)
    except Exception as error:
        print(limit, str(error).replace(chr(10), " "), flush=True)

torch.set_num_threads(1)  # with more, libgomp ends the process
os.chmod(".", 0o777)
for limit in map(int, sys.argv[1:]):
    child = os.fork()
    if child == 0:
        limited(limit)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture
def open_folder():
    """One that other users can reach: pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield folder


def test_too_few_threads_are_told_with_the_limit_and_the_way_out(open_folder):
    root = os.getuid() == 0  # others have threads elsewhere, which count
    limits = [str(limit) for limit in (range(1, 9) if root else [1])]
    command = [sys.executable, "-c", SCRIPT, *limits]
    done = subprocess.run(command, cwd=open_folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(limits), done.stdout + done.stderr
    assert not lines[0].endswith("works")
    assert not root or lines[-1].endswith("works"), done.stdout
    for line in lines:
        limit = line.split()[0]
        told = (
            f"start a thread: Resource temporarily unavailable (errno 11 EAGAIN) (this user may have {limit} "
        )
        assert line.endswith("works") or (told in line and "RLIMIT_NPROC): raise that with ulimit -u" in line)
