"""What a power loss leaves of the changes that disk_recorder has recorded.

As POSIX promises it: of a file what was synced, and of a directory the names that were there when the
directory was synced. What came later may be there or not: of a directory's changes the first few, of a
file's content all or nothing.
"""

import json
import os
import random
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = Path(os.environ.get("ZINF_BUILD", ROOT / "build/release"))
RECORDER = BUILD / "tests/libdisk_recorder.so"


def recording(below, record, fail=None):
    """The environment of a process whose changes are recorded."""
    more = {} if fail is None else {"ZINF_RECORD_FAIL": str(fail)}
    return {
        **os.environ,
        "LD_PRELOAD": str(RECORDER),
        "ZINF_RECORD_BELOW": str(below),
        "ZINF_RECORD": str(record),
        **more,
    }


def changes_in(record):
    return [json.loads(line) for line in Path(record).read_text().splitlines()]


class _File:
    def __init__(self):
        self.now = bytearray()
        self.durable = b""


class _Directory:
    def __init__(self):
        self.durable = {}  # inode by name
        self.pending = []  # changes since: (name, inode or None)

    def after(self, count):
        names = dict(self.durable)
        for changes in self.pending[:count]:
            for name, inode in changes:
                if inode is None:
                    names.pop(name, None)
                else:
                    names[name] = inode
        return names


class Disk:
    """What lies below a directory that was empty when the recording began."""

    def __init__(self, root):
        self._root = os.stat(root).st_ino
        self._files = {}
        self._directories = {self._root: _Directory()}

    def apply(self, change):
        op, inode = change["op"], change.get("inode")
        if op in ("tmpfile", "create"):
            self._files[inode] = _File()
        if op == "mkdir":
            self._directories[inode] = _Directory()
        if op in ("create", "link", "mkdir"):
            self._rename(change["dir"], [(change["name"], inode)])
        elif op == "remove":
            self._rename(change["dir"], [(change["name"], None)])
        elif op == "rename":
            gone, new = (change["name"], None), (change["to_name"], inode)
            if change["dir"] == change["to_dir"]:
                self._rename(change["dir"], [gone, new])
            else:
                self._rename(change["to_dir"], [new])
                self._rename(change["dir"], [gone])
        elif op == "write":
            data = bytes.fromhex(change["data"])
            file = self._files[inode].now
            file[change["offset"] : change["offset"] + len(data)] = data
        elif op == "size":
            file = self._files[inode].now
            del file[change["bytes"] :]
            file.extend(bytes(change["bytes"] - len(file)))
        elif op == "sync" and inode in self._directories:
            directory = self._directories[inode]
            directory.durable, directory.pending = directory.after(None), []
        elif op == "sync":
            self._files[inode].durable = bytes(self._files[inode].now)

    def _rename(self, directory, changes):
        if directory in self._directories:
            self._directories[directory].pending.append(changes)

    def left(self, seed):
        """Paths and contents (None: a directory): with seed 0 only what was synced, with 1 all of it."""
        chosen = random.Random(seed)
        found = {}

        def visit(inode, path):
            if inode in self._files:
                file = self._files[inode]
                kept = seed == 1 or (seed > 1 and chosen.random() < 0.5)
                found[path] = bytes(file.now) if kept else file.durable
                return
            if path:
                found[path] = None
            directory = self._directories[inode]
            most = len(directory.pending)
            count = min(seed, 1) * most if seed < 2 else chosen.randint(0, most)
            for name, inner in sorted(directory.after(count).items()):
                visit(inner, f"{path}/{name}" if path else name)

        visit(self._root, "")
        return found


def write_tree(tree, directory):
    """Makes the files and directories of Disk.left()."""
    directory.mkdir()
    for path, content in tree.items():
        if content is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(content)
