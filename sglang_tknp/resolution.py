"""TKNP's part of SGLang's argument resolution: defaults, and refusals with their reasons.

Each step runs in the launcher at the place of the SGLang step that it wraps.
"""

import logging
from collections.abc import Callable
from typing import Any

from sglang_tknp import compat, refusals
from sglang_tknp.config import TknpConfig
from sglang_tknp.placement import parse_layer_blocks
from sglang_tknp.plugin import fail_closed

logger = logging.getLogger(__name__)

# On the command line a refusal is one line on stderr; to a caller of engine() it is a ValueError.
exit_on_refusal = False

# Slots per owner of --tknp-force-slots, where the user names no --cuda-graph-bs-decode.
FORCED_SLOTS = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]


def _check(check: Callable[..., Any], *args: Any) -> Any:
    return fail_closed(check, *args) if exit_on_refusal else check(*args)


def resolve_layout(server_args: Any) -> None:
    """First step of all: what TKNP refuses, and N from --nnodes when the user gave none."""
    _check(_resolve_layout, server_args)


def _resolve_layout(server_args: Any) -> None:
    settings = TknpConfig.from_env()
    message = refusals.refused(server_args)
    if message:
        raise ValueError(message)
    if settings.device_memory_gb is not None and not compat.cpu_platform_active():
        raise ValueError(
            f"--tknp-device-memory-gb={settings.device_memory_gb:g} works on TKNP's CPU platform "
            "only: a GPU's memory is what it has; use --mem-fraction-static or --max-total-tokens"
        )
    if settings.prefix_slack is not None and server_args.disable_radix_cache:
        raise ValueError(
            f"--tknp-prefix-slack={settings.prefix_slack} does nothing with --disable-radix-cache: "
            "no owner keeps a prefix; leave one of them out"
        )
    num_nodes = refusals.num_nodes_of(
        server_args.tp_size, server_args.attn_dp_size, server_args.nnodes
    )
    if num_nodes != server_args.attn_dp_size:
        compat.declare(server_args, attn_dp_size=num_nodes)


def resolve_graphs(server_args: Any) -> None:
    """Decode graphs only, and the slots of --tknp-force-slots."""
    _check(_resolve_graphs, server_args)


def _resolve_graphs(server_args: Any) -> None:
    cfg = compat.resolving(server_args)
    compat.declare(
        server_args,
        disable_prefill_cuda_graph=True,
        # Its dummy steps have each node's own batch for all, and its timings wait for all ranks.
        disable_flashinfer_autotune=True,
    )
    if TknpConfig.from_env().force_slots:
        compat.declare(server_args, disable_decode_cuda_graph=True)
        if cfg.cuda_graph_bs_decode is None:
            largest = cfg.cuda_graph_max_bs_decode or FORCED_SLOTS[-1]
            sizes = [size for size in FORCED_SLOTS if size < largest]
            compat.declare(server_args, cuda_graph_bs_decode=[*sizes, largest])


def check_model_kind(server_args: Any) -> None:
    """Before SGLang's own rules for kinds of models, which know nothing of TKNP."""
    _check(_check_model_kind, server_args)


def _check_model_kind(server_args: Any) -> None:
    from sglang_tknp.model_ext.checks import refusal

    model_config = compat.model_config(server_args)
    message = refusal(model_config, model_config.hf_config.architectures or ())
    if message:
        raise ValueError(message)


def check_model_size(server_args: Any) -> None:
    """The model's layers and heads against the nodes, and what is captured."""
    _check(_check_model_size, server_args)
    _check(_check_graphs, server_args)


def _check_graphs(server_args: Any) -> None:
    """By now all of SGLang's ways to name a graph backend have come together."""
    message = refusals.refused_graphs(
        *compat.graph_backends(server_args), force_slots=TknpConfig.from_env().force_slots
    )
    if message:
        raise ValueError(message)


def _check_model_size(server_args: Any) -> None:
    cfg = compat.resolving(server_args)
    model_config = compat.model_config(server_args)
    num_nodes, num_layers = cfg.attn_dp_size, model_config.hf_text_config.num_hidden_layers
    refusals.check_heads(
        model_config.num_attention_heads,
        model_config.get_total_num_kv_heads(),
        num_layers,
        num_nodes,
        cfg.tp_size // num_nodes,
    )
    layer_blocks = TknpConfig.from_env().layer_blocks
    if layer_blocks is not None:
        parse_layer_blocks(layer_blocks, num_layers, num_nodes)


def _before(step: Callable[[Any], None]) -> Callable[..., None]:
    """Run `step` before SGLang's own step, where TKNP is on: a program may start stock engines."""

    def run(server_args: Any, previous: Callable[[Any], None]) -> None:
        if TknpConfig.from_env().enable:
            step(server_args)
        previous(server_args)

    return run


# SGLang's steps, in their order, and what TKNP does before each.
STEPS = {
    "handle_deprecated_dp_attention": _before(resolve_layout),
    "handle_cuda_graph_config": _before(resolve_graphs),
    "handle_model_specific_adjustments": _before(check_model_kind),
    "handle_other_validations": _before(check_model_size),
}
