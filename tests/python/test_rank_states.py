"""optimizer.state_dict() with several ranks: slices of one rank, which no other rank takes for its own."""

import torch
import zinf
from test_rank_use import said

# Loads the files that are named; the slices of this model have the same lengths on all ranks.
LOAD = """
torch.manual_seed(0)
engine = zinf.Engine(**json.loads(sys.argv[2]))
with engine.init():
    model = torch.nn.Linear(128, 128, bias=False)
optimizer = zinf.AdamW(model.parameters())
model(torch.ones(1, 128)).sum().backward()
optimizer.step()
path = f"{sys.argv[1]}/{rank}-of-{os.environ['WORLD_SIZE']}.pt"
torch.save(optimizer.state_dict(), path)
if dist.is_initialized():
    dist.barrier()
for name in sys.argv[3:]:
    before = moments(model, optimizer)
    try:
        optimizer.load_state_dict(torch.load(f"{sys.argv[1]}/{name}.pt", weights_only=True))
        say(name, "")
    except ValueError as error:
        assert moments(model, optimizer) == before
        say(name, str(error))
"""


def test_a_rank_refuses_the_slices_of_another(tmp_path):
    first, second = said(2, LOAD, tmp_path, "{}", "0-of-2")
    assert first == [["0-of-2", ""]]
    text = second[0][1]
    assert "these optimizer states are of rank 0 of 2, and this is rank 1 of 2" in text
    assert "engine.save(path)" in text and "engine.load(path)" in text


def test_another_number_of_ranks_is_refused_and_so_is_one_process(tmp_path):
    said(1, LOAD, tmp_path, "{}")
    said(2, LOAD, tmp_path, "{}")
    rows = said(4, LOAD, tmp_path, "{}", "0-of-2", "0-of-1")
    for rank, (two, one) in enumerate(rows):
        assert f"of rank 0 of 2, and this is rank {rank} of 4" in two[1]
        assert f"of one process, and this is rank {rank} of 4" in one[1]
    (row,) = said(1, LOAD, tmp_path, "{}", "0-of-2")
    assert "of rank 0 of 2, and this is one process" in row[0][1]


def test_replicas_of_a_slice_take_each_others_states(tmp_path):
    """Ranks 0 and 2 keep the same slices, as each group of two ranks has the whole model."""
    rows = said(4, LOAD, tmp_path, '{"partition_group": 2}', "0-of-4")
    assert [bool(row[0][1]) for row in rows] == [False, True, False, True]
    assert "rank 0 of 4 with partition_group=2, and this is rank 1 of 4" in rows[1][0][1]


def test_a_rank_takes_its_own_slices_back_through_files_and_copies():
    rows = said(
        2,
        """
import copy, io
engine, model, optimizer = start()
train(model, optimizer, range(2))
kept = copy.deepcopy(optimizer.state_dict())
file = io.BytesIO()
torch.save(kept, file)
file.seek(0)
weights = [p.detach().clone() for p in model.parameters()]
train(model, optimizer, range(2, 4))
first = digest(model)
with torch.no_grad():
    for p, w in zip(model.parameters(), weights):
        p.copy_(w)
optimizer.load_state_dict(torch.load(file, weights_only=True))
train(model, optimizer, range(2, 4))
say(first == digest(model))
""",
    )
    assert rows == [[[True]], [[True]]]


def test_a_dictionary_without_states_is_taken_by_all_and_one_of_a_process_has_no_mark(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 200)
    optimizer = zinf.AdamW(model.parameters(), lr=0.5)
    torch.save(optimizer.state_dict(), tmp_path / "fresh.pt")
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    packed = optimizer.state_dict()
    assert packed.keys() == {"state", "param_groups"}
    torch.optim.AdamW(model.parameters()).load_state_dict(packed)
    rows = said(
        2,
        """
torch.manual_seed(0)
engine = zinf.Engine()
with engine.init():
    model = torch.nn.Linear(30, 200)
optimizer = zinf.AdamW(model.parameters())
optimizer.load_state_dict(torch.load(sys.argv[1]))
say(optimizer.param_groups[0]["lr"])
""",
        tmp_path / "fresh.pt",
    )
    assert rows == [[[0.5]], [[0.5]]]
