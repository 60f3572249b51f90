"""Cells that run again, and engines that end with what they manage."""

import gc
import os

import pytest
import torch
import zinf
from torch import nn
from twins import LR, assert_same_model, budget, plain_adamw, same, step

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

WIDTH = 512
MIB = 1 << 20

CELL = """
engine = zinf.Engine(host_memory=host_memory, nvme=nvme)
torch.manual_seed(0)
with engine.init():
    model = build()
optimizer = zinf.AdamW(model.parameters(), lr=LR)
for seed in range(steps):
    value = step(model, optimizer, seed, loss)
value
"""
ADOPTING_CELL = """
engine = zinf.Engine(host_memory=host_memory, nvme=nvme)
engine.adopt(model)
optimizer = zinf.AdamW(model.parameters(), lr=LR)
for seed in range(steps):
    value = step(model, optimizer, seed, loss)
"""


def build():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])  # 8 MiB


def loss(model, seed):
    return model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean()


def plain_model(steps=3, runs=1):
    """After so many steps, with a new optimizer for each run of them."""
    torch.manual_seed(0)
    model = build()
    for _ in range(runs):
        optimizer = plain_adamw(model)
        for seed in range(steps):
            step(model, optimizer, seed, loss)
        optimizer.zero_grad()
    return model


class Notebook:
    """One namespace for all cells; the last results are kept, as IPython does."""

    def __init__(self, **names):
        self.names = {
            "zinf": zinf, "torch": torch, "build": build, "step": step, "loss": loss, "LR": LR, "steps": 3,
            "Out": {}, **names,
        }  # fmt: skip

    def run(self, cell, **names):
        self.names.update(names)
        exec(cell, self.names)
        self.names["_"] = self.names["Out"][len(self.names["Out"])] = self.names["value"]

    def __getitem__(self, name):
        return self.names[name]


@pytest.fixture
def notebook(nvme):
    made = Notebook(nvme=nvme)
    yield made
    made.names.clear()
    gc.collect()
    assert not open_engines(), "nothing refers to an engine any more"
    assert not os.listdir(nvme)


def open_engines():
    return zinf._C.Manager.live()


def test_a_cell_runs_again_within_its_budget(notebook):
    plain = plain_model()
    host_memory = budget(12 * MIB)
    for _ in range(3):
        notebook.run(CELL, host_memory=host_memory)
        assert_same_model(notebook["model"], plain)
    gc.collect()
    assert len(open_engines()) == 1, "older engines end with their models"


def test_a_cell_runs_again_with_another_budget(notebook):
    plain = plain_model()
    least = budget(0)
    for extra in (12, 16, 10, 24):
        notebook.run(CELL, host_memory=least + extra * MIB)
        assert notebook["engine"].stats()["host_limit_bytes"] == least + extra * MIB
        assert_same_model(notebook["model"], plain)


def test_a_cell_that_failed_runs_again(notebook):
    plain = plain_model()
    host_memory = budget(12 * MIB)
    with pytest.raises(ZeroDivisionError):
        notebook.run(CELL + "1 / 0\n", host_memory=host_memory)
    for _ in range(2):
        notebook.run(CELL)
        assert_same_model(notebook["model"], plain)


def test_a_newer_engine_evicts_what_an_older_one_has(notebook):
    plain, further = plain_model(), plain_model(steps=4)
    host_memory = budget(12 * MIB)
    notebook.run(CELL, host_memory=host_memory)
    first, first_optimizer = notebook["model"], notebook["optimizer"]
    notebook.run(CELL)
    assert len(open_engines()) == 2
    assert_same_model(notebook["model"], plain)
    assert_same_model(first, plain)
    step(first, first_optimizer, 3, loss)
    assert_same_model(first, further)
    assert_same_model(notebook["model"], plain)


def test_a_newer_engine_takes_a_model_over(notebook):
    plain = plain_model(runs=3)
    torch.manual_seed(0)
    model = build()
    host_memory = budget(12 * MIB)
    for _ in range(3):
        notebook.run(ADOPTING_CELL, model=model, host_memory=host_memory)
    gc.collect()
    assert len(open_engines()) == 1
    assert_same_model(model, plain)
    assert zinf._C.manager_of(model[0].weight) is notebook["engine"]._manager


def test_a_model_without_its_engine_trains_on(nvme):
    plain = plain_model(steps=5)
    host_memory = budget(12 * MIB)

    def make():
        engine = zinf.Engine(host_memory=host_memory, nvme=nvme)
        torch.manual_seed(0)
        with engine.init():
            model = build()
        return model

    model = make()
    gc.collect()
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    for seed in range(5):
        step(model, optimizer, seed, loss)
    assert_same_model(model, plain)
    assert all(zinf._C.is_managed(parameter) for parameter in model.parameters())
    # A parameter that comes later is managed too.
    model.append(nn.Linear(WIDTH, WIDTH))
    step(model, optimizer, 5, loss)
    assert zinf._C.is_managed(model[-1].weight)
    del model
    gc.collect()
    assert len(open_engines()) == 1, "the optimizer has its parameters and states"
    del optimizer
    gc.collect()
    assert not open_engines()
    assert not os.listdir(nvme)


@pytest.mark.parametrize("last", ["engine", "model"])
def test_del_closes(nvme, last):
    engine = zinf.Engine(host_memory=budget(12 * MIB), nvme=nvme)
    with engine.init():
        model = build()
    weight = model[0].weight.detach().clone()
    if last == "engine":
        del model
    else:
        del engine
    gc.collect()
    assert len(open_engines()) == 1
    if last == "model":
        assert same(model[0].weight, weight)
        del model
    else:
        del engine
    gc.collect()
    assert not open_engines()
    assert not os.listdir(nvme)


def test_the_newest_budget_counts(nvme):
    with zinf.Engine(host_memory="1GB", nvme=nvme) as first:
        with zinf.Engine(host_memory="2GB") as second:
            assert first.stats()["host_limit_bytes"] == second.stats()["host_limit_bytes"] == 2 * 10**9
            with zinf.Engine():
                assert first.stats()["host_limit_bytes"] == 2 * 10**9
        assert first.stats()["host_limit_bytes"] == 10**9


def test_what_older_engines_hold_is_told(nvme):
    host_memory = budget(40 * MIB)
    old = zinf.Engine(host_memory=host_memory)
    with old.init():
        model = build()
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    step(model, optimizer, 0, loss)
    new = zinf.Engine(host_memory=host_memory)
    with new.init():
        other = build()
    with pytest.raises(zinf.BudgetError, match="are other engines': close those, or delete their models"):
        zinf.AdamW(other.parameters(), lr=LR)
    del old, model, optimizer
    gc.collect()
    step(other, zinf.AdamW(other.parameters(), lr=LR), 0, loss)
    new.close()
