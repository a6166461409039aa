"""What is asked of every system: the points of the comparison, as SGLang's client runs them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from compare_predict import layout_of
from compare_toy import PAPER, Toy

HEADLINE_CONTEXT = 64 * 1024
CONTEXTS = (32 * 1024, 64 * 1024, 96 * 1024)
# The paper's 100 ms per output token is 1.25 times a full TKNP pool's step; so is this.
SLO_MS_PER_TOKEN = 120
# Quantiles of the paper's mixed inputs: least, median, largest; 64K at 7/8; the last, at 3/4,
# makes the longest quarter hold its published share of all tokens. Geometric in between.
MIXED_QUANTILES = ((0, 8223), (0.5, 19048), (0.75, 50500), (0.875, 65536), (1, 126848))
MIXED_INPUT = 16


@dataclass(frozen=True)
class Point:
    """One run of the client; `context` is the paper's that the request stands for."""

    kind: str  # fixed, poisson or mixed
    requests: int
    rate: float = math.inf  # requests per second; infinite: all at once
    context: int = HEADLINE_CONTEXT
    repeats: int = 1  # rounds that it takes part in

    @property
    def name(self) -> str:
        rate = "burst" if math.isinf(self.rate) else f"{self.rate:g}/s"
        length = f"{self.context // 1024}K" if self.context >= 1024 else str(self.context)
        length = "mixed" if self.kind == "mixed" else length
        return f"{length} {self.requests} {rate}"


def resident(toy: Toy, nodes: int, context: int) -> tuple[int, int]:
    """Whole requests that the pool holds at once: with DP, with TKNP (T = 1)."""
    size = toy.request_tokens(context)
    dp, tknp = (sum(layout_of(toy, name, nodes).resident(size)) for name in ("dp", "tknp"))
    return dp, tknp


def plan(toy: Toy, nodes: int, quick: bool, rounds: int) -> list[Point]:
    """From what fits everywhere to several waves; the edge is where TKNP's pool is just full."""
    dp, edge = resident(toy, nodes, HEADLINE_CONTEXT)
    points = [Point("fixed", nodes * 2, repeats=rounds), Point("fixed", edge, repeats=rounds)]
    # The paper's 0.5, 1 and 2 requests/s are half, one and two times what TKNP's pool completes.
    if quick:
        return [*points, Point("poisson", 16, 1.0)]
    points += [Point("fixed", n) for n in (nodes, dp, edge // 2, 2 * edge)]
    for context in (CONTEXTS[0], CONTEXTS[2]):
        few, many = resident(toy, nodes, context)
        points += [Point("fixed", n, context=context) for n in (few, many)]
    points += [Point("poisson", 24, rate) for rate in (0.5, 1.0, 2.0)]
    return [*points, Point("mixed", 48), Point("mixed", 48, 1.0)]


def edge_of(toy: Toy, nodes: int, context: int, rounds: int) -> Point:
    """As many requests at once as TKNP's pool holds."""
    _, edge = resident(toy, nodes, context)
    return Point("fixed", edge, context=context, repeats=rounds)


def mixed_lengths(toy: Toy, count: int) -> list[int]:
    """Tokens of whole requests, scaled so that 64K stands for the toy's; in a drawn order."""
    scale = toy.request_tokens(HEADLINE_CONTEXT) / (HEADLINE_CONTEXT + PAPER.output_tokens)
    lengths = [round(scale * quantile((i + 0.5) / count)) for i in range(count)]
    Random(42).shuffle(lengths)
    return lengths


def quantile(share: float) -> float:
    for (low, a), (high, b) in zip(MIXED_QUANTILES, MIXED_QUANTILES[1:], strict=False):
        if share <= high:
            return a * (b / a) ** ((share - low) / (high - low))
    raise ValueError(f"a share of {share} is above 1")


def write_mixed(toy: Toy, count: int, path: Path) -> None:
    """A dataset for the client: our tokenizer makes one token of each word."""
    draw = Random(7)
    with path.open("w") as out:
        for length in mixed_lengths(toy, count):
            sizes = (MIXED_INPUT, max(length - MIXED_INPUT, 8))
            texts = [" ".join(f"w{draw.randrange(3, toy.vocab)}" for _ in range(n)) for n in sizes]
            out.write(json.dumps({"conversations": [{"content": text} for text in texts]}) + "\n")


def client_args(point: Point, toy: Toy, model: Path, port: int, folder: Path) -> list[str]:
    """Arguments of `python -m sglang.benchmark.serving`; its results go to client.jsonl."""
    common = (
        f"--base-url http://127.0.0.1:{port} --model {model} --tokenizer {model} --backend sglang"
        f" --num-prompts {point.requests} --request-rate {point.rate} --warmup-requests 0"
        f" --seed 42 --disable-tqdm --output-details --output-file {folder / 'client.jsonl'}"
    )
    if point.kind == "mixed":
        data = folder / f"mixed-{point.requests}.jsonl"
        write_mixed(toy, point.requests, data)
        return [*common.split(), "--dataset-name", "custom", "--dataset-path", str(data)]
    inputs, outputs = toy.lengths(point.context)
    lengths = (
        "--dataset-name random-ids --tokenize-prompt --random-range-ratio 1.0"
        f" --random-input-len {inputs} --random-output-len {outputs}"
        f" --goodput e2el:{SLO_MS_PER_TOKEN * outputs}"
    )
    return [*common.split(), *lengths.split()]


def agreement_prompts(toy: Toy, count: int = 8) -> Sequence[list[int]]:
    draw = Random(11)
    return [[draw.randrange(3, toy.vocab) for _ in range(toy.input_tokens)] for _ in range(count)]
