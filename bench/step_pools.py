"""For step.py: decode steps of real servers (SmolLM2), and the same messages sent raw."""

import contextlib
import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang_tknp.launch.models import prepare_smollm2
from sglang_tknp.launch.quickstart import running, server_command, wait_ready
from sglang_tknp.traffic import RowSizes, even_layout, step_traffic
from sglang_tknp.transport import GlooTransport, Transfer

NODES = 2
CASES = [(batch, context) for batch in (1, 8) for context in (64, 512)]
SHORT, LONG = 8, 40  # generated tokens; a step is their difference over 32
LIMIT = timedelta(seconds=60)
PLUGIN = Path(__file__).parent / "step_plugin"


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, owner: int | None) -> float:
        """Seconds until all prompts, sent as one batch, have that many tokens."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": prompts, "sampling_params": sampling}
        if owner is not None:
            body["routed_dp_rank"] = owner
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        start = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as reply:
            reply.read()
        return time.perf_counter() - start

    def step_ms(self, batch: int, context: int, owners: Sequence[int | None]) -> list[float]:
        """One value per owner named: of a decode step, prefill and HTTP taken off."""
        prompts = make_prompts(batch, context)
        for owner in set(owners):
            self.generate(prompts, 2, owner)  # from now on the prefixes are cached
        return [
            (self.generate(prompts, LONG, owner) - self.generate(prompts, SHORT, owner))
            / (LONG - SHORT)
            * 1e3
            for owner in owners
        ]


def make_prompts(batch: int, context: int) -> list[list[int]]:
    draw = Random(batch * context)
    return [[draw.randrange(100, 40_000) for _ in range(context)] for _ in range(batch)]


@contextlib.contextmanager
def serving(port: int, env: dict[str, str], tknp: bool) -> Iterator[Client]:
    command = server_command(prepare_smollm2(), NODES, port)
    command[command.index("--context-length") + 1] = "8192"
    if not tknp:
        for flag, values in (("--enable-tknp", 0), ("--tp-size", 1), ("--attn-dp-size", 1)):
            index = command.index(flag)
            del command[index : index + 1 + values]
    before = dict(os.environ)
    os.environ.update(env)
    try:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            with running(command, log) as process:
                wait_ready(process, port, log)
                yield Client(port)
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def awake_cores() -> Iterator[None]:
    """One process per core that runs whenever nothing else does.

    A core that sleeps wakes slowly, and a virtual one may wake elsewhere. TKNP's nodes sleep in
    turn, stock SGLang's one busy core does not: this takes the difference away.
    """
    context = mp.get_context("spawn")
    spinners = [context.Process(target=spin, args=(core,)) for core in os.sched_getaffinity(0)]
    try:
        for process in spinners:
            process.start()
        yield
    finally:
        for process in spinners:
            process.kill()


def spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def measure_servers(port: int, rounds: int) -> dict[str, dict[tuple[int, int], float]]:
    """Median milliseconds of a decode step per (batch, context), stock and TKNP in turn."""
    one_core = {"SGLANG_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"}
    found: dict[str, dict[tuple[int, int], list[float]]] = {"stock": {}, "tknp": {}}
    for _ in range(rounds):
        for name, env in (("stock", one_core), ("tknp", {})):
            with serving(port, env, name == "tknp") as client:
                for case in CASES:
                    # A lone request has its owner before or behind the second root.
                    owners = [0, 1] * 3 if name == "tknp" and case[0] == 1 else [None] * 6
                    found[name].setdefault(case, []).extend(client.step_ms(*case, owners))
    return {
        name: {case: statistics.median(values) for case, values in cases.items()}
        for name, cases in found.items()
    }


# The same messages raw: two processes, one core each.


def messages_of_step(batch: int, layers: int, sizes: RowSizes) -> list[tuple[int, int]]:
    """(sender, bytes) of every message of a decode step, in order; owners even."""
    blocks = [layers // NODES] * NODES
    step = step_traffic(even_layout(batch, NODES), blocks, sizes)
    messages = [(1, step.inputs - step.positions)]
    for root, block in enumerate(blocks):
        owner = 1 - root
        messages += [(root, step.qkv[owner]), (owner, step.output[owner])] * block
        if root == 0:
            messages += [(0, step.handoff // 2)] * 2 + [(0, step.positions)]
    messages.append((1, step.logits[0]))
    assert sum(size for _, size in messages) == step.peer_group
    return [(sender, size) for sender, size in messages if size]


def raw_rank(rank: int, store: str, plans: dict[Any, list[tuple[int, int]]], queue: Any) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=LIMIT)
    gloo = GlooTransport(dist.new_group([0, 1], timeout=LIMIT), timeout=60)
    found = {}
    for case, messages in plans.items():
        work = [(sender, torch.zeros(size, dtype=torch.uint8)) for sender, size in messages]
        times = []
        for _ in range(60):
            dist.barrier()
            start = time.perf_counter()
            pass_messages(gloo, rank, work)
            times.append((time.perf_counter() - start) * 1e3)
        found[case] = statistics.median(times[10:])
    queue.put((rank, found))
    dist.barrier()


def pass_messages(gloo: GlooTransport, rank: int, work: list[tuple[int, torch.Tensor]]) -> None:
    """One after the other; every receive is posted when its predecessor is done."""
    sends = []
    for sender, tensor in work:
        verb = "send" if sender == rank else "receive"
        transfer = Transfer("scatter", verb, tensor, 1 - rank)
        gloo.post([transfer], []) if verb == "send" else gloo.post([], [transfer])
        if verb == "send":
            sends.append(transfer)
        else:
            gloo.wait(transfer)
    for transfer in sends:
        gloo.wait(transfer)


def measure_raw() -> dict[tuple[int, int], float]:
    """Milliseconds of a step's messages alone, per (batch, context)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(prepare_smollm2())
    head_dim = config.hidden_size // config.num_attention_heads
    sizes = RowSizes(
        q_size=config.num_attention_heads * head_dim,
        kv_size=config.num_key_value_heads * head_dim,
        hidden_size=config.hidden_size,
        head_width=config.vocab_size,
        element_bytes=2,  # bfloat16
        tp_size=1,
    )
    layers = config.num_hidden_layers
    plans = {case: messages_of_step(case[0], layers, sizes) for case in CASES}
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (f"file://{folder}/store", plans, queue)
        ranks = [context.Process(target=raw_rank, args=(rank, *args)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        found = dict(queue.get(timeout=300) for _ in ranks)
        for process in ranks:
            process.join(60)
    return {case: max(found[0][case], found[1][case]) for case in CASES}
