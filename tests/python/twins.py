"""A plain model and a managed one with the same weights, treated alike."""

import gc

import torch
import zinf
from torch import nn
from torch.nn import functional as F

LR = 1e-2


def build_net(dropout=0.0):
    """Two weights of 86 KiB, and small ones."""
    return nn.Sequential(
        nn.Linear(72, 301), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(301), nn.Linear(301, 72)
    )


def budget(extra):
    """A host_memory with so many bytes beside what the process's tensors hold now."""
    zinf.Engine().close()  # from the first engine on they are counted
    gc.collect()
    return zinf._C.trim_host_memory() + extra


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(72, 72)


def inputs(seed=0, rows=5):
    return torch.randn(rows, 72, generator=torch.Generator().manual_seed(seed))


def net_loss(model, seed=0):
    return F.mse_loss(model(inputs(seed)), inputs(seed + 1000))


def born(engine, build=build_net, seed=0):
    """A model built inside engine.init()."""
    torch.manual_seed(seed)
    with engine.init():
        return build()


def pair(engine, build=build_net, seed=0):
    """The plain model and its managed twin."""
    torch.manual_seed(seed)
    return build(), born(engine, build, seed)


def plain_adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **({"lr": LR} | options), fused=True)


def optimizers(plain, managed, **options):
    return plain_adamw(plain, **options), zinf.AdamW(managed.parameters(), **({"lr": LR} | options))


def step(model, optimizer, seed=0, loss=net_loss):
    value = loss(model, seed)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.detach().clone()


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(ours, plain):
    return ours.dtype == plain.dtype and ours.shape == plain.shape and torch.equal(bits(ours), bits(plain))


def assert_same_model(ours, plain):
    for kind in ("named_parameters", "named_buffers"):
        left, right = dict(getattr(ours, kind)()), dict(getattr(plain, kind)())
        assert left.keys() == right.keys()
        differ = [name for name, value in right.items() if not same(left[name], value)]
        assert not differ, f"{kind} differ: {differ}"


def assert_same_grads(ours, plain):
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        grad = theirs[name].grad
        if grad is None:
            assert parameter.grad is None, f"{name} has a gradient, its twin has none"
        else:
            assert same(parameter.grad, grad), f"gradients of {name} differ"


def assert_same_training(ours, plain, steps=3, **options):
    """Trains both with new optimizers and compares the losses and what is left."""
    theirs, mine = optimizers(plain, ours, **options)
    for seed in range(steps):
        assert same(step(ours, mine, seed), step(plain, theirs, seed)), f"losses differ in step {seed}"
    assert_same_model(ours, plain)


def assert_alike(action, plain, managed):
    """What an action returns (tensors) is the same on both."""
    expected, got = action(plain), action(managed)
    assert len(got) == len(expected)
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert same(ours, theirs), f"result {index} differs"
