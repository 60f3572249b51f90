"""Updates that step() puts off until their weights are used: nobody can tell the difference."""

import copy
import gc
import io
import threading

import pytest
import torch
import zinf
from torch import nn
from torch.nn.utils import clip_grad_norm_
from twins import bits, born, budget, plain_adamw

MIB = 1 << 20
LAYERS, WIDTH = 48, 256  # weights of 256 KiB; 48 MiB with states and gradients
NORM = 0.05
WARM = 3  # steps until updates wait


def deep():
    return nn.Sequential(*[
        layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())
    ])  # fmt: skip


def loss_of(model, seed, rows=4):
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return model(x.to(model[0].weight.dtype)).float().square().mean()


def step(model, optimizer, seed, rows=4, set_to_none=True):
    loss = loss_of(model, seed, rows)
    loss.backward()
    if not isinstance(optimizer, zinf.AdamW):
        clip_grad_norm_(model.parameters(), NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none)
    return loss


def content(tensors):
    """Their bits, outside of torch's memory, which a budget counts."""
    return [bits(tensor).clone().numpy().tobytes() for tensor in tensors]


def plainly(scenario):
    """What the scenario gives with plain PyTorch, of which nothing is left in memory."""
    torch.manual_seed(0)
    model = deep()
    return content(scenario(model, plain_adamw(model)))


class Managed:
    """A model and an optimizer in too little memory."""

    def __init__(self, nvme, update="step", host_memory=None):
        gc.collect()
        self.engine = zinf.Engine(host_memory=host_memory or budget(24 * MIB), nvme=nvme)
        self.model = born(self.engine, deep)
        self.optimizer = zinf.AdamW(self.model.parameters(), lr=1e-2, update=update, max_grad_norm=NORM)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.engine.close()

    def warm_up(self):
        for seed in range(WARM):
            step(self.model, self.optimizer, seed)
        assert self.waiting() > LAYERS // 2

    def waiting(self):
        return self.engine.stats()["updates_waiting"]

    def content(self, scenario):
        return content(scenario(self.model, self.optimizer))


def steps(first, last):
    """A scenario: losses and weights."""

    def scenario(model, optimizer):
        losses = [step(model, optimizer, seed).detach().clone() for seed in range(first, last)]
        return losses + list(model.parameters())

    return scenario


def after_warm_up(then):
    """The scenario of a plain model that begins where warm_up() ends."""

    def scenario(model, optimizer):
        steps(0, WARM)(model, optimizer)
        return then(model, optimizer)

    return scenario


def assert_same(nvme, scenario, update="step"):
    """A scenario that begins with updates that wait gives what it gives with plain PyTorch."""
    expected = plainly(after_warm_up(scenario))
    with Managed(nvme, update) as run:
        run.warm_up()
        assert run.content(scenario) == expected


both = pytest.mark.parametrize("update", ["step", "backward"])


@both
def test_updates_wait_for_the_next_forward(nvme, update):
    expected = plainly(after_warm_up(steps(WARM, 8)))
    with Managed(nvme, update) as run:
        run.warm_up()
        loss_of(run.model, 0)
        assert run.waiting() == 0
        assert run.content(steps(WARM, 8)) == expected
        assert run.waiting() == 0


def saved_and_loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


LOOKS = {
    "an operator": lambda weight: weight + 0,
    "a view": lambda weight: weight.t()[1:],
    "data": lambda weight: weight.data,
    "an element": lambda weight: torch.tensor(weight[0, 0].item()),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy().copy()),
    "a copy": copy.deepcopy,
    "tolist": lambda weight: torch.tensor(weight.tolist()),
    "torch.save": saved_and_loaded,
}


@pytest.mark.raw_access
@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_the_new_weight(nvme, look):
    def scenario(model, optimizer):
        seen = []
        for seed in (7, 8):  # what the first look leaves behind is old at the second
            seen += [LOOKS[look](parameter) for parameter in list(model.parameters())[:6]]
            step(model, optimizer, seed)
        return seen + [LOOKS[look](parameter) for parameter in model.parameters()]

    assert_same(nvme, scenario)


def test_states_that_were_read_through_a_pointer(nvme):
    def scenario(_, optimizer):
        return [torch.tensor(state["exp_avg"].tolist()) for state in list(optimizer.state.values())[:8]]

    def twice(model, optimizer):
        first = scenario(model, optimizer)
        step(model, optimizer, 7)
        return first + scenario(model, optimizer)

    assert_same(nvme, twice)


def test_new_data_in_place_of_a_weight_or_a_gradient(nvme):
    def scenario(model, optimizer):
        step(model, optimizer, 7)
        for parameter in list(model.parameters())[:4]:
            parameter.data = torch.full_like(parameter, 0.01)
        loss_of(model, 8).backward()
        if not isinstance(optimizer, zinf.AdamW):
            clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        for parameter in list(model.parameters())[4:8]:
            parameter.grad.data = torch.zeros_like(parameter)
        optimizer.zero_grad()
        return [*model.parameters(), *[state["exp_avg"] for state in optimizer.state.values()]]

    assert_same(nvme, scenario)


def test_two_parameters_with_one_gradient(nvme):
    def scenario(model, optimizer):
        loss_of(model, 7).backward()
        first, second = list(model.parameters())[:2]
        first.grad = second.grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return model.parameters()

    with zinf.Engine() as engine:  # in memory: torch's clipping would scale the gradient twice
        model = born(engine, deep)
        optimizer = zinf.AdamW(model.parameters(), lr=1e-2, max_grad_norm=NORM)
        expected = content(after_warm_up(scenario)(model, optimizer))
        del model, optimizer
    with Managed(nvme) as run:
        run.warm_up()
        assert run.content(scenario) == expected


def test_another_thread_looks_meanwhile(nvme):
    expected = plainly(after_warm_up(steps(WARM, 9)))
    with Managed(nvme) as run:
        run.warm_up()
        over = threading.Event()

        def look():
            while not over.is_set():
                for parameter in run.model.parameters():
                    parameter.tolist()

        thread = threading.Thread(target=look)
        thread.start()
        try:
            got = run.content(steps(WARM, 9))
        finally:
            over.set()
            thread.join()
        assert got == expected


def test_a_release_beyond_the_budget_makes_them_first(nvme):
    expected = plainly(after_warm_up(steps(WARM, 5)))
    with Managed(nvme) as run:
        run.warm_up()
        run.engine.release(run.model)
        assert run.waiting() == 0
        run.engine.close()
        assert run.content(steps(WARM, 5)) == expected


@both
def test_the_optimizer_s_states_are_the_new_ones(nvme, update):
    def scenario(model, optimizer):
        states = optimizer.state_dict()["state"]
        return [states[index][name] for index in sorted(states) for name in ("step", "exp_avg", "exp_avg_sq")]

    assert_same(nvme, scenario, update)


@both
def test_a_save_has_them_and_a_load_forgets_none(nvme, update, tmp_path):
    expected = plainly(after_warm_up(steps(WARM, 6)))
    with Managed(nvme, update) as run:
        run.warm_up()
        run.engine.save(str(tmp_path / "saved"))
        assert run.content(steps(WARM, 6)) == expected
        step(run.model, run.optimizer, 9)
        assert run.waiting() > 0
        run.engine.load(str(tmp_path / "saved"))
        assert run.content(steps(WARM, 6)) == expected


def test_a_load_that_is_refused_loses_nothing(nvme, tmp_path):
    expected = plainly(after_warm_up(steps(WARM, 5)))
    with Managed(nvme) as run:
        run.warm_up()
        with pytest.raises(FileNotFoundError):
            run.engine.load(str(tmp_path / "nothing"))
        assert run.content(steps(WARM, 5)) == expected


def test_gradients_that_stay_are_zeroed_afterwards(nvme):
    def scenario(model, optimizer):
        for seed in (7, 8):
            step(model, optimizer, seed, set_to_none=False)
        return [*model.parameters(), *[parameter.grad for parameter in model.parameters()]]

    assert_same(nvme, scenario)


@both
def test_edits_come_after_the_update(nvme, update):
    def scenario(model, optimizer):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        return steps(WARM, 5)(model, optimizer)

    assert_same(nvme, scenario, update)


@both
def test_close_finishes_them(nvme, update):
    expected = plainly(after_warm_up(lambda model, _: model.parameters()))
    run = Managed(nvme, update)
    run.warm_up()
    run.engine.close()
    assert content(run.model.parameters()) == expected


@both
def test_a_probe_changes_nothing(nvme, update):
    expected = plainly(after_warm_up(steps(WARM, 5)))
    with Managed(nvme, update) as run:
        run.warm_up()
        run.engine.probe(lambda: step(run.model, run.optimizer, 0))
        assert run.content(steps(WARM, 5)) == expected


def test_they_do_not_keep_a_model(nvme):
    with Managed(nvme) as run:
        run.warm_up()
        del run.model, run.optimizer
        gc.collect()
        assert run.waiting() == 0 and run.engine.stats()["managed"] == 0


def test_the_optimizer_may_go_first(nvme):
    expected = plainly(after_warm_up(lambda model, _: model.parameters()))
    with Managed(nvme) as run:
        run.warm_up()
        del run.optimizer
        gc.collect()
        assert content(run.model.parameters()) == expected


def test_bfloat16_with_a_split_master(nvme):
    ends = []
    for place in ({"host_memory": budget(18 * MIB), "nvme": nvme}, {}):
        with zinf.Engine(**place) as engine:
            model = born(engine, lambda: deep().to(torch.bfloat16))
            optimizer = zinf.AdamW(model.parameters(), lr=1e-2, max_grad_norm=NORM)
            waited = []
            for seed in range(6):
                step(model, optimizer, seed)
                waited.append(engine.stats()["updates_waiting"])
            assert any(waited) == bool(place)
            ends.append(content(model.parameters()))
            del model, optimizer
    assert ends[0] == ends[1]


# Activations become more than ever before while updates wait for memory beside them.
@pytest.mark.parametrize("more", [0, 2, 4, 8])
def test_a_batch_that_grows(nvme, more):
    rows = 400
    schedule = (4, 4, 4, 4, rows // 2, 4, rows, 4, rows)

    def scenario(model, optimizer):
        for seed, now in enumerate(schedule):
            step(model, optimizer, seed, now)
        return model.parameters()

    expected = plainly(scenario)
    with Managed(nvme, host_memory=budget(256 * MIB)) as run:
        least = run.engine.probe(lambda: step(run.model, run.optimizer, 0, rows)).least_bytes
    del run
    with Managed(nvme, host_memory=least + more * MIB) as run:
        assert run.content(scenario) == expected


def test_after_an_error_a_load_helps(nvme, tmp_path):
    expected = plainly(after_warm_up(steps(WARM, 6)))
    faults = zinf._C._FaultInjector()
    try:
        with Managed(nvme) as run:
            run.warm_up()
            run.engine.save(str(tmp_path / "saved"))
            step(run.model, run.optimizer, 9)
            assert run.waiting() > 0
            faults.set("error", "read", 1, 5, and_after=True)
            with pytest.raises(RuntimeError, match="errno 5 EIO"):
                for seed in range(3):
                    step(run.model, run.optimizer, seed)
            faults.clear()
            for _ in range(2):
                with pytest.raises((RuntimeError, ValueError), match="EIO"):
                    loss_of(run.model, 1)
            run.engine.load(str(tmp_path / "saved"))
            assert run.content(steps(WARM, 6)) == expected
    finally:
        faults.remove()
