"""The zinf command as a person meets it: output, JSON, bad input, exit codes."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ZINF = pathlib.Path(sys.executable).parent / "zinf"


def zinf(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = [str(ZINF), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_version():
    run = zinf("--version")
    version = (pathlib.Path(__file__).parents[2] / "version.txt").read_text().strip()
    assert (run.returncode, run.stdout.strip()) == (0, f"zinf {version}")


def test_doctor_is_content_with_a_fit_machine(tmp_path):
    run = zinf("doctor", tmp_path, "--json")
    report = json.loads(run.stdout)
    assert run.returncode == 0, report
    assert report["ok"]
    found = {finding["name"]: finding for finding in report["findings"]}
    assert {"cpu", "memory", "memlock", "io_uring", "file system", "O_DIRECT"} <= found.keys()
    assert {"disk space", "disk speed", "torch"} <= found.keys()
    assert found["torch"]["value"].startswith("2.13.")
    assert os.listdir(tmp_path) == []


def test_doctor_fails_with_a_remedy_where_training_would(tmp_path):
    run = zinf("doctor", tmp_path / "missing")
    assert run.returncode == 1
    assert "-> name a directory that exists" in run.stdout
    assert "training would fail here: disk" in run.stderr


def test_doctor_warns_of_a_file_system_in_memory():
    shm = pathlib.Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    run = zinf("doctor", shm, "--json")
    found = {finding["name"]: finding for finding in json.loads(run.stdout)["findings"]}
    assert found["file system"]["verdict"] == "warning"
    assert found["O_DIRECT"]["verdict"] == "warning"


@pytest.mark.parametrize("backend", ["auto", "io_uring", "threads"])
def test_bench_prints_one_json_object(tmp_path, backend):
    run = zinf("io", "bench", tmp_path, "--size", "64MiB", "--backend", backend, "--mix", "--json")
    if backend == "io_uring" and "io_uring" in run.stderr:
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["block"] == 1 << 20
    assert report["depth"] == 16
    assert report["verified"] is True
    assert report["mix_gbps"] > 0
    assert report["read_gbps"] is None
    assert report["backend"] == backend or backend == "auto"
    assert os.listdir(tmp_path) == []


def test_bench_measures_reading_and_writing_by_default(tmp_path):
    report = json.loads(zinf("io", "bench", tmp_path, "--size", "16MiB", "--json").stdout)
    for name in ("read_gbps", "write_gbps", "ceiling_read_gbps", "ceiling_write_gbps"):
        assert report[name] > 0
    assert report["mix_gbps"] is None


def test_bench_table_names_the_ceiling(tmp_path):
    run = zinf("io", "bench", tmp_path, "--size", "16MiB")
    assert run.returncode == 0
    assert "plain pread/pwrite" in run.stdout
    assert "every byte read back" in run.stdout


def test_bench_does_not_touch_a_file_without_leave(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * 8192)
    run = zinf("io", "bench", precious)
    assert run.returncode == 2
    assert "--overwrite" in run.stderr
    assert precious.read_bytes() == b"x" * 8192
    run = zinf("io", "bench", precious, "--overwrite", "--size", "4KiB")
    assert run.returncode == 2
    assert precious.read_bytes() == b"x" * 8192


@pytest.mark.parametrize("arguments", ["doctor . --json", "--help"])
def test_output_that_is_lost_is_a_failure(tmp_path, arguments):
    with open("/dev/full", "w") as full:
        run = subprocess.run([ZINF, *arguments.split()], stdout=full, stderr=subprocess.PIPE, cwd=tmp_path)
    assert run.returncode == 1
    assert b"write standard output: No space left on device" in run.stderr


def test_tune_keeps_what_it_found(tmp_path):
    run = zinf("io", "tune", tmp_path, "--size", "128MiB", "--json")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    kept = json.loads((tmp_path / "zinf-io.json").read_text())
    assert kept["block"] == report["block"]
    assert kept["depth"] == report["depth"]
    assert os.listdir(tmp_path) == ["zinf-io.json"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("", 2, "subcommand is required"),
        ("io", 2, "subcommand is required"),
        ("io bnch .", 2, "did you mean bench?"),
        ("doktor", 2, "did you mean doctor?"),
        ("io bench . --blok 1MiB", 2, "did you mean --block?"),
        ("io bench . --elephant", 2, "known are"),
        ("io bench", 2, "path is required"),
        ("io bench . --block 4M", 2, '"4MB" (decimal) or "4MiB" (binary)'),
        ("io bench . --block 1000", 2, "multiple of 4096"),
        ("io bench . --block 0", 2, "multiple of 4096"),
        ("io bench . --depth 0", 2, "from 1 to 4096"),
        ("io bench . --depth many", 2, "--depth"),
        ("io bench . --size 0", 2, "at least 4 KiB"),
        ("io bench . --size 900PB", 1, "are needed"),
        ("io bench . --size 99999999999999999999", 2, "64 bits"),
        ("io bench . --size 4KiB --mix", 2, "too small"),
        ("io bench . --backend uring", 2, "did you mean io_uring?"),
        ("io bench . --backend memory", 2, "no disk"),
        ("io bench /nonexistent", 1, "No such file or directory"),
        ("io tune /nonexistent", 1, "No such file or directory"),
        ("io tune . --size 4KiB", 2, "at least 128 MiB"),
    ],
)
def test_bad_input_is_told_and_leaves_nothing(tmp_path, arguments, code, words):
    run = zinf(*arguments.split(), cwd=tmp_path)
    assert run.returncode == code, run.stderr
    assert words in run.stderr
    assert run.stdout == ""
    assert os.listdir(tmp_path) == []


def test_more_memory_than_there_is_is_told(tmp_path):
    if shutil.disk_usage(tmp_path).free < 45e9:
        pytest.skip("a full disk would be told first: needs 45 GB free")
    run = zinf(*"io bench . --size 40GB --block 1GiB --depth 4096".split(), cwd=tmp_path)
    assert run.returncode == 1
    assert "are available" in run.stderr


def test_a_path_that_is_not_utf8_is_told():
    run = subprocess.run([ZINF, "doctor", b"/no\xffwhere", "--json"], capture_output=True)
    assert run.returncode == 1
    assert json.loads(run.stdout)["path"] == "/no\ufffdwhere"


def test_no_more_memory_is_an_error_and_no_abort(tmp_path):
    command = f"ulimit -v 100000; exec {ZINF} io bench {tmp_path} --size 64MiB --backend threads"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert run.returncode == 1, run
    assert "zinf: " in run.stderr


def test_a_read_only_directory_is_told(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    tmp_path.chmod(0o555)
    run = zinf("io", "bench", tmp_path, "--size", "1MiB", user=65534)
    assert run.returncode == 1
    assert "Permission denied (errno 13 EACCES)" in run.stderr
