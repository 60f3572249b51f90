"""zinf's I/O beside fio and DeepSpeed's aio: same file, block and depth, in turn.

    python bench/micro/io_vs_fio.py DIRECTORY [--pairs 7] [--deepspeed PYTHON]

Prints the median of the ratios of interleaved pairs with their spread, and CPU
seconds per GB (fio: its job's user and system time; zinf: the whole process).
zinf verifies the data outside the clock. "fio" runs with its defaults, "fio_best" with what zinf uses too:
registered buffers and files, no scrambling of the data, and huge pages where enough are free
(/proc/sys/vm/nr_hugepages; it says which). DeepSpeed needs a Python that has it and
its compiled operators (TORCH_EXTENSIONS_DIR).
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
GB = 1e9

DEEPSPEED = """
import os, sys, time, resource, torch
from deepspeed.ops.op_builder import AsyncIOBuilder
path, direction, block, depth, passes = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
size = os.path.getsize(path)
handle = AsyncIOBuilder().load(verbose=False).aio_handle(block, depth, False, True, 1)
memory = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
move = handle.sync_pread if direction == "read" else handle.sync_pwrite
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
move(memory, path, 0)
begin, cpu_begin = time.perf_counter(), cpu()
for _ in range(passes): move(memory, path, 0)
seconds, used = time.perf_counter() - begin, cpu() - cpu_begin
gb = passes * size / 1e9
print('{"gbps": %f, "cpu_per_gb": %f}' % (gb / seconds, used / gb), flush=True)
os._exit(0)  # its threads sometimes abort at the exit
"""


def last_json(command: list[str]) -> dict:
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.strip().splitlines()[-1])


def zinf(path: str, direction: str, block: int, depth: int, passes: int) -> dict:
    program = ROOT / "build/release/bench/micro/io_pass"
    return last_json([str(program), path, direction, str(block), str(depth), str(passes)])


def deepspeed(python: str, path: str, direction: str, block: int, depth: int, passes: int) -> dict:
    arguments = [path, direction, str(block), str(depth), str(passes)]
    return last_json([python, "-c", DEEPSPEED, *arguments])


def huge_pages_free(block: int, depth: int) -> bool:
    text = pathlib.Path("/proc/meminfo").read_text()
    free = int(text.split("HugePages_Free:")[1].split()[0])
    return free * (2 << 20) >= block * depth + (4 << 20)


def fio_best(path: str, direction: str, block: int, depth: int, passes: int) -> dict:
    best = ["--fixedbufs=1", "--registerfiles=1", "--scramble_buffers=0"]
    if huge_pages_free(block, depth):
        best += ["--iomem=mmaphuge", "--iomem_align=2m"]
    return fio(path, direction, block, depth, passes, best)


def fio(
    path: str, direction: str, block: int, depth: int, passes: int, more: list[str] | None = None
) -> dict:
    command = [
        "fio",
        "--name=x",
        f"--filename={path}",
        f"--size={os.path.getsize(path)}",
        f"--bs={block}",
        f"--iodepth={depth}",
        "--ioengine=io_uring",
        "--direct=1",
        f"--rw={direction}",
        f"--loops={passes}",
        "--output-format=json",
        *(more or []),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(run.stdout)["jobs"][0]
    side = job[direction]
    seconds = side["runtime"] / 1000
    cpu = seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100
    return {"gbps": side["bw_bytes"] / GB, "cpu_per_gb": cpu / (side["io_bytes"] / GB)}


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def compare(args: argparse.Namespace, path: str, direction: str, block: int, depth: int) -> dict:
    rivals = {"fio": fio, "fio_best": fio_best}
    if args.deepspeed:
        rivals["deepspeed"] = lambda *rest: deepspeed(args.deepspeed, *rest)
    rows = {name: [] for name in ("zinf", *rivals)}
    for _ in range(args.pairs):
        rows["zinf"].append(zinf(path, direction, block, depth, args.passes))
        for name, run in rivals.items():
            rows[name].append(run(path, direction, block, depth, args.passes))
    result = {"direction": direction, "block": block, "depth": depth, "pairs": args.pairs}
    for name, runs in rows.items():
        result[name + "_gbps"] = statistics.median(r["gbps"] for r in runs)
        result[name + "_cpu_per_gb"] = statistics.median(r["cpu_per_gb"] for r in runs)
    for name in rivals:
        speed = [a["gbps"] / b["gbps"] for a, b in zip(rows["zinf"], rows[name], strict=True)]
        cpu = [a["cpu_per_gb"] / b["cpu_per_gb"] for a, b in zip(rows["zinf"], rows[name], strict=True)]
        result[f"speed_vs_{name}"] = statistics.median(speed)
        result[f"cpu_vs_{name}"] = statistics.median(cpu)
        print(
            f"{direction:5} {block >> 10:6} KiB x {depth:2}  zinf {result['zinf_gbps']:.2f} GB/s, "
            f"{name} {result[name + '_gbps']:.2f} GB/s: speed {spread(speed)}, CPU {spread(cpu)}"
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--size", type=int, default=1 << 30)
    parser.add_argument("--deepspeed", help="a Python that has DeepSpeed")
    args = parser.parse_args()
    cpu = next(x for x in open("/proc/cpuinfo") if x.startswith("model name")).split(":")[1].strip()
    print(f"{cpu}, {os.cpu_count()} cores, kernel {platform.release()}")
    print(f"huge pages for fio_best: {'yes' if huge_pages_free(4 << 20, 8) else 'no'}")
    path = os.path.join(args.directory, "io_vs_fio.tmp")
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, args.size)
        results = [
            compare(args, path, direction, block, depth)
            for block, depth in ((1 << 20, 8), (1 << 20, 32), (4 << 20, 8))
            for direction in ("read", "write")
        ]
    finally:
        os.unlink(path)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
