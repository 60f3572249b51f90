"""What scripts do with parameters, one test each: managed ones behave like plain ones."""

import copy
import gc
import io
import os
import pickle
import signal
import threading

import numpy as np
import pytest
import safetensors.torch
import torch
import zinf
from models import CASES, build_gpt2
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from training import build
from twins import (
    LR,
    assert_alike,
    assert_same_grads,
    assert_same_model,
    assert_same_training,
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

JOIN_SECONDS = 120


# Building.


@pytest.mark.parametrize("name", ["mlp", "lstm", "tied", "normed", "gpt2", "mixtral"])
def test_building_inside_init_gives_the_same_values(engine, name):
    plain = build(CASES[name])
    with engine.init():
        managed = build(CASES[name])
    assert_same_model(managed, plain)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=_generator_after(lambda: build(CASES[name]))))


def _generator_after(action):
    action()
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return generator


def test_building_keeps_little_in_memory(evicting):
    model = born(evicting, lambda: nn.Sequential(*[nn.Linear(200, 200) for _ in range(12)]))
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert evicting.stats()["weights_bytes"] == sum(parameter.nbytes for parameter in model.parameters())
    assert evicting.stats()["peak_resident_bytes"] <= 2 * largest


def test_from_pretrained_inside_init(engine, tmp_path):
    torch.manual_seed(0)
    plain = build_gpt2()
    plain.save_pretrained(tmp_path / "checkpoint")
    with engine.init():
        managed = type(plain).from_pretrained(tmp_path / "checkpoint")
    assert_same_model(managed, plain)
    assert engine.stats()["weights_bytes"] == sum(parameter.nbytes for parameter in plain.parameters())


def test_save_pretrained(engine, tmp_path):
    plain, managed = pair(engine, build_gpt2)
    managed.save_pretrained(tmp_path / "checkpoint")
    assert_same_model(type(plain).from_pretrained(tmp_path / "checkpoint"), plain)


# Reading and writing parameters.


def test_views(engine):
    plain, managed = pair(engine)

    def view(model):
        weight = model[0].weight
        return [weight.view(-1)[3:7], weight.t(), weight[5], weight.narrow(0, 2, 3), *weight.chunk(3)]

    assert_alike(view, plain, managed)
    kept = [view(plain), view(managed)]
    for model, optimizer in zip((plain, managed), optimizers(plain, managed), strict=True):
        step(model, optimizer)
    for theirs, ours in zip(*kept, strict=True):
        assert same(ours, theirs), "a view that was taken before the step does not show it"


def test_view_outlives_its_model(engine):
    plain, managed = pair(engine)
    rows = managed[0].weight.detach()[2:4]
    del managed
    assert same(rows, plain[0].weight[2:4])


def test_in_place_edits(engine):
    def edit(model):
        weight = model[0].weight
        weight.data.mul_(2)
        weight.data[3, 5] = 7.0
        weight.detach().view(-1)[10:20].zero_()
        weight.data.t()[4].copy_(torch.arange(301.0))
        nn.init.ones_(model[0].bias)
        weight.requires_grad_(False).add_(1).requires_grad_(True)
        return list(model.parameters())

    plain, managed = pair(engine)
    assert_alike(edit, plain, managed)
    assert_same_training(managed, plain)


def test_no_grad_edits(engine):
    def descend(model):
        net_loss(model).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter[0] = 0.25
        model.zero_grad()
        return list(model.parameters())

    plain, managed = pair(engine)
    for _ in range(3):
        assert_alike(descend, plain, managed)


def test_data_is_replaced(engine):
    def replace(model):
        torch.manual_seed(5)
        model[0].weight.data = torch.randn(301, 72)
        model[0].bias.data = model[0].bias.data * 3
        return list(model.parameters())

    plain, managed = pair(engine)
    assert_alike(replace, plain, managed)
    assert_same_training(managed, plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_model_is_converted(engine, dtype):
    plain, managed = pair(engine)
    assert_same_model(managed.to(dtype), plain.to(dtype))
    assert same(managed(inputs().to(dtype)), plain(inputs().to(dtype)))


def test_state_dict(engine):
    plain, managed = pair(engine)
    ours, theirs = managed.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    for model, optimizer in zip((plain, managed), optimizers(plain, managed), strict=True):
        step(model, optimizer)
    assert all(same(ours[name], value) for name, value in theirs.items()), "a state dict follows its model"


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(engine, assign):
    plain, managed = pair(engine)
    torch.manual_seed(9)
    source = build_net()
    plain.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
    managed.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
    assert_same_model(managed, source)
    assert_same_training(managed, plain)


def test_load_state_dict_between_steps(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    source = build_net().state_dict()
    for seed in range(4):
        assert same(step(managed, mine, seed), step(plain, theirs, seed))
        if seed == 1:
            plain.load_state_dict(source)
            managed.load_state_dict(source)
    assert_same_model(managed, plain)


def test_load_state_dict_from_a_managed_model(engine):
    source, managed = pair(engine)
    target = build_net()
    target.load_state_dict(managed.state_dict())
    assert_same_model(target, source)


def test_deepcopy(engine):
    plain, managed = pair(engine)
    copied = copy.deepcopy(managed)
    assert_same_training(managed, plain)
    torch.manual_seed(0)
    untouched = build_net()
    assert_same_model(copied, untouched)
    assert_same_training(copied, untouched)


def test_deepcopy_of_a_tied_model(engine):
    plain, managed = pair(engine, CASES["tied"].build)
    copied = copy.deepcopy(managed)
    assert copied.head.weight is copied.table.weight
    assert_same_model(copied, plain)


@pytest.mark.raw_access
def test_pickle(engine):
    plain, managed = pair(engine)
    assert_same_model(pickle.loads(pickle.dumps(managed)), plain)
    assert_same_training(managed, plain)


@pytest.mark.raw_access
@pytest.mark.parametrize("whole", [False, True], ids=["state_dict", "model"])
def test_torch_save(engine, tmp_path, whole):
    plain, managed = pair(engine)
    for target in (tmp_path / "model.pt", io.BytesIO()):
        torch.save(managed if whole else managed.state_dict(), target)
        if isinstance(target, io.BytesIO):
            target.seek(0)
        loaded = torch.load(target, weights_only=not whole)
        if not whole:
            restored = build_net()
            restored.load_state_dict(loaded)
            loaded = restored
        assert_same_model(loaded, plain)


@pytest.mark.raw_access
def test_safetensors(engine, tmp_path):
    plain, managed = pair(engine)
    safetensors.torch.save_file(managed.state_dict(), tmp_path / "model.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(same(loaded[name], value) for name, value in plain.state_dict().items())
    safetensors.torch.save_model(managed, str(tmp_path / "whole.safetensors"))
    torch.manual_seed(9)
    target = born(engine, seed=9)
    safetensors.torch.load_model(target, str(tmp_path / "whole.safetensors"))
    assert_same_model(target, plain)


@pytest.mark.raw_access
def test_numpy(engine):
    plain, managed = pair(engine)
    array = managed[0].weight.detach().numpy()
    assert np.array_equal(array, plain[0].weight.detach().numpy())
    assert np.array_equal(np.asarray(managed[3].bias.detach()), np.asarray(plain[3].bias.detach()))


@pytest.mark.raw_access
def test_writes_through_numpy_are_kept(engine):
    plain, managed = pair(engine)
    for model in (plain, managed):
        array = model[0].weight.detach().numpy()
        array[3] = 0.5
        del array
    assert_same_training(managed, plain)


@pytest.mark.raw_access
def test_dlpack(engine):
    plain, managed = pair(engine)
    assert same(torch.from_dlpack(managed[0].weight.detach()), plain[0].weight)
    assert np.array_equal(np.from_dlpack(managed[0].weight.detach()), plain[0].weight.detach().numpy())


@pytest.mark.raw_access
def test_printing(engine):
    plain, managed = pair(engine)
    assert repr(managed[0].weight) == repr(plain[0].weight)
    assert repr(managed) == repr(plain)
    assert f"{managed[0].weight[0, 0]:.6f}" == f"{plain[0].weight[0, 0]:.6f}"
    assert managed[0].weight.tolist() == plain[0].weight.tolist()
    assert managed[0].bias[3].item() == plain[0].bias[3].item()


def test_parameters_to_vector_and_back(engine):
    plain, managed = pair(engine)
    assert_alike(lambda model: [parameters_to_vector(model.parameters())], plain, managed)
    for model in (plain, managed):
        vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 2, model.parameters())
    assert_same_model(managed, plain)
    assert_same_training(managed, plain)


def test_functional_transforms(engine):
    plain, managed = pair(engine)

    def per_sample_gradients(model):
        def loss(parameters, row):
            return torch.func.functional_call(model, parameters, (row,)).pow(2).mean()

        parameters = {name: value.detach() for name, value in model.named_parameters()}
        rows = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, inputs())
        return list(rows.values())

    assert_alike(per_sample_gradients, plain, managed)


def test_inference_mode_and_fast_path(engine):
    def encoder():
        layer = nn.TransformerEncoderLayer(72, 4, 150, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()

    plain, managed = pair(engine, encoder)
    padding = torch.zeros(4, 9, dtype=torch.bool)
    padding[:, 7:] = True
    batch = torch.randn(4, 9, 72)
    with torch.inference_mode():
        assert same(managed(batch), plain(batch))
        ours = managed(batch, src_key_padding_mask=padding)
        assert same(ours, plain(batch, src_key_padding_mask=padding))


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
    plain.append(_linear(3))
    managed.append(born(engine, lambda: _linear(3)))
    plain.append(_linear(4))
    managed.append(_linear(4))
    engine.adopt(managed)
    assert engine.stats()["managed"] == before + 4
    for model, optimizer in ((plain, theirs), (managed, mine)):
        optimizer.add_param_group({"params": list(model[5:].parameters()), "lr": 0.05})
    for seed in range(3):
        assert same(step(managed, mine, seed), step(plain, theirs, seed))
    assert_same_model(managed, plain)


def _linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(72, 72)


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


# Between steps.


def test_eval_between_steps(engine):
    plain, managed = pair(engine, CASES["resnet"].build)
    theirs, mine = optimizers(plain, managed)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        batch = CASES["resnet"].batch(generator, 0)
        for model, optimizer in ((plain, theirs), (managed, mine)):
            CASES["resnet"].loss(model.train(), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        images, _ = CASES["resnet"].batch(generator, 0)
        with torch.no_grad():
            assert same(managed.eval()(images), plain.eval()(images))
    assert_same_model(managed, plain)


def test_generate_between_steps(engine):
    plain, managed = pair(engine, build_gpt2)
    theirs, mine = optimizers(plain, managed)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    for seed in range(2):
        tokens = CASES["gpt2"].batch(torch.Generator().manual_seed(seed), 0)
        for model, optimizer in ((plain, theirs), (managed, mine)):
            torch.manual_seed(seed)
            CASES["gpt2"].loss(model.train(), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
        ours = managed.generate(tokens[:, :5], **options)
        assert torch.equal(ours, plain.generate(tokens[:, :5], **options))
    assert_same_model(managed, plain)


class InterruptionError(Exception):
    pass


def _interrupt(*_):
    raise InterruptionError


def test_exception_in_the_middle_of_forward(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    for seed in range(3):
        hook = managed[3].register_forward_hook(_interrupt)
        with pytest.raises(InterruptionError):
            net_loss(managed, seed)
        hook.remove()
        with pytest.raises(RuntimeError, match="shape"):
            managed[0](torch.ones(2, 71))
        assert same(step(managed, mine, seed), step(plain, theirs, seed))
    assert_same_model(managed, plain)


def test_exception_in_the_middle_of_backward(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    for seed in range(3):
        for model in (plain, managed):
            hook = model[3].weight.register_hook(_interrupt)
            with pytest.raises(InterruptionError):
                net_loss(model, seed).backward()
            hook.remove()
        assert_same_grads(managed, plain)
        plain.zero_grad()
        managed.zero_grad()
        assert same(step(managed, mine, seed), step(plain, theirs, seed))
    assert_same_model(managed, plain)


def test_several_models_and_optimizers(engine):
    """A generator and a critic, trained in turn through each other."""
    plain_generator, generator = pair(engine, seed=0)
    plain_critic, critic = pair(engine, seed=1)
    expected = _adversarial_losses(plain_generator, plain_critic, plain_adamw)
    got = _adversarial_losses(generator, critic, lambda model: zinf.AdamW(model.parameters(), lr=LR))
    assert got == expected
    assert_same_model(generator, plain_generator)
    assert_same_model(critic, plain_critic)


def _adversarial_losses(generator, critic, make_optimizer):
    first, second = make_optimizer(generator), make_optimizer(critic)
    losses = []
    for seed in range(3):
        loss = critic(generator(inputs(seed))).pow(2).mean()
        loss.backward()
        first.step()
        first.zero_grad()
        second.zero_grad()
        (-critic(generator(inputs(seed)).detach()).mean()).backward()
        second.step()
        second.zero_grad()
        losses.append(loss.item())
    return losses


def test_one_optimizer_over_managed_and_plain_parameters(engine):
    plain, managed = pair(engine)
    heads = [_linear(1), _linear(1)]
    for model, head, optimizer in (
        (plain, heads[0], torch.optim.AdamW([*plain.parameters(), *heads[0].parameters()], LR, fused=True)),
        (managed, heads[1], zinf.AdamW([*managed.parameters(), *heads[1].parameters()], LR)),
    ):
        for seed in range(3):
            head(model(inputs(seed))).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(managed, plain)
    assert_same_model(heads[1], heads[0])


def test_two_engines(engine, tmp_path_factory, place):
    other_place = {**place, "nvme": str(tmp_path_factory.mktemp("other"))}
    with zinf.Engine(**other_place) as other:
        plain, managed = pair(engine)
        second_plain, second = pair(other, seed=1)
        assert_same_training(managed, plain)
        assert_same_training(second, second_plain)
        assert other.stats()["weights_bytes"] == engine.stats()["weights_bytes"]


def test_model_deleted_and_rebuilt(engine):
    for seed in range(3):
        plain, managed = pair(engine, seed=seed)
        assert_same_training(managed, plain)
        del managed
        gc.collect()
        assert engine.stats()["managed"] == 0


def test_adopted_model_with_views_that_were_taken_before(engine):
    plain = build_net()
    adopted = copy.deepcopy(plain)
    row = adopted[0].weight.detach()[4]
    engine.adopt(adopted)
    for model, optimizer in zip((plain, adopted), optimizers(plain, adopted), strict=True):
        step(model, optimizer)
    assert same(row, plain[0].weight[4]), "an older view does not show the step"
    del row
    assert_same_training(adopted, plain)


# Threads and processes.


def _in_threads(count, action):
    errors = []

    def run(index):
        try:
            action(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_forward_in_several_threads(engine):
    plain, managed = pair(engine)
    expected = plain(inputs()).detach()

    def run(_):
        with torch.no_grad():
            for _ in range(50):
                assert same(managed(inputs()), expected)

    _in_threads(4, run)


def test_training_in_several_threads(engine):
    pairs = [pair(engine, seed=seed) for seed in range(3)]
    _in_threads(3, lambda index: assert_same_training(*reversed(pairs[index]), steps=5))


def test_building_in_a_thread(engine):
    made = {}
    _in_threads(1, lambda _: made.update(model=born(engine)))
    torch.manual_seed(0)
    plain = build_net()
    assert_same_training(made["model"], plain)


def _exit_code_of_child(action):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a hang becomes a signal
        code = 1
        try:
            code = action()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forked_child_is_refused(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    step(plain, theirs)
    step(managed, mine)

    def use():
        try:
            managed[0].weight.sum()
        except RuntimeError as error:
            return 0 if "fork" in str(error) else 2
        return 3

    assert _exit_code_of_child(use) == 0, "2: unclear error, 3: no error"
    assert same(step(managed, mine), step(plain, theirs)), "the parent goes on"
    assert_same_model(managed, plain)


def test_forked_child_may_leave_the_model_alone(engine):
    plain, managed = pair(engine)
    assert _exit_code_of_child(lambda: int(torch.ones(3).sum().item() != 3)) == 0
    assert_same_training(managed, plain)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return inputs(index)[0], inputs(index + 1000)[0]


def test_data_loader_with_worker_processes(engine):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, timeout=60)
    for x, y in loader:
        for model, optimizer in ((plain, theirs), (managed, mine)):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(managed, plain)


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
