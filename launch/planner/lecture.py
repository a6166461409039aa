"""The formulas of a lecture on serving in parallel, as functions: small models to reason with.

"Parallelism Strategies: DP, TP, PP, EP, CP and Large-Scale MoE Serving"; the numbers in brackets
are its equations. Its tables, (3.6.1) and (3.6.5) are not in the text that this was written from;
(3.6.5) follows from the sizes it gives. Units: bytes, seconds, FLOP, and their quotients. Every
function raises ValueError where its formula means nothing.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]


class Inconsistency(NamedTuple):
    """A number of the lecture that does not follow from its own."""

    claim: str
    stated: float  # bytes
    follows: float  # bytes, from `reason`
    reason: str


# In its summary. Nothing here is tested against the stated numbers.
KNOWN_INCONSISTENT = (
    Inconsistency(
        claim="EP144 reads 0.96 GB of experts per step",
        stated=0.96e9,
        follows=58 * 2 * 3 * 7168 * 2048,
        reason="58 MoE layers, each with ceil(256 / 144) = 2 experts of 44 MB: 88 MB a layer",
    ),
    Inconsistency(
        claim="EP8 and TP8 read 85 GB",
        stated=85e9,
        follows=58 * 32 * 3 * 7168 * 2048,
        reason="58 MoE layers, each with 256 / 8 = 32 experts of 44 MB: 1.41 GB a layer",
    ),
)


# --- capacity ---


def weight_bytes(parameters: float, parameter_bytes: float) -> float:
    """Bytes of a model's weights: 2P in BF16."""
    _positive(parameters=parameters, parameter_bytes=parameter_bytes)
    return parameters * parameter_bytes


def kv_token_bytes(layers: int, kv_heads: int, head_dim: int, dtype_bytes: float) -> float:
    """KV bytes of one token: K and V of every layer. With one layer, kv_layer of (3.6.8)."""
    _positive(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)
    return 2 * layers * kv_heads * head_dim * dtype_bytes


def ranks_to_hold(total_bytes: float, rank_bytes: float) -> int:
    """The fewest ranks whose memory together holds so many bytes, evenly cut."""
    _positive(total_bytes=total_bytes, rank_bytes=rank_bytes)
    return math.ceil(total_bytes / rank_bytes)


# --- tensor parallelism ---


def heads_per_rank(heads: int, ranks: int) -> int:
    """Query heads of each TP rank: n_h / T. ValueError unless T divides them."""
    _positive(heads=heads, ranks=ranks)
    if heads % ranks:
        raise ValueError(f"{ranks} TP ranks do not divide {heads} query heads")
    return heads // ranks


def kv_replication(kv_heads: int, ranks: int) -> int:
    """TP ranks that keep the same KV head: max(1, T / n_kv); MLA's latent counts as one head.

    ValueError unless one of the two divides the other.
    """
    _positive(kv_heads=kv_heads, ranks=ranks)
    if max(kv_heads, ranks) % min(kv_heads, ranks):
        raise ValueError(f"{ranks} TP ranks and {kv_heads} KV heads do not divide one another")
    return max(1, ranks // kv_heads)


def decode_bytes(weights: float, kv: float, ranks: int, kv_heads: int | None = None) -> float:
    """Bytes that each TP rank reads in a decode step: 2P/T + B kv/T (3.6.2).

    Args:
        weights: bytes of the model, 2P in BF16.
        kv: bytes of the whole batch's KV, B kv; logical, each head once.
        ranks: T.
        kv_heads: n_kv, beyond which more ranks read no less KV; None as in the equation.
    """
    _positive(weights=weights, ranks=ranks)
    _not_negative(kv=kv)
    kept = 1 if kv_heads is None else kv_replication(kv_heads, ranks)
    return weights / ranks + kv * kept / ranks


def tpot(
    weights: float,
    kv: float,
    ranks: int,
    *,
    bandwidth: float,
    layers: int,
    latency: float,
    kv_heads: int | None = None,
) -> float:
    """Seconds of a decode step: bytes over bandwidth, and two all-reduces a layer (3.6.3).

    One rank has no peers, so there the equation says `tpot_overstatement` too much.

    Args:
        bandwidth: of one rank's memory, in bytes a second.
        latency: of one all-reduce, in seconds; the lecture takes 10 us.
        (the others as in `decode_bytes`)
    """
    _positive(bandwidth=bandwidth)
    streaming = decode_bytes(weights, kv, ranks, kv_heads) / bandwidth
    return streaming + tpot_floor(layers, latency)


def tpot_floor(layers: int, latency: float) -> float:
    """Seconds below which no number of ranks takes (3.6.3): 2 n_layers t_lat."""
    _positive(layers=layers)
    _not_negative(latency=latency)
    return 2 * layers * latency


def tpot_overstatement(ranks: int, layers: int, latency: float) -> float:
    """Seconds that (3.6.3) says too much: its all-reduces at T = 1, else none."""
    _positive(ranks=ranks)
    return tpot_floor(layers, latency) if ranks == 1 else 0.0


# --- collectives ---


def activation_bytes(tokens: int, hidden: int, dtype_bytes: float) -> float:
    """Message of a TP all-reduce or a PP hop: tokens d_model b, of a batch or of a chunk."""
    _positive(tokens=tokens, hidden=hidden, dtype_bytes=dtype_bytes)
    return tokens * hidden * dtype_bytes


def collective_regime(
    message: float, *, bandwidth: float, latency: float, margin: float = 4.0
) -> str:
    """What dominates a collective: "latency", "bandwidth" or "neither".

    The lecture compares m / beta_net with t_lat by "much less" and "much greater": here a factor
    of `margin`, at least 1.
    """
    _positive(message=message, bandwidth=bandwidth, latency=latency)
    if margin < 1:
        raise ValueError(f"margin is {margin}, and below 1 a collective would be both")
    ratio = message / bandwidth / latency
    if ratio <= 1 / margin:
        return "latency"
    return "bandwidth" if ratio >= margin else "neither"


# --- pipeline parallelism ---


def pipeline_bubble(stages: int, microbatches: int) -> float:
    """Idle share of the stages' time: (s - 1) / (m + s - 1) (3.6.4)."""
    _positive(stages=stages, microbatches=microbatches)
    return (stages - 1) / (microbatches + stages - 1)


def pipeline_hops(stages: int, seconds_per_hop: float) -> float:
    """Seconds that hops add to every token: s - 1 of them, with each stage's scheduling."""
    _positive(stages=stages)
    _not_negative(seconds_per_hop=seconds_per_hop)
    return (stages - 1) * seconds_per_hop


# --- experts ---


def expert_parameters(hidden: int, inner: int) -> int:
    """Of one gated expert: 3 d_model d_expert."""
    _positive(hidden=hidden, inner=inner)
    return 3 * hidden * inner


def resident_experts(experts: int, ranks: int) -> int:
    """Whole experts on the fullest EP rank, a layer: ceil(experts / E)."""
    _positive(experts=experts, ranks=ranks)
    return -(-experts // ranks)


def expert_bytes(experts: int, ranks: int, one_expert: float, layers: int = 1) -> float:
    """Bytes of experts that the fullest EP rank reads in a step, if tokens reach all of them.

    Under TP each rank reads experts / T of them, as slices: the same where E divides them.
    """
    _positive(one_expert=one_expert, layers=layers)
    return layers * resident_experts(experts, ranks) * one_expert


def tokens_per_expert(batch: int, top_k: int, experts: int) -> float:
    """t_e of evenly routed tokens: B_tot k / experts."""
    _positive(batch=batch, top_k=top_k, experts=experts)
    if top_k > experts:
        raise ValueError(f"a token cannot reach {top_k} of {experts} experts")
    return batch * top_k / experts


def expert_intensity(tokens: float, parameter_bytes: float = 1.0) -> float:
    """FLOP per weight byte of an expert that `tokens` reach: 2 t_e in FP8 (3.6.6)."""
    _positive(tokens=tokens, parameter_bytes=parameter_bytes)
    return 2 * tokens / parameter_bytes


def ridge(flops: float, bandwidth: float) -> float:
    """FLOP per byte from which on a product is compute-bound: pi / beta.

    The lecture's 295 has FLOP/s of BF16 beside bytes of FP8; an FP8 product's ridge is twice that.
    """
    _positive(flops=flops, bandwidth=bandwidth)
    return flops / bandwidth


def all_to_all_bytes(
    top_k: int, width: int, dispatch_bytes: float = 1.0, combine_bytes: float = 2.0
) -> float:
    """Bytes that one token sends and gets back in an MoE layer: k d (1 + 2) (3.6.5).

    The equation itself is missing from the text; its results give this: FP8 out, BF16 back.

    Args:
        width: d_model, or the narrower latent width of LatentMoE.
    """
    _positive(top_k=top_k, width=width, dispatch_bytes=dispatch_bytes, combine_bytes=combine_bytes)
    return top_k * width * (dispatch_bytes + combine_bytes)


def lockstep_padding(batches: Sequence[int]) -> float:
    """Wasted share when every rank pads to the largest batch; also of owners that wait for one."""
    if not batches or min(batches) < 0 or max(batches) == 0:
        raise ValueError(f"no rank of {list(batches)} has a batch to pad to")
    return 1 - sum(batches) / (len(batches) * max(batches))


# --- context parallelism in prefill ---


def cp_received_bytes(length: int, ranks: int, kv_layer: float) -> float:
    """KV bytes that each GPU receives a layer: (N - 1) / N L kv_layer (3.6.8)."""
    _positive(length=length, ranks=ranks, kv_layer=kv_layer)
    return (ranks - 1) / ranks * length * kv_layer


def cp_flop(length: int, ranks: int, hidden: int) -> float:
    """FLOP of attention of each GPU a layer: 4 L^2 d_model / N (3.6.9)."""
    _positive(length=length, ranks=ranks, hidden=hidden)
    return 4 * length**2 * hidden / ranks


def cp_threshold(
    ranks: int, kv_layer: float, hidden: int, *, flops: float, bandwidth: float
) -> float:
    """Tokens from which on the ring hides: (N - 1) kv_layer pi / (4 d_model beta) (3.6.10)."""
    _positive(ranks=ranks, kv_layer=kv_layer, hidden=hidden, flops=flops, bandwidth=bandwidth)
    return (ranks - 1) * kv_layer * flops / (4 * hidden * bandwidth)


# --- context parallelism in decode ---


def dcp_degrees(kv_heads: int, ranks: int) -> tuple[int, ...]:
    """Degrees that TP ranks allow: the divisors of T / n_kv, so 1 alone up to one rank a head."""
    copies = kv_replication(kv_heads, ranks)
    return tuple(degree for degree in range(1, copies + 1) if copies % degree == 0)


def dcp_kv_bytes(kv: float, kv_heads: int, ranks: int, degree: int) -> float:
    """KV bytes of each GPU: M_KV / (min(T, H) D). ValueError for a degree that is not allowed."""
    _not_negative(kv=kv)
    allowed = dcp_degrees(kv_heads, ranks)
    if degree not in allowed:
        raise ValueError(
            f"DCP of {degree} does not fit {ranks} TP ranks and {kv_heads} KV heads; use one of "
            f"{', '.join(map(str, allowed))}"
        )
    return kv / (min(ranks, kv_heads) * degree)


def dcp_step(other: float, kv: float, degree: int, overhead: float) -> float:
    """Seconds of a decode step: t_other + t_KV / D + t_DCP, the last 0 at D = 1 (3.6.11)."""
    _positive(degree=degree)
    _not_negative(other=other, kv=kv, overhead=overhead)
    return other + kv / degree + (overhead if degree > 1 else 0)


def dcp_pays(kv: float, degree: int, overhead: float) -> bool:
    """The lecture's useful condition: t_KV (1 - 1/D) > t_DCP."""
    return dcp_step(0, kv, degree, overhead) < kv


def merge_partial(outputs: Floats, lse: Floats) -> tuple[Floats, Floats]:
    """Attention over all positions from that over disjoint sets of them, by log-sum-exp weights.

    Args:
        outputs: shape (sets, ..., head_dim): of each set, with its own softmax.
        lse: shape (sets, ...): the natural logarithm of the sum of exp(score); minus infinity
            for an empty set, whose output then does not count.

    Returns:
        The output, shape (..., head_dim), and its log-sum-exp, shape (...).

    Raises:
        ValueError: shapes that do not belong together, or a query without any position.
    """
    if outputs.shape[:-1] != lse.shape or lse.ndim < 1 or not len(lse):
        raise ValueError(f"outputs of shape {outputs.shape} do not fit lse of shape {lse.shape}")
    largest = lse.max(axis=0)
    if not np.isfinite(largest).all():
        raise ValueError("a query has no position in any set, or a log-sum-exp is not a number")
    weights = np.exp(lse - largest)
    total = weights.sum(axis=0)
    shares = (weights / total)[..., None]
    merged = np.where(shares > 0, outputs, 0) * shares
    return merged.sum(axis=0), largest + np.log(total)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}, and has to be above 0")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}, and cannot be below 0")
