"""update="backward": the same bits, no gradients left, and clear errors for what cannot be."""

import copy

import pytest
import torch
import zinf
from models import CASES
from torch import nn
from torch.nn.utils import clip_grad_norm_
from training import LR as CASE_LR
from training import PLACEMENTS, WEIGHT_DECAY, assert_same, build, outcome, plain_outcome, train
from twins import LR, assert_same_model, born, build_net, net_loss, pair, plain_adamw, same, step

# One case of the matrix per placement; without GradScaler, which this mode refuses.
PLACES = list(PLACEMENTS)
NAMES = [name for name, case in CASES.items() if case.loss_scale is None and name != "gpt2-compile"]


def backward_adamw(model, **options):
    return zinf.AdamW(model.parameters(), **({"lr": LR, "update": "backward"} | options))


@pytest.mark.parametrize("name", NAMES)
def test_same_bits_as_plain_pytorch(name, nvme):
    case = CASES[name]
    placement = PLACEMENTS[PLACES[NAMES.index(name) % len(PLACES)]]
    with zinf.Engine(nvme=nvme, **placement) as engine:
        with engine.init():
            model = build(case)
        optimizer = backward_adamw(
            model,
            lr=CASE_LR,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=case.max_grad_norm or case.clip_norm,
            micro_batches=case.micro_batches,
        )
        losses = train(case, model, optimizer)
        ours = outcome(losses, model, optimizer)
    assert_same(ours, plain_outcome(name))


def test_gradients_do_not_pile_up(nvme):
    """At most one weight, its gradient and its states are in memory at a time."""
    with zinf.Engine(nvme=nvme, weights="nvme", states="nvme", evict="always") as engine:
        model = born(engine, lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)]))
        optimizer = backward_adamw(model)
        for _ in range(2):
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.stats()["peak_resident_bytes"] <= 4 * 256 * 256 * 4 + 64 * 1024


@pytest.mark.parametrize(
    "touch",
    [
        lambda model: clip_grad_norm_(model.parameters(), 1.0),
        lambda model: model[0].weight.grad.sum(),
        lambda model: model[0].weight.grad.mul_(0.5),
        lambda model: model[0].weight.grad.numpy(),
        lambda model: model[0].weight.grad.clone(),
        lambda model: net_loss(model, 1).backward(),
    ],
)
def test_a_used_gradient_raises(engine, touch):
    model = born(engine)
    optimizer = backward_adamw(model)
    net_loss(model).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"used by the update inside backward.*max_grad_norm=.*\"step\""):
        touch(model)
    model.zero_grad()
    net_loss(model).backward()  # and all is well again
    optimizer.step()


def test_a_used_gradient_is_nan_where_nothing_can_raise(engine):
    """A copy of the storage reads through a pointer."""
    model = born(engine)
    optimizer = backward_adamw(model)
    net_loss(model).backward()
    assert copy.deepcopy(model[0].weight.grad).isnan().all()
    optimizer.step()


def test_gradients_are_dropped_whatever_zero_grad_is_told(engine):
    model = born(engine)
    optimizer = backward_adamw(model)
    step(model, optimizer)
    net_loss(model).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_second_backward_must_be_announced(engine):
    plain, model = pair(engine)
    optimizer, plain_optimizer = backward_adamw(model), plain_adamw(plain)
    net_loss(model).backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"second backward before step\(\).*micro_batches=2"):
        net_loss(model).backward()
    model.zero_grad()
    optimizer.step()  # the first one counts, and nothing is broken
    step(plain, plain_optimizer)
    assert_same_model(model, plain)


def test_two_optimizers_cannot_share_a_parameter(engine):
    model = born(engine)
    optimizer = backward_adamw(model)
    with pytest.raises(ValueError, match=r"another optimizer with update=\"backward\".*del optimizer"):
        backward_adamw(model)
    step(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    del optimizer, scheduler
    step(model, backward_adamw(model))


def test_micro_batches(engine):
    plain, model = pair(engine)
    optimizer, plain_optimizer = backward_adamw(model, micro_batches=3), plain_adamw(plain)
    for number in range(3):
        for one, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
            for micro in range(3):
                net_loss(one, 3 * number + micro).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert_same_model(model, plain)


def test_parameters_that_the_last_micro_batch_does_not_use(engine):
    plain, model = pair(engine)
    optimizer, plain_optimizer = backward_adamw(model, micro_batches=2), plain_adamw(plain)
    for _ in range(2):
        for one, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
            net_loss(one).backward()
            one[4](torch.ones(1, 301)).sum().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert_same_model(model, plain)


def test_clipping_has_the_bits_of_the_other_mode(engine):
    plain, model = pair(engine)
    optimizer, plain_optimizer = backward_adamw(model, max_grad_norm=0.01), plain_adamw(plain)
    for seed in range(3):
        net_loss(plain, seed).backward()
        clip_grad_norm_(plain.parameters(), 0.01)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        step(model, optimizer, seed)
    assert_same_model(model, plain)


def test_a_changed_lr_between_backward_and_step_raises(engine):
    model = born(engine)
    optimizer = backward_adamw(model)
    net_loss(model).backward()
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(RuntimeError, match=r"lr was changed between backward and step\(\)"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = LR
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0  # after step() it may
    optimizer.zero_grad()
    step(model, optimizer)


def test_schedulers(engine):
    plain, model = pair(engine)
    for one, optimizer in ((model, backward_adamw(model)), (plain, plain_adamw(plain))):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for seed in range(3):
            step(one, optimizer, seed)
            scheduler.step()
    assert_same_model(model, plain)


def test_grad_scaler_is_refused(engine):
    model = born(engine)
    optimizer = backward_adamw(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net_loss(model)).backward()
    with pytest.raises(RuntimeError, match="GradScaler does not work"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="gradients of a scaled loss"):
        optimizer.step()


def test_grad_scaler_is_refused_before_harm_where_gradients_wait(engine):
    model = born(engine)
    optimizer = backward_adamw(model, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net_loss(model)).backward()
    with pytest.raises(RuntimeError, match="GradScaler does not work"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    model(torch.ones(2, 72))  # nothing was updated: it can be used


class Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("in the middle")


def test_after_an_exception_inside_backward_everything_raises_until_load(engine, tmp_path):
    plain, model = pair(engine)
    optimizer, plain_optimizer = backward_adamw(model), plain_adamw(plain)
    step(model, optimizer)
    step(plain, plain_optimizer)
    engine.save(tmp_path / "one")
    hidden = model[0](torch.ones(1, 72))
    with pytest.raises(KeyError, match="in the middle"):
        model[4](Break.apply(hidden)).sum().backward()
    for use in (lambda: net_loss(model), lambda: model[0].weight.sum(), lambda: optimizer.step()):
        with pytest.raises(RuntimeError, match=r"exception inside backward.*load"):
            use()
    with pytest.raises(FileNotFoundError):
        engine.load(tmp_path / "none")
    with pytest.raises(RuntimeError, match="exception inside backward"):
        net_loss(model)
    engine.load(tmp_path / "one")
    optimizer.zero_grad()
    step(model, optimizer, 1)
    step(plain, plain_optimizer, 1)
    assert_same_model(model, plain)


def test_an_exception_before_the_first_update_harms_nobody(engine):
    plain, model = pair(engine)
    optimizer, plain_optimizer = backward_adamw(model), plain_adamw(plain)
    with pytest.raises(KeyError):
        Break.apply(model(torch.ones(1, 72))).sum().backward()
    optimizer.zero_grad()
    step(model, optimizer)
    step(plain, plain_optimizer)
    assert_same_model(model, plain)


def test_parameters_without_an_engine_are_updated_by_step():
    torch.manual_seed(0)
    model, plain = build_net(), None
    plain = copy.deepcopy(model)
    step(model, backward_adamw(model))
    step(plain, plain_adamw(plain))
    assert_same_model(model, plain)


def test_copies_update_in_backward_too(engine):
    model = born(engine)
    optimizer = backward_adamw(model)
    step(model, optimizer)
    twin_model, twin = copy.deepcopy((model, optimizer))
    engine.adopt(twin_model)
    step(model, optimizer, 1)
    step(twin_model, twin, 1)
    assert_same_model(twin_model, model)


def test_a_saved_graph_notices_the_update(engine):
    model = born(engine)
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    loss = net_loss(model)
    loss.backward(retain_graph=True)
    before = model[4].weight.detach().clone()
    optimizer.step()
    assert not same(model[4].weight, before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("options", [{"micro_batches": 0}, {"update": "step", "micro_batches": 2}])
def test_wrong_arguments(options):
    with pytest.raises(ValueError, match="micro_batches"):
        zinf.AdamW([nn.Parameter(torch.zeros(2))], **({"update": "backward"} | options))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_can_be_skipped_only_before_it_was_made(tmp_path, clip):
    with zinf.Engine(host_memory="100MiB", nvme=str(tmp_path)) as engine:
        model = engine.adopt(torch.nn.Linear(8, 8))
        optimizer = zinf.AdamW(model.parameters(), update="backward", max_grad_norm=clip)
        model(torch.ones(1, 8)).sum().backward()
        if clip is None:
            with pytest.raises(RuntimeError, match=r"zero_grad\(\) before step\(\)"):
                optimizer.zero_grad()
            optimizer.step()
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        assert not torch.equal(before, model.weight)
