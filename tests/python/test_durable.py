"""A save that has returned is on the disk, one that fails leaves nothing, and a kill leaves no scratch."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zinf as package
from power_loss import BUILD, RECORDER, Disk, changes_in, recording, write_tree
from ranks import TIMEOUT, Ranks
from test_rank_use import START as RANK_START

if not hasattr(package, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)
if not RECORDER.exists():
    pytest.skip(f"{RECORDER} was not built", allow_module_level=True)

ZINF = BUILD / "cli/zinf" if "ZINF_BUILD" in os.environ else Path(sys.executable).parent / "zinf"

START = """
import os, signal, sys
import torch, zinf

torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports much: once, not in every child

def train(**options):
    torch.set_num_threads(1)
    engine = zinf.Engine(**options)
    torch.manual_seed(0)
    with engine.init():
        model = torch.nn.Linear(40, 40)
    optimizer = zinf.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return engine, model, optimizer

def save_new(path):
    engine, *kept = train()
    engine.save(path)

def in_child(body, kill=None):
    "What waitpid() tells of it."
    child = os.fork()
    if child == 0:
        if kill is not None:
            limit("KILL", kill)
        try:
            body()
        except BaseException as error:
            print("in the child:", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]

def limit(kind, number):
    open(os.environ["ZINF_RECORD"], "w").close()
    os.environ[f"ZINF_RECORD_{kind}"] = str(number)
"""

SAVED = """
with open(os.environ["ZINF_RECORD"], "a") as record:
    record.write('{"op": "saved"}\\n')
"""


def cli(*arguments):
    return subprocess.run([str(ZINF), *map(str, arguments)], capture_output=True, text=True, timeout=TIMEOUT)


def run(script, env, *arguments):
    command = [sys.executable, "-c", START + script, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_power_losses(below, record, name, tmp_path):
    """After every change the save is whole or not there; once it has returned it is there."""
    disk, saved, checked = Disk(below), False, set()
    for number, change in enumerate(changes_in(record)):
        saved = saved or change["op"] == "saved"
        disk.apply(change)
        for seed in range(6):
            tree = disk.left(seed)
            if name not in tree:
                assert not saved, f"lost after {number} changes, seed {seed}"
                continue
            key = hashlib.sha256(repr(sorted(tree.items())).encode()).digest()
            if key in checked:
                continue
            checked.add(key)
            copy = tmp_path / f"left-{len(checked)}"
            write_tree(tree, copy)
            verified = cli("checkpoint", "verify", copy / name)
            assert verified.returncode == 0, f"after {number} changes, seed {seed}: {verified}"
    assert saved
    assert checked


@pytest.fixture
def below(tmp_path):
    directory = tmp_path / "below"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("named", ["", "1"], ids=["nameless", "without O_TMPFILE"])
def test_a_power_loss_after_any_change_of_a_save(tmp_path, below, named):
    env = {**recording(below, tmp_path / "record"), "ZINF_RECORD_NAMED": named}
    run("engine, *kept = train()\nengine.save(sys.argv[1])" + SAVED, env, below / "new/er/save")
    check_power_losses(below, tmp_path / "record", "new/er/save", tmp_path)
    assert [str(path.relative_to(below)) for path in sorted(below.rglob("*"))] == [
        "new", "new/er", "new/er/save", "new/er/save/volume.zinf",
    ]  # fmt: skip


def test_a_power_loss_after_any_change_of_a_save_of_ranks(tmp_path, below, monkeypatch):
    for name, value in recording(below, tmp_path / "record").items():
        monkeypatch.setenv(name, value)
    body = """
engine, model, optimizer = start()
train(model, optimizer, range(1))
engine.save(sys.argv[1])
"""
    with Ranks(2, RANK_START + body + SAVED, below / "new/save") as ranks:
        ends = ranks.outputs()
    monkeypatch.undo()
    assert [code for code, _ in ends] == [0, 0], ends
    check_power_losses(below, tmp_path / "record", "new/save", tmp_path)
    assert sorted(path.name for path in (below / "new").iterdir()) == ["save"]


@pytest.mark.parametrize("named", ["", "1"], ids=["nameless", "without O_TMPFILE"])
def test_a_save_that_fails_leaves_nothing_also_when_all_that_follows_fails(tmp_path, below, named):
    env = {**recording(below, tmp_path / "record"), "ZINF_RECORD_NAMED": named}
    script = """
engine, model, optimizer = train()
number = 0
while True:
    limit("FAIL", number)
    try:
        engine.save(sys.argv[1] + "/new/save")
        break
    except (OSError, RuntimeError) as error:
        assert "Input/output error" in str(error), error
    assert os.listdir(sys.argv[1]) == [], number
    number += 1
print(number)
"""
    assert int(run(script, env, below).splitlines()[-1]) > 15
    assert cli("checkpoint", "verify", below / "new/save").returncode == 0


def test_a_save_of_ranks_that_fails_leaves_nothing(tmp_path, below, monkeypatch):
    for name, value in recording(below, tmp_path / "record").items():
        monkeypatch.setenv(name, value)
    body = """
engine, model, optimizer = start()
train(model, optimizer, range(1))
number = 0
while True:
    dist.barrier()
    if rank == 0:
        open(os.environ["ZINF_RECORD"], "w").close()
    os.environ["ZINF_RECORD_FAIL"] = str(number)
    dist.barrier()
    try:
        engine.save(sys.argv[1] + "/new/save")
        break
    except (OSError, RuntimeError) as error:
        text = str(error)
        assert "Input/output error" in text or "another rank has failed" in text, text
    dist.barrier()
    assert os.listdir(sys.argv[1]) == [], number
    number += 1
say(number)
"""
    with Ranks(2, RANK_START + body, below) as ranks:
        ends = ranks.outputs()
    monkeypatch.undo()
    assert [code for code, _ in ends] == [0, 0], ends
    numbers = [json.loads(line)[0] for _, text in ends for line in text.splitlines() if line.startswith("[")]
    assert len(numbers) == 2
    assert min(numbers) > 30
    assert cli("checkpoint", "verify", below / "new/save").returncode == 0


@pytest.mark.parametrize("named", ["", "1"], ids=["nameless", "without O_TMPFILE"])
def test_a_kill_after_any_change_of_a_run_leaves_an_empty_directory(tmp_path, below, named):
    """But for the instant in which a file of a system without O_TMPFILE has its name."""
    env = {**recording(below, tmp_path / "record"), "ZINF_RECORD_NAMED": named}
    script = """
options = {"nvme": sys.argv[1], "weights": "nvme", "states": "nvme", "evict": "always"}
left = []
number = 0
while True:
    number += 1
    end = in_child(lambda: train(**options), kill=number)
    names = os.listdir(sys.argv[1])
    left += [name.rstrip("0123456789abcdef") for name in names]
    for name in names:
        os.remove(f"{sys.argv[1]}/{name}")
    if end == 0:
        break
    assert os.WTERMSIG(end) == signal.SIGKILL, end
print(number, *sorted(set(left)))
"""
    number, *left = run(script, env, below).split()
    assert int(number) > 10
    assert left == (["zinf-scratch-"] if named else [])


def test_signals_and_aborts_leave_an_empty_directory(below):
    script = """
def die(number):
    engine, *kept = train(nvme=sys.argv[1], weights="nvme", states="nvme", evict="always")
    assert engine.stats()["bytes_written"] > 0
    if number == signal.SIGABRT:
        os.abort()
    os.kill(os.getpid(), number)

for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGABRT):
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    end = in_child(lambda: die(number))
    assert os.WTERMSIG(end) == number, (number, end)
    assert os.listdir(sys.argv[1]) == [], number
"""
    run(script, {**os.environ, "PYTHONFAULTHANDLER": ""}, below)


@pytest.mark.parametrize("named", ["", "1"], ids=["nameless", "without O_TMPFILE"])
def test_a_kill_after_any_change_of_a_save_leaves_what_prune_finds_and_the_next_save_removes(
    tmp_path, below, named
):
    env = {**recording(below, tmp_path / "record"), "ZINF_RECORD_NAMED": named}
    script = """
number = 0
while True:
    number += 1
    folder = f"{sys.argv[1]}/{number}"
    os.mkdir(folder)
    end = in_child(lambda: save_new(folder + "/save"), kill=number)
    if end == 0:
        break
    assert os.WTERMSIG(end) == signal.SIGKILL, end
print(number)
"""
    number = int(run(script, env, below))
    assert number > 10
    cut = [folder for folder in below.iterdir() if list(folder.iterdir())]
    assert len(cut) >= 4
    again = """
engine, *kept = train()
for folder in sys.argv[2:]:
    if not os.path.exists(folder + "/save"):
        engine.save(folder + "/save")
        others = [name for name in os.listdir(folder) if name != "save"]
        assert all(name.startswith("zinf.unfinished-") for name in others), others
"""
    run(again, dict(os.environ), "", *cut[::2])
    pruned = cli("checkpoint", "prune", below)
    assert pruned.returncode == 0, pruned
    for folder in below.iterdir():
        left = sorted(path.name for path in folder.iterdir())
        assert left in ([], ["save"]), left
        if left:
            assert cli("checkpoint", "verify", folder / "save").returncode == 0
