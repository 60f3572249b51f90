"""The C++ API under mpirun: the bits of a plain reference that averages in the order of ranks."""

import os
import re
import subprocess

import pytest
import torch
import zinf
from rank_training import averaged, clip_as_ranks_do
from test_cpp import BUILD, TEXT, Gpt, example, fnv1a, one_thread  # noqa: F401
from torch import nn

PROGRAM = BUILD / "tests/cpp_ranks"
STEPS = 3
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="built without MPI, or there is no build tree")


def run_ranks(ranks, *arguments):
    command = [*MPIRUN, "-np", ranks, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=ENVIRONMENT,
                          timeout=120)  # fmt: skip


def tree(terms):
    if len(terms) == 1:
        return terms[0]
    middle = len(terms) // 2
    return tree(terms[:middle]) + tree(terms[middle:])


def train_replicas(build, ranks, loss_of, micro_batches, max_grad_norm, how=None, **options):
    """Plain PyTorch: a replica per rank, gradients averaged pass by pass."""
    torch.manual_seed(0)
    first = build()
    replicas = [first, *(build() for _ in range(1, ranks))]
    optimizer = zinf.AdamW(first.parameters(), **options)
    for step in range(STEPS):
        with torch.no_grad():
            for replica in replicas[1:]:
                for ours, theirs in zip(replica.parameters(), first.parameters(), strict=True):
                    ours.copy_(theirs)
        total, passes = None, []
        for micro in range(micro_batches):
            for rank, replica in enumerate(replicas):
                replica.zero_grad()
                loss = loss_of(replica, step, micro, rank)
                if loss is not None:
                    loss.backward()
            passed = list(averaged(replicas, group=2 if how == "groups" else None))
            passes += [[p.grad for p in replica.parameters()] for replica in replicas]
            total = passed if total is None else [a + b for a, b in zip(total, passed, strict=True)]
        if how == "world":
            total = [tree(terms) / ranks for terms in zip(*passes, strict=True)]
        for parameter, grad in zip(first.parameters(), total, strict=True):
            parameter.grad = grad
        if max_grad_norm is not None:
            clip_as_ranks_do(list(first.parameters()), max_grad_norm)
        optimizer.step()
    return fnv1a(first)


def small_reference(ranks, dtype, micro_batches, max_grad_norm, idle=False, how=None):
    def build():
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)

    def loss_of(model, step, micro, rank):
        torch.manual_seed(1000 + 100 * step + 10 * micro + rank)
        x = torch.randn(16, 8).to(dtype)
        return None if idle and rank == 1 else model(x).square().mean()

    return train_replicas(build, ranks, loss_of, micro_batches, max_grad_norm, how, lr=1e-2)


def small_run(ranks, nvme, stage, dtype, update, micro_batches, max_grad_norm, *what):
    name = str(dtype).removeprefix("torch.")
    return run_ranks(ranks, PROGRAM, nvme, stage, name, update, micro_batches, max_grad_norm or "-", *what)


def hashes(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"weights (\w{16})", done.stdout)


@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
@pytest.mark.parametrize(
    ("update", "micro_batches"),
    [("step", 1), pytest.param("backward", 1, marks=pytest.mark.full), ("backward", 2)],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_hash(tmp_path, one_thread, ranks, update, micro_batches, max_grad_norm):  # noqa: F811
    narrow = ranks == 3 and max_grad_norm is None  # clipped ones are rounded by the reference alone
    dtype = torch.bfloat16 if narrow else torch.float32
    expected = small_reference(ranks, dtype, micro_batches, max_grad_norm)
    stage, nvme = (3, tmp_path) if max_grad_norm else (2, "-")
    done = small_run(ranks, nvme, stage, dtype, update, micro_batches, max_grad_norm)
    assert hashes(done) == [expected] * ranks
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_rank_without_a_backward_pass(tmp_path, one_thread, update):  # noqa: F811
    expected = small_reference(2, torch.float32, 1, None, idle=True)
    assert hashes(small_run(2, tmp_path, 3, torch.float32, update, 1, None, "idle")) == [expected] * 2


def test_another_model_is_named(tmp_path):
    done = small_run(2, tmp_path, 3, torch.float32, "step", 1, None, "other")
    assert done.returncode != 0
    assert "17" in done.stderr and "16" in done.stderr and "rank" in done.stderr, done.stderr


def test_the_others_hear_of_an_exception(tmp_path):
    done = small_run(2, tmp_path, 3, torch.float32, "step", 1, None, "throw")
    assert done.returncode != 0
    assert "rank 1: enough" in done.stderr
    assert "rank 0: rank 1 of 2 failed: an exception has ended it" in done.stderr


def test_a_step_that_ranks_have_begun_and_not_ended_is_the_last_one(tmp_path):
    done = small_run(2, tmp_path, 3, torch.float32, "step", 1, None, "options")
    for rank in range(2):
        assert re.search(rf"rank {rank}, step 0: .*with lr=0.5", done.stdout), done.stdout + done.stderr
        again = rf"rank {rank}, step 1: weights and states do not fit together"
        assert re.search(again, done.stdout), done.stdout + done.stderr


def test_a_rank_refuses_the_states_of_another(tmp_path):
    done = small_run(2, tmp_path, 3, torch.float32, "step", 1, None, "states")
    assert "rank 0, states of 0: nothing" in done.stdout, done.stdout + done.stderr
    assert "rank 1, states of 1: nothing" in done.stdout, done.stdout + done.stderr
    refusal = "rank 1, states of 0: these optimizer states are of rank 0 of 2, and this is rank 1 of 2"
    assert refusal in done.stdout, done.stdout + done.stderr
    assert "Save on each rank to a file of its own" in done.stdout


@pytest.mark.parametrize("what", ["groups", "world"])
def test_groups_and_worlds(tmp_path, one_thread, what):  # noqa: F811
    passes = 2 if what == "world" else 1
    expected = small_reference(4, torch.float32, passes, None, how=what)
    done = small_run(4, tmp_path, 3, torch.float32, "backward", passes, None, what)
    assert hashes(done) == [expected] * 4


def test_save_says_that_it_cannot(tmp_path):
    done = small_run(2, tmp_path, 3, torch.float32, "step", 1, None, "save")
    assert done.returncode != 0
    assert "save() in C++ does not work with several ranks yet" in done.stderr


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_example(example, tmp_path, one_thread, ranks):  # noqa: F811
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()

    def loss_of(model, step, _, rank):
        torch.manual_seed(step + 1)
        starts = torch.randint(len(text) - 65, (4, 1))[rank::ranks]
        batch = text[starts + torch.arange(65)]
        return nn.functional.cross_entropy(model(batch[:, :64]).reshape(-1, 256), batch[:, 1:].reshape(-1))

    expected = train_replicas(Gpt, ranks, loss_of, 1, 1.0, lr=1e-3, weight_decay=0.1)
    done = run_ranks(ranks, example.parent / "train_gpt_ranks", TEXT, tmp_path, STEPS)
    assert hashes(done) == [expected]
    assert f"step {STEPS} of {STEPS}" in done.stdout
    assert not list(tmp_path.iterdir())
