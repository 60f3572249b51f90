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

    def place(self, key: str) -> "Place":
        place = (BF16_PLACES if self.bf16 else PLACES)[key]
        return place.with_gradients(2 if self.bf16 else 4) if self.clip else place

    def unclipped(self) -> "Setting":
        return replace(self, clip=False)

    def __str__(self) -> str:
        bf16 = ", bf16" if self.bf16 else ""
        clip = ", clipped" if self.clip else ""
        return f"{self.size}, {self.batch} x {self.tokens}{bf16}{clip}"


@dataclass(frozen=True)
class Held:
    """Bytes of memory that a process holds: at most, and between its steps when it gives back the rest."""

    peak: int
    rest: int


@dataclass(frozen=True)
class Need:
    """What a step of a setting needs of memory."""

    parameters: int
    activations: int  # bytes
    least: int  # host_memory

    def plain(self) -> Held:
        """By plain PyTorch: activations go as gradients come."""
        peak = 12 * self.parameters + 1.15 * max(self.activations, 4 * self.parameters)
        return Held(int(peak), 12 * self.parameters)

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
    """Where weights and states live, and the least that a step must then move."""

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

    def with_gradients(self, each: int) -> "Place":
        """They wait for the norm: in memory, or they are written and read as well."""
        if not self.bound():
            return replace(self, resident=self.resident + each)
        return replace(self, stored=self.stored + each, read=self.read + each, written=self.written + each)

    def budget(self, need: Need) -> int:
        return self.resident * need.parameters + need.room()

    def held(self, need: Need) -> Held:
        budget = self.budget(need)
        return Held(budget, min(budget, 12 * need.parameters))

    def arguments(self, need: Need, nvme: str) -> list[object]:
        disk = ["--nvme", nvme] if self.bound() else []
        return ["--host-memory", self.budget(need), "--update", "backward", *disk]


PLACES = {
    "ram": Place("everything in RAM", resident=12, stored=0, read=0, written=0, target=1.03),
    "states": Place("weights resident, states on NVMe", 4, 8, 8, 8, 1.10),
    "nothing": Place("nothing resident", 0, 12, 16, 12, 1.10),
}
# With split masters: the 16 bits that a weight lacks are stored beside the moments.
BF16_PLACES = {
    "ram": PLACES["ram"],
    "states": replace(PLACES["states"], resident=2, stored=10, read=10, written=10),
    "nothing": replace(PLACES["nothing"], read=14),
}
