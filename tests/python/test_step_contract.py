"""update="step" keeps PyTorch's contract: gradients are there, and step() may be pending."""

import copy

import pytest
import torch
import zinf
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from twins import (
    LR,
    assert_alike,
    assert_same_grads,
    assert_same_model,
    born,
    build_net,
    inputs,
    net_loss,
    optimizers,
    pair,
    plain_adamw,
    same,
    step,
)

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)


def run_both(plain, managed, action, steps=4, **options):
    """forward, backward, action(model, optimizer, number of the step), for both; compares what is left."""
    for model, optimizer in zip((plain, managed), optimizers(plain, managed, **options), strict=True):
        for seed in range(steps):
            net_loss(model, seed).backward()
            action(model, optimizer, seed)
    assert_same_model(managed, plain)


def test_gradients_are_managed_units(engine):
    plain, managed = pair(engine)
    weights = engine.stats()["managed"]
    net_loss(plain).backward()
    net_loss(managed).backward()
    assert engine.stats()["managed"] == weights + len(list(managed.parameters()))
    assert_same_grads(managed, plain)


def test_gradients_leave_memory(evicting):
    managed = born(evicting, build_layers)
    net_loss(managed).backward()
    stats = evicting.stats()
    assert stats["peak_resident_bytes"] < stats["weights_bytes"]
    assert all(parameter.grad is not None for parameter in managed.parameters())


def test_clip_grad_norm(engine):
    norms = []

    def clip(model, optimizer, _):
        norms.append(clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad()

    run_both(*pair(engine), clip)
    assert all(same(ours, theirs) for ours, theirs in zip(norms[4:], norms[:4], strict=True))


@pytest.mark.parametrize("options", [{"norm_type": float("inf")}, {"norm_type": 1.0}, {"foreach": True}])
def test_clip_grad_norm_options(engine, options):
    plain, managed = pair(engine)
    for model in (plain, managed):
        net_loss(model).backward()
    norms = [clip_grad_norm_(model.parameters(), 0.01, **options) for model in (plain, managed)]
    assert same(norms[1], norms[0])
    assert_same_grads(managed, plain)


def test_clip_grad_value(engine):
    def clip(model, optimizer, _):
        clip_grad_value_(model.parameters(), 1e-4)
        optimizer.step()
        optimizer.zero_grad()

    run_both(*pair(engine), clip)


@pytest.mark.parametrize("norm", [1e-3, 1e3], ids=["clips", "does not clip"])
def test_max_grad_norm_equals_clip_grad_norm(engine, norm):
    plain, managed = pair(engine)
    theirs = plain_adamw(plain)
    mine = zinf.AdamW(managed.parameters(), lr=LR, max_grad_norm=norm)
    for seed in range(4):
        net_loss(plain, seed).backward()
        clip_grad_norm_(plain.parameters(), norm)
        theirs.step()
        theirs.zero_grad()
        step(managed, mine, seed)
    assert_same_model(managed, plain)


def test_max_grad_norm_without_an_engine():
    torch.manual_seed(0)
    plain = build_net()
    ours = copy.deepcopy(plain)
    theirs, mine = plain_adamw(plain), zinf.AdamW(ours.parameters(), lr=LR, max_grad_norm=1e-3)
    for seed in range(4):
        net_loss(plain, seed).backward()
        clip_grad_norm_(plain.parameters(), 1e-3)
        theirs.step()
        theirs.zero_grad()
        step(ours, mine, seed)
    assert_same_model(ours, plain)


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale and clip"])
def test_grad_scaler(engine, unscale):
    """Two steps of the six meet an infinity and are skipped."""
    plain, managed = pair(engine)
    scales = {}
    for model, optimizer in zip((plain, managed), optimizers(plain, managed), strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales[model] = []
        for seed in range(6):
            loss = net_loss(model, seed) * (float("inf") if seed in (1, 4) else 1.0)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales[model].append(scaler.get_scale())
    assert scales[managed] == scales[plain]
    assert len(set(scales[plain])) > 1
    assert_same_model(managed, plain)


def test_zero_grad_keeps_the_gradients(engine):
    def zero(model, optimizer, _):
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(not parameter.grad.any() for parameter in model.parameters())

    run_both(*pair(engine), zero)


def test_zero_grad_of_the_model(engine):
    def zero(model, optimizer, seed):
        optimizer.step()
        model.zero_grad(set_to_none=seed % 2 == 0)

    run_both(*pair(engine), zero)


def test_gradients_are_read(engine):
    plain, managed = pair(engine)
    for model in (plain, managed):
        net_loss(model).backward()
    assert_alike(lambda model: [parameter.grad.norm() for parameter in model.parameters()], plain, managed)
    assert_alike(lambda model: [parameter.grad[0] for parameter in model.parameters()], plain, managed)


def test_gradients_read_before_the_step_keep_their_values(engine):
    kept = []

    def read(model, optimizer, _):
        grads = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        kept.append([grad.clone() for grad in grads])

    run_both(*pair(engine), read)
    for ours, theirs in zip(kept[4:], kept[:4], strict=True):
        assert all(same(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_gradients_are_replaced(engine):
    def replace(model, optimizer, seed):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    run_both(*pair(engine), replace)


def test_gradients_without_a_backward(engine):
    plain, managed = pair(engine)
    for model, optimizer in zip((plain, managed), optimizers(plain, managed), strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert_same_model(managed, plain)


def test_gradients_are_edited_in_place(engine):
    def edit(model, optimizer, _):
        for parameter in model.parameters():
            parameter.grad += 0.1 * parameter.detach()
            parameter.grad.mul_(2)[0] = 0.5
            parameter.grad.data.clamp_(-0.3, 0.3)
        optimizer.step()
        optimizer.zero_grad()

    run_both(*pair(engine), edit)


def test_some_gradients_are_dropped(engine):
    def drop(model, optimizer, seed):
        list(model.parameters())[seed].grad = None
        optimizer.step()
        optimizer.zero_grad()

    run_both(*pair(engine), drop)


def test_gradients_shared_by_assignment(engine):
    """Two parameters may be given one gradient tensor."""

    def share(model, optimizer, _):
        model[3].weight.grad = model[3].bias.grad
        optimizer.step()
        optimizer.zero_grad()

    run_both(*pair(engine), share)


# step() may return before the update has landed: what follows at once must wait for it.


def test_weights_edited_right_after_the_step(engine):
    def edit(model, optimizer, _):
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
        optimizer.zero_grad()

    run_both(*pair(engine), edit)


def test_gradients_edited_right_after_the_step(engine):
    def edit(model, optimizer, _):
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.fill_(1e6)
        optimizer.zero_grad()

    run_both(*pair(engine), edit)


def test_backward_right_after_the_step(engine):
    def again(model, optimizer, seed):
        optimizer.step()  # the gradients stay and accumulate
        net_loss(model, seed + 50).backward()

    run_both(*pair(engine), again)


def test_steps_without_new_gradients(engine):
    def repeat(model, optimizer, _):
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # nothing to do

    run_both(*pair(engine), repeat)


def test_weights_read_right_after_the_step(engine):
    read = []

    def save(model, optimizer, _):
        optimizer.step()
        read.append({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.zero_grad()

    run_both(*pair(engine), save)
    for ours, theirs in zip(read[4:], read[:4], strict=True):
        assert all(same(ours[name], value) for name, value in theirs.items())


def test_optimizer_state_read_right_after_the_step(engine):
    read = []

    def save(model, optimizer, _):
        optimizer.step()
        optimizer.zero_grad()
        read.append(copy.deepcopy(optimizer.state_dict()["state"]))

    run_both(*pair(engine), save)
    for ours, theirs in zip(read[4:], read[:4], strict=True):
        assert ours.keys() == theirs.keys()
        for index, states in theirs.items():
            assert float(ours[index]["step"]) == float(states["step"])
            assert same(ours[index]["exp_avg"], states["exp_avg"])
            assert same(ours[index]["exp_avg_sq"], states["exp_avg_sq"])


def test_optimizer_state_by_parameter(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    for seed in range(2):
        step(plain, theirs, seed)
        step(managed, mine, seed)
    for ours, parameter in zip(managed.parameters(), plain.parameters(), strict=True):
        assert same(mine.state[ours]["exp_avg"], theirs.state[parameter]["exp_avg"])
        assert same(mine.state[ours]["exp_avg_sq"], theirs.state[parameter]["exp_avg_sq"])


def test_optimizer_state_dict_resumes(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    for seed in range(3):
        step(plain, theirs, seed)
        step(managed, mine, seed)
    again = zinf.AdamW(managed.parameters(), lr=99.0)
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    del mine
    for seed in range(3, 6):
        assert same(step(managed, again, seed), step(plain, theirs, seed))
    assert_same_model(managed, plain)


def test_closure(engine):
    plain, managed = pair(engine)
    losses = []
    for model, optimizer in zip((plain, managed), optimizers(plain, managed), strict=True):
        for seed in range(3):

            def closure(model=model, optimizer=optimizer, seed=seed):
                optimizer.zero_grad()
                loss = net_loss(model, seed)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
    assert losses[3:] == losses[:3]
    assert_same_model(managed, plain)


def test_hooks_around_the_step(engine):
    notes = []

    def note(model, optimizer, _):
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: notes.append(model[0].weight.sum().item())),
            optimizer.register_step_post_hook(lambda *_: notes.append(model[0].weight.sum().item())),
        ]
        optimizer.step()
        optimizer.zero_grad()
        for hook in hooks:
            hook.remove()

    run_both(*pair(engine), note)
    assert notes[8:] == notes[:8]


def test_adamw_without_an_engine():
    torch.manual_seed(0)
    plain = build_net()
    ours = copy.deepcopy(plain)
    theirs, mine = plain_adamw(plain), zinf.AdamW(ours.parameters(), lr=LR)
    assert isinstance(mine, torch.optim.Optimizer)
    for seed in range(5):
        assert same(step(ours, mine, seed), step(plain, theirs, seed))
    assert_same_model(ours, plain)


def test_narrow_weights_that_the_user_edits(engine):
    """An edited element becomes its master; the others keep theirs."""
    plain, managed = pair(engine, lambda: build_net().bfloat16())
    runs = [(model, zinf.AdamW(model.parameters(), lr=1e-4)) for model in (plain, managed)]
    for seed in range(6):
        for model, optimizer in runs:
            model(inputs(seed).bfloat16()).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if seed == 2:
                with torch.no_grad():
                    model[0].weight[:5] *= 3
                    model[4].bias.zero_()
    assert_same_model(managed, plain)


# Operators over lists never make everything resident at once.


def build_layers():
    """Sixteen weights of 121 KiB that any order of use may drop, and no other parameter."""
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(72, 431, bias=False), nn.Tanh(), nn.Linear(431, 72, bias=False))
            for _ in range(8)
        ]
    )


def weights_and_grads(model):
    parameters = list(model.parameters())
    return parameters, [parameter.grad for parameter in parameters]


@torch.no_grad()
def foreach_norm(model):
    parameters, grads = weights_and_grads(model)
    return [*torch._foreach_norm(parameters), *torch._foreach_norm(grads)]


@torch.no_grad()
def foreach_mul(model):
    parameters, grads = weights_and_grads(model)
    torch._foreach_mul_(grads, 0.5)
    torch._foreach_mul_(parameters, [0.9] * len(parameters))
    return [*parameters, *grads]


@torch.no_grad()
def foreach_add(model):
    parameters, grads = weights_and_grads(model)
    torch._foreach_add_(parameters, grads, alpha=-0.1)
    return parameters


@torch.no_grad()
def foreach_zero(model):
    _, grads = weights_and_grads(model)
    torch._foreach_zero_(grads)
    return grads


@torch.no_grad()
def amp_unscale(model):
    _, grads = weights_and_grads(model)
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.25))
    return [*grads, found]


@torch.no_grad()
def fused_sgd(model):
    torch.optim.SGD(model.parameters(), lr=LR, fused=True).step()
    return list(model.parameters())


@torch.no_grad()
def fused_adamw(model):
    plain_adamw(model).step()
    return list(model.parameters())


@torch.no_grad()
def cat_everything(model):
    parameters, grads = weights_and_grads(model)
    return [torch.cat([tensor.view(-1) for tensor in tensors]) for tensors in (parameters, grads)]


@torch.no_grad()
def clip_everything(model):
    return [clip_grad_norm_(model.parameters(), 1e-3), *weights_and_grads(model)[1]]


LIST_OPERATORS = [
    foreach_norm,
    foreach_mul,
    foreach_add,
    foreach_zero,
    amp_unscale,
    fused_sgd,
    fused_adamw,
    cat_everything,
    clip_everything,
]


@pytest.mark.parametrize("operator", LIST_OPERATORS, ids=lambda operator: operator.__name__)
def test_operators_over_lists_run_piece_by_piece(evicting, operator):
    plain, managed = pair(evicting, build_layers)
    for model in (plain, managed):
        net_loss(model).backward()
    assert_alike(operator, plain, managed)
    stats = evicting.stats()
    assert stats["peak_resident_bytes"] <= stats["weights_bytes"] // 2
    assert stats["audit_violations"] == stats["undeclared_writes"] == 0


def test_step_runs_piece_by_piece(evicting):
    plain, managed = pair(evicting, build_layers)
    theirs, mine = optimizers(plain, managed, weight_decay=0.1)
    for seed in range(2):
        assert same(step(managed, mine, seed), step(plain, theirs, seed))
    stats = evicting.stats()
    assert stats["peak_resident_bytes"] < stats["weights_bytes"]
    assert_same_model(managed, plain)
