"""Bits that flip on the disk, under files that this process has open."""

import os
import random
import stat


def data_ranges(file):
    """[begin, end) of what was ever written to a file."""
    end, size = 0, os.fstat(file).st_size
    while end < size:
        try:
            begin = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # ENXIO: a hole up to the end
            return
        end = os.lseek(file, begin, os.SEEK_HOLE)
        yield begin, end


def flip(file, offset, bit):
    byte = os.pread(file, 1, offset)[0]
    os.pwrite(file, bytes([byte ^ (1 << bit)]), offset)


def open_files(directory):
    """Descriptors of this process's regular files below a directory, with or without a name there."""
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        try:
            below = os.readlink(link).startswith(f"{directory}/")
            if below and stat.S_ISREG(os.stat(link).st_mode):
                yield os.open(link, os.O_RDWR)
        except OSError:  # closed meanwhile
            continue


def flip_open_files(directory, seed, count=3):
    """Flips some bits of what was written to the files that are open below a directory: how many."""
    generator = random.Random(seed)
    files = list(open_files(directory))
    places = [(file, begin, end) for file in files for begin, end in data_ranges(file)]
    for _ in range(count if places else 0):
        file, begin, end = generator.choices(places, [end - begin for _, begin, end in places])[0]
        flip(file, generator.randrange(begin, end), generator.randrange(8))
    for file in files:
        os.close(file)
    return count if places else 0
