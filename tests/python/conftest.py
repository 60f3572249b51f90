"""Options and fixtures that the Python tests share."""

import mmap
import os
from pathlib import Path

# Before torch starts its threads: on a busy machine those that spin at the end of
# every small operator make the tests ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
import zinf

# Results depend on the number of threads: plain and managed runs share one.
torch.set_num_threads(2)

PAGE_BYTES = 4096

# The two ends: nothing moves, and nothing stays.
PLACES = {
    "host": {"weights": "host", "states": "host"},
    "evict": {"weights": "nvme", "states": "nvme", "evict": "always"},
}


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the full product of the matrix as well")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: part of the full product only, needs --all")
    config.addinivalue_line("markers", "raw_access: takes raw pointers, which the audit refuses")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all"):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def process_io():
    """Bytes that this process moved to and from disks: (read, written)."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def scratch_bytes(directory):
    """Bytes of disk that files of this process in a directory take: they have no names."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            path, info = os.readlink(entry), entry.stat()
        except OSError:  # that of the listing itself
            continue
        if path.startswith(f"{directory}/"):
            found[info.st_ino] = info.st_blocks * 512
    return sum(found.values())


def counts_bytes(directory):
    """Whether direct writes to a directory reach a disk; those to tmpfs do not."""
    path = directory / "probe"
    before = process_io()[1]
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:  # aligned, as O_DIRECT wants it
            os.write(file, page)
    except OSError:
        return False
    finally:
        os.close(file)
        path.unlink()
    return process_io()[1] > before


@pytest.fixture
def nvme(tmp_path, request):
    """An empty directory on a real disk: below tmp_path, or $ZINF_TEST_DIR, or the build tree."""
    places = [tmp_path, request.config.rootpath / "build"]
    if "ZINF_TEST_DIR" in os.environ:
        places.insert(0, Path(os.environ["ZINF_TEST_DIR"]))
    for place in places:
        directory = place / f"nvme-{os.getpid()}-{tmp_path.name}"
        directory.mkdir(parents=True)
        if counts_bytes(directory):
            return str(directory)
        directory.rmdir()
    pytest.skip(f"none of {[str(place) for place in places]} is on a disk that takes O_DIRECT")


@pytest.fixture(params=PLACES)
def place(request, nvme):
    """The arguments of an engine, for tests that make engines themselves."""
    return {"nvme": nvme, **PLACES[request.param]}


@pytest.fixture
def engine(request, place):
    """An audited engine; the audit's verdict is part of every test that uses it."""
    audit = request.node.get_closest_marker("raw_access") is None
    with zinf.Engine(audit=audit, **place) as engine:
        yield engine
        stats = engine.stats()
    if audit:
        assert stats["audit_violations"] == 0
        assert stats["undeclared_writes"] == 0


@pytest.fixture
def evicting(nvme):
    """An engine that drops every unit after each use: for tests of residency."""
    with zinf.Engine(nvme=nvme, audit=True, **PLACES["evict"]) as engine:
        yield engine
