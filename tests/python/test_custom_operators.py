"""Operators of others that write, through a pointer, what their schemas declare as read."""

import json
from pathlib import Path

import pytest
import torch
import zinf
from conftest import PLACES
from custom_operators import add_and_raise, alias_add, custom_add, list_add, nested_add, numpy_add, numpy_sum
from ranks import run_ranks
from torch import nn
from twins import assert_same_model, assert_same_training, build_net, pair, same
from zinf import emulated

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

emulated.enable(memory_bytes=256 << 20)  # here: before any test has run a backward pass


def build_with_seed():
    torch.manual_seed(0)
    return build_net()


def _raises(model):
    with pytest.raises(RuntimeError, match="after the write"):
        add_and_raise(model[0].weight)


CALLS = {
    "numpy": lambda model: numpy_add(model[0].weight),
    "alias": lambda model: alias_add(model[0].weight),
    "view": lambda model: numpy_add(model[0].weight[3:7]),
    "list": lambda model: list_add([model[0].weight, model[4].weight]),
    "nested": lambda model: nested_add(model[0].weight),
    "custom_op": lambda model: custom_add(model[0].weight),
    "raises": _raises,
}


@pytest.mark.raw_access
@pytest.mark.parametrize("call", CALLS)
def test_undeclared_writes_are_kept(engine, call):
    plain, managed = pair(engine)
    for model in (plain, managed):
        with torch.no_grad():
            CALLS[call](model)
    assert not torch.equal(plain[0].weight, build_with_seed()[0].weight)
    assert_same_model(managed, plain)
    assert_same_training(managed, plain)


@pytest.mark.raw_access
def test_undeclared_writes_to_gradients_are_kept(engine):
    plain, managed = pair(engine)
    for model in (plain, managed):
        model(torch.ones(2, 72)).sum().backward()
        numpy_add(model[0].weight.grad)
    assert same(managed[0].weight.grad, plain[0].weight.grad)


def test_a_bfloat16_weight_that_is_written_is_its_own_master(nvme):
    """As after a declared write."""
    weights = []
    for write in (lambda weight: weight.add_(0.25), alias_add):
        with zinf.Engine(nvme=nvme, **PLACES["evict"]) as engine:
            torch.manual_seed(0)
            with engine.init():
                layer = nn.Linear(72, 72).bfloat16()
            optimizer = zinf.AdamW(layer.parameters(), lr=1e-2)
            for step in range(4):
                layer(torch.ones(2, 72, dtype=torch.bfloat16)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    with torch.no_grad():
                        write(layer.weight)
            weights.append(layer.weight.detach().clone())
    assert same(*weights)


def test_an_operator_that_only_reads_changes_nothing(nvme):
    """What is not changed is not written to NVMe, and leaves memory again."""
    with zinf.Engine(nvme=nvme, **PLACES["evict"]) as engine:
        plain, managed = pair(engine)
        with torch.no_grad():
            managed(torch.ones(2, 72))
            before = engine.stats()
            for _ in range(3):
                assert same(numpy_sum(managed[0].weight), numpy_sum(plain[0].weight))
        after = engine.stats()
        assert after["writes"] == before["writes"]
        assert after["escapes"] == before["escapes"]
        assert after["resident_bytes"] == 0


@pytest.mark.parametrize("place", PLACES)
def test_undeclared_writes_on_a_device_are_kept(nvme, place):
    plain = build_with_seed()
    with zinf.Engine(nvme=nvme, **PLACES[place]) as engine:
        torch.manual_seed(0)
        with engine.init():
            managed = build_net().to("emu")
        engine.adopt(managed)
        with torch.no_grad():
            for model in (plain, managed):
                alias_add(model[0].weight)
                model(torch.ones(2, 72, device=model[0].weight.device))
                alias_add(model[4].weight)
        for ours, theirs in zip(managed.parameters(), plain.parameters(), strict=True):
            assert same(ours.cpu(), theirs)


RANKS = """
import json, os, sys
import torch, zinf
from torch import nn
from zinf import emulated

device, evict, folder = sys.argv[1:]
sys.path.append(folder)
from custom_operators import alias_add, numpy_add, numpy_sum

rank = int(os.environ["RANK"])
if device == "emu":
    emulated.enable(memory_bytes=64 << 20)
write = alias_add if device == "emu" else numpy_add

def build():
    torch.manual_seed(0)
    return nn.Linear(60, 70)

plain, engine = build(), zinf.Engine(evict=evict)
with engine.init():
    model = build().to(device)
engine.adopt(model)
optimizer = zinf.AdamW(model.parameters(), lr=1e-2)
theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)

def step(model, optimizer):
    model(torch.ones(2, 60, device=model.weight.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

with torch.no_grad():
    for each in (model, plain):
        write(each.weight)
step(model, optimizer)
step(plain, theirs)
with torch.no_grad():
    for each in (model, plain):
        write(each.weight)
    if rank == 0 and device == "cpu":  # who only reads tells no other rank
        numpy_sum(model.weight)
step(model, optimizer)
step(plain, theirs)
same = [torch.equal(ours.cpu(), other) for ours, other in zip(model.parameters(), plain.parameters())]
print(json.dumps(same), flush=True)
"""


@pytest.mark.parametrize("evict", ["always", pytest.param("auto", marks=pytest.mark.full)])
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_ranks_keep_the_undeclared_writes_that_all_of_them_make(device, evict):
    for text in run_ranks(2, RANKS, device, evict, Path(__file__).parent):
        assert json.loads(text.splitlines()[-1]) == [True, True]
