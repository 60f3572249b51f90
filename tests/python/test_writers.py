"""torch.save, safetensors and save_pretrained: within the budget, and with the bytes of a plain model."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import writing
import zinf
from models import build_gpt2
from torch import nn
from twins import budget

WRITING = Path(__file__).with_name("writing.py")


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 7))
    model[3].weight.data = model[3].weight.data.bfloat16()
    model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    return model


def gpt2():
    torch.manual_seed(0)
    return build_gpt2()


def managed(engine, builder=build):
    with engine.init():
        return builder()


def bytes_below(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WAYS = {
    "torch.save": lambda model, path: torch.save(model.state_dict(), path),
    "save_file": lambda model, path: safetensors.torch.save_file(model.state_dict(), path, {"format": "pt"}),
    "save_model": lambda model, path: safetensors.torch.save_model(model, str(path), {"ü": 'a "b" \n line'}),
    "save": lambda model, path: path.write_bytes(safetensors.torch.save(model.state_dict())),
    "slices": lambda model, path: safetensors.torch.save_file({"rows": model[1].weight[3:5]}, path),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_has_a_plain_models_bytes(engine, tmp_path, way):
    for name, model in {"plain": build(), "managed": managed(engine)}.items():
        (tmp_path / name).mkdir()
        WAYS[way](model, tmp_path / name / "file")
    assert bytes_below(tmp_path / "managed") == bytes_below(tmp_path / "plain")


@pytest.mark.parametrize("shard_size", ["50GB", "40KB"])
def test_save_pretrained_writes_a_plain_models_bytes(engine, tmp_path, shard_size):
    gpt2().save_pretrained(tmp_path / "plain", max_shard_size=shard_size)
    managed(engine, gpt2).save_pretrained(tmp_path / "managed", max_shard_size=shard_size)
    plain = bytes_below(tmp_path / "plain")
    assert bytes_below(tmp_path / "managed") == plain
    files = [path for path in plain if path.suffix == ".safetensors"]
    assert (len(files) > 1) == (shard_size == "40KB")


def test_a_model_of_four_times_the_budget_is_written(nvme, tmp_path):
    run = subprocess.run(
        [sys.executable, WRITING, tmp_path, nvme], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    peaks = {name: int(size) for name, size in (line.split() for line in run.stdout.splitlines())}
    assert set(peaks) == {"torch.save", "legacy", "optimizer", "save_file", "save_model", "save_pretrained"}
    assert max(peaks.values()) < writing.BUDGET, peaks
    written = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for path in (tmp_path / "model.pt", tmp_path / "old.pt"):
        loaded = torch.load(path)
        assert loaded.keys() == written.keys()
        assert all(torch.equal(loaded[name], written[name]) for name in written)


def test_what_was_written_leaves_memory(evicting, tmp_path):
    model = managed(evicting)
    states = model.state_dict()
    torch.save(states, tmp_path / "model.pt")
    safetensors.torch.save_file(states, tmp_path / "model.safetensors")
    assert evicting.stats()["resident_bytes"] == 0
    assert evicting.stats()["escapes"] == 0


REFUSED = {
    "not contiguous": lambda model: {"a": model[1].weight.t()},
    "shared": lambda model: {"a": model[1].weight, "b": model[1].weight},
    "sparse": lambda model: {"a": model[1].weight, "b": torch.eye(3).to_sparse()},
    "no tensor": lambda model: {"a": model[1].weight, "b": 3},
}


@pytest.mark.parametrize("tensors", REFUSED.values(), ids=REFUSED)
def test_safetensors_refuses_what_it_refuses_of_a_plain_model(engine, tmp_path, tensors):
    texts = set()
    for model in (build(), managed(engine)):
        with pytest.raises((ValueError, RuntimeError)) as refusal:
            safetensors.torch.save_file(tensors(model), tmp_path / "file")
        texts.add(str(refusal.value).replace("'b', 'a'", "'a', 'b'"))
    assert len(texts) == 1
    assert list(tmp_path.glob("file*")) == []


def test_a_safetensors_file_that_cannot_be_written_leaves_the_old_one(nvme, tmp_path):
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"old")
    with zinf.Engine(weights="host") as engine:
        model = managed(engine, lambda: nn.Linear(512, 512))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
        try:
            with pytest.raises(safetensors.SafetensorError, match="File too large"):
                safetensors.torch.save_file(model.state_dict(), target)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        with pytest.raises(safetensors.SafetensorError, match="No such file or directory"):
            safetensors.torch.save_file(model.state_dict(), tmp_path / "missing" / "file")
    assert bytes_below(tmp_path) == {Path("model.safetensors"): b"old"}


def test_a_link_is_replaced_and_its_target_stays(engine, tmp_path):
    (tmp_path / "blob").write_bytes(b"old")
    (tmp_path / "model").symlink_to("blob")
    safetensors.torch.save_file(managed(engine).state_dict(), tmp_path / "model")
    assert (tmp_path / "blob").read_bytes() == b"old"
    assert not (tmp_path / "model").is_symlink()


def test_a_file_larger_than_the_budget_is_loaded_and_may_be_written_again(nvme, tmp_path):
    size = 1 << 20
    torch.save({name: torch.full((size,), float(name)) for name in range(8)}, tmp_path / "file.pt")
    limit = budget(4 * size * 3)
    with zinf.Engine(host_memory=limit, nvme=nvme) as engine:
        loaded = torch.load(tmp_path / "file.pt")
        (tmp_path / "file.pt").write_bytes(b"")
        assert [float(loaded[name].sum()) for name in range(8)] == [float(name * size) for name in range(8)]
        loaded[3].add_(1)
        assert engine.stats()["host_used_bytes"] < limit
        assert float(loaded[3].sum()) == 4 * size
    assert list(Path(nvme).iterdir()) == []
