"""Every operator in torch's own database, with managed arguments under audit."""

import warnings

import pytest
import torch
import zinf
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only
from twins import same

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

# What they return is whatever their memory held.
NOT_REPEATABLE = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
PARTS = 8


def _copied(value, holder):
    def copy(tensor):
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.numel() == 0:
            return tensor
        parameter = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
        holder.register_parameter(f"p{len(holder._parameters)}", parameter)
        return parameter

    return tree_map_only(torch.Tensor, copy, value)


def _run(op, arguments, keywords):
    torch.manual_seed(0)
    results = [leaf for leaf in tree_leaves(op(*arguments, **keywords)) if type(leaf) is torch.Tensor]
    sums = [leaf.float().sum() for leaf in results if leaf.requires_grad and leaf.is_floating_point()]
    if sums:
        torch.manual_seed(0)
        sum(sums).backward()
    return results


def _dense(tensor):
    dense = tensor.detach().resolve_conj().resolve_neg()
    return dense.clone(memory_format=torch.contiguous_format)


def _dtype_of(info):
    return torch.float32 if torch.float32 in info.dtypes or not info.dtypes else min(info.dtypes, key=str)


def check_operator(engine, info, sample):
    values = ((sample.input, *sample.args), sample.kwargs)
    plain, managed = nn.Module(), nn.Module()
    plain_values = _copied(values, plain)
    try:
        expected = _run(info.op, *plain_values)
    except Exception:  # torch's own limits: a sample that cannot run, or be differentiated twice
        return 0
    managed_values = _copied(values, managed)
    engine.adopt(managed)
    results = _run(info.op, *managed_values)
    name = info.full_name
    stats = engine.stats()
    assert stats["undeclared_writes"] == stats["audit_violations"] == 0, name
    for ours, theirs in zip(managed.parameters(), plain.parameters(), strict=True):
        assert same(_dense(ours), _dense(theirs)), name
        assert (ours.grad is None) == (theirs.grad is None), name
        assert (
            ours.grad is None or name in NOT_REPEATABLE or same(_dense(ours.grad), _dense(theirs.grad))
        ), name
    if name not in NOT_REPEATABLE:
        for ours, theirs in zip(results, expected, strict=True):
            if theirs.layout is torch.strided:
                assert same(_dense(ours), _dense(theirs)), name
    return 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_find_and_write_what_plain_ones_do(evicting, part):
    ran = 0
    for info in op_db[part::PARTS]:
        with warnings.catch_warnings(action="ignore"):
            dtype = _dtype_of(info)
            trains = info.supports_autograd and dtype.is_floating_point
            samples = info.sample_inputs("cpu", dtype, requires_grad=trains)
            for _, sample in zip(range(4), samples, strict=False):
                ran += check_operator(evicting, info, sample)
    assert ran > 100
