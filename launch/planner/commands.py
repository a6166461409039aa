"""How each layout is launched with SGLang 0.5.23, and which it has no code for."""

from dataclasses import dataclass

from sglang_tknp.launch.planner.layouts import Setting

_HOSTS = "--nnodes {nodes} --node-rank $RANK --dist-init-addr $FIRST_HOST:5000"
MANY = 8  # replicas, of which not every address is written out
_ATTENTION_DP_MODELS = ("Qwen3ForCausalLM",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a launch command says beside its layout."""

    model_path: str = "$MODEL"
    flags: tuple[str, ...] = ()  # of any server
    tknp_flags: tuple[str, ...] = ()


PLAIN = Server()


def why_not_launched(name: str, setting: Setting) -> str | None:
    """Why SGLang 0.5.23 cannot run a layout; None if it can."""
    if name == "tknp-dual":
        return "not implemented: planned only"
    if name == "attention-dp" and setting.model.architecture not in _ATTENTION_DP_MODELS:
        return (
            f"SGLang's {setting.model.architecture} splits attention over all ranks: it has no "
            "attention DP"
        )
    return None


def launch(name: str, setting: Setting, options: Server = PLAIN) -> tuple[str, ...]:
    """The commands of one pool, one line each; a line may be for every host, with its own $RANK."""
    nodes, tp = setting.num_nodes, setting.tp_size
    ranks = nodes * tp
    words = ["python -m sglang.launch_server --model-path", options.model_path, *options.flags]
    server = " ".join(words)
    hosts = _HOSTS.format(nodes=nodes)
    if name == "tknp":
        tknp = " ".join(["--enable-tknp", *options.tknp_flags])
        return (f"{server} {tknp} --tp-size {ranks} --attn-dp-size {nodes} {hosts}",)
    if name == "dp":
        return _behind_router(f"{server} --tp-size {tp}", nodes)
    if name.startswith("dp-tp"):
        replica = int(name.removeprefix("dp-tp"))
        return _behind_router(f"{server} --tp-size {replica} --dp-size {tp // replica}", nodes)
    if name == "tp":
        return (f"{server} --tp-size {ranks} {hosts}",)
    if name == "pp":
        return (f"{server} --tp-size {tp} --pp-size {nodes} {hosts}",)
    if name.startswith("pp"):
        stages = int(name.removeprefix("pp"))
        pipeline = _HOSTS.format(nodes=stages)
        return _behind_router(
            f"{server} --tp-size {tp} --pp-size {stages} {pipeline}", nodes // stages
        )
    if name == "dcp":
        shards = ranks // setting.model.num_kv_heads
        return (f"{server} --tp-size {ranks} --dcp-size {shards} {hosts}",)
    assert name == "attention-dp", name
    return (f"{server} --tp-size {ranks} --attn-dp-size {nodes} {hosts}",)


def _behind_router(server: str, replicas: int) -> tuple[str, ...]:
    """Every replica is a server of its own, and SGLang's router (the package sglang-router) stands
    before them, with the policy that is simulated."""
    if replicas == 1:
        return (server,)
    urls = " ".join(f"http://$HOST{i}:30000" for i in range(replicas))
    if replicas > MANY:
        urls = f"http://$HOST0:30000 ... http://$HOST{replicas - 1}:30000"
    return (
        f"{server} --host 0.0.0.0 --port 30000",
        f"python -m sglang_router.launch_router --policy round_robin --worker-urls {urls}",
    )
