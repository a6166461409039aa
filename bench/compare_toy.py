"""The toy model of the comparison, and its memory, chosen from the paper's ratios before measuring.

The paper's node has 560 GiB for one copy of Llama 3.1 405B (454 GiB) and KV: a DP replica keeps 106
GiB, which is 6, 3 or 2 requests of 32K, 64K or 96K tokens and 1024 outputs. The toy keeps these
ratios. Everything else follows from what a CPU can do:

- A request must be short, for its prompt is prefilled here (the paper's pool only decodes). KV per
  token must then be large beside the weights, so that a few hundred tokens fill a rank: one very
  wide KV head, narrow hidden rows.
- One KV head per rank of a node, as 8 heads over 8 GPUs: TP over more nodes repeats KV.
- float32, because torch's bfloat16 attention on a CPU reads KV at a tenth of its float32's speed
  (1 against 10 GB/s): attention would take 90 % of a step.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

GIB = 1 << 30
# SGLang keeps 1 - this of a rank's memory for other things, on our CPU platform.
STATIC_FRACTION = 0.9
ELEMENT_BYTES = 4
# vLLM's. Rows of one token each are gathered at half the speed.
PAGE_SIZE = 16


@dataclass(frozen=True)
class PaperRatios:
    """Llama 3.1 405B on nodes of 8 H100 (paper, sections 3.2 and 5)."""

    weights_gib: float = 454
    node_gib: float = 560
    kv_gib_per_1k_tokens: float = 126 * 2 * 8 * 128 * 2 * 1024 / GIB
    output_tokens: int = 1024

    def resident_per_replica(self, context: int) -> float:
        """Requests of `context` input tokens that fit beside one copy of the weights."""
        kv = self.kv_gib_per_1k_tokens * (context + self.output_tokens) / 1024
        return (self.node_gib - self.weights_gib) / kv


PAPER = PaperRatios()


@dataclass(frozen=True)
class Toy:
    """Shape of the random Llama checkpoint, float32; sizes in elements."""

    hidden: int = 768
    intermediate: int = 2048
    layers: int = 8
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 2048
    vocab: int = 2048
    positions: int = 512
    input_tokens: int = 32
    tied: bool = False

    @property
    def layer_bytes(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return ELEMENT_BYTES * (attention + 3 * self.hidden * self.intermediate + 2 * self.hidden)

    @property
    def endpoint_bytes(self) -> int:
        """Of the embedding, and again of the head."""
        return ELEMENT_BYTES * self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        norm = ELEMENT_BYTES * self.hidden
        endpoints = self.endpoint_bytes * (1 if self.tied else 2)
        return self.layers * self.layer_bytes + endpoints + norm

    def config(self) -> dict[str, Any]:
        """The fields of its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "float32",
        }

    def kv_bytes_per_token(self, ranks: int = 1, layers: int | None = None) -> int:
        """On one of `ranks` ranks that share the KV heads; a lone head is repeated."""
        heads = max(1, self.kv_heads // ranks)
        return ELEMENT_BYTES * 2 * heads * self.head_dim * (layers or self.layers)

    @property
    def rank_bytes(self) -> int:
        """Memory for weights and KV of one rank that could hold a whole copy (T = 1)."""
        return int(self.weight_bytes * PAPER.node_gib / PAPER.weights_gib)

    @property
    def rope_bytes(self) -> int:
        """SGLang's table of cosines and sines: every rank has it, whatever the layout."""
        return ELEMENT_BYTES * self.positions * self.head_dim

    def device_memory_gb(self, ranks_per_node: int = 1) -> float:
        """What a rank pretends to have, in GiB; the table comes on top of the paper's ratios."""
        needed = self.rank_bytes / ranks_per_node + self.rope_bytes
        return round(needed / STATIC_FRACTION / GIB, 5)

    def request_tokens(self, context: int) -> int:
        """Input and output of the request that stands for the paper's `context` input tokens."""
        kv_bytes = self.rank_bytes - self.weight_bytes
        return int(kv_bytes / PAPER.resident_per_replica(context) / self.kv_bytes_per_token())

    @property
    def context_length(self) -> int:
        """What servers are told: a power of two above every request of the comparison."""
        return 512 if self.positions <= 512 else 2048

    def lengths(self, context: int) -> tuple[int, int]:
        return self.input_tokens, self.request_tokens(context) - self.input_tokens


def ratios(
    toy: Toy, ranks: int, contexts: Sequence[int], machine: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Rows of (what, paper, toy); with what compare_machine.py found also of time."""
    rows: list[dict[str, Any]] = [
        row("weights / memory per node", PAPER.weights_gib / PAPER.node_gib, share_of_weights(toy)),
        row("KV heads per rank of a node", 1, toy.kv_heads),
    ]
    kv_bytes = toy.rank_bytes - toy.weight_bytes
    for context in contexts:
        one = toy.request_tokens(context) * toy.kv_bytes_per_token()
        paper = int(PAPER.resident_per_replica(context))
        rows.append(row(f"requests per replica, {context // 1024}K", paper, kv_bytes // one))
    pools = [
        (ranks * node - copy) / (ranks * (node - copy))
        for node, copy in ((PAPER.node_gib, PAPER.weights_gib), (toy.rank_bytes, toy.weight_bytes))
    ]
    if machine is not None:
        share = (machine["paper_attention_share"], machine["attention_share"])
        rows.append(row("attention's share of a full step at the edge", *share))
        rows.append(row("dense work of a full pool / of a full replica", *machine["dense_growth"]))
    return [*rows, row(f"KV of a pool of {ranks} / KV of {ranks} replicas", *pools)]


def share_of_weights(toy: Toy) -> float:
    return toy.weight_bytes / toy.rank_bytes


def row(what: str, paper: float, here: float) -> dict[str, Any]:
    return {"what": what, "paper": round(paper, 3), "toy": round(here, 3)}


# SmolLM2-135M, whose attention decides from few requests on; the same memory ratio.
SMOLLM2 = Toy(
    hidden=576,
    intermediate=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49_152,
    positions=8192,
    tied=True,
)


def empty(toy: Toy) -> Toy:
    """As many layers that do almost nothing, in the same memory: what is left is the server."""
    return replace(toy, hidden=64, intermediate=64, heads=2, kv_heads=1, head_dim=32, tied=False)


def split_heads(toy: Toy) -> Toy:
    """The same bytes in two KV heads of half the width, which TP over two ranks can divide."""
    return replace(toy, heads=2 * toy.heads, kv_heads=2 * toy.kv_heads, head_dim=toy.head_dim // 2)


def prepare_toy(toy: Toy, cache: Path) -> Path:
    """Folder of the checkpoint, made once for each shape."""
    shape = json.dumps(asdict(toy), sort_keys=True)
    folder = cache / f"toy-{toy.layers}x{toy.hidden}-{toy.kv_heads}x{toy.head_dim}"
    if (folder / "toy.json").exists() and (folder / "toy.json").read_text() == shape:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(toy, folder)
    (folder / "toy.json").write_text(shape)  # last: a folder without it is made again
    return folder


def write_checkpoint(toy: Toy, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig.from_dict({**toy.config(), **ends})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # wide enough that tokens depend on the prompt
                parameter.normal_(0, 2 * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    write_tokenizer(toy.vocab, folder)


def write_tokenizer(vocab: int, folder: Path) -> None:
    """One word per id, so that a text has exactly the tokens that we wrote."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
