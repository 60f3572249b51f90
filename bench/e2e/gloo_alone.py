"""Run by every rank: seconds that gloo takes for what a step of ZeRO-3 moves; the first rank prints them."""

import statistics
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    part = torch.zeros(int(sys.argv[1]) // 4 // ranks)
    whole = torch.zeros(ranks, part.numel())
    slices = list(whole)
    received = torch.zeros_like(whole)
    seconds = []
    for _ in range(8):
        dist.barrier()
        begin = time.monotonic()
        dist.all_gather(slices, part)
        dist.all_gather(slices, part)
        dist.all_to_all_single(received, whole)
        seconds.append(time.monotonic() - begin)
    if dist.get_rank() == 0:
        print(f"{statistics.median(seconds[1:]):.2f} ({min(seconds[1:]):.2f}-{max(seconds[1:]):.2f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
