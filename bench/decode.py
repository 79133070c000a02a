"""Is a decode step bound by memory? Bytes of K and V per second: streaming_decode, a plain read, torch's SDPA.

    python bench/decode.py [--json] [--quick] [--threads N]

Each row walks over copies of one layer's cache that together exceed every CPU cache, as the layers of a model do, and
reports the median of the rounds; the three ways alternate within a round. The plain read is the fastest of three
reductions over the same bytes. SDPA reads the same caches as transposed views and writes no token.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from lighttransfer.ops import streaming_decode

PAGE = 32
TOTAL_BYTES = 192 << 20


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


class Case:
    def __init__(self, dtype: torch.dtype, heads: tuple[int, int, int], length: int, batch: int) -> None:
        self.dtype, self.heads, self.length, self.batch = dtype, heads, length, batch
        n_heads, n_kv_heads, head_dim = heads
        self.bytes = 2 * batch * length * n_kv_heads * head_dim * dtype.itemsize
        self.n_layers = max(1, TOTAL_BYTES // self.bytes)
        shape = (self.n_layers, batch, length, n_kv_heads, head_dim)
        self.k, self.v = (torch.randn(shape[1:]).to(dtype).expand(shape).contiguous() for _ in range(2))
        self.q = torch.randn(batch, 1, n_heads, head_dim).to(dtype)
        self.new = torch.randn(2, batch, 1, n_kv_heads, head_dim).to(dtype)
        self.seq_len = torch.full((batch,), length - 1, dtype=torch.int32)
        self.n_recent = torch.zeros(batch, dtype=torch.int32)
        self.words = [
            (k.view(torch.int32).flatten(), v.view(torch.int32).flatten()) for k, v in zip(self.k, self.v, strict=True)
        ]
        # Pages of one row follow each other in memory: the same bytes in the same order.
        self.table = torch.arange(batch * length // PAGE, dtype=torch.int32).reshape(batch, -1)

    def decode(self, layer: int, mass_n_recent: int = -1) -> None:
        streaming_decode(
            self.q,
            self.new[0],
            self.new[1],
            self.k[layer],
            self.v[layer],
            self.seq_len,
            n_sink=4,
            n_recent=self.n_recent,
            mass_n_recent=mass_n_recent,
        )

    def decode_paged(self, layer: int) -> None:
        shape = (-1, PAGE, *self.k.shape[3:])
        streaming_decode(
            self.q,
            self.new[0],
            self.new[1],
            self.k[layer].view(shape),
            self.v[layer].view(shape),
            self.seq_len,
            n_sink=4,
            n_recent=self.n_recent,
            block_table=self.table,
        )

    def sdpa(self, layer: int) -> None:
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k[layer], self.v[layer]))
        scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def read(self, layer: int, reduce) -> None:
        for words in self.words[layer]:
            reduce(words)

    def run(self, rounds: int, clock) -> dict:
        ways = {
            "decode": self.decode,
            "decode, paged": self.decode_paged,
            "decode, mass": lambda layer: self.decode(layer, 1020),
            "sdpa": self.sdpa,
            "read, sum": lambda layer: self.read(layer, lambda x: x.view(torch.float32).sum()),
            "read, max": lambda layer: self.read(layer, lambda x: x.max()),
            "read, norm": lambda layer: self.read(
                layer, lambda x: torch.dot(x.view(torch.float32), x.view(torch.float32))
            ),
        }
        seconds = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                start = clock()
                for layer in range(self.n_layers):
                    way(layer)
                seconds[name].append((clock() - start) / self.n_layers)
        speed = {name: self.bytes / median(times) / 1e9 for name, times in seconds.items()}
        reads = [name for name in ways if name.startswith("read")]
        best = max(reads, key=speed.__getitem__)
        return speed | {"plain read": speed[best], "read by": best, "of read": speed["decode"] / speed[best]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--quick", action="store_true", help="bf16 alone, two lengths")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    # One thread can be timed by its own CPU time, which leaves out what other processes take.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    rows = []
    dtypes = [torch.bfloat16] if args.quick else [torch.bfloat16, torch.float16, torch.float32]
    cases = [
        (dtype, heads, length, batch)
        for dtype in dtypes
        for heads in ((32, 8, 128), (9, 3, 64))
        for length in ((1024, 4096) if args.quick else (1024, 4096, 16384))
        for batch in (1, 8)
    ]
    console = Console(stderr=True)
    for dtype, heads, length, batch in track(cases, console=console, disable=args.json):
        result = Case(dtype, heads, length, batch).run(args.rounds, clock)
        name = str(dtype).removeprefix("torch.")
        rows.append({"dtype": name, "heads": heads, "length": length, "batch": batch, **result})
    machine = f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    if args.json:
        print(json.dumps({"machine": machine, "unit": "GB/s", "rows": rows}, indent=2))
        return
    table = Table(title=f"GB/s of K and V; {machine}")
    columns = ["decode", "decode, paged", "decode, mass", "plain read", "sdpa"]
    for column in ["dtype", "H_q/H_kv, D", "length", "batch", *columns, "decode / read", "decode / sdpa"]:
        table.add_column(column, justify="right")
    for row in rows:
        n_heads, n_kv_heads, head_dim = row["heads"]
        table.add_row(
            row["dtype"],
            f"{n_heads}/{n_kv_heads}, {head_dim}",
            str(row["length"]),
            str(row["batch"]),
            *(f"{row[c]:.1f}" for c in columns),
            f"{row['of read']:.2f}",
            f"{row['decode'] / row['sdpa']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
