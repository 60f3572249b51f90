"""Checks the arrows of docs/architecture.md: who may include whose headers.

Public headers (zinf/x.h) belong to the folder that implements them.
"""

import pathlib
import re
import subprocess
import sys

# Folder -> folders it may include, besides itself.
ALLOWED = {
    "src/base": set(),
    "src/io": {"src/base"},
    "src/measure": {"src/base", "src/io", "src/plan"},
    "src/mem": {"src/base"},
    "src/optim": {"src/base"},
    "src/plan": {"src/base", "src/sched"},
    "src/sched": {"src/base"},
    "src/shard": {"src/base"},
    "src/tier": {"src/base", "src/io", "src/mem"},
    "src/engine": {"src/base", "src/io", "src/mem", "src/sched", "src/shard", "src/tier"},
    "cli": {"src/base"},
    "adapters/emulated": {"src/base"},
    "adapters/mpi": {"src/base", "src/shard"},
    "adapters/torch": {
        "src/base",
        "src/engine",
        "src/io",
        "src/mem",
        "src/optim",
        "src/sched",
        "src/shard",
        "src/tier",
    },  # fmt: skip
    "python/src": {
        "src/base",
        "adapters/emulated",
        "adapters/torch",
        "src/io",
        "src/measure",
        "src/mem",
        "src/optim",
        "src/plan",
    },  # fmt: skip
}

# Which folder a public header belongs to.
PUBLIC = {
    "src/base": {"block", "bytes", "log", "machine", "move", "status", "thread_pool", "version"},
    "src/io": {"disk", "fault_injector", "io", "io_bench", "memory_disk"},
    "src/measure": {"this_machine"},
    "src/mem": {"arena", "budget", "slab"},
    "src/optim": {"adam", "cast", "dtype"},
    "src/plan": {
        "advice",
        "advice_text",
        "beyond",
        "cluster",
        "model_config",
        "model_shape",
        "paper",
        "setup",
        "step_forecast",
        "what_if",
    },
    "src/sched": {"plan", "trace", "trace_book"},
    "src/shard": {"collectives", "comm", "exchange", "partition"},
    "src/tier": {"residency", "store"},
    "src/engine": {"gather_tier", "host_memory", "host_tier", "nvme_path"},
    "adapters/mpi": {"mpi_comm"},
    "adapters/torch": {"engine", "engine_stats", "error", "need", "optim", "zinf"},
}
PUBLIC_FOLDERS = ("include/", "adapters/mpi/include/", "adapters/torch/include/")
# Folders whose public headers these may include too, but not the private ones.
PUBLIC_ONLY = {"cli": {"src/io", "src/measure", "src/mem", "src/optim", "src/plan", "src/tier"}}
# What only these folders may include.
FENCED = {
    r"^(torch|ATen|c10|pybind11)/": ("adapters/emulated", "adapters/torch", "python/src"),
    r"^liburing\.h": ("src/io",),
    r"^mpi\.h": ("adapters/mpi",),
    r"^xxhash\.h": ("src/tier",),
}


def folder_of(path: str) -> str | None:
    return next((f for f in ALLOWED if path.startswith(f + "/")), None)


def owner_of(header: str) -> str | None:
    if match := re.match(r"zinf/(\w+)\.h$", header):
        return next((f for f, names in PUBLIC.items() if match[1] in names), "?")
    return folder_of(header)


def problems_in(path: str) -> list[str]:
    folder = folder_of(path)
    problems = []
    for line in pathlib.Path(path).read_text().splitlines():
        match = re.match(r'#include [<"]([^>"]+)[>"]', line)
        if not match or folder is None:
            continue
        header = match[1]
        owner = owner_of(header)
        if owner == "?":
            problems.append(f"{path}: {header} is in no folder's list of public headers")
        elif header.startswith("zinf/") and owner in PUBLIC_ONLY.get(folder, ()):
            continue
        elif owner and owner != folder and owner not in ALLOWED[folder]:
            problems.append(f"{path}: {folder} may not include {header} of {owner}")
        for pattern, folders in FENCED.items():
            if re.match(pattern, header) and folder not in folders:
                problems.append(f"{path}: {header} belongs to {' and '.join(folders)} alone")
    return problems


def main() -> int:
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.h", "*.cpp"]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    for header in (f for f in files if f.startswith(PUBLIC_FOLDERS)):
        if owner_of(header[header.index("zinf/") :]) == "?":
            print(f"{header}: say in scripts/check_layers.py which folder it belongs to")
            return 1
    problems = [p for path in files for p in problems_in(path)]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
