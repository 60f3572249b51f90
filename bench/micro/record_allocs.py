"""Record the allocate/free events of real training steps, for replay.

    python bench/micro/record_allocs.py tests/data/allocs_gpt2.bin --model gpt2

The models are plain torch; torch's profiler reports every allocation of its CPU
allocator (address, +/- bytes). The file is a prefix (the model is built, and
the first steps run until the optimizer has its states) and a body of whole
steps that can be looped: its last line says which blocks of the end take the
place of which blocks of the beginning.

Format, little-endian, all numbers LEB128 after the magic "zinfalc1":
  num_sizes, size...           the dictionary of sizes, in bytes
  num_slots                    a slot holds one live block
  num_prefix, num_body         events
  event...                     (slot << 1 | 1), size index: allocate
                               (slot << 1): free
  num_moves, (from, to)...     slots renamed after each pass over the body
"""

import argparse
import collections
import heapq
import math

import torch
from torch import nn
from torch.nn import functional as F


class Gpt2Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        # The eager attention of the first GPT-2 codes: its score matrices are
        # what makes the size mix hard.
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        probs = F.dropout(scores.softmax(-1), 0.1)
        x = x + F.dropout(self.out((probs @ v).transpose(1, 2).flatten(2)), 0.1)
        up = F.gelu(self.up(self.ln_2(x)), approximate="tanh")
        return x + F.dropout(self.down(up), 0.1)


class Gpt2(nn.Module):
    def __init__(self, vocab=50257, width=512, heads=8, depth=6, context=1024):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Gpt2Block(width, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class LlamaBlock(nn.Module):
    def __init__(self, width, heads, kv_heads, hidden):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def rotate(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def forward(self, x, cos, sin):
        y = self.norm_1(x)
        q = self.q(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k = self.k(y).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
        v = self.v(y).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocab=32000, width=512, heads=8, kv_heads=2, depth=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, 1408) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.inv_freq = 10000.0 ** (-torch.arange(0, 64, 2) / 64)

    def forward(self, tokens):
        angle = torch.outer(torch.arange(tokens.size(1)).float(), self.inv_freq)
        angle = torch.cat((angle, angle), dim=-1)
        x, cos, sin = self.embed(tokens), angle.cos(), angle.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    def __init__(self, width_in, width, stride):
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
        )
        self.short = nn.Identity()
        if stride != 1 or width_in != wide:
            conv = nn.Conv2d(width_in, wide, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(wide))

    def forward(self, x):
        return F.relu(self.body(x) + self.short(x))


class ResNet50(nn.Module):
    def __init__(self, classes=1000):
        super().__init__()
        layers = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        width_in = 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(depth):
                layers.append(Bottleneck(width_in, width, stride if i == 0 else 1))
                width_in = 4 * width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def token_batch(vocab, rows, length):
    tokens = torch.randint(vocab, (rows, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


# Model, batch of a step, steps in the prefix and in the body. The Llama-like
# run has another length at every step, as fine-tuning on real text has.
def gpt2():
    return Gpt2(), lambda step: token_batch(50257, 4, 192), 2, 2


def llama():
    lengths = (256, 197, 320, 83, 280, 148, 311, 230)
    return Llama(), lambda step: token_batch(32000, 4, lengths[step % 8]), 8, 8


def cnn():
    def batch(step):
        return torch.randn(12, 3, 176, 176), torch.randint(1000, (12,))

    return ResNet50(), batch, 2, 2


MODELS = {"gpt2": gpt2, "llama": llama, "cnn": cnn}


def train(name, marks):
    model, batch, prefix, body = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(prefix + body):
        if step == prefix:
            mark(marks)
        inputs, targets = batch(step)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{name} step {step}: loss {loss.item():.3f}", flush=True)
    mark(marks)


def mark(marks):
    """A free and an allocation of a size that nothing else has."""
    marks.append(torch.empty(7777777, dtype=torch.uint8))
    marks.pop()


def profiled_events(name):
    """(address, +/- bytes) in the order of time; None at a mark."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        train(name, [])
    found = []
    stack = list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, len(found), fields))
    # Events of one nanosecond keep their order in the tree only roughly; a
    # free of an address must come before its next use.
    found.sort(key=lambda e: (e[0], e[2].alloc_size > 0))
    for _, _, fields in found:
        if abs(fields.alloc_size) == 7777777:
            if fields.alloc_size > 0:
                yield None
        else:
            yield fields.ptr, fields.alloc_size


class Slots:
    """Gives the lowest free number, so that the file has few of them."""

    def __init__(self):
        self.free, self.count = [], 0

    def take(self):
        if self.free:
            return heapq.heappop(self.free)
        self.count += 1
        return self.count - 1

    def give(self, slot):
        heapq.heappush(self.free, slot)


def to_sections(events):
    """Events as (slot, bytes or 0 for a free), cut at the marks."""
    live, slots, sections, at_mark = {}, Slots(), [[]], []
    peak = now = unknown = 0
    for event in events:
        if event is None:
            sections.append([])
            at_mark.append(dict(live.values()))
            continue
        address, delta = event
        if delta > 0 and address not in live:
            live[address] = (slots.take(), delta)
            sections[-1].append((live[address][0], delta))
            now += delta
            peak = max(peak, now)
        elif delta < 0 and address in live:
            slot, size = live.pop(address)
            slots.give(slot)
            sections[-1].append((slot, 0))
            now -= size
        elif delta != 0:
            unknown += 1
    print(f"peak {peak / 1e6:.0f} MB, {unknown} events without a partner")
    return sections, at_mark, slots.count


def loop_moves(body, before, after):
    """Which slots at the body's end stand for which at its beginning."""
    touched = {slot for slot, _ in body}
    olds, news = collections.defaultdict(list), collections.defaultdict(list)
    for slot, size in sorted(before.items()):
        if slot in touched:
            olds[size].append(slot)
    for slot, size in sorted(after.items()):
        if slot in touched:
            news[size].append(slot)
    if {s: len(v) for s, v in olds.items()} != {s: len(v) for s, v in news.items()}:
        raise SystemExit(
            "the body does not end as it began: "
            f"{({s: len(v) for s, v in olds.items()})} and "
            f"{({s: len(v) for s, v in news.items()})}"
        )
    return [(n, o) for s in sorted(olds) for n, o in zip(news[s], olds[s], strict=True)]


def leb128(value):
    out = bytearray()
    while True:
        out.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if value == 0:
            return bytes(out)


def write(path, prefix, body, moves, num_slots):
    counts = collections.Counter(size for _, size in prefix + body if size)
    sizes = [size for size, _ in counts.most_common()]
    index = {size: i for i, size in enumerate(sizes)}
    numbers = [len(sizes), *sizes, num_slots, len(prefix), len(body)]
    for slot, size in prefix + body:
        numbers += [slot << 1 | 1, index[size]] if size else [slot << 1]
    numbers += [len(moves), *(slot for move in moves for slot in move)]
    data = b"zinfalc1" + b"".join(map(leb128, numbers))
    with open(path, "wb") as file:
        file.write(data)
    print(
        f"{path}: {len(prefix)} + {len(body)} events, {len(sizes)} sizes, "
        f"{num_slots} slots, {len(moves)} moves, {len(data)} bytes"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path")
    parser.add_argument("--model", choices=MODELS, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    sections, at_mark, num_slots = to_sections(profiled_events(args.model))
    prefix, body = sections[0], sections[1]
    moves = loop_moves(body, at_mark[0], at_mark[1])
    write(args.path, prefix, body, moves, num_slots)


if __name__ == "__main__":
    main()
