"""The emulated device's streams: work is done later, in order, and only events order two of them."""

import threading

import pytest
import test_emulated as device
import torch
from torch import nn
from torch.nn import functional as F
from zinf import emulated

SIDE = 64  # of the matrices
FLOPS = 2 * SIDE**3


@pytest.fixture(autouse=True)
def usual_pace():
    yield
    emulated.set_pace()
    torch.accelerator.synchronize()


def slow(seconds=0.4):
    """From now on a product takes this long."""
    emulated.set_pace(flops=FLOPS / seconds)


@pytest.fixture
def a():
    """A matrix on the device, of which products are known already."""
    a = torch.randn(SIDE, SIDE).to("emu")
    a @ a
    torch.accelerator.synchronize()
    return a


def is_done(stream=None):
    return (stream or torch.accelerator.current_stream()).query()


def test_calls_return_before_the_work_is_done(a):
    slow()
    product = a @ a
    assert not is_done()
    torch.accelerator.synchronize()
    assert is_done()
    assert torch.equal(product.cpu(), a.cpu() @ a.cpu())


@pytest.mark.parametrize("needs", [torch.Tensor.item, torch.nonzero, torch.Tensor.tolist, torch.Tensor.cpu])
def test_what_needs_a_value_waits_for_it(a, needs):
    one = torch.ones((), device="emu")
    one * (a @ a)[0, 0]  # known
    slow(0.2)
    value = one * (a @ a)[0, 0]
    assert not is_done()
    ours = needs(value)
    assert is_done()
    theirs = needs((a.cpu() @ a.cpu())[0, 0])
    assert torch.equal(torch.as_tensor(ours).cpu(), torch.as_tensor(theirs))


def test_a_mask_waits_for_its_values(a):
    slow(0.2)
    product = a @ a
    picked = product[product > 0]
    theirs = a.cpu() @ a.cpu()
    assert torch.equal(picked.cpu(), theirs[theirs > 0])


def test_each_thread_has_its_current_stream():
    side = torch.Stream(device="emu")
    seen = []
    with side:
        assert torch.accelerator.current_stream() == side
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.accelerator.current_stream()]
    assert seen != [side]


def sum_beside(a, waits):
    """The sum of a product that a side stream still computes."""
    side = torch.Stream(device="emu")
    total = torch.zeros(SIDE, SIDE, device="emu")
    total += a  # known
    total.zero_()
    slow()
    event = torch.Event(device="emu")
    torch.accelerator.synchronize()
    with side:
        product = a @ a
        event.record(side)
    if waits:
        torch.accelerator.current_stream().wait_event(event)
    total += product
    torch.accelerator.synchronize()
    return total.cpu(), a.cpu() @ a.cpu()


def test_an_event_orders_two_streams(a):
    ours, theirs = sum_beside(a, waits=True)
    assert torch.equal(ours, theirs)


def test_without_the_event_the_order_is_lost(a):
    ours, theirs = sum_beside(a, waits=False)
    assert not torch.equal(ours, theirs)


def read_beside(a, recorded):
    """A side stream reads what is freed meanwhile."""
    side = torch.Stream(device="emu")
    b = torch.ones(SIDE, SIDE, device="emu")
    with side:
        a @ a
        b + 1  # known
    torch.accelerator.synchronize()
    slow()
    with side:
        a @ a
        read = b + 1
    if recorded:
        b.record_stream(side)
    del b
    torch.accelerator.synchronize()
    return read.cpu()


def test_memory_is_freed_in_the_order_of_the_streams_that_are_recorded(a):
    assert torch.equal(read_beside(a, recorded=True), torch.full((SIDE, SIDE), 2.0))


def test_memory_that_another_stream_reads_unrecorded_is_poisoned(a):
    assert read_beside(a, recorded=False).isnan().all()


def test_memory_is_freed_in_the_order_of_its_own_stream(a):
    b = torch.ones(SIDE, SIDE, device="emu")
    b + 1
    slow()
    a @ a
    read = b + 1
    del b
    assert not is_done()
    assert torch.equal(read.cpu(), torch.full((SIDE, SIDE), 2.0))


def test_a_full_device_waits_for_memory_that_is_still_in_use(a):
    slow()
    free, _ = torch.accelerator.get_memory_info()
    large = torch.empty(free * 3 // 4, dtype=torch.uint8, device="emu")
    a @ a
    del large
    assert not is_done()
    again = torch.empty(free * 3 // 4, dtype=torch.uint8, device="emu")
    assert is_done() and again.numel() == free * 3 // 4


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_from_pinned_memory_are_done_later(a, pinned):
    host = torch.ones(SIDE)
    host = host.pin_memory() if pinned else host
    assert host.is_pinned() == pinned
    slow()
    a @ a
    there = torch.empty(SIDE, device="emu").copy_(host, non_blocking=True)
    assert is_done() != pinned
    host.fill_(2)  # too early where the copy is later: as on a real device
    assert (there.cpu() == (2 if pinned else 1)).all()


def test_copies_to_pinned_memory_are_done_later(a):
    host = torch.zeros(SIDE, SIDE).pin_memory()
    slow()
    host.copy_(a @ a, non_blocking=True)
    assert (host == 0).all()
    torch.accelerator.synchronize()
    assert torch.equal(host, a.cpu() @ a.cpu())


def test_pinned_memory_is_kept_for_copies_that_are_not_done(a):
    host = torch.ones(1 << 16).pin_memory()
    used, _ = emulated.pinned_bytes()
    slow()
    a @ a
    there = torch.empty(1 << 16, device="emu").copy_(host, non_blocking=True)
    del host
    assert emulated.pinned_bytes()[0] == used - (4 << 16)
    torch.full((1 << 16,), 3.0).pin_memory()
    assert (there.cpu() == 1).all()


def test_the_hosts_numbers_are_read_at_the_call(a):
    number = torch.tensor(2.0)
    a * number  # known
    slow()
    a @ a
    twice = a * number
    number.fill_(3)
    assert torch.equal(twice.cpu(), a.cpu() * 2)


def test_an_error_of_a_kernel_is_raised_at_the_next_synchronization():
    table = torch.randn(4, 2, device="emu")
    F.embedding(torch.tensor([1, 2]).to("emu"), table)  # known
    beyond = F.embedding(torch.tensor([1, 9]).to("emu"), table)
    with pytest.raises(IndexError, match="out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    assert beyond.shape == (2, 2)


def test_events_tell_the_time_between_them(a):
    slow(0.05)
    events = [torch.Event(device="emu", enable_timing=True) for _ in range(2)]
    events[0].record()
    a @ a
    events[1].record()
    events[1].synchronize()
    assert events[0].query() and events[0].elapsed_time(events[1]) >= 50


def test_copies_keep_to_their_rate():
    host = torch.ones(1000)
    emulated.set_pace(to_device=20_000, to_host=40_000)
    emulated.trace(True)
    host.to("emu").cpu()
    (default, *_) = emulated.trace(False)
    times = {name: end - begin for name, begin, end in default}
    assert times["to device"] >= 0.2e9 and times["to host"] >= 0.1e9


@pytest.mark.parametrize("seed", range(3))
def test_training_has_the_cpus_bits_whatever_the_delays(seed):
    torch.manual_seed(seed)
    model, batch = device.mlp()
    block = nn.Sequential(model[0], nn.Dropout(0.1), *model[1:])
    torch.manual_seed(5)
    theirs = device.train(block, device.class_loss, batch, "cpu")
    emulated.set_pace(max_delay=5e-4, seed=seed)
    torch.manual_seed(5)
    ours = device.train(block, device.class_loss, batch, "emu")
    for name, tensor in theirs.items():
        device.assert_same_bits(ours[name], tensor, name)


def test_a_model_on_a_side_stream_has_the_cpus_bits():
    model, batch = device.mlp()
    theirs = device.train(model, device.class_loss, batch, "cpu")
    emulated.set_pace(max_delay=5e-4, seed=1)
    with torch.Stream(device="emu"):
        ours = device.train(model, device.class_loss, batch, "emu")
    torch.accelerator.synchronize()
    for name, tensor in theirs.items():
        device.assert_same_bits(ours[name], tensor, name)
