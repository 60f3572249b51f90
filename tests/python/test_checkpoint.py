"""zinf checkpoint and the stale stores of zinf doctor, on stores of make_store."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BUILD = pathlib.Path(os.environ.get("ZINF_BUILD", ROOT / "build/release"))
# Another build's own command, else the one that `make setup` has installed.
ZINF = BUILD / "cli/zinf" if "ZINF_BUILD" in os.environ else pathlib.Path(sys.executable).parent / "zinf"
MAKE_STORE = BUILD / "tests/make_store"


def zinf(*arguments: object) -> subprocess.CompletedProcess:
    command = [str(ZINF), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def make_store(*arguments: object) -> None:
    subprocess.run([str(MAKE_STORE), *map(str, arguments)], check=True, timeout=60)


@pytest.fixture
def held(tmp_path):
    """A store that another process has open."""
    command = [str(MAKE_STORE), "--hold", str(tmp_path / "held")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.stdin.close()


def flip(path: pathlib.Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_inspect_tells_versions_steps_states_and_sizes(tmp_path):
    make_store("--steps", 3, "--keep", "best", tmp_path / "run")
    report = json.loads(zinf("checkpoint", "inspect", tmp_path / "run", "--json").stdout)
    assert report["owner"] == 0
    assert report["block"] == 65536
    assert report["state_bytes"] == 1 << 20
    assert report["num_states"] == 2
    assert [v["step"] for v in report["versions"]] == [2, 3]
    newest = report["versions"][-1]
    assert newest["names"] == ["best"]
    assert newest["bytes"] == 1_000_000
    assert newest["states"][0] == {
        "unit": "fc.weight",
        "state": "exp_avg",
        "dtype": "float32",
        "shape": [250, 500],
        "shard_index": 0,
        "shard_count": 1,
        "bytes": 500_000,
    }
    text = zinf("checkpoint", "inspect", tmp_path / "run")
    assert text.returncode == 0
    assert "not in use" in text.stdout
    assert "best" in text.stdout
    assert "made for 2 states of 1 MiB together" in text.stdout


def test_inspect_wants_all_paths_of_a_store(tmp_path):
    make_store(tmp_path / "a", tmp_path / "b")
    alone = zinf("checkpoint", "inspect", tmp_path / "b")
    assert alone.returncode == 1
    assert "volume 0 of the 2" in alone.stderr
    both = zinf("checkpoint", "inspect", tmp_path / "b", tmp_path / "a", "--json")
    assert len(json.loads(both.stdout)["versions"]) == 2


def test_inspect_looks_into_a_store_in_use(held, tmp_path):
    report = json.loads(zinf("checkpoint", "inspect", tmp_path / "held", "--json").stdout)
    assert report["owner"] == held.pid


def test_an_empty_store_and_no_store(tmp_path):
    make_store("--steps", 0, tmp_path / "run")
    assert "no version was committed" in zinf("checkpoint", "inspect", tmp_path / "run").stdout
    (tmp_path / "nothing").mkdir()
    for command in ("inspect", "verify"):
        run = zinf("checkpoint", command, tmp_path / "nothing")
        assert run.returncode == 1
        assert "volume.zinf" in run.stderr


def test_a_folder_of_stores_is_told_store_by_store(tmp_path):
    for name in ("step-1", "step-2", "deep/step-3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make_store("--steps", 1, tmp_path / name)
    paths = [str(tmp_path / name) for name in ("deep/step-3", "step-1", "step-2")]

    inspect = zinf("checkpoint", "inspect", tmp_path)
    assert inspect.returncode == 0, inspect.stderr
    assert [line.split(": ")[0] for line in inspect.stdout.splitlines() if "not in use" in line] == paths
    report = json.loads(zinf("checkpoint", "inspect", tmp_path, "--json").stdout)
    assert [store["paths"] for store in report["stores"]] == [[path] for path in paths]
    assert all(len(store["versions"]) == 1 for store in report["stores"])
    verify = zinf("checkpoint", "verify", tmp_path)
    assert verify.returncode == 0, verify.stderr
    assert [line.split(": 1 version, ")[0] for line in verify.stdout.splitlines()] == paths

    for slot in (1, 2):
        flip(tmp_path / "step-1/volume.zinf", slot * 4096 + 40)
    for command in ("inspect", "verify"):
        run = zinf("checkpoint", command, tmp_path)
        assert run.returncode == 1
        assert f"{paths[1]} failed: " in run.stdout
        assert paths[2] in run.stdout, "the others are looked at all the same"
        assert f"1 of the 3 stores in {tmp_path} failed" in run.stderr
    run = zinf("checkpoint", "inspect", tmp_path, "--json")
    assert run.returncode == 1
    assert "no valid superblock" in json.loads(run.stdout)["stores"][1]["error"]


@pytest.mark.parametrize("part", [0.999, 0.5, 0.1, 0.0])
def test_a_truncated_store_is_told(tmp_path, part):
    make_store("--keep", "best", tmp_path / "run")
    volume = tmp_path / "run/volume.zinf"
    os.truncate(volume, int(volume.stat().st_size * part))
    for arguments in (["inspect"], ["inspect", "--json"], ["verify"]):
        run = zinf("checkpoint", *arguments, tmp_path / "run")
        assert run.returncode == 1, run.stdout
        assert "truncated" in run.stderr or "not a volume" in run.stderr


def test_inspect_tells_when_a_version_was_made(tmp_path):
    before = time.time()
    make_store("--steps", 1, tmp_path / "run")
    report = json.loads(zinf("checkpoint", "inspect", tmp_path / "run", "--json").stdout)
    assert before - 0.1 <= report["versions"][0]["created"] <= time.time() + 0.1


def test_verify_is_content_with_a_whole_store(tmp_path):
    make_store(tmp_path / "run")
    run = zinf("checkpoint", "verify", tmp_path / "run")
    assert run.returncode == 0, run.stderr
    assert "2 versions" in run.stdout
    assert "every checksum is right" in run.stdout


@pytest.mark.parametrize("action", ["verify", "inspect"])
def test_a_rank_that_is_missing_is_told(tmp_path, action):
    (tmp_path / "run").mkdir()
    for rank in (0, 2):
        make_store(tmp_path / f"run/rank-{rank:05d}-of-00003")
    run = zinf("checkpoint", action, tmp_path / "run")
    assert run.returncode == 1
    assert "is no whole checkpoint: it has no rank-00001-of-00003" in run.stderr
    make_store(tmp_path / "run/rank-00001-of-00003")
    assert zinf("checkpoint", action, tmp_path / "run").returncode == 0


def test_verify_names_what_is_bad(tmp_path):
    make_store(tmp_path / "run")
    volume = tmp_path / "run/volume.zinf"
    data = volume.read_bytes()
    # The last byte that is not zero belongs to a state.
    flip(volume, len(data.rstrip(b"\0")) - 1)
    run = zinf("checkpoint", "verify", tmp_path / "run")
    assert run.returncode == 1
    assert "1 of the blocks" in run.stderr
    assert "bad: the checksum of fc.weight/exp_avg" in run.stdout
    for word in ("block", str(volume), "offset", "version step", "wanted", "got"):
        assert word in run.stdout


def test_verify_refuses_a_store_in_use(held, tmp_path):
    run = zinf("checkpoint", "verify", tmp_path / "held")
    assert run.returncode == 1
    assert f"in use by process {held.pid}" in run.stderr


def test_a_superblock_that_is_gone_is_told(tmp_path):
    make_store(tmp_path / "run")
    for slot in (1, 2):
        flip(tmp_path / "run/volume.zinf", slot * 4096 + 40)
    run = zinf("checkpoint", "inspect", tmp_path / "run")
    assert run.returncode == 1
    assert "no valid superblock" in run.stderr


def test_prune_removes_the_stale_and_keeps_what_is_precious(held, tmp_path):
    (tmp_path / "deep").mkdir()
    make_store(tmp_path / "deep/stale")
    make_store("--keep", "best", tmp_path / "kept")
    make_store(tmp_path / "bad")
    for slot in (1, 2):
        flip(tmp_path / "bad/volume.zinf", slot * 4096 + 40)
    (tmp_path / "deep/other.txt").write_text("not ours")

    trial = zinf("checkpoint", "prune", tmp_path, "--dry-run")
    assert trial.returncode == 0
    assert "1 would be removed" in trial.stdout
    assert (tmp_path / "deep/stale/volume.zinf").exists()

    run = zinf("checkpoint", "prune", tmp_path)
    assert run.returncode == 0, run.stderr
    assert f"removed   {tmp_path}/deep/stale" in run.stdout
    assert "holds kept versions (best); --all removes it" in run.stdout
    assert f"in use by process {held.pid}" in run.stdout
    assert "cannot be read" in run.stdout
    assert "1 removed" in run.stdout
    assert "3 kept" in run.stdout
    assert not (tmp_path / "deep/stale").exists()
    assert (tmp_path / "deep/other.txt").exists()

    everything = zinf("checkpoint", "prune", tmp_path, "--all")
    assert "2 removed" in everything.stdout
    assert sorted(os.listdir(tmp_path)) == ["deep", "held"]
    assert (tmp_path / "held/volume.zinf").exists()


@pytest.mark.parametrize("offset", [4100, 8200])
def test_a_damaged_superblock_is_told_and_nothing_is_pruned(tmp_path, offset):
    make_store("--steps", 3, "--keep", "best", tmp_path / "run")
    flip(tmp_path / "run/volume.zinf", offset)
    verify = zinf("checkpoint", "verify", tmp_path / "run")
    assert verify.returncode == 1
    assert "a superblock is damaged" in verify.stdout
    prune = zinf("checkpoint", "prune", tmp_path)
    assert (tmp_path / "run/volume.zinf").exists()
    assert "is damaged" in prune.stdout or "kept versions" in prune.stdout


def test_verify_of_a_store_without_versions_fails(tmp_path):
    make_store("--steps", 0, tmp_path / "run")
    verify = zinf("checkpoint", "verify", tmp_path / "run")
    assert verify.returncode == 1
    assert "holds no version" in verify.stderr


def test_doctor_does_not_call_checkpoints_stale(tmp_path):
    make_store("--steps", 1, "--keep", "best", tmp_path / "run")
    assert "stale stores  none" in zinf("doctor", tmp_path).stdout


def test_doctor_tells_stale_stores(held, tmp_path):
    def finding() -> dict:
        report = json.loads(zinf("doctor", tmp_path, "--json").stdout)
        return {f["name"]: f for f in report["findings"]}["stale stores"]

    assert finding()["verdict"] == "ok"  # the one in use is not stale
    make_store(tmp_path / "left")
    stale = finding()
    assert stale["verdict"] == "warning"
    assert str(tmp_path / "left") in stale["value"]
    assert "zinf checkpoint prune" in stale["remedy"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("checkpoint", 2, "subcommand is required"),
        ("checkpoint inspct x", 2, "did you mean inspect?"),
        ("checkpoint inspect", 2, "directory is required"),
        ("checkpoint prune . --dryrun", 2, "did you mean --dry-run?"),
        ("checkpoint inspect /nonexistent", 1, "No such file or directory"),
        ("checkpoint prune /nonexistent", 1, "No such file or directory"),
    ],
)
def test_bad_input_is_told(arguments, code, words):
    run = zinf(*arguments.split())
    assert run.returncode == code, run.stderr
    assert words in run.stderr
