"""What scripts do with parameters, one test each: managed ones behave like plain ones."""

import copy
import gc
import io
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
import zinf
from models import CASES, build_gpt2
from torch import nn
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
    heads = [linear(1), linear(1)]
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
