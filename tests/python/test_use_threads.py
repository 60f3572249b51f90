"""Managed models in threads and beside other processes."""

import os
import signal
import threading

import pytest
import torch
import zinf
from torch import nn
from torch.nn import functional as F
from twins import (
    assert_same_model,
    assert_same_training,
    born,
    build_net,
    inputs,
    optimizers,
    pair,
    same,
    step,
)

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

JOIN_SECONDS = 120


def _in_threads(count, action):
    errors = []

    def run(index):
        try:
            action(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_forward_in_several_threads(engine):
    plain, managed = pair(engine)
    expected = plain(inputs()).detach()

    def run(_):
        with torch.no_grad():
            for _ in range(50):
                assert same(managed(inputs()), expected)

    _in_threads(4, run)


def test_training_in_several_threads(engine):
    pairs = [pair(engine, seed=seed) for seed in range(3)]
    _in_threads(3, lambda index: assert_same_training(*reversed(pairs[index]), steps=5))


def test_building_in_a_thread(engine):
    made = {}
    _in_threads(1, lambda _: made.update(model=born(engine)))
    torch.manual_seed(0)
    plain = build_net()
    assert_same_training(made["model"], plain)


def _exit_code_of_child(action):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a hang becomes a signal
        code = 1
        try:
            code = action()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forked_child_is_refused(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    step(plain, theirs)
    step(managed, mine)

    def use():
        try:
            managed[0].weight.sum()
        except RuntimeError as error:
            return 0 if "fork" in str(error) else 2
        return 3

    assert _exit_code_of_child(use) == 0, "2: unclear error, 3: no error"
    assert same(step(managed, mine), step(plain, theirs)), "the parent goes on"
    assert_same_model(managed, plain)


def test_forked_child_may_leave_the_model_alone(engine):
    plain, managed = pair(engine)
    assert _exit_code_of_child(lambda: int(torch.ones(3).sum().item() != 3)) == 0
    assert_same_training(managed, plain)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return inputs(index)[0], inputs(index + 1000)[0]


def test_data_loader_with_worker_processes(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, timeout=60)
    for x, y in loader:
        for model, optimizer in ((plain, theirs), (managed, mine)):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(managed, plain)


def test_statistics_while_units_come_and_go():
    """Who counts the units meets some that are just being buried."""
    stop = threading.Event()
    with zinf.Engine() as engine:

        def come_and_go():
            while not stop.is_set():
                engine.adopt(nn.Linear(4, 4))

        threads = [threading.Thread(target=come_and_go) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(30_000):
                engine.stats()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert engine.stats()["managed"] == 0
