"""What a pool tells: the start-up table, /server_info, /metrics, and what it refuses."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_tknp import compat
from sglang_tknp.config import TknpConfig
from sglang_tknp.model_ext.stage import Stage, current_stage
from sglang_tknp.placement import format_table
from sglang_tknp.scheduler_ext import reports
from sglang_tknp.scheduler_ext.metrics import StepMetrics

logger = logging.getLogger(__name__)


def log_pool(scheduler: Any) -> None:
    """Log the table of nodes, once; reached by all ranks."""
    stage = current_stage()
    start_metrics(scheduler, stage)
    kv_tokens: list[Any] = [None] * stage.topology.num_nodes
    own = int(scheduler.max_total_num_tokens)
    torch.distributed.all_gather_object(kv_tokens, own, group=stage.peers.cpu_group)
    if stage.topology.rank == 0:
        table = format_table(stage.placement, stage.model_bytes, kv_tokens)
        logger.info("TKNP pool is ready, %d KV tokens in all:\n%s", sum(kv_tokens), table)


def start_reports(scheduler: Any, address: str) -> None:
    """Tell the controller what this node can hold, and from now on what it holds."""
    # The limit is for the controller's queue: what it has sent has room here, also in a burst.
    scheduler.max_queued_requests = None
    reporter = reports.start(scheduler, address)
    if reporter is not None:
        current_stage().step.after_step.append(reporter.report_when_due)
        scheduler.idle_sleeper.before_sleep.append(reporter.report_before_sleep)
        scheduler.idle_sleeper.while_waiting.append(reporter.report_when_due)


def after_get_init_info(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Target: Scheduler.get_init_info, on every rank: the longest prompt is the largest node's.

    SGLang takes the first node's limits for all, and that node's layers leave it the least room.
    """
    group = compat.parallel().tp_group
    for name in ("max_total_num_tokens", "max_req_input_len"):
        limits: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(limits, info[name], group=group.cpu_group)
        info[name] = max(limits)
    return info


def start_metrics(scheduler: Any, stage: Stage) -> None:
    """On the first rank of a node: count its exchange, after every step and when it goes idle."""
    if not compat.metrics_enabled() or stage.topology.tp_rank != 0:
        return
    metrics = StepMetrics(
        stage.step,
        stage.node,
        int(scheduler.max_total_num_tokens),
        stage.placement.blocks[stage.node],
    )
    stage.step.after_step.append(metrics.update_when_due)
    scheduler.idle_sleeper.before_sleep.append(metrics.update)


def after_add_topology(result: Any, controller: Any, state: dict[str, Any]) -> None:
    """Target: SchedulerInternalStateController._add_topology, for /server_info."""
    stage = current_stage()
    start, end = stage.placement.bounds[stage.node]
    state["tknp"] = {
        "num_nodes": stage.topology.num_nodes,
        "ranks_per_node": stage.topology.tp_size,
        "node": stage.node,
        "layer_blocks": list(stage.placement.blocks),
        "layers": [start, end - 1],
        "weight_bytes": stage.placement.node_bytes[stage.node],
        "kv_tokens": int(controller.scheduler.max_total_num_tokens),
        "exchange_timeout": TknpConfig.from_env().exchange_timeout,
        "num_steps": stage.step.num_steps,
        "decode_slots": decode_slots(stage.step),
        "exchange": {
            kind: {"messages": traffic.messages, "bytes": traffic.bytes}
            for kind, traffic in stage.step.exchange.stats.items()
        },
    }


def decode_slots(step: Any) -> dict[str, Any] | None:
    """The captured layouts, as slots per owner, and how many steps ran on each; None if none."""
    if step.slots is None:
        return None
    return {
        "layouts": [list(layout.rows) for layout in (*step.slots.even, *step.slots.uneven)],
        "replays": {",".join(map(str, layout.rows)): n for layout, n in step.replays.items()},
        "fallbacks": step.num_fallbacks,
    }


def around_weight_update(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Targets: the ways to update weights while serving, on every rank."""
    message = "--enable-tknp does not support weight updates while serving: restart the pool"
    return compat.refused_update(request, message)


def before_validate_one_request(manager: Any, request: Any, *_: Any, **__: Any) -> None:
    """Target: TokenizerManager._validate_one_request; ValueError is HTTP 400 to the client."""
    for name in ("input_embeds", "positional_embed_overrides"):
        if getattr(request, name, None) is not None and TknpConfig.from_env().enable:
            raise ValueError(
                f"{name} does not work with --enable-tknp: the first node embeds token ids; send "
                "text or input_ids"
            )
