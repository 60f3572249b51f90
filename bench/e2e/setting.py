"""What is trained and where it lives: settings, places, and the budgets that belong to them."""

from dataclasses import dataclass, replace

from watch import WorkerError, run

GB = 10**9
ROOM_BYTES = 1.5 * GB  # to move in, for a model of 640 M parameters or more; for smaller ones in proportion
ROOM_PARAMETERS = 640e6


@dataclass(frozen=True)
class Setting:
    size: str
    batch: int
    tokens: int
    clip: bool = False
    bf16: bool = False

    def arguments(self) -> list[object]:
        clip = ["--clip", 1.0] if self.clip else []
        bf16 = ["--bf16"] if self.bf16 else []
        return ["--size", self.size, "--batch", self.batch, "--tokens", self.tokens, *clip, *bf16]

    def __str__(self) -> str:
        clip = ", clipped" if self.clip else ""
        return f"{self.size}, {self.batch} x {self.tokens}{clip}"


@dataclass(frozen=True)
class Need:
    """What a step of a setting needs of memory."""

    parameters: int
    activations: int  # bytes
    least: int  # host_memory

    def plain(self) -> int:
        """The most that plain PyTorch holds: activations go as gradients come."""
        return int(12 * self.parameters + 1.15 * max(self.activations, 4 * self.parameters))

    def room(self) -> int:
        """host_memory with which nothing stays from one use to the next."""
        room = ROOM_BYTES * min(1.0, self.parameters / ROOM_PARAMETERS)
        return int(max(1.1 * self.least, room + self.activations))


def measure_need(setting: Setting, nvme: str) -> Need:
    result = run(*setting.arguments(), "--need", "--update", "backward", "--nvme", nvme)
    if "error" in result:
        raise WorkerError(f"{result['error']}: {result['message']}")
    return Need(result["parameters"], result["activations"], result["least"])


@dataclass(frozen=True)
class Place:
    """Where fp32 weights and states live, and the least that a step must then move."""

    name: str
    resident: int  # bytes per parameter that may stay in memory
    stored: int  # and those on the disk
    read: int  # bytes per parameter and step
    written: int
    target: float  # of the ratio to the reference

    def bound(self) -> int:
        return self.read + self.written

    def reference(self) -> str:
        return f"O({self.bound()} B)" if self.bound() else "C"

    def clipped(self, clip: bool) -> "Place":
        """Gradients wait for the norm: in memory, or they are written and read as well."""
        if not clip:
            return self
        if not self.bound():
            return replace(self, resident=self.resident + 4)
        return replace(self, stored=self.stored + 4, read=self.read + 4, written=self.written + 4)

    def budget(self, need: Need) -> int:
        return self.resident * need.parameters + need.room()

    def arguments(self, need: Need, nvme: str) -> list[object]:
        disk = ["--nvme", nvme] if self.bound() else []
        return ["--host-memory", self.budget(need), "--update", "backward", *disk]


PLACES = {
    "ram": Place("everything in RAM", resident=12, stored=0, read=0, written=0, target=1.03),
    "states": Place("weights resident, states on NVMe", 4, 8, 8, 8, 1.10),
    "nothing": Place("nothing resident", 0, 12, 16, 12, 1.10),
}
