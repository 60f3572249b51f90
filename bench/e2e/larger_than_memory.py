"""A model that does not fit: 1.3 B parameters in a memory control group of 5 GB, with host_memory="4GB".

    python bench/e2e/larger_than_memory.py --nvme DIRECTORY [--size 1.3B] [--steps 10]

Needs root (it makes a control group, version 1 or 2, without swap). Clipping is on, both update modes, real
text.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator

from watch import run

GB = 10**9


class Group:
    """A memory control group of this machine."""

    def __init__(self, limit: int):
        legacy = os.path.isdir("/sys/fs/cgroup/memory")
        self.path = ("/sys/fs/cgroup/memory" if legacy else "/sys/fs/cgroup") + f"/zinf-{os.getpid()}"
        os.mkdir(self.path)
        if legacy:
            self._write("memory.limit_in_bytes", limit)
            with contextlib.suppress(OSError):  # where swap is not counted, there is none
                self._write("memory.memsw.limit_in_bytes", limit)
            self._peak, self._kills = "memory.max_usage_in_bytes", "memory.oom_control"
        else:
            self._write("memory.max", limit)
            with contextlib.suppress(OSError):
                self._write("memory.swap.max", 0)
            self._peak, self._kills = "memory.peak", "memory.events"

    def join(self) -> None:
        self._write("cgroup.procs", os.getpid())

    def peak(self) -> int:
        return int(self._read(self._peak))

    def kills(self) -> int:
        return sum(
            int(line.split()[1]) for line in self._read(self._kills).splitlines() if "oom_kill " in line
        )

    def remove(self) -> None:
        os.rmdir(self.path)

    def _write(self, name: str, value: int) -> None:
        with open(f"{self.path}/{name}", "w") as file:
            file.write(str(value))

    def _read(self, name: str) -> str:
        with open(f"{self.path}/{name}") as file:
            return file.read()


@contextlib.contextmanager
def group_of(limit: int) -> Iterator[Group]:
    group = Group(limit)
    try:
        yield group
    finally:
        group.remove()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--size", default="1.3B")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", type=float, default=5, help="of the control group, in GB")
    parser.add_argument("--host-memory", type=float, default=4, help="in GB")
    parser.add_argument("--updates", nargs="*", default=["step", "backward"])
    args = parser.parse_args()
    good = True
    hashes = set()
    for update in args.updates:
        with group_of(int(args.limit * GB)) as group:
            result = run("--size", args.size, "--host-memory", int(args.host_memory * GB),
                         "--nvme", args.nvme, "--update", update, "--clip", 1.0,
                         "--steps", args.steps, "--lr", 3e-5, before=group.join, log=sys.stderr)  # fmt: skip
            peak, kills = group.peak(), group.kills()
        if "error" in result:
            print(f'update="{update}": {result["error"]}: {result["message"]} ({kills} kills)')
            good = False
            continue
        losses, seconds = result["losses"], sorted(result["seconds"])
        hashes.add(result["hash"])
        stats = result["stats"]
        moved = (stats["bytes_read"] + stats["bytes_written"]) / result["parameters"] / args.steps
        print(f'update="{update}": {result["parameters"] / 1e9:.2f} B parameters, loss {losses[0]:.3f} -> '
              f"{losses[-1]:.3f} in {len(losses)} steps of {seconds[len(seconds) // 2]:.0f} s, {moved:.1f} "
              f"bytes per parameter and step; peak {result['peak'] / GB:.2f} GB anonymous + shared, "
              f"{stats['host_peak_bytes'] / GB:.2f} GB budgeted; {kills} kills", flush=True)  # fmt: skip
        print(f"  the control group's peak, with the page cache: {peak / GB:.2f} GB")
        good = good and losses[-1] < losses[0] and kills == 0
    good = good and len(hashes) == 1
    print("the same weights in all modes" if len(hashes) == 1 else "OTHER WEIGHTS")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
