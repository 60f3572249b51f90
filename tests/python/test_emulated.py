"""The emulated device: the CPU's bits, memory of its own, and what torch expects of a device."""

import concurrent.futures
import copy
import ctypes
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zinf import emulated

MEMORY_BYTES = 256 << 20
emulated.enable(memory_bytes=MEMORY_BYTES)  # here: before any test has run a backward pass


def run_apart(code):
    """In a process of its own, for what ends a process."""
    code = "from zinf import emulated\nimport torch\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def assert_same_bits(emulated_tensor, cpu_tensor, what):
    assert emulated_tensor.device.type == "emu", what
    theirs = cpu_tensor.detach().contiguous()
    ours = emulated_tensor.detach().cpu().contiguous()
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, what
    assert torch.equal(ours.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)), what


def train(model, loss_of, batch, device):
    """Three steps from the same weights; returns losses, last gradients, parameters and buffers."""
    model = copy.deepcopy(model).to(device)
    batch = [tensor.to(device) for tensor in batch]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    seen = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        seen[f"loss {step}"] = loss
    seen |= {f"grad of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return seen | model.state_dict()


def class_loss(model, x, target):
    return F.cross_entropy(model(x), target)


def mlp():
    layers = [nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)]
    return nn.Sequential(*layers), (torch.randn(16, 20), torch.randint(5, (16,)))


def cnn():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [
        nn.Conv2d(8, 16, 3, stride=2, bias=False),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 5)), (
        torch.randn(4, 3, 16, 16),
        torch.randint(5, (4,)),
    )


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.rnn = kind(12, 16, num_layers=2, batch_first=True, **options)
        self.head = nn.LazyLinear(5)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0][:, -1])


def recurrent(kind, **options):
    model, tokens = Recurrent(kind, **options), torch.randint(30, (4, 7))
    model(tokens)  # the head learns its size
    return model, (tokens, torch.randint(5, (4,)))


class Encoder(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        run = self.encoder
        x = checkpoint(run, x, use_reentrant=False) if self.checkpointed else run(x)
        return self.head(x.mean(1))


def encoder(**options):
    return Encoder(**options), (torch.randn(3, 10, 32), torch.randint(5, (3,)))


MODELS = {
    "mlp": mlp,
    "cnn": cnn,
    "lstm": lambda: recurrent(nn.LSTM),
    "bidirectional lstm": lambda: recurrent(nn.LSTM, bidirectional=True),
    "transformer encoder": encoder,
    "checkpointed encoder": lambda: encoder(checkpointed=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_gives_the_bits_of_the_cpu(name):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    ours, theirs = (train(model, class_loss, batch, device) for device in ("emu", "cpu"))
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert_same_bits(ours[key], theirs[key], key)


@pytest.mark.parametrize(
    "kind, options", [(nn.GRU, {}), (nn.RNN, {}), (nn.LSTM, {"proj_size": 8, "bias": False})]
)
def test_training_other_recurrent_layers_comes_close(kind, options):
    """torch orders their sums by the kind of device."""
    torch.manual_seed(0)
    model, batch = recurrent(kind, **options)
    ours, theirs = (train(model, class_loss, batch, device) for device in ("emu", "cpu"))
    for key in theirs:
        torch.testing.assert_close(ours[key].cpu(), theirs[key], rtol=1e-3, atol=1e-4, msg=key)


def test_training_gpt2_gives_the_bits_of_the_cpu():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=4, **dropouts
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(100, (2, 16))

    def loss_of(model, tokens):
        return model(tokens, labels=tokens).loss

    ours, theirs = (train(model, loss_of, [tokens], device) for device in ("emu", "cpu"))
    for key in theirs:
        assert_same_bits(ours[key], theirs[key], key)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_with_lists_of_tensors(optimizer):
    seen = []
    for device in ("emu", "cpu"):
        torch.manual_seed(0)
        model = mlp()[0].to(device)
        own = optimizer(model.parameters(), lr=0.1, foreach=True)
        model(torch.ones(2, 20).to(device)).sum().backward()
        own.step()
        seen.append(model.state_dict())
    for key in seen[1]:
        assert_same_bits(seen[0][key], seen[1][key], key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gives_the_bits_of_the_cpu(dtype):
    x, w = torch.randn(8, 16), torch.randn(16, 16)
    assert_same_bits((x.to("emu", dtype) @ w.to("emu", dtype)).tanh(), (x.to(dtype) @ w.to(dtype)).tanh(), "")


def test_autocast_has_the_lists_of_accelerators():
    x, w = torch.randn(4, 8, device="emu"), torch.randn(8, 8, device="emu", requires_grad=True)
    with torch.autocast("emu", dtype=torch.bfloat16):
        product = x @ w
        assert product.dtype == torch.bfloat16 and product.softmax(-1).dtype == torch.float32
    product.float().sum().backward()
    assert w.grad.dtype == torch.float32


def test_histograms_of_integers():
    counts = torch.histc(torch.tensor([0, 2, 2, 3], device="emu", dtype=torch.int32), bins=4, min=0, max=3)
    assert counts.dtype == torch.int32 and counts.tolist() == [1, 0, 2, 1]


def test_random_numbers_are_the_cpus():
    torch.manual_seed(3)
    theirs = [torch.randn(7), torch.rand(3, 3), torch.randperm(9), F.dropout(torch.ones(50))]
    torch.manual_seed(3)
    ones = torch.ones(50, device="emu")
    ours = [torch.randn(7, device="emu"), torch.rand(3, 3, device="emu")]
    ours += [torch.randperm(9, device="emu"), F.dropout(ones)]
    for our, their in zip(ours, theirs, strict=True):
        assert_same_bits(our, their, "random")


# What kernels return, and what they do to their arguments.


def test_views_share_their_base():
    base = torch.zeros(4, 6, device="emu")
    base.view(-1)[3:5].fill_(1)
    base.t()[5].add_(2)
    base.unfold(1, 2, 2)[0, 0].mul_(5)
    base.as_strided((2,), (6,), 1).sub_(1)
    for row in base.unbind():
        assert row.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    expected = torch.zeros(4, 6)
    expected.view(-1)[3:5].fill_(1)
    expected.t()[5].add_(2)
    expected.unfold(1, 2, 2)[0, 0].mul_(5)
    expected.as_strided((2,), (6,), 1).sub_(1)
    assert_same_bits(base, expected, "views")


def test_in_place_and_out_return_their_argument():
    x = torch.ones(3, device="emu")
    assert x.add_(1) is x
    out = torch.empty(0, device="emu")
    assert torch.mul(x, 3, out=out) is out
    assert out.tolist() == [6, 6, 6]
    values, indices = torch.empty(0, device="emu"), torch.empty(0, dtype=torch.long, device="emu")
    torch.sort(torch.tensor([3.0, 1.0], device="emu"), out=(values, indices))
    assert values.tolist() == [1, 3] and indices.tolist() == [1, 0]


def test_resize_and_set_follow():
    x = torch.arange(4.0, device="emu")
    x.resize_(2, 4)
    assert x.shape == (2, 4) and x[0].tolist() == [0, 1, 2, 3]
    y = torch.empty(0, device="emu").set_(x.untyped_storage(), 2, (2,))
    y.fill_(7)
    assert x[0].tolist() == [0, 1, 7, 7]


def test_storage_resizes():
    x = torch.arange(4.0, device="emu")
    before = emulated.memory_allocated()
    x.untyped_storage().resize_(0)
    assert emulated.memory_allocated() == before - 64
    x.untyped_storage().resize_(16)
    assert emulated.memory_allocated() == before
    x.fill_(1)
    assert x.sum().item() == 4


def test_views_of_a_tensor_without_memory():
    """The engine takes the memory of a weight away and keeps its shape."""
    storage = torch._C._construct_storage_from_data_pointer(0, torch.device("emu"), 64)
    x = torch.empty(0, device="emu").set_(storage, 0, (4, 4))
    assert x.t().reshape(2, 2, 4)[1].unfold(0, 2, 1).shape == (1, 4, 2)
    with pytest.raises(RuntimeError, match="64 bytes at 0 is not in the device's memory"):
        x + 1


def test_indexing_with_masks_lists_and_host_indices():
    x = torch.arange(12.0, device="emu").view(3, 4)
    assert x[x > 8].tolist() == [9, 10, 11]
    assert x[torch.tensor([2, 0])].tolist() == x[[2, 0]].tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    x[:, torch.tensor([True, False, False, True], device="emu")] = -1.0
    assert x[1].tolist() == [-1, 5, 6, -1]
    assert [part.tolist() for part in x[0].split(2)] == [[-1, 1], [2, -1]]


def test_complex_conjugates():
    x = torch.tensor([1 + 2j, 3 - 1j])
    y = x.to("emu")
    assert_same_bits(y.conj() * y, x.conj() * x, "conj")
    assert torch.equal(y.conj().cpu(), x.conj())


def test_mixing_devices_is_refused():
    x = torch.ones(3, device="emu")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, 3) @ x
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2]


# The device as torch sees it.


def test_device_and_its_module():
    x = torch.ones(2).to("emu")
    assert x.device == torch.device("emu", 0) and x.is_emu and not x.is_cpu
    assert torch.ones(2).emu().device.type == "emu"
    assert torch.emu is emulated and torch.emu.is_available() and torch.emu.device_count() == 1
    assert torch.accelerator.current_accelerator().type == "emu"
    with torch.device("emu"):
        assert nn.Linear(2, 2).weight.is_emu
    torch.emu.synchronize()
    with pytest.raises(RuntimeError, match="no device 1"):
        torch.ones(2, device="emu:1")


def test_streams_and_events_are_always_done():
    stream, event = torch.Stream(device="emu"), torch.Event(device="emu")
    event.record(stream)
    stream.wait_event(event)
    event.wait(torch.accelerator.current_stream())
    event.synchronize()
    assert event.query() and stream.query()
    torch.ones(2, device="emu").record_stream(stream)


def test_pinned_memory():
    x = torch.arange(5).pin_memory()
    assert x.is_pinned() and x[2:].is_pinned() and not torch.arange(5).is_pinned()
    assert x.to("emu", non_blocking=True).tolist() == [0, 1, 2, 3, 4]
    assert torch.empty(3, pin_memory=True).is_pinned()


def test_enable_again():
    emulated.enable(MEMORY_BYTES)
    with pytest.raises(RuntimeError, match=r"emu already has \d+\.0 MiB, it cannot get 1\.0 MiB"):
        emulated.enable(1 << 20)


def test_moving_a_module_keeps_tied_parameters():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    parameter = model[0].weight
    model.to("emu")
    assert model[1].weight is model[0].weight is parameter and parameter.is_emu
    model.cpu()
    assert parameter.is_cpu


def test_state_dict_deepcopy_and_saving():
    model, _ = cnn()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moved = copy.deepcopy(model.to("emu"))
    file = io.BytesIO()
    torch.save(moved.state_dict(), file)
    file.seek(0)
    on_device = torch.load(file)
    file.seek(0)
    on_host = torch.load(file, map_location="cpu")
    other = cnn()[0].to("emu")
    other.load_state_dict(on_host)
    for name, tensor in state.items():
        for found in (moved.state_dict()[name], on_device[name], other.state_dict()[name]):
            assert_same_bits(found, tensor, name)
        assert torch.equal(on_host[name], tensor)
    assert all(tensor.is_cpu for tensor in moved.cpu().state_dict().values())


def test_printing():
    x = torch.tensor([1.5, -2.0], device="emu")
    assert repr(x) == "tensor([ 1.5000, -2.0000], device='emu:0')"
    assert "nan" in repr(torch.full((2000,), torch.nan, device="emu"))


def test_backward_runs_on_a_thread_of_the_device():
    threads = []

    class Witness(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            threads.append(threading.get_ident())
            return grad * 2

    x = torch.ones(3, device="emu", requires_grad=True)
    Witness.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    assert threads != [threading.get_ident()]


def test_many_threads_at_once():
    def work(seed):
        x = torch.full((64, 64), float(seed), device="emu")
        for _ in range(50):
            x = (x @ x).clamp(max=seed)
        return x.min().item()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(1, 9))) == list(range(1, 9))


# Its memory.


def test_memory_is_counted_and_given_back():
    before = emulated.memory_allocated()
    emulated.reset_peak_memory_stats()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="emu")
    y = torch.empty(100, dtype=torch.uint8, device="emu")
    assert emulated.memory_allocated() == before + (1 << 20) + 128
    assert emulated.mem_get_info() == (MEMORY_BYTES - emulated.memory_allocated(), MEMORY_BYTES)
    del x, y
    assert emulated.memory_allocated() == before
    assert emulated.max_memory_allocated() == before + (1 << 20) + 128


def test_out_of_memory_says_how_much():
    free, total = emulated.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match=f"{free + 1} bytes are needed, {free} of {total}"):
        torch.empty(free + 1, dtype=torch.uint8, device="emu")
    with pytest.raises(torch.OutOfMemoryError, match="emu: out of memory"):
        torch.zeros(free // 2 + 64, dtype=torch.uint8, device="emu").to(torch.float64)
    assert emulated.mem_get_info() == (free, total)


def test_neighbours_join_when_freed():
    free, _ = emulated.mem_get_info()
    parts = [torch.empty(free // 8, dtype=torch.uint8, device="emu") for _ in range(7)]
    for i in (1, 5, 3, 2, 4, 0, 6):
        parts[i] = None
    torch.empty(free * 3 // 4, dtype=torch.uint8, device="emu")


def test_freed_memory_is_nan():
    torch.accelerator.synchronize()  # others' memory is free, too
    x = torch.ones(100, device="emu")
    address = x.data_ptr()
    del x
    torch.accelerator.synchronize()  # it is freed in the order of its stream
    y = torch.empty(100, device="emu")
    assert y.data_ptr() == address and y.isnan().all().item()


@pytest.mark.parametrize("access", ["ctypes.string_at(address, 4)", "ctypes.memset(address, 0, 4)"])
def test_the_host_cannot_touch_it(access):
    run = run_apart(
        f"""
        import ctypes
        emulated.enable(1 << 20)
        x = torch.ones(4, device="emu")
        address = x.data_ptr()
        print(x.sum().item(), flush=True)
        {access}
        print("still alive")
        """
    )
    assert run.stdout == "4.0\n", run.stderr
    assert run.returncode == -signal.SIGSEGV


def test_numpy_is_refused():
    with pytest.raises(TypeError, match="device type tensor to numpy"):
        torch.ones(2, device="emu").numpy()


def test_a_forked_child_leaves_it_alone():
    x = torch.ones(1000, device="emu")
    child = os.fork()
    if child == 0:
        del x
        os._exit(0 if emulated._is_in_bad_fork() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert x.sum().item() == 1000


def test_the_process_ends_well_with_live_tensors():
    run = run_apart(
        """
        emulated.enable(1 << 20)
        x = torch.ones(4, device="emu", requires_grad=True)
        y = (x * x).sum()
        y.backward()
        torch.kept = [x, y, x.grad]
        """
    )
    assert run.returncode == 0, run.stderr


def test_nothing_is_there_before_it_is_enabled():
    run = run_apart("assert not emulated.is_available(); torch.ones(2, device='emu')")
    assert "emu" in run.stderr and run.returncode == 1


def test_ctypes_reads_host_memory():
    """The crash above is the device's, not the test's."""
    assert ctypes.string_at(torch.ones(1).data_ptr(), 4) == b"\0\0\x80\x3f"
