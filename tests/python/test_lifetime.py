"""Nothing outlives its owner, and a model survives its engine."""

import copy
import gc
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import zinf
from conftest import scratch_bytes
from torch import nn
from torch.nn import functional as F
from twins import (
    LR,
    assert_same_model,
    assert_same_training,
    born,
    build_net,
    inputs,
    net_loss,
    optimizers,
    pair,
    same,
    step,
)

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)


def test_zero_grad_gives_gradients_back(engine):
    managed = born(engine)
    weights = engine.stats()
    for _ in range(3):
        net_loss(managed).backward()
        assert engine.stats()["managed"] > weights["managed"]
        managed.zero_grad()
        gc.collect()
        assert engine.stats()["managed"] == weights["managed"]
        assert engine.stats()["resident_bytes"] <= max(weights["resident_bytes"], weights["weights_bytes"])


def test_training_does_not_pile_up_units(engine):
    managed = born(engine)
    optimizer = zinf.AdamW(managed.parameters(), lr=LR)
    step(managed, optimizer)
    first = engine.stats()["managed"]
    for seed in range(10):
        step(managed, optimizer, seed)
    assert engine.stats()["managed"] == first


def test_deleted_model_gives_everything_back(engine):
    managed = born(engine)
    optimizer = zinf.AdamW(managed.parameters(), lr=LR)
    step(managed, optimizer)
    net_loss(managed).backward()
    del managed, optimizer
    gc.collect()
    stats = engine.stats()
    assert stats["managed"] == 0
    assert stats["resident_bytes"] == 0
    assert stats["weights_bytes"] == 0


def test_deleted_parameters_are_given_back(engine):
    managed = born(engine)
    before = engine.stats()
    lost = managed[4].weight.nbytes + managed[4].bias.nbytes
    managed[4] = nn.Identity()
    gc.collect()
    after = engine.stats()
    assert after["managed"] == before["managed"] - 2
    assert after["weights_bytes"] == before["weights_bytes"] - lost


def test_what_init_made_and_dropped_is_given_back(engine):
    torch.manual_seed(0)
    with engine.init():
        model = build_net()
        scratch = [torch.randn(300, 300) for _ in range(3)]
        dropped = nn.Linear(500, 500)
    del dropped
    gc.collect()
    assert engine.stats()["managed"] == len(list(model.parameters()))
    assert scratch[0].sum().isfinite(), "tensors that are no parameters are plain after init"


def test_extents_are_reused(evicting, nvme):
    """Models come and go: after the first ones the store does not grow."""
    usage = []
    for seed in range(6):
        managed = born(evicting, seed=seed)
        optimizer = zinf.AdamW(managed.parameters(), lr=LR)
        for _ in range(3):
            step(managed, optimizer)
        del managed, optimizer
        gc.collect()
        usage.append(scratch_bytes(nvme))
    assert usage[1] > 0
    assert usage[-1] <= usage[1]


def test_closed_engine_leaves_no_files(place):
    with zinf.Engine(**place) as engine:
        managed = born(engine)
        step(managed, zinf.AdamW(managed.parameters(), lr=LR))
        assert os.listdir(place["nvme"]) == []
    assert scratch_bytes(place["nvme"]) == 0


def test_closed_engine_leaves_a_plain_model(place):
    with zinf.Engine(**place) as engine:
        plain, managed = pair(engine)
        assert_same_training(managed, plain)
        net_loss(plain).backward()
        net_loss(managed).backward()
    assert engine.stats()["managed"] == 0
    assert all(same(ours.grad, theirs.grad) for ours, theirs in _parameters(managed, plain))
    managed.zero_grad()
    plain.zero_grad()
    assert_same_model(copy.deepcopy(managed), plain)
    assert np.array_equal(managed[0].weight.detach().numpy(), plain[0].weight.detach().numpy())
    assert_same_training(managed, plain)


def _parameters(*models):
    return zip(*(model.parameters() for model in models), strict=True)


def test_optimizer_goes_on_after_close(place):
    engine = zinf.Engine(**place)
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    for seed in range(6):
        assert same(step(managed, mine, seed), step(plain, theirs, seed))
        if seed == 2:
            engine.close()
    assert_same_model(managed, plain)


def test_release_leaves_a_plain_model(engine):
    plain, managed = pair(engine)
    other_plain, other = pair(engine, seed=1)
    theirs, mine = optimizers(plain, managed)
    for seed in range(6):
        assert same(step(managed, mine, seed), step(plain, theirs, seed))
        if seed == 2:
            engine.release(managed)
            assert engine.stats()["managed"] == len(list(other.parameters()))
    assert_same_model(managed, plain)
    assert_same_training(other, other_plain)


def test_released_model_is_adopted_again(engine):
    plain, managed = pair(engine)
    engine.release(managed)
    assert engine.stats()["managed"] == 0
    engine.adopt(managed)
    assert engine.stats()["managed"] == len(list(managed.parameters()))
    assert_same_training(managed, plain)


def test_closing_twice_is_harmless(place):
    engine = zinf.Engine(**place)
    born(engine)
    engine.close()
    engine.close()


def test_closed_engine_refuses_work(place):
    engine = zinf.Engine(**place)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.adopt(build_net())
    with pytest.raises(RuntimeError, match="closed"), engine.init():
        build_net()


def test_exception_inside_init(engine):
    with pytest.raises(ZeroDivisionError), engine.init():
        nn.Linear(300, 300)
        _ = 1 / 0
    gc.collect()
    assert engine.stats()["managed"] == 0
    assert_same_training(*reversed(pair(engine)))


def test_exception_inside_the_engine_s_block(place):
    with pytest.raises(ZeroDivisionError), zinf.Engine(**place) as engine:
        plain, managed = pair(engine)
        _ = 1 / 0
    assert_same_training(managed, plain)


def test_engine_dropped_without_close(place):
    """The model holds what it needs, or is plain by then: never garbage."""
    engine = zinf.Engine(**place)
    plain, managed = pair(engine)
    del engine
    gc.collect()
    assert_same_training(managed, plain)


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "raise SystemExit(0)", "optimizer.step()"])
def test_process_exits_without_close(place, ending):
    script = f"""
        import sys, torch, zinf
        engine = zinf.Engine(**{place!r})
        with engine.init():
            model = torch.nn.Sequential(torch.nn.Linear(72, 301), torch.nn.Linear(301, 72))
        optimizer = zinf.AdamW(model.parameters())
        model(torch.ones(2, 72)).sum().backward()
        optimizer.step()
        {ending}
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(place["nvme"]) == []


@pytest.mark.raw_access
def test_array_of_a_parameter_stays_valid(engine):
    """As in PyTorch, the array and the parameter are the same memory."""
    plain, managed = pair(engine)
    arrays = [model[0].weight.detach().numpy() for model in (plain, managed)]
    address = arrays[1].ctypes.data
    for model, optimizer in zip((plain, managed), optimizers(plain, managed), strict=True):
        for seed in range(3):
            step(model, optimizer, seed)
    assert arrays[1].ctypes.data == address
    assert np.array_equal(arrays[1], arrays[0])
    for array in arrays:
        array[7] = 0.125
    assert same(managed(inputs()), plain(inputs()))


@pytest.mark.raw_access
def test_array_outlives_the_model_and_the_engine(place):
    with zinf.Engine(**place) as engine:
        plain, managed = pair(engine)
        array = managed[0].weight.detach().numpy()
        del managed
        gc.collect()
        assert np.array_equal(array, plain[0].weight.detach().numpy())
    assert np.array_equal(array, plain[0].weight.detach().numpy())


def test_parameter_may_leave_memory_when_its_array_is_gone(nvme):
    with zinf.Engine(nvme=nvme, weights="nvme", states="nvme", evict="always") as engine:
        managed = born(engine)
        array = managed[0].weight.detach().numpy()
        managed(inputs())
        assert engine.stats()["resident_bytes"] >= array.nbytes
        del array
        managed(inputs())
        assert engine.stats()["resident_bytes"] < managed[0].weight.nbytes


def test_saved_graph_keeps_what_it_needs(engine):
    """A graph may outlive its model."""
    plain, managed = pair(engine)
    rows = [inputs().requires_grad_() for _ in range(2)]
    losses = [F.mse_loss(model(x), inputs(1)) for model, x in zip((plain, managed), rows, strict=True)]
    del managed
    gc.collect()
    for loss in losses:
        loss.backward()
    assert same(rows[1].grad, rows[0].grad)
    del losses, loss
    gc.collect()
    assert engine.stats()["managed"] == 0
