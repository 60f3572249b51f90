"""Directories that others have prepared, that a process of the same pid has left, or that are read-only."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import zinf
from power_loss import BUILD
from twins import LR, assert_same_model, born, step

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

ZINF = BUILD / "cli/zinf" if "ZINF_BUILD" in os.environ else Path(sys.executable).parent / "zinf"
NOBODY = 65534
TEXT = "precious text of someone"


def cli(*arguments, **options):
    command = [str(ZINF), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def trained(engine):
    model = born(engine)
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    step(model, optimizer)
    return model, optimizer


def save_to(path):
    with zinf.Engine() as engine:
        model, _ = trained(engine)
        engine.save(path)
    return model


def trap(directory, victim):
    """A folder that someone else has prepared, so that a lock in it would be written to the victim."""
    directory.mkdir()
    (directory / "lock").symlink_to(victim)
    return directory


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text(TEXT)
    yield path
    assert path.read_text() == TEXT


def test_a_folder_under_an_expected_name_is_passed_by(nvme, tmp_path, victim):
    """What a killed process of the same pid has left, and what someone has put there."""
    for number in range(200):
        folder = Path(nvme) / f"zinf-{os.getpid()}-{number}"
        if number % 2:
            folder.symlink_to(trap(tmp_path / f"trap-{number}", victim))
        else:
            folder.mkdir()
            (folder / "lock").write_text(f"{os.getpid()}\n")
            (folder / "volume.zinf").write_bytes(bytes(8192))
    with zinf.Engine(nvme=nvme, weights="nvme", states="nvme", evict="always") as engine:
        trained(engine)
        assert engine.stats()["bytes_written"] > 0


def test_a_save_passes_by_what_has_the_names_of_earlier_versions(tmp_path, victim):
    for number, name in enumerate([f"save.unfinished-{os.getpid()}", "save.unfinished"]):
        (tmp_path / name).symlink_to(trap(tmp_path / f"trap-{number}", victim))
    model = save_to(tmp_path / "save")
    assert sorted(os.listdir(tmp_path / "trap-0")) == ["lock"]
    with zinf.Engine() as engine:
        again = born(engine, seed=1)
        engine.load(tmp_path / "save", only="weights")
        assert_same_model(again, model)


@pytest.mark.parametrize("name", ["file", "folder", "link", "dangling"])
def test_a_save_replaces_nothing(tmp_path, name):
    (tmp_path / "file").write_text(TEXT)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "dangling").symlink_to("none")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=f"{name} exists already: remove it"):
        save_to(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == before
    assert os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
def test_commands_do_not_write_through_a_lock_that_is_a_link(tmp_path, victim, kind):
    save_to(tmp_path / "stores/save")
    getattr(tmp_path / "stores/save/lock", kind)(victim)
    verified = cli("checkpoint", "verify", tmp_path / "stores/save")
    assert verified.returncode != 0
    assert "lock is" in verified.stderr
    assert cli("checkpoint", "inspect", tmp_path / "stores/save").returncode == 0
    for more in ([], ["--all"]):
        pruned = cli("checkpoint", "prune", tmp_path / "stores", *more)
        assert pruned.returncode == 0
        assert "1 kept" in pruned.stdout
    assert (tmp_path / "stores/save/volume.zinf").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the rights of root")
def test_root_does_not_follow_what_another_user_has_prepared(tmp_path, victim):
    """A user's folder on a shared disk, with links where root would write or remove."""
    save_to(tmp_path / "kept/save")
    disk = tmp_path / "disk"
    disk.mkdir()
    trap(disk / "zinf-1-0", victim)
    trap(disk / "x.unfinished-12", victim)
    (disk / "y.unfinished-12").symlink_to(tmp_path / "kept")
    (disk / "zinf-scratch-12").symlink_to(victim)
    (disk / "z").mkdir()
    (disk / "z/volume.zinf").symlink_to(tmp_path / "kept/save/volume.zinf")
    for path in [disk, *disk.rglob("*")]:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    pruned = cli("checkpoint", "prune", disk, "--all")
    assert pruned.returncode == 0, pruned
    assert (tmp_path / "kept/save/volume.zinf").exists()
    assert cli("checkpoint", "verify", tmp_path / "kept/save").returncode == 0


@pytest.fixture
def shared():
    """A directory that every user can enter."""
    directory = Path(tempfile.mkdtemp(prefix="zinf-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the rights of root")
def test_a_save_of_another_user_can_be_read_and_not_removed(shared):
    save_to(shared / "save")
    (shared / "save").chmod(0o755)
    (shared / "save/volume.zinf").chmod(0o644)
    shutil.copy(ZINF, shared / "zinf")
    other = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "capture_output": True, "text": True}
    for command in ("verify", "inspect"):
        run = subprocess.run([shared / "zinf", "checkpoint", command, shared / "save"], **other)
        assert run.returncode == 0, run
    pruned = subprocess.run([shared / "zinf", "checkpoint", "prune", "--all", shared], **other)
    assert "belongs to user 0" in pruned.stdout, pruned
    assert (shared / "save/volume.zinf").exists()


READ = """
import errno, os, sys, torch, zinf
try:
    os.mkdir(sys.argv[1] + "/new")
    sys.exit("the directory can be written")
except OSError as error:
    assert error.errno == errno.EROFS, error
engine = zinf.Engine()
torch.manual_seed(1)
with engine.init():
    model = torch.nn.Linear(40, 40)
optimizer = zinf.AdamW(model.parameters(), lr=1e-2)
print(engine.load(sys.argv[1] + "/save")[1], model.weight.sum().item())
try:
    engine.save(sys.argv[1] + "/more")
    sys.exit("saved")
except RuntimeError as error:
    assert "Read-only file system" in str(error), error
"""


def test_a_save_on_a_read_only_file_system_is_loaded_inspected_and_verified(tmp_path):
    read_only = tmp_path / "read only"
    read_only.mkdir()
    with zinf.Engine() as engine:
        torch.manual_seed(0)
        with engine.init():
            model = torch.nn.Linear(40, 40)
        step_of = zinf.AdamW(model.parameters(), lr=LR)
        model(torch.ones(1, 40)).sum().backward()
        step_of.step()
        engine.save(read_only / "save", extra=7)
        shutil.copytree(read_only / "save", read_only / "with lock")
        (read_only / "with lock/lock").write_text("1\n")
        expected = model.weight.sum().item()

    def there(*command):
        mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
        line = ["unshare", "-m", "sh", "-c", mount, read_only, *command]
        return subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=120)

    if there("true").returncode != 0:
        pytest.skip("no leave to mount a directory read-only")
    for command in ("verify", "inspect"):
        for save in ("save", "with lock"):
            run = there(ZINF, "checkpoint", command, read_only / save)
            assert run.returncode == 0, run
    run = there(sys.executable, "-c", READ, read_only)
    assert run.returncode == 0, run
    assert run.stdout.split() == ["7", str(expected)]
