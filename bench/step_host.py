"""For step.py: the processor time that TKNP's own code takes of a step, on real gloo ranks.

The product's Step, Exchange and attention code run whole steps of a model that computes nothing:
its dense layers, attention and logits are stand-ins that return made tensors. What remains is
TKNP's host work and the transport. The calling thread's processor time counts, which leaves
waiting out, and the time inside torch.distributed does not. The rank that is measured has a core
of its own; all others share another one, as they only have to answer. The same step is measured
once more alone, in a process without peers whose transport does nothing: what the code costs on a
core that does not sleep between messages.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang_tknp.placement import ModelBytes, place
from sglang_tknp.topology import Topology
from sglang_tknp.transport import GlooTransport

sys.path.append(str(Path(__file__).parent / "step_plugin"))
from sections import Sections  # noqa: E402

DTYPE = torch.bfloat16
LIMIT = timedelta(seconds=60)
LAYERS, HIDDEN, VOCAB = 16, 512, 1024
ROWS = 4  # per owner, of one TP rank of a 405B model on eight
HEADS, KV_HEADS, HEAD_DIM = 16, 1, 128
STEPS, WARM_UP = 60, 10


def fake_layer(layer: int) -> Any:
    return SimpleNamespace(
        layer_id=layer,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        tp_v_head_num=KV_HEADS,
        qk_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
    )


def fake_stage(rank: int, nodes: int, group: Any) -> Any:
    """A stage whose model calls the attention of its layers, and computes nothing itself."""
    layers = [LAYERS // nodes] * nodes
    sizes = ModelBytes(embedding=1, layers=(1,) * LAYERS, final_norm=1, head=1, tied=False)
    stage: Any = SimpleNamespace(
        topology=Topology(num_nodes=nodes, tp_size=1, rank=rank),
        placement=place(sizes, layers),
        node=rank,
        peers=SimpleNamespace(ranks=list(range(nodes)), cpu_group=group, device_group=group),
        node_group=SimpleNamespace(device_group=None),
        device=torch.device("cpu"),
        dtype=DTYPE,
        hidden_size=HIDDEN,
        is_head_node=rank == nodes - 1,
        attention=tuple(map(fake_layer, range(LAYERS))),
        scope=contextlib.nullcontext,
    )
    stage.model = SimpleNamespace(lm_head=None, logits_processor=FakeLogitsProcessor())
    stage.model.forward = lambda *args, **kwargs: run_block(stage, args[1].shape[0])
    return stage


class FakeLogitsProcessor:
    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}

    def _compute_lm_head(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        rows = hidden.shape[0]
        return self.made.setdefault(rows, torch.zeros(rows, VOCAB, dtype=DTYPE))

    def __call__(self, ids: Any, rows: torch.Tensor, head: Any, batch: Any) -> torch.Tensor:
        return self._compute_lm_head(rows)


def run_block(stage: Any, num_rows: int) -> Any:
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = stage.__dict__.setdefault("qkv", torch.zeros(num_rows, width, dtype=DTYPE))
    parts = qkv.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=-1)
    for layer in stage.placement.block(stage.node):
        stage.attention[layer].forward(*parts, None)
    if stage.is_head_node:
        return torch.zeros(num_rows, HIDDEN, dtype=DTYPE)
    rows = torch.zeros(num_rows, HIDDEN, dtype=DTYPE)
    return SimpleNamespace(tensors={"hidden_states": rows, "residual": rows})


class NoTransport:
    """Every message has arrived."""

    device = torch.device("cpu")

    def post(self, sends: Any, receives: Any) -> None:
        for transfer in (*sends, *receives):
            transfer.work = self

    def wait(self, transfer: Any) -> None:
        pass


def make_step(rank: int, nodes: int, group: Any, sections: Sections) -> Any:
    """`group`: the gloo group of the peers, or None to be alone."""
    from sglang_tknp.exchange import Exchange
    from sglang_tknp.model_ext import attention
    from sglang_tknp.model_ext import step as step_module

    made = torch.zeros(ROWS, HEADS * HEAD_DIM, dtype=DTYPE)
    attention.attend = sections.wrap("stand-in", lambda layer, q, k, v, batch: made)
    stage = fake_stage(rank, nodes, group)
    transport: Any = GlooTransport(group, timeout=60) if group else NoTransport()
    transport.post = sections.wrap("transport", transport.post)
    transport.wait = sections.wrap("transport", transport.wait)
    exchange = Exchange(transport, rank, list(range(nodes)), timeout=60, cpu_group=group)
    exchange.warm_up()
    step_module.attend_for_root = sections.wrap("owner", step_module.attend_for_root)
    step = step_module.Step(stage, exchange)
    for layer in stage.placement.block(rank):
        module = stage.attention[layer]
        module.forward = sections.wrap("root", attention.RootAttention(module, lambda: step))
    step.stage_forward = sections.wrap("stand-in", step.stage_forward)
    return step


def batch_of(nodes: int) -> Any:
    return SimpleNamespace(
        global_num_tokens_cpu=[ROWS] * nodes, is_extend_in_batch=False, forward_mode=None
    )


def run_rank(rank: int, nodes: int, measured: int, store: str, queue: Any) -> None:
    # Before gloo starts its threads, so that they stay on this core too.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0] if rank == measured else cores[-1]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nodes, timeout=LIMIT)
    group = dist.new_group(list(range(nodes)), timeout=LIMIT)
    found = run_steps(rank, nodes, group)
    if rank == measured:
        queue.put(found)
    dist.barrier(group)


def run_alone(rank: int, nodes: int, queue: Any) -> None:
    from sglang_tknp.model_ext.logits import Logits

    torch.set_num_threads(1)
    with mock.patch.object(Logits, "_agree_on_shape", lambda self: (VOCAB, DTYPE)):
        queue.put(run_steps(rank, nodes, None))


def run_steps(rank: int, nodes: int, group: Any) -> dict[str, float]:
    from sglang_tknp import compat

    sections = Sections(time.thread_time)
    samples = []
    with (
        mock.patch.object(compat, "dense_forward_mode", lambda batch: None),
        mock.patch.object(compat, "handoff_tensors", lambda *pair: pair),
        torch.no_grad(),
    ):
        step = make_step(rank, nodes, group, sections)
        ids, batch = torch.arange(ROWS), batch_of(nodes)
        forward = sections.wrap("step", step.forward)
        for _ in range(STEPS + WARM_UP):
            sections.totals.clear()
            forward(ids, ids, batch)
            samples.append(dict(sections.totals))
    return medians(nodes, samples[WARM_UP:])


def medians(nodes: int, samples: list[dict[str, float]]) -> dict[str, float]:
    """Microseconds per layer as root and as owner, and per step beside them."""
    block = LAYERS // nodes
    divided_by = {"root": block, "owner": LAYERS - block, "step": 1}
    return {
        name: statistics.median(sample[name] for sample in samples) / number * 1e6
        for name, number in divided_by.items()
    }


def measure(nodes: int) -> dict[str, float]:
    """The larger one of the first root, which collects, and the head's node, which sends logits."""
    ends = [measure_rank(nodes, rank) for rank in (0, nodes - 1)]
    alone = [measure_alone(nodes, rank) for rank in (0, nodes - 1)]
    return {
        "nodes": nodes,
        **{name: round(max(end[name] for end in ends), 1) for name in ends[0]},
        **{f"{name}_alone": round(max(end[name] for end in alone), 1) for name in alone[0]},
    }


def measure_alone(nodes: int, rank: int) -> dict[str, float]:
    context = mp.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=run_alone, args=(rank, nodes, queue))
    process.start()
    try:
        found: dict[str, float] = queue.get(timeout=120)
    finally:
        process.kill()
    return found


def measure_rank(nodes: int, measured: int) -> dict[str, float]:
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (nodes, measured, f"file://{folder}/store", queue)
        ranks = [context.Process(target=run_rank, args=(r, *args)) for r in range(nodes)]
        try:
            for process in ranks:
                process.start()
            found: dict[str, float] = queue.get(timeout=300)
            for process in ranks:
                process.join(60)
        finally:
            for process in ranks:
                process.kill()
    return found
