"""Ctrl-C: the loop goes on, with the weights of a run that made the same steps."""

import contextlib
import itertools
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import zinf
from torch.nn.utils import clip_grad_norm_
from twins import LR, assert_same_model, born, build_net, net_loss, plain_adamw

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

NORM = 0.05
PLACES = {
    "ram": {},
    "states": {"states": "nvme"},
    "nothing": {"weights": "nvme", "states": "nvme", "evict": "always"},
}
UPDATES = {
    "step": {"update": "step"},
    "backward": {"update": "backward"},
    "step-clipped": {"update": "step", "max_grad_norm": NORM},
    "backward-clipped": {"update": "backward", "max_grad_norm": NORM},
}
SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    time.sleep(float(line))
    os.kill(os.getppid(), signal.SIGINT)
    print(flush=True)
"""


@pytest.fixture(autouse=True)
def one_thread():
    """Small operators: a second thread would mostly be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


class Sender:
    """Another process, which sends SIGINT when it is told to."""

    def __enter__(self):
        command = [sys.executable, "-S", "-c", SENDER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def send(self, seconds):
        """In so many seconds, or when the machine comes to it."""
        self._process.stdin.write(f"{seconds}\n".encode())

    def sent(self):
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def forget(self):
        self._process.stdout.readline()  # waits for it


def train(model, optimizer, batch):
    optimizer.zero_grad()
    net_loss(model, batch).backward()
    optimizer.step()


def plain_run(batches, clip=None):
    torch.manual_seed(0)
    model = build_net()
    optimizer = plain_adamw(model)
    for batch in batches:
        net_loss(model, batch).backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def managed(engine, **options):
    model = born(engine)
    return model, zinf.AdamW(model.parameters(), lr=LR, **options)


def steps_of(model, optimizer):
    """How many steps the weights have made: all the same number."""
    states = [optimizer.state.get(parameter) for parameter in model.parameters()]
    steps = {int(state["step"]) if state else 0 for state in states}
    assert len(steps) == 1, f"weights of different steps: {steps}"
    return steps.pop()


class InterruptedRun:
    """Trains batch after batch; `made` are those whose steps were made."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.made = []
        self.batch = 0

    def note(self):
        """Whether the last batch counts; can be repeated."""
        if steps_of(self.model, self.optimizer) > len(self.made):
            self.made.append(self.batch)

    def until_interrupted(self, sender, seconds):
        """False when no exception came of it within some steps."""
        steps_after = 0
        try:
            sender.send(seconds)
            while steps_after < 20:
                self.note()
                self.batch += 1
                train(self.model, self.optimizer, self.batch)
                steps_after += sender.sent()
        except KeyboardInterrupt:
            pass
        sender.forget()
        self.note()
        return steps_after < 20


def interrupt_at_random(nvme, place, update, count):
    moments = random.Random(f"{place} {update}")
    where = dict(PLACES[place], nvme=nvme) if PLACES[place] else {}
    with Sender() as sender, zinf.Engine(**where) as engine:
        run = InterruptedRun(*managed(engine, **UPDATES[update]))
        times = [time.perf_counter()]
        for _ in range(5):
            run.batch += 1
            train(run.model, run.optimizer, run.batch)
            run.note()
            times.append(time.perf_counter())
        seconds = min(after - before for before, after in itertools.pairwise(times))
        seen = [run.until_interrupted(sender, moments.random() * 2 * seconds) for _ in range(count)]
        # Python itself swallows one that comes in the callback of a weak reference.
        assert seen.count(False) <= count // 50
        run.batch += 1
        train(run.model, run.optimizer, run.batch)
        run.note()
        assert run.batch - len(run.made) <= count
        assert_same_model(run.model, plain_run(run.made, UPDATES[update].get("max_grad_norm")))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("place", PLACES)
def test_interrupts_at_random_moments(nvme, place, update):
    interrupt_at_random(nvme, place, update, count=6)


@pytest.mark.full
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("place", PLACES)
def test_200_interrupts_at_random_moments(nvme, place, update):
    interrupt_at_random(nvme, place, update, count=200)


@contextlib.contextmanager
def warm(place, **options):
    """A managed model after two steps: the first makes its updates at the end of backward."""
    with zinf.Engine(**place) as engine:
        model, optimizer = managed(engine, **options)
        for batch in range(2):
            train(model, optimizer, batch)
        yield model, optimizer


def test_interrupt_in_step_waits_for_its_end(place):
    with warm(place) as (model, optimizer):
        real = optimizer._update

        def update(*arguments, **options):
            interrupt()
            real(*arguments, **options)

        optimizer._update = update
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 2)
        optimizer._update = real
        assert steps_of(model, optimizer) == 3
        train(model, optimizer, 3)
        assert_same_model(model, plain_run(range(4)))


@pytest.mark.parametrize("next_call", ["zero_grad", "backward", "step"])
def test_interrupt_inside_backward_waits_for_its_end(place, next_call):
    """The step counts as made, whatever comes next."""
    with warm(place, update="backward") as (model, optimizer):
        optimizer.zero_grad()
        hook = model[0].weight.register_hook(lambda _: interrupt())
        with pytest.raises(KeyboardInterrupt):
            net_loss(model, 2).backward()
        hook.remove()
        assert steps_of(model, optimizer) == 3
        if next_call == "zero_grad":
            optimizer.param_groups[0]["lr"] = 1.0  # of the next step
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = LR
        elif next_call == "step":
            optimizer.step()
            optimizer.zero_grad()
        net_loss(model, 3).backward()
        optimizer.step()
        assert_same_model(model, plain_run(range(4)))


@pytest.mark.parametrize("next_call", ["zero_grad", "model.zero_grad", "backward"])
def test_interrupt_between_backward_and_step(place, next_call):
    with warm(place, update="backward") as (model, optimizer):
        optimizer.zero_grad()
        net_loss(model, 2).backward()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        if next_call != "backward":
            (optimizer if next_call == "zero_grad" else model).zero_grad()
        net_loss(model, 3).backward()
        optimizer.step()
        train(model, optimizer, 4)
        assert_same_model(model, plain_run(range(5)))


def test_interrupt_between_step_and_zero_grad(place):
    with warm(place, update="backward") as (model, optimizer):
        train(model, optimizer, 2)
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        net_loss(model, 3).backward()
        optimizer.step()
        assert_same_model(model, plain_run(range(4)))


def test_zero_grad_in_the_place_of_step_is_refused_as_ever(place):
    with warm(place, update="backward") as (model, optimizer):
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        train(model, optimizer, 2)  # the interrupt was before this step
        optimizer.zero_grad()
        net_loss(model, 3).backward()
        with pytest.raises(RuntimeError, match="call step.. first"):
            optimizer.zero_grad()


def test_interrupt_before_the_first_update_changes_nothing(place):
    with warm(place, update="backward") as (model, optimizer):
        optimizer.zero_grad()
        hook = model[-1].bias.register_hook(lambda _: interrupt())
        with pytest.raises(KeyboardInterrupt):
            net_loss(model, 2).backward()
        hook.remove()
        assert_same_model(model, plain_run(range(2)))
        train(model, optimizer, 3)
        assert_same_model(model, plain_run([0, 1, 3]))


def test_a_second_interrupt_goes_through_at_once(place):
    with warm(place, update="backward") as (model, optimizer):
        optimizer.zero_grad()
        after = []

        def twice(_):
            interrupt()
            interrupt()
            after.append("the second one")

        hook = model[0].weight.register_hook(twice)
        with pytest.raises(KeyboardInterrupt):
            net_loss(model, 2).backward()
        hook.remove()
        assert not after
        with pytest.raises(RuntimeError, match="load a good state first"):
            optimizer.step()


def test_a_handler_of_the_user_s_is_called_once_and_stays(place):
    with warm(place, update="backward") as (model, optimizer):
        told = []
        before = signal.signal(signal.SIGINT, lambda *_: told.append(steps_of(model, optimizer)))
        try:
            hook = model[0].weight.register_hook(lambda _: interrupt())
            train(model, optimizer, 2)
            hook.remove()
            assert told == [3], "after the last update of the step"
            train(model, optimizer, 3)
            interrupt()
            assert told == [3, 4]
        finally:
            signal.signal(signal.SIGINT, before)
        assert_same_model(model, plain_run(range(4)))


@pytest.mark.parametrize("update", ["step", "backward"])
def test_training_in_another_thread_goes_on(place, update):
    with warm(place, update=update) as (model, optimizer):
        hook = model[0].weight.register_hook(lambda _: interrupt())
        errors, done = [], threading.Event()

        def run():
            torch.set_num_threads(1)  # as a new thread has not
            try:
                train(model, optimizer, 2)
            except BaseException as error:
                errors.append(error)
            done.set()

        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=run).start()
            done.wait()
            time.sleep(60)  # ends with the interrupt
        done.wait()
        hook.remove()
        assert not errors
        train(model, optimizer, 3)
        assert_same_model(model, plain_run(range(4)))
