"""Optimizers, schedules and autograd on managed parameters, one test each."""

import pytest
import torch
import zinf
from torch import nn
from twins import (
    LR,
    assert_alike,
    assert_same_grads,
    assert_same_model,
    assert_same_training,
    born,
    build_net,
    inputs,
    linear,
    net_loss,
    optimizers,
    pair,
    plain_adamw,
    same,
    step,
)

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)


# Optimizers, groups and schedules.


SCHEDULES = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
    "ReduceLROnPlateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lr_schedulers(engine, schedule):
    plain, managed = pair(engine)
    for model, optimizer in zip((plain, managed), optimizers(plain, managed), strict=True):
        scheduler = SCHEDULES[schedule](optimizer)
        for seed in range(6):
            loss = step(model, optimizer, seed)
            scheduler.step(*([float(loss)] if schedule == "ReduceLROnPlateau" else []))
    assert_same_model(managed, plain)


def test_hyper_parameters_change_between_steps(engine):
    plain, managed = pair(engine)
    for model, optimizer in zip((plain, managed), optimizers(plain, managed), strict=True):
        for seed in range(4):
            step(model, optimizer, seed)
            # At once: an update that is still under way keeps the values it started with.
            optimizer.param_groups[0].update(lr=LR / (seed + 2), betas=(0.8, 0.95), weight_decay=0.1 * seed)
    assert_same_model(managed, plain)


def test_parameter_groups(engine):
    plain, managed = pair(engine)

    def groups(model):
        return [
            {"params": list(model[0].parameters()), "lr": 0.03, "weight_decay": 0.2},
            {"params": list(model[3].parameters()), "betas": (0.5, 0.9)},
            {"params": list(model[4].parameters()), "eps": 1e-3},
        ]

    theirs = torch.optim.AdamW(groups(plain), lr=LR, fused=True)
    mine = zinf.AdamW(groups(managed), lr=LR)
    for seed in range(4):
        assert same(step(managed, mine, seed), step(plain, theirs, seed))
    assert_same_model(managed, plain)


def test_frozen_parameters(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    for seed in range(4):
        for model in (plain, managed):
            model[0].requires_grad_(seed >= 2)
        assert same(step(managed, mine, seed), step(plain, theirs, seed))
    assert_same_model(managed, plain)


def test_unused_parameters(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    for seed in range(4):
        for model, optimizer in ((plain, theirs), (managed, mine)):
            parts = model if seed % 2 else model[:1]  # the last layer has a gradient every second step
            parts(inputs(seed)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(managed, plain)


def test_parameters_added_between_steps(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    step(plain, theirs)
    step(managed, mine)
    before = engine.stats()["managed"]
    plain.append(linear(3))
    managed.append(born(engine, lambda: linear(3)))
    plain.append(linear(4))
    managed.append(linear(4))
    engine.adopt(managed)
    assert engine.stats()["managed"] == before + 4
    for model, optimizer in ((plain, theirs), (managed, mine)):
        optimizer.add_param_group({"params": list(model[5:].parameters()), "lr": 0.05})
    for seed in range(3):
        assert same(step(managed, mine, seed), step(plain, theirs, seed))
    assert_same_model(managed, plain)


def test_parameters_removed_between_steps(engine):
    def build_two():
        return nn.Sequential(build_net(), nn.Linear(72, 72))

    plain, managed = pair(engine, build_two)
    runs = []
    for model, kind in ((plain, plain_adamw), (managed, lambda part: zinf.AdamW(part.parameters(), lr=LR))):
        optimizer = kind(model[0])
        optimizer.add_param_group({"params": list(model[1].parameters())})
        runs.append((model, optimizer))
    for model, optimizer in runs:
        step(model, optimizer)
        for parameter in optimizer.param_groups.pop()["params"]:
            del optimizer.state[parameter]
        model[1] = nn.Identity()
    for seed in range(3):
        (model, optimizer), (ours, mine) = runs
        assert same(step(ours, mine, seed), step(model, optimizer, seed))
    assert_same_model(managed, plain)


OPTIMIZERS = {
    "SGD": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {"centered": True},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
    "LBFGS": {"max_iter": 3},
    "Muon": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_torch_optimizer(engine, name):
    def build_flat():  # Muon takes matrices only
        return nn.Sequential(nn.Linear(72, 130, bias=False), nn.Tanh(), nn.Linear(130, 72, bias=False))

    plain, managed = pair(engine, build_flat if name == "Muon" else build_net)
    for model in (plain, managed):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=LR, **OPTIMIZERS[name])
        for seed in range(3):

            def closure(model=model, optimizer=optimizer, seed=seed):
                optimizer.zero_grad()
                loss = net_loss(model, seed)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert_same_model(managed, plain)


@pytest.mark.parametrize("option", ["foreach", "fused"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_torch_optimizers_over_lists(engine, name, option):
    plain, managed = pair(engine)
    for model in (plain, managed):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=LR, **{option: True})
        for seed in range(3):
            step(model, optimizer, seed)
    assert_same_model(managed, plain)


def test_exponential_moving_average(engine):
    plain, managed = pair(engine)
    averages = []
    for model, optimizer in zip((plain, managed), optimizers(plain, managed), strict=True):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for seed in range(3):
            step(model, optimizer, seed)
            average.update_parameters(model)
        averages.append(average)
    assert_same_model(averages[1].module, averages[0].module)


# Autograd.


def test_gradient_accumulation(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    for seed in range(3):
        for model, optimizer in ((plain, theirs), (managed, mine)):
            for micro in range(4):
                (net_loss(model, 10 * seed + micro) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(managed, plain)


def test_retain_graph(engine):
    plain, managed = pair(engine)
    for model in (plain, managed):
        loss = net_loss(model)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_grads(managed, plain)


def test_retained_graph_refuses_changed_weights(engine):
    managed = born(engine)
    loss = net_loss(managed)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        managed[4].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_grad(engine):
    plain, managed = pair(engine)
    assert_alike(lambda model: torch.autograd.grad(net_loss(model), list(model.parameters())), plain, managed)
    assert all(parameter.grad is None for parameter in managed.parameters())


def test_double_backward(engine):
    plain, managed = pair(engine)

    def penalised(model, seed):
        loss = net_loss(model, seed)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 0.1 * sum(grad.pow(2).sum() for grad in grads)

    theirs, mine = optimizers(plain, managed)
    for seed in range(3):
        assert same(step(managed, mine, seed, penalised), step(plain, theirs, seed, penalised))
    assert_same_model(managed, plain)


def test_custom_function(engine):
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight.t(), x.t() @ grad

    def loss(model, seed):
        return Multiply.apply(inputs(seed), model[0].weight.t()).pow(2).mean()

    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    for seed in range(3):
        assert same(step(managed, mine, seed, loss), step(plain, theirs, seed, loss))
    assert_same_model(managed, plain)


def test_hooks_on_parameters_and_gradients(engine):
    plain, managed = pair(engine)
    seen = {plain: [], managed: []}
    for model in (plain, managed):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad * 0.5)
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, model=model: seen[model].append(
                    (parameter.grad.norm().item(), parameter.detach().sum().item())
                )
            )
    assert_same_training(managed, plain)
    assert seen[managed] == seen[plain]


def test_update_inside_a_gradient_hook(engine):
    """The optimizer-in-backward recipe of PyTorch's tutorials."""
    plain, managed = pair(engine)
    for model in (plain, managed):
        each = {
            parameter: torch.optim.SGD([parameter], lr=LR, momentum=0.9) for parameter in model.parameters()
        }

        def update(parameter, each=each):
            each[parameter].step()
            each[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for seed in range(3):
            net_loss(model, seed).backward()
    assert_same_model(managed, plain)
    assert all(parameter.grad is None for parameter in managed.parameters())


def test_hooks_on_modules(engine):
    plain, managed = pair(engine)
    seen = {plain: [], managed: []}
    for model in (plain, managed):
        notes = seen[model]
        model[0].register_forward_pre_hook(lambda module, _, n=notes: n.append(module.weight.sum().item()))
        model[4].register_full_backward_hook(lambda module, *_, n=notes: n.append(module.weight.max().item()))
    assert_same_training(managed, plain)
    assert seen[managed] == seen[plain]


def test_sparse_gradients_are_refused(engine):
    def build_table():
        return nn.Embedding(300, 72, sparse=True)

    table = born(engine, build_table)
    optimizer = zinf.AdamW(table.parameters(), lr=LR)
    with pytest.raises((RuntimeError, NotImplementedError), match="(?i)sparse"):
        table(torch.tensor([1, 5, 5])).sum().backward()
        optimizer.step()
    torch.manual_seed(0)
    assert_same_model(table, build_table())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_torchs_optimizers_use_sparse_gradients(engine, kind):
    plain, managed = pair(engine, lambda: nn.Embedding(300, 72, sparse=True))
    for model in (plain, managed):
        optimizer = kind(model.parameters(), lr=LR)
        for seed in range(3):
            rows = torch.randint(300, (20,), generator=torch.Generator().manual_seed(seed))
            model(rows).square().sum().backward()
            assert model.weight.grad.is_sparse
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(managed, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float32_has_the_bits_of_torchs_fused_adamw_and_narrow_types_have_a_master(engine, dtype):
    """Torch has no master of a narrow weight: the first update is the same, those after it are not."""
    plain, managed = pair(engine, lambda: nn.Linear(72, 36).to(dtype))
    own = nn.Linear(72, 36).to(dtype)
    own.load_state_dict(plain.state_dict())
    fused = torch.optim.AdamW(plain.parameters(), lr=LR, fused=True)
    of = {
        plain: fused,
        managed: zinf.AdamW(managed.parameters(), lr=LR),
        own: zinf.AdamW(own.parameters(), lr=LR),
    }
    equal = []
    for seed in range(4):
        for model, optimizer in of.items():
            model(inputs(seed).to(dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_model(managed, own)
        equal.append(all(map(same, managed.parameters(), plain.parameters())))
    assert equal == [True, *[dtype == torch.float32] * 3]
