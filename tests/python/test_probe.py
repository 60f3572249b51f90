"""engine.probe(): the least host_memory of a step, and nothing is trained."""

import pytest
import torch
import zinf
from models import transformers
from torch import nn
from twins import LR, assert_same_model, bits, born, budget

MIB = 1 << 20
WIDTH = 1536


def build():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])  # 9 MiB each


def loss(model, seed, rows=4):
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return model(x).pow(2).mean()


def train(engine, seeds, rows, **options):
    """The model after some steps; BudgetError from wherever it comes."""
    model = born(engine, build)
    optimizer = zinf.AdamW(model.parameters(), lr=LR, **options)
    for seed in seeds:
        loss(model, seed, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def least_of(nvme, rows, **options):
    """With what the process's tensors hold anyway."""
    with zinf.Engine(host_memory=budget(1024 * MIB), nvme=nvme) as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR, **options)
        need = engine.probe(lambda: loss(model, 0, rows).backward())
        assert need.fits
        assert not any(optimizer.state.values())
        return need.least_bytes


@pytest.mark.parametrize("rows", [4, pytest.param(4096, marks=pytest.mark.full)])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=["free", "clipped"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_the_least_works_and_less_does_not(nvme, update, options, rows):
    options = {"update": update, **options}
    least = least_of(nvme, rows, **options) - budget(0)
    with zinf.Engine(host_memory=budget(least), nvme=nvme) as engine:
        train(engine, range(3), rows, **options)
        stats = engine.stats()
        assert stats["host_used_bytes"] <= stats["host_limit_bytes"]
    with zinf.Engine(host_memory=budget(least - least // 7), nvme=nvme) as engine:
        with pytest.raises(zinf.BudgetError):
            train(engine, range(3), rows, **options)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("update", [{"update": "step"}, {"update": "backward", "micro_batches": 2}])
def test_the_least_works_for_two_micro_batches(nvme, update, max_grad_norm):
    """Gradients of the first wait while the second has its activations."""
    vocabulary = 4000

    def make(engine):
        hf = transformers()
        config = hf.GPT2Config(n_layer=3, n_embd=256, n_head=4, vocab_size=vocabulary, n_positions=128)
        model = born(engine, lambda: hf.GPT2LMHeadModel(config))
        return model, zinf.AdamW(model.parameters(), lr=LR, max_grad_norm=max_grad_norm, **update)

    def passes(model, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2):
            rows = torch.randint(vocabulary, (2, 128), generator=generator)
            model(input_ids=rows, labels=rows).loss.backward()

    with zinf.Engine(host_memory=budget(1024 * MIB), nvme=nvme) as engine:
        model, optimizer = make(engine)
        least = engine.probe(lambda: passes(model, 0)).least_bytes
    del model, optimizer
    least -= budget(0)
    with zinf.Engine(host_memory=budget(least), nvme=nvme) as engine:
        model, optimizer = make(engine)
        for seed in range(3):
            passes(model, seed)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("with_step", [True, False])
def test_nothing_is_trained(nvme, update, with_step):
    def net():
        return nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 64))

    with zinf.Engine(host_memory=budget(64 * MIB), nvme=nvme) as engine:
        plain, model = net(), born(engine, net, seed=1)
        plain.load_state_dict(model.state_dict())
        optimizer = zinf.AdamW(model.parameters(), lr=LR, update=update)
        before = torch.get_rng_state()

        def step():
            loss(model, 0).backward()
            if with_step:
                optimizer.step()
                optimizer.zero_grad()

        assert engine.probe(step).fits
        assert_same_model(model, plain)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(optimizer.state.values())
        step()  # and goes on as if nothing had been


def test_gradients_from_before_are_kept(nvme):
    with zinf.Engine(host_memory=budget(64 * MIB), nvme=nvme) as engine:
        model = born(engine, build)
        zinf.AdamW(model.parameters(), lr=LR)
        loss(model, 0).backward()
        before = [bits(parameter.grad).clone() for parameter in model.parameters()]
        engine.probe(lambda: loss(model, 1).backward())
        assert all(torch.equal(bits(p.grad), b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_step_that_does_not_fit_is_measured_all_the_same(nvme):
    with zinf.Engine(host_memory=budget(64 * MIB), nvme=nvme) as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR)
        with pytest.raises(zinf.BudgetError, match="engine.probe"):
            loss(model, 0, rows=16384).backward()
        optimizer.zero_grad()
        need = engine.probe(lambda: loss(model, 0, rows=16384).backward())
        assert not need.fits and "does not fit" in str(need)
        loss(model, 0).backward()  # the limit is as before
        optimizer.step()
        with pytest.raises(zinf.BudgetError):
            loss(model, 0, rows=16384)


def test_states_that_stay_are_counted():
    base = budget(0)
    with zinf.Engine(host_memory=budget(400 * MIB)) as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR)
        least = engine.probe(lambda: loss(model, 0).backward()).least_bytes
        assert not any(optimizer.state.values())
    assert least - base >= 4 * 36 * MIB, "weights, gradients and two moments"


def test_states_that_stay_are_counted_beside_the_activations():
    def backward(model):
        y = loss_input = model(torch.randn(512, WIDTH))  # 3 MiB
        for _ in range(30):
            y = y.sigmoid()
        (y.mean() + loss_input.mean()).backward()

    with zinf.Engine(host_memory=budget(900 * MIB)) as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR)
        least = engine.probe(lambda: backward(model)).least_bytes
    del model, optimizer
    least -= budget(0)
    with zinf.Engine(host_memory=budget(least)) as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR)
        for _ in range(3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()


def test_what_a_probe_refuses(nvme):
    with zinf.Engine(nvme=nvme) as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR, update="backward")
        with pytest.raises(TypeError, match="takes a function that runs a step, not a int"):
            engine.probe(3)
        with pytest.raises(RuntimeError, match="inside probe"):
            engine.probe(lambda: engine.probe(lambda: None))

        def step():
            loss(model, 0).backward()
            with torch.no_grad():
                next(model.parameters()).mul_(2)

        with pytest.raises(RuntimeError, match=r"changed 0.weight"):
            engine.probe(step)
        with pytest.raises(ZeroDivisionError):
            engine.probe(lambda: 1 / 0)
        loss(model, 0).backward()
        with pytest.raises(RuntimeError, match="between backward and step"):
            engine.probe(lambda: None)
        optimizer.step()


def test_a_probe_leaves_no_trace_in_what_is_reserved(nvme):
    """Everything fits in memory: nothing is reserved on NVMe, also after a probe."""
    with zinf.Engine(host_memory=budget(900 * MIB), nvme=f"{nvme}:40MB") as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR)
        engine.probe(lambda: loss(model, 0).backward())
        loss(model, 0).backward()
        optimizer.step()


def test_the_copies_of_buffers_are_not_counted(nvme):
    class Buffered(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("large", torch.zeros(64 * MIB, dtype=torch.uint8))

    with zinf.Engine(host_memory=budget(900 * MIB), nvme=nvme) as engine:
        model = born(engine, Buffered)
        base = zinf._C.trim_host_memory()
        assert engine.probe(lambda: model.large.add_(1)).least_bytes - base < 32 * MIB
        assert not model.large.any()


def test_updates_beside_weights_that_stay_are_counted(nvme):
    least = {}
    for update in ("step", "backward"):
        with zinf.Engine(host_memory=budget(900 * MIB), nvme=nvme, weights="host", states="nvme") as engine:
            model = born(engine, build)
            optimizer = zinf.AdamW(model.parameters(), lr=LR, update=update)
            base = zinf._C.trim_host_memory()
            least[update] = engine.probe(lambda m=model: loss(m, 0).backward()).least_bytes - base
            assert not any(optimizer.state.values())
    assert least["backward"] >= 18 * MIB, "two moments of a weight"
    assert least["step"] >= 18 * MIB


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_the_named_least_works_for_updates_beside_accumulated_gradients(tmp_path, micro_batches):
    """A large weight late in backward: its update needs the gradient of all passes, which is a unit."""

    def train(host_memory, probe):
        torch.manual_seed(0)
        with zinf.Engine(host_memory=host_memory, nvme=str(tmp_path)) as engine:
            with engine.init():
                model = torch.nn.Sequential(
                    torch.nn.Linear(256, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 512)
                )
            optimizer = zinf.AdamW(model.parameters(), update="backward", micro_batches=micro_batches)

            def step():
                for _ in range(micro_batches):
                    model(torch.ones(4, 256)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            if probe:
                return engine.probe(step).least_bytes
            for _ in range(4):
                step()
            return None

    least = train("1GB", probe=True)
    train(least, probe=False)


def test_close_inside_a_probe_is_refused():
    engine = zinf.Engine(host_memory="100MiB")
    engine.adopt(torch.nn.Linear(64, 64))
    with pytest.raises(RuntimeError, match=r"close\(\) inside probe\(\)"):
        engine.probe(engine.close)
    engine.close()
