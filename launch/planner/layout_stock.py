"""The layouts that engines have without TKNP: DP, TP, PP, DCP and attention DP.

Each is taken at its best where the paper leaves a choice open, and says where.
"""

from collections.abc import Sequence

from sglang_tknp.launch.planner.layouts import Layout, Line, Rows, Setting, Terms
from sglang_tknp.placement import place

LSE_BYTES = 4  # float32
# SGLang 0.5.23 builds the head of these on all pipeline stages, though only the last one uses it.
HEAD_ON_EVERY_STAGE = ("LlamaForCausalLM", "MistralForCausalLM")


class Dp(Layout):
    """A whole model in every replica, and a queue before each (paper, section 5.1).

    A replica is a node, or with `replica_ranks` a part of one.
    """

    name = "dp"
    title = "DP"
    uncertain = frozenset({"memory"})

    def __init__(self, setting: Setting, replica_ranks: int | None = None) -> None:
        self.replica_ranks = replica_ranks or setting.tp_size
        self.per_node = setting.tp_size // self.replica_ranks
        if self.per_node > 1:
            self.name = f"dp-tp{self.replica_ranks}"
            self.title = f"DP, TP{self.replica_ranks} replicas"
        super().__init__(setting)

    def memory(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        held, replicas = self.model.weight_bytes, self.per_node * self.num_nodes
        room = self.setting.node_memory // self.per_node - held
        tokens = self.tokens_in(room, self.replica_ranks)
        return (held * self.per_node,) * self.num_nodes, (tokens,) * replicas

    def arrange(self, owners: Rows) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
        alone = tuple((owner,) for owner in owners)
        return alone, alone

    def fixed_terms(self, rows: Rows) -> Terms:
        return self.base_terms(sum(rows), self.replica_ranks)

    def lines(self, rows: Rows, tokens: Sequence[float]) -> list[Line]:
        token = self.costs.attention_token(self.replica_ranks)
        return self.attention_lines(rows, tokens, token, self.num_layers)


class Tp(Layout):
    """One replica over all ranks: all-reduces cross nodes, KV heads repeat beyond Hkv ranks."""

    name = "tp"
    title = "TP"

    @classmethod
    def why_not(cls, setting: Setting) -> str | None:
        ranks, model = setting.num_nodes * setting.tp_size, setting.model
        if model.num_heads % ranks:
            return f"{model.num_heads} heads do not divide over {ranks} ranks"
        return None

    def memory(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        held = (self.model.weight_bytes + self.repeated_bytes) // self.num_nodes
        room = (self.setting.sharded_memory - held) * self.num_nodes
        return (held,) * self.num_nodes, (self.tokens_in(room, self.num_ranks) * self.kv_shards,)

    @property
    def kv_shards(self) -> int:
        """Ranks that share one KV head's context; 1: each holds all of it."""
        return 1

    @property
    def repeated_bytes(self) -> int:
        """K and V projections that ranks beyond Hkv hold again."""
        copies = max(1, self.num_ranks // self.model.num_kv_heads)
        return (copies - 1) * sum(
            int(p.weight_bytes * p.kv_share) for layer in self.model.layers for p in layer.attention
        )

    def fixed_terms(self, rows: Rows) -> Terms:
        return self.base_terms(sum(rows), self.num_ranks)

    def lines(self, rows: Rows, tokens: Sequence[float]) -> list[Line]:
        token = self.costs.attention_token(self.num_ranks) / self.kv_shards
        return self.attention_lines(rows, tokens, token, self.num_layers)


class Dcp(Tp):
    """TP over all ranks, the ranks that would repeat a KV head sharing its context instead.

    Group size D = T_all / Hkv (lecture, decode context parallelism). vLLM and SGLang take
    consecutive ranks, so a group lies in one node where D <= T; the paper describes groups across
    nodes. `Setting.dcp_span` chooses.
    """

    name = "dcp"
    title = "DCP"
    uncertain = frozenset({"memory", "network", "dcp_span"})

    @classmethod
    def why_not(cls, setting: Setting) -> str | None:
        ranks, heads = setting.num_nodes * setting.tp_size, setting.model.num_kv_heads
        if ranks <= heads:
            return f"{ranks} ranks repeat none of {heads} KV heads"
        if ranks % heads:
            return f"{ranks} ranks do not divide over {heads} KV heads"
        return super().why_not(setting)

    @property
    def kv_shards(self) -> int:
        return self.num_ranks // self.model.num_kv_heads

    def fixed_terms(self, rows: Rows) -> Terms:
        terms = super().fixed_terms(rows)
        return {**terms, "attention merge": self.num_layers * self.merge_seconds(sum(rows))}

    def merge_bytes(self, rows: float) -> tuple[float, float, float]:
        """Of a rank and layer: its queries, its partial outputs, its log-sum-exps (equation 4).

        It attends the queries of its whole group, D times its own heads.
        """
        model = self.model
        heads = rows * model.num_heads / self.num_ranks
        query = heads * model.head_dim * model.element_bytes
        return query, self.kv_shards * query, self.kv_shards * heads * LSE_BYTES

    def merge_seconds(self, rows: float) -> float:
        """Of a layer: gather queries and log-sum-exps, reduce-scatter outputs.

        In a node, three collectives of its group. Across nodes, three phases of messages between
        peers, where TKNP's exchange has two, each with the bytes of D - 1 peers.
        """
        hw, shards = self.setting.hardware, self.kv_shards
        query, output, exponents = self.merge_bytes(rows)
        sent = (shards - 1) * (query + exponents + output / shards)
        if self.setting.dcp_span == "node" and shards <= self.tp_size:
            return 3 * hw.node_allreduce_latency + sent / hw.node_allreduce_bandwidth
        return 3 * hw.exchange_latency + sent / hw.message_bandwidth


class Pp(Layout):
    """One stage per node, TP inside, up to a microbatch per stage in flight (lecture, 3.6.4).

    A request gets a token when its microbatch has passed all stages. With `pp_overlap` 1 stages
    never wait for each other but for the hop; with 0 one stage works at a time. With fewer
    `stages` than nodes there are several such pipelines, and a queue before each.
    """

    name = "pp"
    title = "PP"
    uncertain = frozenset({"memory", "network", "pp_overlap"})

    def __init__(self, setting: Setting, stages: int | None = None) -> None:
        self.stages = stages or setting.num_nodes
        self.pipelines = setting.num_nodes // self.stages
        if self.pipelines > 1:
            self.name = f"pp{self.stages}"
            self.title = f"{self.pipelines} x PP{self.stages}"
        super().__init__(setting)

    @classmethod
    def why_not(cls, setting: Setting) -> str | None:
        if setting.num_nodes > setting.model.num_layers:
            return f"the model has only {setting.model.num_layers} layers"
        return None

    def memory(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Layers as evenly as they go, as SGLang splits them: not balanced by bytes."""
        base, more = divmod(self.num_layers, self.stages)
        blocks = [base + (stage < more) for stage in range(self.stages)]
        *early, last = place(self.model.sizes, blocks).node_bytes
        if self.model.architecture in HEAD_ON_EVERY_STAGE:
            early = [held + self.model.sizes.head for held in early]
        weights = (*early, last)
        room = min(
            self.tokens_in(self.setting.sharded_memory - held, self.tp_size) * self.num_layers // n
            for held, n in zip(weights, blocks, strict=True)
        )
        return weights * self.pipelines, (room,) * self.pipelines

    def arrange(self, owners: Rows) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
        alone = tuple((owner,) for owner in owners)
        return alone, alone

    def microbatches(self, rows: int) -> int:
        return max(1, min(self.stages, rows))

    def waves(self, rows: int) -> float:
        """Stage times from a request's token to its next, over those with full overlap.

        Without overlap every microbatch waits for all others; a lone one waits for nobody.
        """
        return 1 + (1 - self.setting.pp_overlap) * (self.microbatches(rows) - 1)

    def fixed_terms(self, rows: Rows) -> Terms:
        """Every stage repeats its weight reads for every microbatch (paper, section 3.1)."""
        some = -(-sum(rows) // self.microbatches(sum(rows)))
        terms = self.base_terms(some, self.tp_size)
        terms["step overhead"] *= self.stages  # every stage has a scheduler
        hidden = 2 * some * self.model.hidden_size * self.model.element_bytes / self.tp_size
        terms["hops"] = self.stages * self.costs.message(hidden)
        waves = self.waves(sum(rows))
        return {name: waves * seconds for name, seconds in terms.items()}

    def lines(self, rows: Rows, tokens: Sequence[float]) -> list[Line]:
        """A stage attends one microbatch at a time."""
        parts = self.microbatches(sum(rows))
        some = -(-sum(rows) // parts)
        token = self.costs.attention_token(self.tp_size)
        start = self.costs.attention_rows(some) + token * sum(tokens) / parts
        slower = self.waves(sum(rows)) * self.num_layers
        return [(slower * start, slower * token * sum(rows) / parts)]


class AttentionDp(Layout):
    """Attention weights on every node, MLPs over all ranks (paper, section 2.2; SGLang's own).

    Nodes step together: the MLP waits for the largest batch, and all pad to it (lecture, lockstep
    padding). Each layer's hidden states are gathered before the MLP and scattered behind it.
    """

    name = "attention-dp"
    title = "attention DP"
    splits_requests = True

    @classmethod
    def why_not(cls, setting: Setting) -> str | None:
        ranks = setting.num_nodes * setting.tp_size
        if setting.model.inner_size % ranks:
            return f"an MLP of {setting.model.inner_size} does not divide over {ranks} ranks"
        return None

    def memory(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        mlp = sum(p.weight_bytes for layer in self.model.layers for p in layer.mlp)
        split = mlp + self.model.sizes.head  # SGLang splits these over all ranks
        held = self.model.weight_bytes - split + split // self.num_nodes
        room = self.tokens_in(self.setting.sharded_memory - held, self.tp_size)
        return (held,) * self.num_nodes, (room,) * self.num_nodes

    def arrange(self, owners: Rows) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
        return tuple((owner,) for owner in owners), (owners,)

    def fixed_terms(self, rows: Rows) -> Terms:
        own = max(rows)
        padded = own * self.num_nodes
        dense = self.costs.halves(own, self.tp_size, padded, self.num_ranks)
        return self.terms_of(dense, self.costs.head(padded, self.num_ranks), own)

    def lines(self, rows: Rows, tokens: Sequence[float]) -> list[Line]:
        token = self.costs.attention_token(self.tp_size)
        return self.attention_lines(rows, tokens, token, self.num_layers)
