"""The end of an engine: what was trained is kept, or the engine stays open."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import zinf
from torch import nn
from twins import LR, assert_same_model, born, budget, plain_adamw, same, step

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

WIDTH = 512
MIB = 1 << 20


def build():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])  # 8 MiB


def loss(model, seed):
    return model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean()


def trained(make=build, seed=0):
    """A plain model after two steps, with its optimizer."""
    torch.manual_seed(seed)
    model = make()
    optimizer = plain_adamw(model)
    for index in range(2):
        step(model, optimizer, index, loss)
    return model, optimizer


def trained_in(engine, seed=0, **options):
    """The same, managed."""
    model = born(engine, build, seed)
    optimizer = zinf.AdamW(model.parameters(), lr=LR, **options)
    for index in range(2):
        step(model, optimizer, index, loss)
    return model, optimizer


def small(nvme):
    """An engine whose budget holds a third of a model with its gradients and states."""
    return zinf.Engine(host_memory=budget(12 * MIB), nvme=nvme)


def is_plain(model):
    return not any(zinf._C.is_managed(parameter) for parameter in model.parameters())


def assert_goes_on(managed, ours, plain, theirs):
    for seed in range(2, 4):
        assert same(step(managed, ours, seed, loss), step(plain, theirs, seed, loss))
    assert_same_model(managed, plain)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_close_keeps_weights_and_states_beyond_the_budget(nvme, update):
    plain, theirs = trained()
    with small(nvme) as engine:
        managed, ours = trained_in(engine, update=update)
    assert is_plain(managed)
    assert_same_model(managed, plain)
    assert_goes_on(managed, ours, plain, theirs)


def test_release_keeps_weights_and_states_beyond_the_budget(nvme):
    plain, theirs = trained()
    other_plain, _ = trained(seed=1)
    with small(nvme) as engine:
        managed, ours = trained_in(engine)
        engine.release(managed)
        assert is_plain(managed)
        assert_same_model(managed, plain)
        # What was released does not count: the budget is there for the next model.
        other, _ = trained_in(engine, seed=1)
        engine.release(other)
        assert_same_model(other, other_plain)
    assert_goes_on(managed, ours, plain, theirs)


def test_a_closed_model_leaves_the_next_budget_alone(nvme):
    plain, _ = trained()
    host_memory = budget(12 * MIB)
    with zinf.Engine(host_memory=host_memory, nvme=nvme) as engine:
        first, _ = trained_in(engine)
    with zinf.Engine(host_memory=host_memory, nvme=nvme) as engine:
        managed, _ = trained_in(engine)
    assert_same_model(managed, plain)
    assert_same_model(first, plain)


def test_discard_gives_nothing_back(nvme):
    engine = small(nvme)
    managed, _ = trained_in(engine)
    engine.close(discard=True)
    engine.close()
    for parameter in managed.parameters():
        with pytest.raises(RuntimeError, match="was discarded when its engine was closed"):
            parameter.sum()
    assert not list(Path(nvme).iterdir())


def test_exception_in_the_block_is_the_one_that_is_seen(nvme):
    plain, _ = trained()
    with pytest.raises(ZeroDivisionError) as raised, small(nvme) as engine:
        managed, _ = trained_in(engine)
        _ = 1 / 0
    assert not getattr(raised.value, "__notes__", [])
    assert_same_model(managed, plain)


SCRIPT = """
import resource, sys, torch, zinf
sys.path.insert(0, {tests!r})
from test_close import assert_goes_on, is_plain, trained, trained_in
from twins import assert_same_model

torch.set_num_threads(1)
plain, theirs = trained()

def take_memory_away(left):
    '''The system gives this process only so many bytes more.'''
    status = open("/proc/self/status").read()
    used = int(status.split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + left, resource.RLIM_INFINITY))

def give_it_back():
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def open_engine():
    return zinf.Engine(host_memory="12MiB", nvme={nvme!r})

"""


def run_alone(nvme, script):
    text = SCRIPT.format(tests=str(Path(__file__).parent), nvme=nvme) + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)


def test_close_that_cannot_keep_everything_changes_nothing(nvme):
    done = run_alone(
        nvme,
        """
        engine = open_engine()
        managed, ours = trained_in(engine)
        take_memory_away(6 << 20)
        for end in (engine.close, lambda: engine.__exit__(None, None, None)):
            try:
                end()
            except zinf.BudgetError as error:
                print(error)
        give_it_back()
        assert not is_plain(managed)
        assert_same_model(managed, plain)
        engine.close()
        assert is_plain(managed)
        assert_goes_on(managed, ours, plain, theirs)
        """,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        for text in ("still open", "are missing", "engine.save()", "discard"):
            assert text in line


def test_release_that_cannot_keep_everything_changes_nothing(nvme):
    done = run_alone(
        nvme,
        """
        engine = open_engine()
        managed, ours = trained_in(engine)
        take_memory_away(6 << 20)
        try:
            engine.release(managed)
        except RuntimeError as error:
            print(error)
        give_it_back()
        assert all(zinf._C.is_managed(p) for p in managed.parameters())
        engine.close()
        assert_goes_on(managed, ours, plain, theirs)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "are missing" in done.stdout


def test_exception_that_closes_the_engine_names_what_is_lost(nvme):
    done = run_alone(
        nvme,
        """
        try:
            with open_engine() as engine:
                managed, ours = trained_in(engine)
                take_memory_away(4 << 20)
                raise ZeroDivisionError("mine")
        except ZeroDivisionError as error:
            give_it_back()
            print(error, error.__notes__)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine")
    assert "optimizer states could not be given back when the engine was closed" in done.stdout
    assert "are missing" in done.stdout
