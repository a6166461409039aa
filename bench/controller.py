"""Stock SGLang's data-parallel controller and ours, side by side: cost, spread, affinity, scale.

    python bench/controller.py [--only decision hop tokenizer reports spread affinity pool]
                               [--repeats 5]

No server runs: both controllers' own code is called, on real ZMQ sockets and processes where they
matter. Numbers are medians of the repeats; microseconds are CPU time of the thread at work. JSON
goes to bench/results/controller.json, unless --only leaves a question out.
"""

import argparse
import itertools
import json
import multiprocessing as mp
import platform
import sys
import tempfile
import time
import timeit
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.metadata import version
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import controller_pools
import zmq
from controller_pools import (
    HUGE,
    LENGTHS,
    OUTPUT,
    OWNERS,
    OurController,
    Rows,
    StockController,
    by_header,
    deaf_workers,
    paper_lengths,
    report,
    us_each,
)
from exchange import RESULTS as EXCHANGE_RESULTS
from exchange import machine
from sglang.srt.managers import io_struct
from sglang.srt.managers.data_parallel_controller import DPBudget, LoadBalanceMethod
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.network import get_zmq_socket

from sglang_tknp import compat_ipc
from sglang_tknp.scheduler_ext.forward import header_of
from sglang_tknp.scheduler_ext.ledger import Ledger
from sglang_tknp.scheduler_ext.messages import Header, Live, encode
from sglang_tknp.scheduler_ext.policy import Policy, Request
from sglang_tknp.scheduler_ext.prefixes import BLOCK_TOKENS, PrefixIndex

RESULTS = EXCHANGE_RESULTS.with_name("controller.json")
BLOCKS = 128  # of a prompt, where its prefix counts
HOPS = {128: 20_000, 1024: 20_000, 8192: 5000, 32_768: 1500, 131_072: 600}  # by prompt length


# 1. decision: choose an owner and account for it, on owners that hold 64 requests each


def stock_decision(method: str, owners: int) -> float:
    budget, lengths = DPBudget(owners), paper_lengths(Random(0), 96 * owners)
    kind = LoadBalanceMethod.from_str(method)
    for tokens in lengths[: 64 * owners]:
        budget.dispatch(kind, tokens)
    return us_each(lambda tokens: budget.dispatch(kind, tokens), lengths[64 * owners :])


def our_decision(policy: Policy, requests: Sequence[Request], prior: int) -> float:
    def step(request: Request) -> None:
        owner = policy.pick(request)
        assert owner is not None
        policy.reserve(request, owner)

    for request in requests[:prior]:
        step(request)
    return us_each(step, requests[prior:])


def ledger_of(owners: int, capacity: int, by_used: bool = False) -> Ledger:
    ledger = Ledger(owners, by_used=by_used)
    for owner in range(owners):
        ledger.apply(report(owner, 1, capacity=capacity))
    return ledger


def by_load(by_used: bool, owners: int) -> float:
    lengths = paper_lengths(Random(0), 96 * owners)
    requests = [Request(str(i), n + OUTPUT, n) for i, n in enumerate(lengths)]
    return our_decision(Policy(ledger_of(owners, HUGE, by_used)), requests, 64 * owners)


@cache
def prompts_for(owners: int) -> list[tuple[int, ...]]:
    draw = Random(0)
    return [tuple(draw.getrandbits(61) for _ in range(BLOCKS)) for _ in range(64 * owners)]


def by_prefix(seen: bool, owners: int) -> float:
    """The index is full and evicts; an owner of a million KV tokens holds 16 requests first."""
    prompts, index = prompts_for(owners), PrefixIndex(owners)
    capacity, tokens = 1_000_000, BLOCKS * BLOCK_TOKENS
    for number, prompt in enumerate(prompts[: 40 * owners]):
        index.add(number % owners, prompt, capacity)
    first = 16 * owners if seen else 40 * owners
    requests = [Request(str(i), tokens, tokens, prefix=p) for i, p in enumerate(prompts[first:])]
    policy = Policy(ledger_of(owners, capacity), index, 65_536)
    return our_decision(policy, requests[: 24 * owners], 16 * owners)


def decision(repeats: int) -> Rows:
    cases: dict[str, tuple[Callable[[Any, int], float], Any]] = {
        "stock total_requests": (stock_decision, "total_requests"),
        "stock total_tokens": (stock_decision, "total_tokens"),
        "ours kv-reserved": (by_load, False),
        "ours kv-used": (by_load, True),
        "ours, from its header on": (by_header, None),
        "ours, affinity, new prompts": (by_prefix, False),
        "ours, affinity, seen prompts": (by_prefix, True),
    }
    rounds = range(repeats)
    return [
        {"way": way, **{f"us_at_{n}": median(ask(case, n) for _ in rounds) for n in (8, 64, 256)}}
        for way, (ask, case) in cases.items()
    ]


# 2. hop: from a tokenizer's frame to a worker's


def tokenized(tokens: int) -> Any:
    """A request as SGLang's tokenizer sends it."""
    nothing = ("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
    draw = Random(tokens)
    request = io_struct.TokenizedGenerateReqInput(
        rid="r" * 32,
        input_ids=array("q", [draw.randrange(128_000) for _ in range(tokens)]),
        sampling_params=SamplingParams(max_new_tokens=OUTPUT),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        stream=False,
        **dict.fromkeys(nothing),
    )
    request.time_stats = APIServerReqTimeStats()
    request.wrap_pickle_fields()
    return request


def send_all(address: str, frames: list[bytes], count: int, go: Any) -> None:
    with zmq.Context() as context, get_zmq_socket(context, zmq.PUSH, address) as socket:
        go.wait()
        for _ in range(count):
            socket.send_multipart(frames, copy=False)


def receive_all(addresses: list[str], warm: int, count: int, seconds: Any) -> None:
    """Sends the seconds that all receipts after the first `warm` took."""
    with zmq.Context() as context, get_zmq_socket(context, zmq.PULL, addresses[0], False) as socket:
        for address in addresses[1:]:
            socket.connect(address)
        for number in range(count):
            socket.recv(copy=False)
            if number + 1 == warm:
                began = time.perf_counter()
        seconds.send(time.perf_counter() - began)


def pass_on(way: str, requests: Any, workers: list[Any]) -> Iterator[int]:
    """A controller's loop; yields after each turn how many requests it has passed on."""
    if way == "stock":  # waits for a request; the real loop spins
        stock = StockController("total_tokens", workers)
        for sent in itertools.count(1):
            stock._request_dispatcher(io_struct.sock_recv(requests))
            yield sent
    ours = OurController(workers, requests)
    while True:
        ours.turn(1.0)
        yield sum(ours.assigner.sent)


def one_hop_run(way: str, frames: list[bytes], count: int, backlog: bool) -> tuple[float, float]:
    """Returns the controller thread's CPU microseconds per hop, and hops per second end to end.

    With `backlog`, all requests lie in the controller's socket before it starts.
    """
    fork, warm = mp.get_context("fork"), count // 5
    with tempfile.TemporaryDirectory() as folder:
        source, targets = f"ipc://{folder}/in", [f"ipc://{folder}/{i}" for i in range(OWNERS)]
        (told, seconds), go = fork.Pipe(duplex=False), fork.Event()
        sending, receiving = (source, frames, count, go), (targets, warm, count, seconds)
        sender = fork.Process(target=send_all, args=sending, daemon=True)
        receiver = fork.Process(target=receive_all, args=receiving, daemon=True)
        sender.start()
        receiver.start()
        with zmq.Context(1 + OWNERS) as context:
            requests = get_zmq_socket(context, zmq.PULL, source, False)
            workers = [get_zmq_socket(context, zmq.PUSH, target) for target in targets]
            if backlog:
                go.set()
                sender.join()
            time.sleep(0.3)
            go.set()
            loop = pass_on(way, requests, workers)
            first = next(sent for sent in loop if sent >= warm)
            cpu = time.thread_time()
            while next(loop) < count:
                pass
            cpu = time.thread_time() - cpu
            rate = (count - warm) / told.recv()
            sender.join()
            receiver.join()
            context.destroy()
    return cpu / (count - first) * 1e6, rate


def hop(repeats: int) -> Rows:
    rows = []
    for tokens, count in HOPS.items():
        request = tokenized(tokens)
        frame = compat_ipc.encode_message(request)
        head = encode(header_of(request, with_prefix=False))
        ways = {"stock": [frame], "ours": [head, frame]}
        runs: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for _, backlog, way in itertools.product(range(2 * repeats), (True, False), ways):
            run = one_hop_run(way, ways[way], count, backlog)
            runs.setdefault((way, backlog), []).append(run)
        medians = {
            case: [median(column) for column in zip(*runs[case], strict=True)] for case in runs
        }
        row: dict[str, Any] = {"tokens": tokens, "frame_KiB": len(frame) / 1024}
        row |= {f"{way}_us": medians[way, True][0] for way in ways}
        row["ratio"] = row["stock_us"] / row["ours_us"]
        row |= {f"{way}_allows_per_s": 1e6 / row[f"{way}_us"] for way in ways}
        row |= {f"{way}_end_to_end_per_s": medians[way, False][1] for way in ways}
        row |= {f"{way}_us_as_they_come": medians[way, False][0] for way in ways}
        for way in ways:
            each = [us for us, _ in runs[way, True]]
            row[f"{way}_us_range"] = f"{min(each):.3g} to {max(each):.3g}"
        rows.append(row)
    return rows


# 3. what else a request costs: its header at the tokenizer, reports at the controller


def encoded_header(asked: Any, *, with_prefix: bool) -> bytes:
    return encode(header_of(asked, with_prefix=with_prefix))


def tokenizer(repeats: int) -> Rows:
    """Beside the frame, which stock makes there too."""
    rows: Rows = []
    for tokens in HOPS:
        asked = tokenized(tokens)
        row: dict[str, Any] = {"tokens": tokens}
        for what, make in {
            "stock_frame": partial(compat_ipc.encode_message, asked),
            "header": partial(encoded_header, asked, with_prefix=False),
            "header_with_hashes": partial(encoded_header, asked, with_prefix=True),
        }.items():
            timer = timeit.Timer(make, timer=time.thread_time)
            number, _ = timer.autorange()
            seconds = median(timer.repeat(repeats, number)) / number
            row |= {f"{what}_us": seconds * 1e6, f"{what}_bytes": len(make())}
        rows.append(row)
    return rows


def report_us(kind: str) -> tuple[float, int]:
    """One report to a controller whose owners hold 64 requests: microseconds, and its bytes."""
    ours = OurController(deaf_workers())
    for number in range(64 * OWNERS):
        ours.on_request(Header(str(number), 1000, OUTPUT), None)
    frames = []
    for turn, owner in itertools.product(range(64), range(OWNERS)):
        changes: dict[str, Any] = {"received": 64, "used": 64_000}
        if kind == "one request ended":
            changes["ended"] = (turn,)
        elif kind == "all 64 requests named":
            changes["live"] = tuple(Live(n, str(n * OWNERS + owner), 1000) for n in range(64))
        frames.append(encode(report(owner, turn + 2, **changes)))
    us = us_each(ours.on_report, [[SimpleNamespace(buffer=frame)] for frame in frames])
    assert sum(ours.assigner.drifts) == 0
    return us, len(frames[-1])


def reports(repeats: int) -> Rows:
    rows: Rows = []
    for kind in ("state only", "one request ended", "all 64 requests named"):
        runs = [report_us(kind) for _ in range(4 * repeats)]
        rows.append({"report": kind, "us": median(us for us, _ in runs), "bytes": runs[0][1]})
    return rows


# The answers

QUESTIONS: dict[str, Callable[[int], Rows]] = {
    "decision": decision,
    "hop": hop,
    "tokenizer": tokenizer,
    "reports": reports,
    "spread": controller_pools.spread,
    "affinity": controller_pools.affinity,
    "pool": controller_pools.pool,
}
NOTES = {
    "hop": "us: CPU of the controller's thread per hop, its requests ready in its socket; judged. "
    "End to end, sender and receiver share the cores with it, and the kernel copies every frame "
    "four times, whichever the controller. Twice the repeats.",
}


def targets(answers: dict[str, Rows]) -> Rows:
    """The row of a question that has these cells, its column, and the bound, with its sign."""
    ours = {"way": "ours kv-reserved"}
    equal, mixed = ({"way": "ours", "lengths": name} for name in list(LENGTHS)[:2])
    rows: Rows = []
    for question, cells, column, at_most, bound in (
        ("decision", ours, "us_at_8", True, 3.0),
        ("decision", ours, "us_at_256", True, 5.0),
        ("hop", {"tokens": 131_072}, "ratio", False, 20.0),
        ("spread", equal, "worst", True, 1.05),
        ("spread", mixed, "worst", True, 1.15),
    ):
        for row in answers.get(question, []):
            if cells.items() <= row.items():
                case = ", ".join(map(str, cells.values()))
                met = row[column] <= bound if at_most else row[column] >= bound
                target = f"{'<=' if at_most else '>='} {bound:g}"
                measured = {"measured": row[column], "target": target, "met": met}
                rows.append({"question": question, "case": case, "column": column, **measured})
    return rows


def rounded(rows: Rows) -> Rows:
    return [
        {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in row.items()}
        for row in rows
    ]


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def print_table(title: str, rows: Rows) -> None:
    print(f"\n{title}\n")
    print(f"| {' | '.join(name.replace('_', ' ') for name in rows[0])} |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print(f"| {' | '.join(map(shown, row.values()))} |")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    answers: dict[str, Rows] = {}
    for question in args.only:
        answers[question] = rounded(QUESTIONS[question](args.repeats))
        print_table(question, answers[question])
        print(NOTES.get(question, ""))
    judged = targets(answers)
    if judged:
        print_table("targets", judged)
    if len(answers) == len(QUESTIONS):
        names = ("sglang", "sglang-tknp", "pyzmq", "msgspec")
        result = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "versions": {"python": platform.python_version(), **{n: version(n) for n in names}},
            "repeats": args.repeats,
            "targets": judged,
            "notes": NOTES,
            **answers,
        }
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwritten: {RESULTS}")


if __name__ == "__main__":
    main()
