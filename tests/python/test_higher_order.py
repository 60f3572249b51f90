"""Torch's higher-order operators with managed arguments: each does what it does with plain ones."""

import pytest
import torch
import zinf
from test_operators import check_operator
from torch import nn
from torch._higher_order_ops import associative_scan, foreach_map, map, scan, strict_mode, while_loop
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.wrap import wrap
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.hop_db import hop_db
from twins import assert_alike, assert_same_grads, assert_same_model, pair, same

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")

# How many of (without gradients, with gradients) torch itself runs on a CPU.
RUNS_ON_CPU = {"inline_asm_elementwise": 0, "flex_attention": 1}


@pytest.mark.parametrize("info", hop_db, ids=lambda info: f"{info.name}_{info.variant_test_name}")
def test_database(evicting, info):
    ran = 0
    for trains in (False, True):
        for sample in info.sample_inputs_func(info, "cpu", torch.float32, trains):
            ran += check_operator(evicting, info, sample)
    assert ran == RUNS_ON_CPU.get(info.name, 2)


SIZE = 128


class Matrix(nn.Module):
    """A weight that an operator gets as an argument, or finds in a closure."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 16)
        self.bias = nn.Parameter(torch.randn(SIZE))


def _cond(model, x):
    return torch.cond(x.sum() > 0, lambda x: x @ model.weight, lambda x: x @ model.weight.t(), (x,))


def _cond_on_a_weight(model, x):
    return torch.cond(model.weight.sum() > 0, lambda w, x: x @ w, lambda w, x: x - w, (model.weight, x))


def _while_loop(model, x):
    with torch.no_grad():
        steps, end = while_loop(
            lambda step, x: step < 3, lambda step, x: (step + 1, x @ model.weight), (torch.tensor(0), x)
        )
    return end * steps + model.bias


def _while_loop_over_a_weight(model, x):
    with torch.no_grad():
        end = while_loop(lambda w, x: w.sum() < 1e3, lambda w, x: (w.abs() * 2, x + w), (model.weight, x))
    return end[1] @ model.weight


def _map(model, x):
    return map(lambda row, weight: row @ weight + model.bias, x, model.weight)


def _map_over_a_weight(model, x):
    return map(lambda row, x: (x * row).sum(0), model.weight, x)


def _scan(model, x):
    return scan(lambda carry, row: (torch.tanh(carry @ model.weight + row), carry * 2), model.bias, x)[1]


def _associative_scan(model, x):
    return associative_scan(lambda a, b: a * b, model.weight, 0, combine_mode="generic") + x


def _foreach_map(model, x):
    with torch.no_grad():
        end = foreach_map(torch.add, [model.weight, x], [x, model.weight])
    return end[0] @ model.weight


def _strict_mode(model, x):
    with torch.no_grad():
        end = strict_mode(lambda w, x: (x @ w,), (model.weight, x))
    return end[0] @ model.weight


def _wrap(model, x):
    return wrap(lambda w, x: x @ w, model.weight, x)


def _out_dtype(model, x):
    with torch.no_grad():
        end = out_dtype(torch.ops.aten.mul.Tensor, torch.float64, model.weight, x)
    return end @ model.weight.double()


def _flex_attention(model, x, attention=flex_attention):
    query, key, value = x.repeat(3, 1).reshape(3, 1, 2, SIZE, SIZE // 2)
    return attention(query, key, value, lambda score, b, h, m, n: score + model.weight[m, n])


CALLS = [
    _cond,
    _cond_on_a_weight,
    _while_loop,
    _while_loop_over_a_weight,
    _map,
    _map_over_a_weight,
    _scan,
    _associative_scan,
    _foreach_map,
    _strict_mode,
    _wrap,
    _out_dtype,
    _flex_attention,
]


def _rows():
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def _assert_alike(engine, call):
    plain, managed = pair(engine, Matrix)
    expected, got = call(plain, _rows()), call(managed, _rows())
    assert same(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    assert_same_grads(managed, plain)
    assert_same_model(managed, plain)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__[1:])
def test_weights(engine, call):
    _assert_alike(engine, call)


@pytest.mark.raw_access
@pytest.mark.parametrize("call", [_cond, _map, _scan, _flex_attention], ids=lambda call: call.__name__[1:])
def test_compiled(engine, call):
    torch._dynamo.reset()
    _assert_alike(engine, torch.compile(call, backend="aot_eager"))


@pytest.mark.raw_access
def test_flex_attention_in_inductor(engine):
    """Without gradients: on a CPU, torch itself compiles no more of it."""
    torch._dynamo.reset()
    plain, managed = pair(engine, Matrix)
    compiled = torch.compile(flex_attention)
    with torch.no_grad():
        assert_alike(lambda model: [_flex_attention(model, _rows(), compiled)], plain, managed)
    assert_same_model(managed, plain)


def test_operator_that_is_made_after_the_engine(engine):
    class Twice(torch._ops.HigherOrderOperator):
        def __call__(self, function, *arguments):
            return super().__call__(function, *arguments)

    twice = Twice("zinf_test_twice")

    @twice.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
    def _(function, x):
        return function(function(x))

    twice.py_autograd_impl(lambda function, x: function(function(x)))
    _assert_alike(engine, lambda model, x: twice(lambda w: w @ x, model.weight))
