"""The systems of the comparison: what each one's server is started with, and where it can run.

All get the same W ranks in nodes of T, the same memory per rank and the same flags; only the
parallel layout differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compare_toy import PAGE_SIZE, Toy

# A request is let in only when its whole output has room, as the paper's are in effect: 64 tokens
# of input for each of output. SGLang would otherwise let in more, and retract some later.
RESERVE_WHOLE = {"SGLANG_INIT_NEW_TOKEN_RATIO": "1.0", "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "1.0"}
PLUGIN = Path(__file__).parent / "compare_plugin"


@dataclass(frozen=True)
class Pool:
    """W = nodes x ranks_per_node ranks."""

    nodes: int = 2
    ranks_per_node: int = 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Settings:
    """What is equal in all systems."""

    model: Path
    device_memory_gb: float | None  # pretended, on a CPU; None: what there is
    max_running: int = 128
    context_length: int = 512
    chunked_prefill: int = 256
    matmul: str = "medium"
    admission: str = "whole"  # or "stock": SGLang's own guess of how long outputs get
    dp_balance: str = "auto"


def layout_flags(system: str, pool: Pool) -> list[str]:
    nodes, per_node, ranks = pool.nodes, pool.ranks_per_node, pool.ranks
    flags = {
        "tknp": f"--enable-tknp --tp-size {ranks} --attn-dp-size {nodes}",
        "dp": f"--dp-size {nodes} --tp-size {per_node}",
        "tp": f"--tp-size {ranks}",
        "pp": f"--pp-size {nodes} --tp-size {per_node}",
        "attention-dp": f"--tp-size {ranks} --attn-dp-size {nodes}",
        "dcp": f"--tp-size {ranks} --dcp-size {nodes}",
    }
    return flags[system].split()


ON_CPU = {
    "attention-dp": "SGLang pads its steps with what has no CPU kernel",
    "dcp": "SGLang has it in GPU attention backends only",
}
NAMES = ("tknp", "dp", "tp", "pp", "attention-dp", "dcp")


def why_not(system: str, pool: Pool, toy: Toy, cpu: bool) -> str | None:
    """The reason why `system` cannot run this model on this platform, or None."""
    if system == "tp":
        return why_not_tp(pool.ranks, toy, cpu)
    if system == "pp" and toy.tied:
        return "SGLang gives a tied head to no last pipeline stage, and fails"
    return ON_CPU.get(system) if cpu else None


def why_not_tp(ranks: int, toy: Toy, cpu: bool) -> str | None:
    repeats = ranks % toy.kv_heads == 0  # each KV head on several ranks
    if toy.heads % ranks or not (repeats or toy.kv_heads % ranks == 0):
        return f"{toy.heads} heads, {toy.kv_heads} for KV, do not divide over {ranks} ranks"
    if cpu and toy.kv_heads < ranks:
        return "on CPU SGLang fails to load a model with fewer KV heads than ranks"
    return None


def server_flags(system: str, pool: Pool, settings: Settings) -> list[str]:
    """Arguments of sglang.launch_server, without host and port."""
    pretended = ""
    if settings.device_memory_gb is not None:
        pretended = f" --dtype float32 --tknp-device-memory-gb {settings.device_memory_gb}"
    common = (
        f"--model-path {settings.model} --disable-radix-cache{pretended}"
        f" --page-size {PAGE_SIZE} --random-seed 1 --max-running-requests {settings.max_running}"
        f" --context-length {settings.context_length}"
        f" --chunked-prefill-size {settings.chunked_prefill} --enable-metrics"
    )
    flags = common.split() + layout_flags(system, pool)
    if system == "dp":
        flags += ["--load-balance-method", settings.dp_balance]
    return flags


def server_env(system: str, settings: Settings, site: Sequence[str]) -> dict[str, str]:
    """Variables that the server needs; `site` is what else has to be on its PYTHONPATH."""
    env = {
        "PYTHONPATH": ":".join([str(PLUGIN), *site]),
        "TKNP_COMPARE_MATMUL": settings.matmul,
    }
    if settings.admission == "whole":
        env |= RESERVE_WHOLE
    if system in ("dp", "attention-dp"):
        env["TKNP_COMPARE_STOCK_DP"] = "1"
    return env
