"""Compiled autograd: backward passes that torch compiles, over managed parameters."""

import pytest
import torch
import zinf
from torch._dynamo import compiled_autograd
from twins import LR, assert_same_grads, assert_same_model, net_loss, pair, plain_adamw, same

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

pytestmark = [pytest.mark.raw_access, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=["eager", "aot_eager"])
def compiled(request):
    """Enables compiled autograd for a `with`."""
    torch._dynamo.reset()
    yield lambda: compiled_autograd._enable(torch.compile(backend=request.param))
    torch._dynamo.reset()


def _backward(model, compiled, seed=0):
    with compiled():
        loss = net_loss(model, seed)
        loss.backward()
    return loss.detach()


def test_gradients_have_the_plain_bits(engine, compiled):
    plain, managed = pair(engine)
    for seed in range(3):  # the second and third are added, with the graph of the first or another
        assert same(_backward(managed, compiled, seed), _backward(plain, compiled, seed))
        assert_same_grads(managed, plain)


def test_gradients_become_managed(evicting, compiled):
    managed = pair(evicting)[1]
    before = evicting.stats()["managed"]
    _backward(managed, compiled)
    optimizer = zinf.AdamW(managed.parameters())
    assert evicting.stats()["managed"] == before + len(list(managed.parameters()))
    optimizer.step()


def test_training(engine, compiled):
    plain, managed = pair(engine)
    theirs, ours = plain_adamw(plain), zinf.AdamW(managed.parameters(), lr=LR)
    for seed in range(4):
        assert same(_backward(managed, compiled, seed), _backward(plain, compiled, seed))
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(managed, plain)


def test_an_exception_inside_a_compiled_pass_leaves_a_model_that_trains(engine, compiled):
    plain, managed = pair(engine)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("inside backward")

    with compiled(), pytest.raises(Exception, match="inside backward"):
        Fails.apply(managed[0](torch.ones(2, 72))).sum().backward()
    managed.zero_grad()
    _backward(managed, compiled)
    _backward(plain, compiled)
    assert_same_grads(managed, plain)
