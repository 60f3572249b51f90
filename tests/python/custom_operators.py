"""Operators that write, through a pointer, what their schemas declare as read: none says (a!)."""

import torch

library = torch.library.Library("zinf_test", "DEF")


def alias_of(tensor):
    """Another tensor on the same storage, which interception does not know."""
    with torch.no_grad():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


def define(schema):
    def register(function):
        library.define(schema)
        library.impl(function.__name__, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.zinf_test, function.__name__)

    return register


@define("numpy_add(Tensor x) -> Tensor")
def numpy_add(x):
    array = x.detach().numpy()
    array += 0.25
    return torch.zeros(1)


@define("alias_add(Tensor x) -> Tensor")
def alias_add(x):
    torch._C._to_dlpack(x.detach())  # asks for a mutable pointer, as a kernel of a device would
    alias_of(x).add_(0.25)
    return torch.zeros(1)


@define("list_add(Tensor[] xs) -> Tensor")
def list_add(xs):
    for x in xs:
        x.detach().numpy()[...] += 0.25
    return torch.zeros(1)


@define("nested_add(Tensor x) -> Tensor")
def nested_add(x):
    x.sum()  # an operator of torch, which declares what it does
    return numpy_add(x)


@define("add_and_raise(Tensor x) -> Tensor")
def add_and_raise(x):
    x.detach().numpy()[...] += 0.25
    raise RuntimeError("after the write")


@define("numpy_sum(Tensor x) -> Tensor")
def numpy_sum(x):
    return torch.tensor(x.detach().numpy().sum())


@torch.library.custom_op("zinf_test::custom_add", mutates_args=())
def custom_add(x: torch.Tensor) -> torch.Tensor:
    array = x.detach().numpy()
    array += 0.25
    return torch.zeros(1)
