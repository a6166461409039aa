"""SGLang settings that TKNP refuses at start, each with its reason and the fix. A pure table."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One setting that may only keep its stock value under TKNP."""

    field: str  # of SGLang's ServerArgs
    flag: str
    stock: Sequence[Any]  # the values that TKNP serves, beside None
    reason: str
    fix: str = ""  # default: leave the flag out


REFUSALS = (
    Refusal(
        field="pp_size",
        flag="--pp-size",
        stock=(1,),
        reason="TKNP's layer blocks already spread the layers over the nodes",
    ),
    Refusal(
        field="dcp_size",
        flag="--dcp-size",
        stock=(1,),
        reason="a request's KV stays whole on its owner",
    ),
    Refusal(
        field="attn_cp_size",
        flag="--attn-cp-size",
        stock=(1,),
        reason="a request's KV stays whole on its owner",
    ),
    Refusal(
        field="ep_size",
        flag="--ep-size",
        stock=(1,),
        reason="TKNP is for dense models, which have no experts",
    ),
    Refusal(
        field="dp_size",
        flag="--dp-size",
        stock=(1,),
        reason="a TKNP pool is one replica",
        fix="use --attn-dp-size for TKNP's nodes, and start several pools behind SGLang's router",
    ),
    Refusal(
        field="enable_dp_attention",
        flag="--enable-dp-attention",
        stock=(False,),
        reason="it is the deprecated spelling of attention data parallelism",
        fix="use --attn-dp-size for TKNP's nodes",
    ),
    Refusal(
        field="load_balance_method",
        flag="--load-balance-method",
        stock=("auto",),
        reason="TKNP's controller places requests by the KV that owners can hold",
        fix="use --tknp-owner-policy",
    ),
    Refusal(
        field="speculative_algorithm",
        flag="--speculative-algorithm",
        stock=(),
        reason="a draft's rows have no owner in TKNP's step yet",
    ),
    Refusal(
        field="enable_lora",
        flag="--enable-lora",
        stock=(False,),
        reason="an adapter's batch layout does not follow rows to the root",
        fix="serve the merged checkpoint",
    ),
    Refusal(
        field="lora_paths",
        flag="--lora-paths",
        stock=([],),
        reason="an adapter's batch layout does not follow rows to the root",
        fix="serve the merged checkpoint",
    ),
    Refusal(
        field="enable_two_batch_overlap",
        flag="--enable-two-batch-overlap",
        stock=(False,),
        reason="it splits batches that TKNP's step keeps whole",
    ),
    Refusal(
        field="enable_single_batch_overlap",
        flag="--enable-single-batch-overlap",
        stock=(False,),
        reason="it is for experts, which TKNP's dense models do not have",
    ),
    Refusal(
        field="dwdp_size",
        flag="--dwdp-size",
        stock=(1,),
        reason="its ranks step on their own, and TKNP's nodes step together",
    ),
    Refusal(
        field="enable_return_hidden_states",
        flag="--enable-return-hidden-states",
        stock=(False,),
        reason="hidden states stay on the head's node, owners receive logits",
    ),
    Refusal(
        field="enable_return_aux_hidden_states",
        flag="--enable-return-aux-hidden-states",
        stock=(False,),
        reason="hidden states stay on the node of their layer",
    ),
    Refusal(
        field="return_hidden_states_mode",
        flag="--return-hidden-states-mode",
        stock=(),
        reason="hidden states stay on the head's node, owners receive logits",
    ),
    Refusal(
        field="return_aux_hidden_state_layer_ids",
        flag="--return-aux-hidden-state-layer-ids",
        stock=([],),
        reason="hidden states stay on the node of their layer",
    ),
    Refusal(
        field="enable_dp_attention_local_control_broadcast",
        flag="--enable-dp-attention-local-control-broadcast",
        stock=(False,),
        reason="nodes step together, so all must see a pause or a flush before the same step",
    ),
    Refusal(
        field="disaggregation_mode",
        flag="--disaggregation-mode",
        stock=("null",),
        reason="prefill-decode disaggregation is not tested with TKNP yet",
    ),
    Refusal(
        field="enable_memory_saver",
        flag="--enable-memory-saver",
        stock=(False,),
        reason="a release of memory would leave the other nodes without a layer block",
    ),
    Refusal(
        field="enable_hierarchical_cache",
        flag="--enable-hierarchical-cache",
        stock=(False,),
        reason="its storage layout is not tested with a pool of all layers on every node",
    ),
    Refusal(
        field="enable_lmcache",
        flag="--enable-lmcache",
        stock=(False,),
        reason="its storage layout is not tested with a pool of all layers on every node",
    ),
    Refusal(
        field="enable_kv_cache_sharding",
        flag="--enable-kv-cache-sharding",
        stock=(False,),
        reason="a request's KV stays whole on its owner",
    ),
    Refusal(
        field="enable_dp_lm_head",
        flag="--enable-dp-lm-head",
        stock=(False,),
        reason="the head is on the last node only, and owners ask it for their rows",
    ),
    Refusal(
        field="enable_tp_lm_head_all_to_all",
        flag="--enable-tp-lm-head-all-to-all",
        stock=(False,),
        reason="the head is on the last node only, and owners ask it for their rows",
    ),
    Refusal(
        field="enable_pdmux",
        flag="--enable-pdmux",
        stock=(False,),
        reason="it runs two batches at once on one node, and nodes step together",
    ),
    Refusal(
        field="enable_layernorm_sp",
        flag="--enable-layernorm-sp",
        stock=(False,),
        reason="the handoff moves whole rows between nodes",
    ),
    Refusal(
        field="dllm_algorithm",
        flag="--dllm-algorithm",
        stock=(),
        reason="diffusion decoding wants logits of other rows than TKNP's step moves",
    ),
    Refusal(
        field="elastic_ep_backend",
        flag="--elastic-ep-backend",
        stock=(),
        reason="TKNP is for dense models, which have no experts",
    ),
    Refusal(
        field="is_embedding",
        flag="--is-embedding",
        stock=(False,),
        reason="TKNP is for decoding: an embedding request has no decode step",
    ),
    Refusal(
        field="enable_mis",
        flag="--enable-mis",
        stock=(False,),
        reason="it asks for logits of other rows than TKNP's step moves",
    ),
    Refusal(
        field="tokenizer_worker_num",
        flag="--tokenizer-worker-num",
        stock=(1,),
        reason="SGLang's extra tokenizer workers load no plugins",
    ),
    Refusal(
        field="use_ray",
        flag="--use-ray",
        stock=(False,),
        reason="SGLang's Ray actors load no plugins",
    ),
    Refusal(
        field="cpu_offload_gb",
        flag="--cpu-offload-gb",
        stock=(0,),
        reason="every node holds its block in device memory",
        fix="leave it out and use more nodes",
    ),
    Refusal(
        field="weight_cache_mode",
        flag="--weight-cache-mode",
        stock=("off",),
        reason="its daemon holds whole models, and a node holds a block",
    ),
    Refusal(
        field="disable_cuda_graph_padding",
        flag="--disable-cuda-graph-padding",
        stock=(False,),
        reason="owners rarely have exactly a captured number of rows, so no graph would ever run",
        fix="use --disable-cuda-graph for exact rows",
    ),
    Refusal(
        field="enable_symm_mem",
        flag="--enable-symm-mem",
        stock=(False,),
        reason="it moves the buffers of collectives that TKNP's capture keeps in place",
    ),
    Refusal(
        field="debug_cuda_graph",
        flag="--debug-cuda-graph",
        stock=(False,),
        reason="it needs breakable graphs, and TKNP captures a decode step whole",
        fix="use --tknp-force-slots, which runs what graphs replay without graphs",
    ),
    Refusal(
        field="enable_torch_compile",
        flag="--enable-torch-compile",
        stock=(False,),
        reason="the exchange runs between a layer's projections and its attention",
    ),
)


# Variables of SGLang's that make ranks step apart, or move its scheduler out of Python.
REFUSED_VARIABLES = ("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "SGLANG_RUST_SERVER")


def refused(server_args: Any, env: Mapping[str, str] = os.environ) -> str | None:
    """The message for the first refused setting, or None."""
    for name in REFUSED_VARIABLES:
        if env.get(name, "").lower() in ("1", "true", "yes"):
            return f"{name}={env[name]} does not work with --enable-tknp; unset it"
    for refusal in REFUSALS:
        value = getattr(server_args, refusal.field)
        # None is "not named by the user" in every field of SGLang's.
        if value is not None and not any(value == stock for stock in refusal.stock):
            fix = refusal.fix or f"leave out {refusal.flag}, or --enable-tknp"
            return (
                f"{refusal.flag} ({value!r}) does not work with --enable-tknp: {refusal.reason}; "
                f"{fix}"
            )
    return None


def refused_graphs(decode: str, prefill: str, *, force_slots: bool) -> str | None:
    """The message for graph backends that TKNP does not serve, or None."""
    if prefill != "disabled":
        return (
            f"--cuda-graph-backend-prefill={prefill} does not work with --enable-tknp: prefill "
            "steps have any number of rows per owner and run eagerly; leave it out"
        )
    if force_slots and decode != "disabled":
        return (
            f"--cuda-graph-backend-decode={decode} does not work with --tknp-force-slots, which "
            "runs the captured slots without graphs; leave one of them out"
        )
    if decode not in ("full", "disabled"):
        return (
            f"--cuda-graph-backend-decode={decode} does not work with --enable-tknp: a decode step "
            "is captured whole, with its exchange; use full or disabled"
        )
    return None


def num_nodes_of(tp_size: int, attn_dp_size: int, nnodes: int) -> int:
    """N, from the flags; ValueError if they give no pool.

    Without --attn-dp-size, every host of a multi-host launch is one node.
    """
    num_nodes = attn_dp_size if attn_dp_size > 1 else nnodes
    if num_nodes < 2:
        raise ValueError(
            f"--enable-tknp needs two nodes or more, and --attn-dp-size={attn_dp_size} with "
            f"--nnodes={nnodes} gives {num_nodes}: set --attn-dp-size N, N >= 2, and --tp-size to "
            "N times the ranks of a node"
        )
    if tp_size % num_nodes:
        raise ValueError(
            f"--tp-size={tp_size} must be a multiple of the {num_nodes} nodes of --enable-tknp "
            f"(--attn-dp-size): every node has --tp-size / --attn-dp-size ranks; use "
            f"--tp-size {-(-tp_size // num_nodes) * num_nodes}"
        )
    if nnodes > 1 and num_nodes % nnodes:
        raise ValueError(
            f"--attn-dp-size={num_nodes} must be a multiple of --nnodes={nnodes}: a node of TKNP "
            f"lies on one host; use --attn-dp-size {nnodes}"
        )
    return num_nodes


def check_heads(num_heads: int, num_kv_heads: int, num_layers: int, nodes: int, ranks: int) -> None:
    """Raise ValueError unless heads and layers divide over `nodes` nodes of `ranks` ranks."""
    if nodes > num_layers:
        raise ValueError(
            f"--attn-dp-size={nodes} is more than the model's {num_layers} layers, and every node "
            f"of TKNP holds at least one; use at most {num_layers}"
        )
    if num_heads % ranks:
        raise ValueError(
            f"the model's {num_heads} attention heads do not divide over the {ranks} ranks of a "
            f"node (--tp-size / --attn-dp-size); use {_divisors(num_heads)} ranks per node"
        )
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise ValueError(
            f"the model's {num_kv_heads} KV heads and the {ranks} ranks of a node "
            "(--tp-size / --attn-dp-size) do not divide either way; use "
            f"{_divisors(num_kv_heads)} ranks per node"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
