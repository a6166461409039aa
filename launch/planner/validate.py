"""Every number of the paper that this planner can be held to, beside what it computes.

One constant of the paper's hardware file is fitted, to one published ratio (V21); all else is
prediction. What the physics does not reproduce is in misses.py.
"""

from collections.abc import Iterator

from sglang_tknp.launch.planner import trace
from sglang_tknp.launch.planner.compare import build
from sglang_tknp.launch.planner.costs import Costs
from sglang_tknp.launch.planner.hardware import GIB, Hardware
from sglang_tknp.launch.planner.layout_stock import Dcp
from sglang_tknp.launch.planner.layout_tknp import Tknp
from sglang_tknp.launch.planner.paper_pools import (
    BATCHES,
    CONTEXTS,
    LLAMA,
    NEMOTRON,
    OUTPUT,
    SEEDS,
    TKNP_OVER_DP,
    Pools,
    attention_seconds,
    mean,
)
from sglang_tknp.launch.planner.published import Check, between, holds, near, rounds

KIB = 1024
BUDGET = 560 - 454  # GiB of KV on a node, as published
AT_32K, AT_64K = CONTEXTS[:2]


def checks(hardware: Hardware) -> Iterator[Check]:
    """V1 to V27 of the validation table, judged on this hardware file."""
    pools = Pools(hardware)
    yield from _sizes(pools)
    yield from _messages(pools)
    yield from _itself()
    yield from _workload()
    yield from _capacity(pools)
    yield from _kernels(pools)
    yield from _scaling(pools)
    yield from _against_dcp(pools)
    yield from _orders(pools)
    yield from _mixed(pools)
    yield from _axes(pools)


def _sizes(pools: Pools) -> Iterator[Check]:
    llama, nemotron = pools.model(LLAMA), pools.model(NEMOTRON)
    where, room = "section 3.2", pools.setting(LLAMA, 4).node_memory / GIB
    kv, weights = 128 * AT_32K * llama.kv_token_bytes(1) / GIB, llama.weight_bytes / GIB
    billions = [model.parameters / 1e9 for model in (llama, nemotron)]
    yield near("V1", "weights of Llama 3.1 405B, billions", 405.85, billions[0], 0.1, "model card")
    yield near("V1", "weights of Nemotron-4 340B, billions", 341.03, billions[1], 0.1, "report")
    yield near("V2", "KV of 128 requests at 32K, GiB", 2016, kv, 0.1, where)
    yield rounds("V3", "the same over a node's KV budget", "19", kv / BUDGET, where)
    yield rounds("V4", "the same over eight replicas' budget", "2.4", kv / BUDGET / 8, where)
    yield near("V5", "model allocation in FP8, GiB", 454, weights, 0.2, where)
    yield near("V5", "KV budget of a node, GiB", BUDGET, room - weights, 0.5, where)


def _messages(pools: Pools) -> Iterator[Check]:
    setting, batch, where = pools.setting(LLAMA, 4), 128, "section 4.4"
    tknp, dcp = build("tknp", setting), build("dcp", setting)
    assert isinstance(tknp, Tknp) and isinstance(dcp, Dcp)
    traffic = tknp.traffic((batch // 4,) * 4)
    _, partial, exponents = dcp.merge_bytes(batch)
    output, layer = traffic.output[1], traffic.layer[0]
    hidden = batch * setting.model.hidden_size * setting.model.element_bytes
    yield near("V6", "attention output from an owner, KiB", 128, output / KIB, 0, where)
    yield near("V7", "partial output of a DCP rank, KiB", 512, partial / KIB, 0, where)
    yield near("V8", "log-sum-exps of a DCP rank, KiB", 8, exponents / KIB, 0, where)
    yield near("V9", "QKV to an owner, KiB", 144, traffic.qkv[1] / KIB, 0, where)
    yield near("V10", "output tensor against DCP's", 0.25, output / partial, 0, "equation 5")
    yield near("V11", "hidden states of an all-reduce, MiB", 4, hidden / KIB**2, 0, where)
    yield near("V11", "output tensor against it, 1/(NT)", 1 / 32, output / hidden, 0, where)
    yield near("V12", "exchange of a layer, KiB", 816, layer / KIB, 0, "equation 3")
    for name in (LLAMA, NEMOTRON):
        model = pools.model(name)
        heads = model.num_heads * model.head_dim / model.hidden_size
        yield near("V13", f"Hq x dh over D, {name}", 1, heads, 0, where)


def _itself() -> Iterator[Check]:
    """The paper's numbers against each other: what the table below can rely on."""
    yield rounds("V14", "paper itself: 5.38 ms over 0.71 ms", "7.6", 5.38 / 0.71, "section 3.1")
    yield near("V14", "paper itself: 1.81 over 2", 0.905, 1.81 / 2, 0.1, "section 5.3")
    yield near("V14", "paper itself: 1.53 x 1.111", 1.70, 1.53 * 1.111, 0.1, "section 5.3")


def _workload() -> Iterator[Check]:
    found = trace.statistics([a.input_tokens for a in trace.paper_mixed(OUTPUT)])
    published = (
        ("shortest input", 8223, found.minimum),
        ("longest input", 126_848, found.maximum),
        ("mean input", 32_898, found.mean),
        ("median input", 19_048, found.median),
        ("standard deviation", 28_496, found.std),
        ("share of requests over 64K", 0.125, found.long_share),
        ("their share of tokens", 0.361, found.long_token_share),
        ("token share of the longest quarter", 0.572, found.longest_quarter_token_share),
    )
    for claim, value, ours in published:
        yield near("V15", f"mixed workload: {claim}", value, ours, 0.1, "section 5.1")


def _capacity(pools: Pools) -> Iterator[Check]:
    dp = build("dp", pools.setting(LLAMA, 4))
    for context, held in zip(CONTEXTS, (6, 3, 2), strict=True):
        claim = f"requests in a DP replica at {context // KIB}K"
        yield near("V16", claim, held, dp.resident(context + OUTPUT)[0], 0, "from 3.2")
    for nodes, published in ((2, 3.3), (4, 4.4), (8, 5.0)):
        setting = pools.setting(LLAMA, nodes)
        ratio = build("tknp", setting).kv_tokens / build("dp", setting).kv_tokens
        yield near("V17", f"KV of TKNP over DP, {nodes} nodes", published, ratio, 6, "figure 5")


def _kernels(pools: Pools) -> Iterator[Check]:
    costs = Costs(pools.model(LLAMA), pools.hardware)
    layer = costs.model.layers[1]  # the first and the last are not in FP8
    eight, one = (attention_seconds(costs, 128, AT_32K, tp) for tp in (8, 1))
    share = eight / (eight + costs.dense_layer(layer, 128, 8).seconds)
    mlp = {(b, tp): costs.mlp(layer, b, tp).seconds for b, tp in ((128, 64), (32, 8), (1, 8))}
    whole, where = costs.mlp(layer, 128, 8).seconds, "section 3.1"
    yield near("V18", "attention TP8, 128 x 32K, ms", 0.71, eight * 1e3, 5, where)
    yield near("V18", "attention TP1, ms", 5.38, one * 1e3, 5, where)
    yield near("V18", "TP1 over TP8", 7.6, one / eight, 5, where)
    yield near("V19", "MLP at TP64 over TP8, batch 128", 1.55, mlp[128, 64] / whole, 10, "figure 4")
    yield near("V19", "four MLPs of 32 over one of 128", 3.17, 4 * mlp[32, 8] / whole, 10, where)
    yield near("V19", "MLP, batch 128 over 1", 1.24, whole / mlp[1, 8], 15, where)
    yield between("V20", "attention's share of a layer", "nearly 0.70", share, 0.67, 0.73, where)


def _scaling(pools: Pools) -> Iterator[Check]:
    def more_nodes(layout: str) -> float:
        at = [pools.throughput(layout, nodes, 128, AT_32K) for nodes in (4, 8)]
        return at[1] / at[0]

    fit, where = pools.tknp_over_dp(), "section 5.3"
    yield near("V21", "TKNP over DP, 4 nodes", TKNP_OVER_DP, fit, 0.2, "figure 8", fitted=True)
    yield near("V22", "TKNP, 8 nodes over 4", 1.81, more_nodes("tknp"), 5, where)
    yield near("V22", "DP, 8 nodes over 4", 2.0, more_nodes("dp"), 5, where)


def _against_dcp(pools: Pools) -> Iterator[Check]:
    """Figures 10 and 11, at best from 32 requests on."""
    one, two = (pools.best_ratio(name, "dcp", 8, AT_32K) for name in ("tknp", "tknp-dual"))
    nemotron = [pools.best_ratio("tknp", name, 4, AT_64K, NEMOTRON) for name in ("dp", "dcp")]
    gain = pools.best_ratio("tknp-dual", "tknp", 8, AT_32K)
    yield near("V23", "TKNP over DCP, 8 nodes, from 32 requests", 1.53, one, 10, "figure 11")
    yield near("V23", "with microbatches", 1.70, two, 10, "figure 11")
    yield near("V23", "Nemotron, TKNP over DP, 64K", 1.54, nemotron[0], 10, "figure 10")
    yield near("V23", "Nemotron, TKNP over DCP, 64K", 1.32, nemotron[1], 10, "figure 10")
    where = "section 5.3"
    yield between("V24", "gain by microbatches, at most", "1.111", gain, 1.111, 1.25, where)


def _orders(pools: Pools) -> Iterator[Check]:
    found = [pools.crossover(context) or 0 for context in CONTEXTS]
    falls = found[0] > found[1] > found[2] > 0
    early = all(pools.ratio("dp", "tknp", 4, b, AT_32K) >= 1 for b in (4, 8, 16))
    loses = pools.ratio("tknp-dual", "tknp", 4, 96, AT_32K) < 1
    late = all(pools.ratio("tknp", other, 4, 128, AT_32K) > 1 for other in ("dp", "tp", "dcp"))
    text = ", ".join(map(str, found))
    yield holds("V25", f"the crossover falls with the context: {text}", falls, "section 5.2")
    yield holds("V25", "DP leads at 4 to 16 requests of 32K", early, "figure 8")
    yield holds("V25", "TKNP leads DP, TP and DCP at 128 of 32K", late, "figure 8")
    yield holds("V25", "microbatches lose on 4 nodes, 96 requests", loses, "section 5.3")


def _mixed(pools: Pools) -> Iterator[Check]:
    tknp, dp = (mean(pools.mixed(n, 1, s).attainment for s in SEEDS) for n in ("tknp", "dp"))
    where = "figure 12"
    yield between("V26", "TKNP's SLO attainment at 1 request/s", "full", tknp, 0.999, 1, where)
    yield holds("V26", "DP's is lower", dp < tknp, where)
    for rate in (1, 2, None):
        seeds = SEEDS if rate else (0,)
        speed = {
            name: mean(pools.mixed(name, rate, seed).throughput for seed in seeds)
            for name in ("tknp", "dp", "dcp")
        }
        claim = f"TKNP is fastest, {f'{rate} requests/s' if rate else 'burst'}"
        yield holds("V26", claim, max(speed, key=lambda n: speed[n]) == "tknp", where)


def _axes(pools: Pools) -> Iterator[Check]:
    """The paper's axes end above what they show."""
    for context, most in zip(CONTEXTS, (1600, 800, 500), strict=True):
        peak = max(pools.throughput("tknp", 4, batch, context) for batch in BATCHES)
        claim = f"TKNP's peak at {context // KIB}K, tok/s"
        yield between("V27", claim, f"axis {most}", peak, 0, most, "figure 8")
    slowest = pools.run("tp", LLAMA, 4, tuple(trace.fixed(128, AT_64K, OUTPUT)))
    for what, seconds, most in (
        ("wait", slowest.mean_wait, 350),
        ("completion", slowest.mean_completion, 400),
    ):
        claim = f"TP's mean {what} at 64K, 128 requests, s"
        yield between("V27", claim, f"axis {most}", seconds, most / 2, most, "figure 9")
