"""Addresses of managed tensors: own ones, for as long as the storage lives."""

import contextlib
import ctypes
import gc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import zinf

LAYERS = 8
WIDTH = 1024
LAYER_BYTES = WIDTH * WIDTH * 4
SMALL_BYTES = 24 << 20
SMALL = {"host_memory": SMALL_BYTES, "weights": "nvme", "states": "nvme"}


@pytest.fixture(autouse=True)
def nothing_before():
    gc.collect()


def layers(engine=None, count=LAYERS, width=WIDTH):
    torch.manual_seed(0)
    with engine.init() if engine else contextlib.nullcontext():
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(count)))
    if engine is None:  # in memory that no budget counts
        for parameter in model.parameters():
            parameter.data = torch.from_numpy(parameter.detach().numpy().copy())
    return model


def storage_addresses(model):
    return [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]


def bytes_at(address, parameter):
    return ctypes.string_at(address, parameter.nbytes)


def same_weights(model, plain):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


PLACES = {
    "short": SMALL,
    "evict": SMALL | {"evict": "always"},
    "host": {"weights": "host"},
    "nothing": {},
}


@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_addresses_are_distinct_and_stay(nvme, options):
    with zinf.Engine(nvme=nvme, **options) as engine:
        model = layers(engine)
        addresses = storage_addresses(model)
        assert len({*addresses, 0}) == LAYERS + 1
        model(torch.ones(2, WIDTH)).sum().backward()
        model[3].weight.detach().numpy()[0, 0] = 1
        for parameter in model.parameters():
            parameter.detach().numpy().sum()
        assert storage_addresses(model) == addresses
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        assert model[1].weight[2:].data_ptr() == addresses[1] + 2 * WIDTH * 4
        with warnings.catch_warnings(action="ignore"):  # that class is on its way out
            assert model[1].weight.storage().data_ptr() == addresses[1]


def test_an_array_is_at_the_address_that_was_told(nvme):
    with zinf.Engine(nvme=nvme, **SMALL) as engine:
        model = layers(engine)
        for parameter, address in zip(model.parameters(), storage_addresses(model), strict=True):
            assert parameter.detach().numpy().ctypes.data == address


def test_asking_for_an_address_brings_nothing(nvme):
    with zinf.Engine(nvme=nvme, **SMALL) as engine:
        model = layers(engine)
        before = engine.stats()
        storage_addresses(model)
        after = engine.stats()
        for name in ("escapes", "faults", "fetches", "reads", "resident_bytes"):
            assert after[name] == before[name], name


@pytest.mark.parametrize("width", [8, WIDTH])
def test_content_is_read_and_written_through_an_address(nvme, width):
    plain = layers(width=width)
    with zinf.Engine(nvme=nvme, **SMALL, evict="always") as engine:
        model = layers(engine, width=width)
        addresses = storage_addresses(model)
        for ours, theirs, address in zip(model.parameters(), plain.parameters(), addresses, strict=True):
            assert bytes_at(address, ours) == theirs.detach().numpy().tobytes()
            ctypes.memset(address + 4, 0, 8)  # after a read, which has left a copy there
            with torch.no_grad():
                theirs.view(-1)[1:3] = 0
        ctypes.memset(addresses[2], 0, 4)
        with torch.no_grad():
            plain[2].weight[0, 0] = 0
        x = torch.ones(2, width)
        assert torch.equal(model(x), plain(x))
        assert same_weights(model, plain)
        ctypes.memset(addresses[2] + 16, 0, 4)  # after it has left memory again
        with torch.no_grad():
            plain[2].weight.view(-1)[4] = 0
        assert torch.equal(model(x), plain(x))
        assert storage_addresses(model) == addresses


def test_an_address_sees_what_operators_do(nvme):
    with zinf.Engine(nvme=nvme, **SMALL) as engine:
        model = layers(engine)
        address = model[0].weight.data_ptr()
        for value in (1.0, 2.0):
            with torch.no_grad():
                model[0].weight.fill_(value)
            assert ctypes.c_float.from_address(address).value == value
        ctypes.c_float.from_address(address).value = 3.0
        assert model[0].weight[0, 0].item() == 3.0


def test_what_was_only_addressed_leaves_memory_again(nvme):
    """Eight layers that were written through their addresses, in room for six."""
    with zinf.Engine(nvme=nvme, **SMALL) as engine:
        model = layers(engine)
        for value, address in enumerate(storage_addresses(model)):
            ctypes.c_float.from_address(address).value = value
        assert engine.stats()["host_used_bytes"] <= SMALL_BYTES
        assert [layer.weight[0, 0].item() for layer in model] == list(range(LAYERS))


def test_an_edit_through_an_array_counts(nvme):
    plain = layers()
    with zinf.Engine(nvme=nvme, **SMALL) as engine:
        model = layers(engine)
        for layer, theirs in zip(model, plain, strict=True):
            array = layer.weight.detach().numpy()
            array[0] = 0.5
            with torch.no_grad():
                theirs.weight[0] = 0.5
                layer.weight.mul_(2)
                theirs.weight.mul_(2)
            assert np.array_equal(array, theirs.weight.detach().numpy())
            array[1] = 0.25
            theirs.weight.data[1] = 0.25
            del array
        assert same_weights(model, plain)


def test_tensors_that_are_held_do_not_hold_content(nvme):
    """Eight layers, each with a tensor and a storage that somebody holds, in room for six."""
    plain = layers()
    with zinf.Engine(nvme=nvme, **SMALL) as engine:
        model = layers(engine)
        held = model.state_dict()
        storages = [tensor.untyped_storage() for tensor in held.values()]
        for tensor, theirs in zip(held.values(), plain.parameters(), strict=True):
            assert np.array_equal(tensor.numpy(), theirs.detach().numpy())
            tensor.numpy()[0] = 2
            assert engine.stats()["host_used_bytes"] <= SMALL_BYTES
        assert all((tensor[0] == 2).all() for tensor in held.values())
        del storages


TAKERS = {
    "numpy": lambda tensor: tensor.numpy(),
    "asarray": np.asarray,
    "dlpack": np.from_dlpack,
    "torch": torch.from_dlpack,
}


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_what_has_an_address_keeps_the_content_while_it_lives(nvme, take):
    with zinf.Engine(nvme=nvme, **SMALL) as engine:
        model = layers(engine)
        held = model.state_dict()
        array = take(held["0.weight"])[1:]  # a view of it holds it too
        for _ in range(2):
            for layer in model:
                layer.weight.detach().sum()
        before = engine.stats()
        array[0] = 7
        assert engine.stats()["faults"] == before["faults"]
        assert engine.stats()["escapes"] == before["escapes"]
        assert (held["0.weight"][1] == 7).all()
        arrays = [array]
        with pytest.raises(zinf.BudgetError):
            arrays.extend(take(tensor) for tensor in held.values())
        del array, arrays
        gc.collect()
        for tensor in held.values():
            take(tensor)


def test_what_is_read_through_addresses_counts_and_goes_again(nvme):
    """Eight layers in room for six: copies for readers are not beside the budget."""
    plain = layers()
    with zinf.Engine(nvme=nvme, **SMALL) as engine:
        model = layers(engine)
        for _ in range(2):
            for ours, theirs in zip(model, plain, strict=True):
                assert (
                    bytes_at(ours.weight.data_ptr(), ours.weight) == theirs.weight.detach().numpy().tobytes()
                )
                assert engine.stats()["host_used_bytes"] <= SMALL_BYTES
        assert engine.stats()["faults"] >= LAYERS


def test_an_operator_of_python_writes_through_an_address(nvme):
    @torch.library.custom_op("zinf_test::set_first", mutates_args={"x"})
    def set_first(x: torch.Tensor, value: float) -> None:
        first = ctypes.c_float.from_address(x.data_ptr())
        assert first.value == x.view(-1)[0].item()
        first.value = value
        assert x.view(-1)[0].item() == value
        x.mul_(2)
        assert ctypes.c_float.from_address(x.data_ptr()).value == 2 * value

    with zinf.Engine(nvme=nvme, **SMALL) as engine, torch.no_grad():
        model = layers(engine)
        before = model[0].weight[0, 1].item()
        set_first(model[0].weight, 7.0)
        assert model[0].weight.view(-1)[:2].tolist() == [14.0, 2 * before]


def test_addresses_outlive_the_engine(nvme):
    plain = layers()
    with zinf.Engine(nvme=nvme, weights="nvme") as engine:
        model = layers(engine)
        addresses = storage_addresses(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert same_weights(model, plain)
    others = zinf.Engine(nvme=nvme, weights="nvme")
    with others:
        more = layers(others)
        assert not set(storage_addresses(more)) & set(addresses)
        del more


def test_a_gradient_that_was_used_has_no_address(nvme):
    with zinf.Engine(nvme=nvme, **SMALL) as engine:
        model = layers(engine)
        optimizer = zinf.AdamW(model.parameters(), update="backward")
        model(torch.ones(1, WIDTH)).sum().backward()
        with pytest.raises(RuntimeError, match="is gone"):
            model[0].weight.grad.data_ptr()
        optimizer.step()


def test_thousands_of_small_parameters_need_few_mappings(nvme):
    def mappings():
        return len(Path("/proc/self/maps").read_text().splitlines())

    count = 20000
    with zinf.Engine(nvme=nvme) as engine:
        with engine.init():
            parameters = torch.nn.ParameterList(
                torch.full((64 if i % 2 else 1024,), float(i)) for i in range(count)
            )
        assert len({parameter.data_ptr() for parameter in parameters}) == count
        before = mappings()
        arrays = [parameter.detach().numpy() for parameter in parameters]
        assert [array.ctypes.data for array in arrays] == [parameter.data_ptr() for parameter in parameters]
        assert [array[-1] for array in arrays] == list(range(count))
        assert mappings() < before + 200
        del arrays


EXPORTS = {
    f"{megabytes}-{places}": {"host_memory": f"{megabytes}MB", "nvme": True} | options
    for megabytes in (28, 40, 60)
    for places, options in {
        "auto": {},
        "nvme": {"weights": "nvme", "states": "nvme"},
        "evict": {"evict": "always"},
        "always": {"weights": "nvme", "states": "nvme", "evict": "always"},
    }.items()
}


@pytest.mark.parametrize("options", EXPORTS.values(), ids=EXPORTS)
def test_exported_weights_are_all_there(nvme, tmp_path, options):
    with zinf.Engine(**options | {"nvme": nvme}) as engine:
        model = layers(engine)
        torch.export.save(torch.export.export(model, (torch.ones(1, WIDTH),)), tmp_path / "model.pt2")
        del model
    gc.collect()
    loaded = torch.export.load(tmp_path / "model.pt2").state_dict
    for name, value in layers().state_dict().items():
        assert torch.equal(loaded[name], value), name


def test_gradients_with_saved_tensors_that_may_be_changed(nvme):
    def gradients(model):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            x = torch.ones(2, WIDTH)
            for layer in model:
                x = layer(x)
            loss = x.sum()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients(layers())
    with zinf.Engine(nvme=nvme, host_memory="100MB", weights="nvme") as engine:
        found = gradients(layers(engine))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_compiled_code_needs_less_memory_than_the_weights(nvme):
    """It takes addresses of the parameters themselves, which leave memory and come back for the next run."""
    plain = layers()
    with zinf.Engine(nvme=nvme, **SMALL) as engine:
        model = layers(engine)
        with torch.no_grad():
            total = torch.compile(lambda *weights: [weight.exp().sum() for weight in weights])
            for _ in range(2):
                for ours, theirs in zip(model, plain, strict=True):
                    assert torch.equal(total(ours.weight)[0], total(theirs.weight)[0])
        assert same_weights(model, plain)
