"""The float32 master of bfloat16 weights: split or plain, edited or not, the results are the same."""

import copy
import pickle
import threading

import pytest
import torch
import zinf
from torch.nn import functional as F
from twins import LR, born, build_net, inputs, same, step

STEPS = 4


def build():
    return build_net().bfloat16()


def loss(model, seed):
    output = model(inputs(seed).bfloat16()).float()
    return F.mse_loss(output, inputs(seed + 1000))


def reference(edit):
    """Plain model, plain master, in memory."""
    torch.manual_seed(0)
    model = build()
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    for seed in range(STEPS):
        edit(model, optimizer)
        step(model, optimizer, seed, loss)
    return model, optimizer


def assert_equal(ours, plain):
    for (name, mine), theirs in zip(ours[0].named_parameters(), plain[0].parameters(), strict=True):
        assert same(mine, theirs), name
    mine, theirs = ours[1].state_dict()["state"], plain[1].state_dict()["state"]
    for index, state in theirs.items():
        for key, value in state.items():
            assert same(mine[index][key], value), (index, key)


def bits_of(tensor):
    return tensor.detach().view(torch.int16)


@torch.no_grad()
def add_to_some_rows(model, optimizer):
    model[0].weight[3:7] += 0.125


@torch.no_grad()
def write_the_same(model, optimizer):
    model[0].weight.copy_(model[0].weight.clone())


def assign_data(model, optimizer):
    data = model[4].weight.detach().clone()
    data[0] *= 2
    model[4].weight.data = data


def edit_through_numpy(model, optimizer):
    array = bits_of(model[0].weight).numpy()
    array[5] += 3


def hold_an_array(model, optimizer):
    held = getattr(optimizer, "held", None)
    if held is None:
        held = optimizer.held = bits_of(model[0].weight).numpy()
    held[2] += 1


def load_weights(model, optimizer):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["0.bias"] += 1
    model.load_state_dict(state)


def reload_optimizer(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def load_both(model, optimizer):
    """The optimizer first: its masters meet weights of another time."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    add_to_some_rows(model, optimizer)
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])


@torch.no_grad()
def set_storage(model, optimizer):
    other = model[4].weight.detach().clone()
    other[1] *= 1.5
    model[4].weight.set_(other)


@torch.no_grad()
def empty_and_refill(model, optimizer):
    """As sharded trainers do: the storage is given back, and filled with the same values."""
    values = model[4].weight.detach().clone()
    storage = model[4].weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    model[4].weight.copy_(values)


def another_optimizer(model, optimizer):
    if not hasattr(optimizer, "other"):
        optimizer.other = zinf.AdamW(model.parameters(), lr=LR, master=optimizer.master)
    step(model, optimizer.other, 7, loss)


def to_float_and_back(model, optimizer):
    if optimizer.state:
        model.float()
        float_loss = F.mse_loss(model(inputs(3)), inputs(4))
        float_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.bfloat16()


EDITS = [
    add_to_some_rows,
    write_the_same,
    assign_data,
    load_weights,
    reload_optimizer,
    load_both,
    set_storage,
    empty_and_refill,
    another_optimizer,
    to_float_and_back,
    lambda model, optimizer: None,
]
RAW_EDITS = [edit_through_numpy, hold_an_array]


def check_edit(engine, edit, master):
    model = born(engine, build)
    optimizer = zinf.AdamW(model.parameters(), lr=LR, master=master)
    for seed in range(STEPS):
        edit(model, optimizer)
        step(model, optimizer, seed, loss)
    assert_equal((model, optimizer), reference(edit))


@pytest.mark.parametrize("master", ["split", "plain"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edits_of_weights(engine, edit, master):
    check_edit(engine, edit, master)


@pytest.mark.raw_access
@pytest.mark.parametrize("master", ["split", "plain"])
@pytest.mark.parametrize("edit", RAW_EDITS, ids=lambda edit: edit.__name__)
def test_edits_through_an_address(engine, edit, master):
    check_edit(engine, edit, master)


def test_a_split_master_takes_two_bytes(nvme):
    written = {}
    for master in ("split", "plain"):
        with zinf.Engine(nvme=nvme, weights="host", states="nvme", evict="always") as engine:
            model = born(engine, build)
            optimizer = zinf.AdamW(model.parameters(), lr=LR, master=master)
            step(model, optimizer, 0, loss)
            before = engine.stats()["bytes_written"]
            step(model, optimizer, 1, loss)
            written[master] = engine.stats()["bytes_written"] - before
            numel = sum(parameter.numel() for parameter in model.parameters())
    assert written == {"split": 10 * numel, "plain": 12 * numel}


def saves(model, optimizer, engine, path):
    engine.save(path)


def reads_states(model, optimizer, engine, path):
    copy.deepcopy(optimizer.state_dict())


def saves_weights(model, optimizer, engine, path):
    torch.save(model.state_dict(), path)


@pytest.mark.parametrize("look", [saves, reads_states, saves_weights])
def test_looking_at_it_does_not_join_it(nvme, tmp_path, look):
    """What the step after the next writes is what it wrote before; a raw pointer joins it for the next."""
    written = []
    with zinf.Engine(nvme=nvme, weights="host", states="nvme", evict="always") as engine:
        model = born(engine, build)
        optimizer = zinf.AdamW(model.parameters(), lr=LR)
        step(model, optimizer, 0, loss)
        look(model, optimizer, engine, tmp_path / "look")
        for seed in range(1, 4):
            before = engine.stats()["bytes_written"]
            step(model, optimizer, seed, loss)
            written.append(engine.stats()["bytes_written"] - before)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert written[1:] == [10 * numel] * 2
    assert written[0] == 10 * numel or look is saves_weights


def test_states_are_read_while_a_step_runs(engine):
    model = born(engine, build)
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    step(model, optimizer, 0, loss)
    stop = threading.Event()

    def read():
        while not stop.is_set():
            optimizer.state_dict()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for seed in range(1, 12):
            step(model, optimizer, seed, loss)
    finally:
        stop.set()
        reader.join()
    torch.manual_seed(0)
    plain = build()
    plain_optimizer = zinf.AdamW(plain.parameters(), lr=LR)
    for seed in range(12):
        step(plain, plain_optimizer, seed, loss)
    assert_equal((model, optimizer), (plain, plain_optimizer))


@pytest.mark.parametrize("master", ["split", "plain"])
def test_weights_alone_are_loaded(engine, tmp_path, master):
    model = born(engine, build)
    optimizer = zinf.AdamW(model.parameters(), lr=LR, master=master)
    step(model, optimizer, 0, loss)
    engine.save(tmp_path / "one")
    expected = {index: state["master"].clone() for index, state in optimizer.state_dict()["state"].items()}
    engine.load(tmp_path / "one", only="weights")  # the same weights: no master changes
    for index, state in optimizer.state_dict()["state"].items():
        assert same(state["master"], expected[index])


def test_only_managed_weights_can_be_split():
    with pytest.raises(ValueError, match="managed bfloat16 weight"):
        zinf._C.SplitMaster(torch.zeros(3).bfloat16())


def test_a_checkpoint_does_not_know_the_format(engine, tmp_path):
    models = {}
    for master in ("split", "plain"):
        model = born(engine, build)
        models[master] = model, zinf.AdamW(model.parameters(), lr=LR, master=master)
        step(*models[master], 0, loss)
        engine.save(tmp_path / master)
        engine.release(model)
    for saved, loaded in (("split", "plain"), ("plain", "split")):
        model = born(engine, build, seed=5)
        optimizer = zinf.AdamW(model.parameters(), lr=LR, master=loaded)
        engine.load(tmp_path / saved)
        assert_equal((model, optimizer), models[saved])
        step(model, optimizer, 1, loss)
        twin = copy.deepcopy(models[saved])
        step(*twin, 1, loss)
        assert_equal((model, optimizer), twin)
        engine.release(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_of_the_optimizer(engine, copied):
    model = born(engine, build)
    optimizer = zinf.AdamW(model.parameters(), lr=LR, max_grad_norm=0.5)
    step(model, optimizer, 0, loss)
    twin_model, twin = copied((model, optimizer))
    for seed in (1, 2):
        step(model, optimizer, seed, loss)
        step(twin_model, twin, seed, loss)
    assert_equal((twin_model, twin), (model, optimizer))


@pytest.mark.parametrize("end", ["release", "close"])
def test_after_the_engine(engine, end):
    """The model is plain again, and edits of it count as before."""
    model = born(engine, build)
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    step(model, optimizer, 0, loss)
    if end == "release":
        engine.release(model)
    else:
        engine.close()
    torch.manual_seed(0)
    plain = build()
    plain_optimizer = zinf.AdamW(plain.parameters(), lr=LR)
    step(plain, plain_optimizer, 0, loss)
    for seed in (1, 2):
        for pair in ((model, optimizer), (plain, plain_optimizer)):
            add_to_some_rows(*pair)
            step(*pair, seed, loss)
    assert_equal((model, optimizer), (plain, plain_optimizer))


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match='must be "split" or "plain"'):
        zinf.AdamW([torch.nn.Parameter(torch.zeros(2))], master="half")
