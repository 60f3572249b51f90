"""A failing disk under a whole run: every I/O of it, by number, fails once in every way."""

import contextlib
import gc
import multiprocessing
import os
import re
import shutil
import signal
import sys

import pytest
import torch
import zinf
from torch import nn
from training import PLACEMENTS, outcome
from twins import LR, step

SAVED, LAST = 2, 4  # the step of the save, and the end of the run

# Name: what happens, to which operation, and the errno that must be told; None: nobody notices.
FAULTS = {
    "read-eio": ("error", "read", "EIO"),
    "read-short": ("short", "read", None),
    "read-torn": ("torn", "read", "EIO"),
    "write-eio": ("error", "write", "EIO"),
    "write-enospc": ("error", "write", "ENOSPC"),
    "write-short": ("short", "write", None),
    "write-torn": ("torn", "write", "ENOSPC"),
    "sync-eio": ("error", "sync", "EIO"),
    "create-enospc": ("error", "create", "ENOSPC"),
}
IN_A_STEP = [name for name, (_, on, _) in FAULTS.items() if on in ("read", "write")]
ERRNO = {"EIO": (5, "Input/output error"), "ENOSPC": (28, "No space left on device")}

# The options of the optimizer, and the type of the weights.
MODES = {
    "step": ({"max_grad_norm": 0.05}, torch.float32),
    "backward": ({"update": "backward"}, torch.float32),
    "backward-clip": ({"update": "backward", "max_grad_norm": 0.05}, torch.float32),
    "step-split": ({}, torch.bfloat16),
    "backward-split": ({"update": "backward"}, torch.bfloat16),
}
QUICK = ("step", "backward", "step-split")

UNIT = r"(?:0|3)\.weight/(?:weight|grad|exp_avg|exp_avg_sq|master|low)"
FILE = r"\S+/(?:volume\.zinf|\((?:scratch|save)-of-process-\d+\))"


def build():
    """Two units of a page each, and random numbers that must go on too."""
    return nn.Sequential(
        nn.Linear(72, 12, bias=False), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 72, bias=False)
    )


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 72, generator=generator).to(model[0].weight.dtype)
    return model(x).float().square().mean()


def evicting(nvme):
    """An engine with which everything leaves memory after each use."""
    return zinf.Engine(nvme=nvme, **PLACEMENTS["evict"])


class Run:
    """An engine, its model and its optimizer."""

    def __init__(self, engine, mode):
        options, dtype = MODES[mode]
        self.engine = engine
        torch.manual_seed(0)
        with self.engine.init():
            self.model = build().to(dtype)
        self.optimizer = zinf.AdamW(self.model.parameters(), **({"lr": LR} | options))

    def train(self, first=SAVED, last=LAST):
        """Returns a hash of the losses and of all that is left."""
        return self.hash([step(self.model, self.optimizer, seed, loss_of) for seed in range(first, last)])

    def hash(self, losses=()):
        return outcome(losses, self.model, self.optimizer).hash


@pytest.fixture
def faults():
    injector = zinf._C._FaultInjector()
    yield injector
    injector.remove()


@contextlib.contextmanager
def started(nvme, tmp_path, mode):
    """A run with a save, and the hash of the steps after it when nothing fails."""
    with evicting(nvme) as engine:
        run = Run(engine, mode)
        run.train(0, SAVED)
        saved = tmp_path / "saved"
        run.engine.save(saved)
        yield run, saved, run.train()
        gc.collect()
        assert run.engine.stats()["managed"] <= 5 * 2, "units of failed steps are left"


def arm(faults, name, nth):
    kind, on, errno = FAULTS[name]
    faults.set(kind, on, nth, ERRNO[errno or "EIO"][0])


def attempt(action):
    """What the action returns, and what it raises at the user's line."""
    try:
        return action(), None
    except RuntimeError as error:
        return None, str(error)


def assert_told(text, name, unit=UNIT):
    """Unit, operation, path, offset and errno are in the text."""
    _, on, errno = FAULTS[name]
    assert errno is not None, f"short transfers are continued: {text}"
    number, meaning = ERRNO[errno]
    where = r" at offset \d+: wanted \d+ bytes, got \d+" if on in ("read", "write") else ""
    cause = rf"{on} {FILE}{where}: {meaning} \(errno {number} {errno}\)"
    assert re.search(rf"{unit}: .*{cause}" if unit else cause, text), text


def every_number(faults, at_least=8):
    """1, 2, ... until a fault was not met: then there are no more such operations."""
    nth = 0
    while nth == 0 or faults.fired:
        nth += 1
        yield nth
    faults.clear()
    assert nth > at_least, "the disk was hardly used"


@pytest.mark.parametrize("fault", IN_A_STEP)
@pytest.mark.parametrize(
    "mode", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in MODES]
)
def test_a_fault_at_every_operation_of_a_step(mode, fault, faults, nvme, tmp_path):
    with started(nvme, tmp_path, mode) as (run, saved, expected):
        raised = 0
        for nth in every_number(faults):
            run.engine.load(saved)
            arm(faults, fault, nth)
            result, error = attempt(run.train)
            if error is None:
                assert result == expected, nth
            else:
                raised += 1
                assert_told(error, fault)
                run.engine.load(saved)
                assert run.train() == expected, nth
        faults.clear()  # the last one was not met: how much is read depends on what was read ahead
        with evicting(nvme) as engine:  # and another engine goes on with the same save
            other = Run(engine, mode)
            engine.load(saved)
            assert other.train() == expected
        assert (raised > 4) == (FAULTS[fault][2] is not None)


@pytest.mark.parametrize("fault", ["read-eio", "write-eio", "write-short", "sync-eio", "create-enospc"])
def test_a_fault_at_every_operation_of_a_save(fault, faults, nvme, tmp_path):
    """The older save stays, nothing is left of the failed one, and training goes on."""
    errno = FAULTS[fault][2]
    with started(nvme, tmp_path, "step") as (run, saved, expected):
        run.engine.load(saved)
        content = run.hash()
        for nth in every_number(faults, at_least=1):
            path = tmp_path / f"new-{nth}"
            arm(faults, fault, nth)
            _, error = attempt(lambda path=path: run.engine.save(path))
            faults.clear()
            if error is None:
                # It may have met a write of the load before, or neighbours that were written together: of
                # these each is tried again by itself.
                left, told = attempt(run.hash)
                if told is None:
                    assert left == content, nth
                else:
                    assert errno is not None and faults.fired, told
                    assert_told(told, fault)
                run.engine.load(path)
                shutil.rmtree(path)
            else:
                lost = nvme in error  # to the engine itself
                assert_told(error, fault, UNIT if lost else None)
                assert not list(tmp_path.glob("new-*")), nth
                if lost:
                    run.engine.load(saved)
            assert run.train() == expected, nth
            run.engine.load(saved)


@pytest.mark.parametrize("mode", ["step", "step-split"])
@pytest.mark.parametrize("fault", ["read-eio", "read-short", "write-eio"])
def test_a_fault_at_every_operation_of_a_load(mode, fault, faults, nvme, tmp_path):
    """What a load has left half done cannot be used; another load brings all back."""
    with started(nvme, tmp_path, mode) as (run, saved, expected):
        trained = run.hash()
        for nth in every_number(faults):
            arm(faults, fault, nth)
            _, error = attempt(lambda: run.engine.load(saved))
            if error is not None:
                assert_told(error, fault, None)
                assert attempt(run.hash)[0] in (None, trained), "half a load can be used"
            else:  # a write may fail behind the scenes
                result, error = attempt(run.train)
                assert error is not None or result == expected, nth
            if error is not None:
                assert_told(error, fault, None)
                run.engine.load(saved)
                assert run.train() == expected, nth


def test_a_fault_in_close_gives_nothing_up(faults, nvme, tmp_path):
    with started(nvme, tmp_path, "step") as (run, saved, _):
        run.engine.load(saved)
        trained = run.hash()
        arm(faults, "read-eio", 1)
        _, error = attempt(run.engine.close)
        assert "still open" in error
        assert_told(error, "read-eio")
        run.engine.load(saved)
        run.engine.close()
        assert run.hash() == trained


def test_a_disk_that_is_full_from_the_beginning(faults, nvme, tmp_path):
    """With no room for the engine's files nothing can leave memory."""
    with started(nvme, tmp_path, "step") as (_, saved, expected):
        pass
    for for_good in (False, True):
        with evicting(nvme) as engine:
            faults.set("error", "create", 1, ERRNO["ENOSPC"][0], and_after=for_good)
            run, error = attempt(lambda engine=engine: Run(engine, "step"))
            assert faults.fired
            faults.clear()
            if for_good:
                assert_told(error, "create-enospc", None)  # when the optimizer is made
                gc.collect()  # what was built of the model
                run = Run(engine, "step")
            else:
                assert error is None  # it is content with less
            engine.load(saved)
            assert run.train() == expected


def be_killed(nvme, directory, on, nth):
    """In a process of its own: the nth operation after the save is its last."""
    torch.set_num_threads(2)
    injector = zinf._C._FaultInjector()
    run = Run(evicting(nvme), "step")
    run.train(0, SAVED)
    run.engine.save(directory / "saved")
    injector.set("kill", on, nth)
    run.train()
    run.engine.save(directory / "newer")


@pytest.fixture(scope="module")
def forks():
    """Processes that begin where torch is imported and no engine was ever made."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # an optimizer would import it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where it finds this module
        yield context


class Killings:
    """Runs that are killed, and one that goes on with what they have saved."""

    def __init__(self, run, expected, forks, nvme, tmp_path):
        self.run, self.expected = run, expected
        self.further = run.train(LAST, LAST + 1)
        self.forks, self.nvme, self.tmp_path = forks, nvme, tmp_path

    def kill(self, on, nth):
        """False when it ended before that operation. Whatever save is there must be whole."""
        directory = self.tmp_path / f"{on}-{nth}"
        child = self.forks.Process(target=be_killed, args=(self.nvme, directory, on, nth))
        child.start()
        child.join(timeout=120)
        assert child.exitcode in (0, -signal.SIGKILL), f"{on} {nth}: {child.exitcode}"
        if (directory / "newer").exists():
            self.run.engine.load(directory / "newer")
            assert self.run.train(LAST, LAST + 1) == self.further, f"{on} {nth}"
        else:
            self.run.engine.load(directory / "saved")
            assert self.run.train() == self.expected, f"{on} {nth}"
        return child.exitcode != 0


def test_another_process_goes_on_after_a_kill(forks, nvme, tmp_path):
    with started(nvme, tmp_path, "step") as (run, _, expected):
        killings = Killings(run, expected, forks, nvme, tmp_path)
        for on, nth in (("read", 1), ("read", 20), ("write", 12), ("write", 30), ("sync", 2), ("create", 1)):
            assert killings.kill(on, nth)


@pytest.mark.full
@pytest.mark.parametrize("on", ["read", "write", "sync", "create"])
def test_a_kill_at_every_operation(on, forks, nvme, tmp_path):
    with started(nvme, tmp_path, "step") as (run, _, expected):
        killings = Killings(run, expected, forks, nvme, tmp_path)
        nth = 1
        while killings.kill(on, nth):
            nth += 1
        assert nth > 1
