"""What this machine does with the toy: dense work, attention, and two cores at once.

    python bench/compare_machine.py

Prints the share of attention in a full step beside the paper's, how far dense work is bound by
reading weights, and what two ranks that read at once take from each other. No server runs.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from compare_toy import PAGE_SIZE, Toy, empty
from compare_workloads import HEADLINE_CONTEXT, resident
from torch.nn.functional import linear, scaled_dot_product_attention

NODES = 2
# One layer of Llama 3.1 405B on 8 H100, in microseconds. Attention: 710 for 128 requests of 32K
# (section 3.1), of which 13 whatever the batch (FlashAttention 3, measured tables). All else: 310,
# which makes attention "nearly 70 %" of that layer (figure 1).
PAPER_ATTENTION_US = (13, 5.45)
PAPER_REST_US = 310


def paper_attention_share(per_owner: int, context: int) -> float:
    fixed, slope = PAPER_ATTENTION_US
    attention = fixed + slope * per_owner * context / 32768
    return attention / (attention + PAPER_REST_US)


def median_ms(work: Callable[[], Any], times: int = 5) -> float:
    work()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


class Dense:
    """Some of the model's layers: their projections, without anything between them."""

    def __init__(self, toy: Toy, layers: int) -> None:
        q, kv = toy.heads * toy.head_dim, 2 * toy.kv_heads * toy.head_dim
        shapes = [(q + kv, toy.hidden), (toy.hidden, q)]
        shapes += [(2 * toy.intermediate, toy.hidden), (toy.hidden, toy.intermediate)]
        self.weights = [torch.randn(shape) for _ in range(layers) for shape in shapes]

    def run(self, rows: int) -> None:
        inputs = {w.shape[1]: torch.ones(rows, w.shape[1]) for w in self.weights[:4]}
        for weight in self.weights:
            linear(inputs[weight.shape[1]], weight)


def dense_ms(toy: Toy, rows: list[int]) -> dict[int, float]:
    """Milliseconds for all layers' projections, by rows."""
    dense = Dense(toy, toy.layers)
    return {count: median_ms(lambda count=count: dense.run(count)) for count in rows}


def attention_ms(toy: Toy, requests: int, tokens: int) -> float:
    """Of all layers, as SGLang's torch_native does it: gather a request's pages, attend."""
    size = requests * -(-tokens // PAGE_SIZE) * PAGE_SIZE
    shape = (size, toy.kv_heads, toy.head_dim)
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(toy.layers)]
    query = torch.randn(1, toy.heads, 1, toy.head_dim)
    token = torch.arange(tokens)
    page = token // PAGE_SIZE
    rows = [(page * requests + i) * PAGE_SIZE + token % PAGE_SIZE for i in range(requests)]

    def run() -> None:
        for cache in caches:
            for index in rows:
                key, value = (part[index].movedim(0, 1)[None] for part in cache)
                scaled_dot_product_attention(
                    query, key, value, enable_gqa=toy.heads != toy.kv_heads
                )

    return median_ms(run)


def prepare_rank(core: int) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


def rank(core: int, work: str, toy: Toy, rows: list[int], tokens: int, barrier: Any, queue: Any):
    """One process of several that do the same at the same time."""
    prepare_rank(core)
    barrier.wait()
    if work == "attention":
        queue.put(attention_ms(toy, rows[0], tokens))
        return
    torch.set_float32_matmul_precision("medium")
    queue.put(dense_ms(toy, rows))


def together(work: str, toy: Toy, rows: list[int], cores: list[int], tokens: int = 0) -> list[Any]:
    """What one process per core, all at once, found."""
    context = mp.get_context("spawn")
    barrier, queue = context.Barrier(len(cores)), context.Queue()
    ranks = [
        context.Process(target=rank, args=(core, work, toy, rows, tokens, barrier, queue))
        for core in cores
    ]
    for process in ranks:
        process.start()
    found = [queue.get(timeout=300) for _ in ranks]
    for process in ranks:
        process.join(60)
    return found


def turns(core: int, toy: Toy, rows: list[int], mine: Any, other: Any, queue: Any) -> None:
    """Half of the layers when it is this process's turn, as a node's in TKNP."""
    prepare_rank(core)
    torch.set_float32_matmul_precision("medium")
    dense, found = Dense(toy, toy.layers // NODES), {}
    for count in rows:
        times = []
        for _ in range(12):
            mine.acquire()
            start = time.perf_counter()
            dense.run(count)
            times.append((time.perf_counter() - start) * 1e3)
            other.release()
        found[count] = statistics.median(times[2:])
    queue.put(found)


def by_turns(toy: Toy, rows: list[int], cores: list[int]) -> dict[int, float]:
    """All layers, half of them in each of two processes that wait for each other."""
    context = mp.get_context("spawn")
    first, second, queue = context.Semaphore(1), context.Semaphore(0), context.Queue()
    pairs = [(cores[0], first, second), (cores[1], second, first)]
    ranks = [context.Process(target=turns, args=(c, toy, rows, a, b, queue)) for c, a, b in pairs]
    for process in ranks:
        process.start()
    halves = [queue.get(timeout=300) for _ in ranks]
    for process in ranks:
        process.join(60)
    return {count: sum(half[count] for half in halves) for count in rows}


def elementwise_ms(toy: Toy, rows: list[int]) -> dict[int, float]:
    """All layers' norms, rotary embedding and activation, by SGLang's own modules."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import get_rope

    norm, activation = RMSNorm(toy.hidden), SiluAndMul()
    rope = get_rope(toy.head_dim, toy.head_dim, toy.positions, 10000, True, dtype=torch.float32)
    found = {}
    for count in rows:
        x, residual = torch.randn(count, toy.hidden), torch.randn(count, toy.hidden)
        gate, at = torch.randn(count, 2 * toy.intermediate), torch.arange(count)
        q = torch.randn(count, toy.heads * toy.head_dim)
        k = torch.randn(count, toy.kv_heads * toy.head_dim)

        def layer(
            x: Any = x, r: Any = residual, g: Any = gate, q: Any = q, k: Any = k, at: Any = at
        ):
            norm(x, r)
            rope(at, q, k)
            norm(x, r)
            activation(g)

        found[count] = toy.layers * median_ms(layer, times=30)
    return found


def rounded(found: dict[int, float]) -> dict[str, float]:
    return {str(count): round(value, 2) for count, value in found.items()}


def measure(toy: Toy, context: int = HEADLINE_CONTEXT) -> dict[str, Any]:
    """Times of this model's parts, with full owners of requests that stand for `context`."""
    dp, edge = resident(toy, NODES, context)
    rows = [1, dp // NODES, edge // NODES, edge]
    cores = sorted(os.sched_getaffinity(0))
    tokens = toy.request_tokens(context)
    (alone,) = together("dense", toy, rows, cores[:1])
    both = together("dense", toy, rows, cores[:NODES])
    slower = {count: max(one[count] for one in both) for count in rows}
    attention = {
        edge // NODES * length: max(
            together("attention", toy, [edge // NODES], cores[:NODES], length)
        )
        for length in (tokens // 2, tokens)
    }
    full = attention[edge // NODES * tokens]
    extra = {
        count: max(0.0, mine - hollow)
        for (count, mine), hollow in zip(
            elementwise_ms(toy, rows).items(),
            elementwise_ms(empty(toy), rows).values(),
            strict=True,
        )
    }
    copy_gb = toy.layers * toy.layer_bytes / 1e9
    return {
        "dense_ms": rounded(alone),
        "dense_ms_two_at_once": rounded(slower),
        "dense_ms_by_turns": rounded(by_turns(toy, rows, cores)),
        "weights_gb_per_s": round(copy_gb / alone[1] * 1e3, 1),
        # The paper's MLP grows 1.24 times from 1 to 128 rows (section 3.1).
        "dense_growth": (1.24, round(alone[edge] / alone[dp // NODES], 2)),
        "attention_ms": rounded(attention),  # of one owner, by context tokens
        "elementwise_ms": rounded(extra),  # beyond the empty model's
        "attention_share": round(full / (full + alone[edge]), 3),
        "paper_attention_share": round(paper_attention_share(edge // NODES, context), 3),
    }


def main() -> None:
    print(json.dumps(measure(Toy()), indent=1))


if __name__ == "__main__":
    main()
