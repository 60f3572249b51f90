"""Messages over a process group of torch: the suite of every group, and a rank that dies."""

import os
import pathlib
import signal

import pytest
from ranks import Ranks, run_ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("ZINF_BUILD", ROOT / "build/release"))
LIBRARY = BUILD / "tests/libcomm_c10d.so"

START = """
import ctypes, datetime, sys
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(days=365))
group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))
library = ctypes.CDLL(sys.argv[1])
message = ctypes.create_string_buffer(4096)
"""

SUITE = (
    START
    + """
failed = library.zinf_run_comm_cases(group.group_name.encode(), message, len(message))
del group
dist.destroy_process_group()
sys.exit(message.value.decode() if failed else 0)
"""
)

WAIT = (
    START
    + """
if dist.get_rank() == 1:
    print("waiting", flush=True)
    sys.stdin.read()
library.zinf_wait_for_nothing(group.group_name.encode(), 1, message, len(message))
print(message.value.decode(), flush=True)
"""
)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_groups_of_torch_pass_the_suite_of_every_group(count):
    run_ranks(count, SUITE, LIBRARY)


def test_a_rank_that_is_killed_is_named():
    with Ranks(3, WAIT, LIBRARY) as ranks:
        for process in ranks.processes:
            assert process.stdout.readline() == "waiting\n"
        ranks.processes[1].send_signal(signal.SIGKILL)
        for rank in (0, 2):
            out, err = ranks.processes[rank].communicate(timeout=300)
            assert "rank 1 of 3 is gone: " in out, out + err
