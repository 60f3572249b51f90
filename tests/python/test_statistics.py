"""Operators that write arguments which their schemas declare as read."""

import pytest
import torch
import zinf
from conftest import PLACES
from torch import nn
from torch.nn import functional as F
from twins import assert_same_model, pair

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

CHANNELS = 1024  # float32: a page


class Statistics(nn.Module):
    """Running statistics that are parameters, as those of a model that learns or averages them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(CHANNELS))
        self.bias = nn.Parameter(torch.rand(CHANNELS))
        self.running_mean = nn.Parameter(torch.zeros(CHANNELS), requires_grad=False)
        self.running_var = nn.Parameter(torch.ones(CHANNELS), requires_grad=False)


def _batch_norm(model, x, training):
    return F.batch_norm(x, model.running_mean, model.running_var, model.weight, model.bias, training)


def _native_batch_norm(model, x, training):
    return torch.native_batch_norm(
        x, model.weight, model.bias, model.running_mean, model.running_var, training, 0.1, 1e-5
    )[0]


def _native_batch_norm_out(model, x, training):
    out = [torch.empty_like(x), torch.empty(CHANNELS), torch.empty(CHANNELS)]
    with torch.no_grad():
        torch.ops.aten.native_batch_norm.out(
            x,
            model.weight,
            model.bias,
            model.running_mean,
            model.running_var,
            training,
            0.1,
            1e-5,
            out=out[0],
            save_mean=out[1],
            save_invstd=out[2],
        )
    return out[0] * model.weight.reshape(1, -1, 1)  # for a gradient


def _batch_norm_impl_index(model, x, training):
    return torch._batch_norm_impl_index(
        x, model.weight, model.bias, model.running_mean, model.running_var, training, 0.1, 1e-5, False
    )[0]


def _native_batch_norm_legit(model, x, training):
    return torch.ops.aten._native_batch_norm_legit(
        x, model.weight, model.bias, model.running_mean, model.running_var, training, 0.1, 1e-5
    )[0]


def _instance_norm(model, x, training):
    return F.instance_norm(
        x, model.running_mean, model.running_var, model.weight, model.bias, use_input_stats=training
    )


def _batch_norm_update_stats(model, x, training):
    if training:
        torch.batch_norm_update_stats(x, model.running_mean, model.running_var, 0.1)
    return x * model.weight.reshape(1, -1, 1) + model.bias.reshape(1, -1, 1)


NORMS = [
    _batch_norm,
    _native_batch_norm,
    _native_batch_norm_out,
    _batch_norm_impl_index,
    _native_batch_norm_legit,
    _instance_norm,
    _batch_norm_update_stats,
]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__[1:])
def test_running_statistics_that_are_parameters(engine, norm):
    plain, managed = pair(engine, Statistics)
    for model in (plain, managed):
        for seed in range(3):
            x = torch.randn(4, CHANNELS, 3, generator=torch.Generator().manual_seed(seed))
            norm(model, x, True).square().sum().backward()
        norm(model, x, False)
    assert not torch.equal(plain.running_mean, torch.zeros(CHANNELS))
    assert_same_model(managed, plain)
    assert torch.equal(managed.weight.grad, plain.weight.grad)


def test_norms_in_evaluation_change_no_statistics(nvme):
    """What is not changed is not written to NVMe."""
    with zinf.Engine(nvme=nvme, **PLACES["evict"]) as engine:
        managed = pair(engine, Statistics)[1]
        x = torch.randn(4, CHANNELS, 3)
        with torch.no_grad():
            _batch_norm(managed, x, False)
            before = engine.stats()["writes"]
            for norm in NORMS:
                norm(managed, x, False)
            assert engine.stats()["writes"] == before
            _batch_norm(managed, x, True)
            assert engine.stats()["writes"] > before
