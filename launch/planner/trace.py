"""Workloads: when requests arrive, and how many tokens each reads and writes. Deterministic.

Also reads and writes traces: Mooncake's JSONL, and the results of `python -m
sglang.benchmark.serving --output-details --output-file`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LONG = 65_536  # tokens; the paper's "64K"
PAPER_COUNT = 128
# Of these datasets SGLang's benchmark draws lengths or prompts from the generator that the
# arrivals come from next, so the seed alone does not give the arrivals.
_DRAWS_FIRST = ("random", "random-ids", "image", "generated-shared-prefix")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")


class Arrival(NamedTuple):
    """One request of a workload."""

    seconds: float  # from the release of the workload
    input_tokens: int
    output_tokens: int


class Statistics(NamedTuple):
    """What the paper publishes of its mixed workload (section 5.1); shares are from 0 to 1."""

    minimum: int
    maximum: int
    mean: float
    median: float
    std: float  # of the population: divided by the count
    long_share: float  # of the requests, those of more than LONG tokens
    long_token_share: float  # of the tokens, those of such requests
    longest_quarter_token_share: float


def fixed(count: int, input_tokens: int, output_tokens: int) -> list[Arrival]:
    """`count` equal requests, all released at once."""
    return burst([input_tokens] * count, output_tokens)


def burst(
    lengths: Sequence[int],
    output_tokens: int,
    *,
    per_burst: int | None = None,
    seconds_between: float = 0.0,
) -> list[Arrival]:
    """Requests of these input lengths, released together or `per_burst` at a time.

    Args:
        lengths: input tokens of each request.
        output_tokens: of every request.
        per_burst: requests of each burst; the last takes what is left.
        seconds_between: from one burst to the next.

    Raises:
        ValueError: no request, or a size that is not positive.
    """
    if not lengths or min(lengths) < 1 or output_tokens < 1:
        raise ValueError("a workload needs requests, of at least one input and one output token")
    if (per_burst is not None and per_burst < 1) or not 0 <= seconds_between < math.inf:
        raise ValueError(
            f"bursts of {per_burst} requests every {seconds_between} s cannot be released"
        )
    size = per_burst or len(lengths)
    return [
        Arrival(index // size * seconds_between, int(length), output_tokens)
        for index, length in enumerate(lengths)
    ]


def poisson(arrivals: Sequence[Arrival], rate: float, seed: int) -> list[Arrival]:
    """The same requests in the same order, arriving as a Poisson process.

    The first arrives at 0 and the others as SGLang's benchmark sends them for the same rate and
    seed with a dataset that draws nothing from NumPy (`custom`, `sharegpt`, `openai`), but for the
    milliseconds by which its sleeps drift. Where `custom` shuffles, keep to its order.

    Args:
        rate: requests a second; infinite for all at once.

    Raises:
        ValueError: a rate that is not positive.
    """
    if not rate > 0:
        raise ValueError(f"a rate of {rate} requests a second releases nothing; use one above 0")
    gaps = np.random.RandomState(seed).exponential(1 / rate, size=max(len(arrivals) - 1, 0))
    times = chain([0.0], np.cumsum(gaps).tolist())
    return [one._replace(seconds=at) for one, at in zip(arrivals, times, strict=False)]


def paper_mixed(output_tokens: int = 1024, seed: int = 0) -> list[Arrival]:
    """128 requests with every published statistic of the paper's mixed workload, at time 0.

    The paper does not publish the lengths, their order (here shuffled by `seed`), the count (128
    is the smallest usual one in which 12.5 % and 25 % are whole) or the output lengths.
    """
    lengths = np.random.RandomState(seed).permutation(paper_lengths())
    return burst(lengths.tolist(), output_tokens)


def mixed(count: int, seed: int, output_tokens: int = 1024) -> list[Arrival]:
    """`count` requests whose lengths are drawn from the 128 of `paper_mixed`, with replacement."""
    lengths = np.random.RandomState(seed).choice(paper_lengths(), size=count)
    return burst(lengths.tolist(), output_tokens)


@lru_cache
def paper_lengths(std: float = 28_496) -> tuple[int, ...]:
    """128 input lengths, ascending, built from the paper's seven statistics (section 5.1).

    The statistics give the tokens of four groups: the 16 longest (over 64K), the next 16 (they
    complete the longest quarter), and the other 96. Those lie on both sides of the median, and how
    many tokens the shorter 64 of them have is solved for the standard deviation. Inside a group
    lengths rise along a power of their rank that gives the group its tokens.

    Two readings stay open, for both can be met: the deviation may divide by 128 (as here) or by
    127 (pass `std` times the root of 127/128), and 64K may be 65,536 or 64,000, between which
    there is no length here.
    """
    total, quarter = 32_898 * PAPER_COUNT, 47_000  # `quarter`: where the longest quarter begins
    longest = round(0.361 * total)
    next_longest = round(0.572 * total) - longest
    upper = [
        *_rising(16, quarter, 63_500, next_longest),
        *_rising(16, 66_000, 126_848, longest),
    ]
    rest = total - longest - next_longest

    def lower(shorter: int) -> list[int]:
        return [
            *_rising(64, 8_223, 19_048, shorter),
            *_rising(32, 19_048, quarter, rest - shorter),
        ]

    few, many = 64 * 11_000, 64 * 16_000  # the deviation falls as the shorter half gets longer
    while many - few > 1:
        middle = (few + many) // 2
        if np.std(lower(middle) + upper) > std:
            few = middle
        else:
            many = middle
    return tuple(sorted(lower(many) + upper))


def _rising(count: int, low: int, high: int, total: int) -> list[int]:
    """`count` lengths from `low` to `high` that sum to `total`: low + (high - low) * rank^power."""
    rank = np.linspace(0, 1, count)
    flat, steep = -5.0, 5.0  # logarithms of the power: a steeper rise has a smaller sum
    for _ in range(60):
        middle = (flat + steep) / 2
        lengths = np.rint(low + (high - low) * rank ** math.exp(middle)).astype(int)
        if lengths.sum() > total:
            flat = middle
        else:
            steep = middle
    missing = total - int(lengths.sum())  # what rounding left: a token for each of the first
    lengths[1 : 1 + abs(missing)] += np.sign(missing)
    return [int(length) for length in lengths]


def statistics(lengths: Sequence[int]) -> Statistics:
    """Of input lengths in tokens, as the paper gives them; ValueError if there are none."""
    if not lengths:
        raise ValueError("no lengths, so no statistics")
    ascending = np.sort(np.asarray(lengths, dtype=np.int64))
    total = int(ascending.sum())
    longest_quarter = ascending[-math.ceil(len(ascending) / 4) :]
    over = ascending[ascending > LONG]
    return Statistics(
        minimum=int(ascending[0]),
        maximum=int(ascending[-1]),
        mean=float(ascending.mean()),
        median=float(np.median(ascending)),
        std=float(ascending.std()),
        long_share=len(over) / len(ascending),
        long_token_share=int(over.sum()) / total,
        longest_quarter_token_share=int(longest_quarter.sum()) / total,
    )


def load(
    path: str | Path, *, tag: str | None = None, index: int | None = None, seed: int = 42
) -> list[Arrival]:
    """The workload of a trace file, whichever of the two formats it is in.

    Mooncake: arrivals count from the first and are put in their order; `hash_ids` are ignored.
    SGLang's benchmark: lengths as the run had them, in its order, and arrivals regenerated from
    its rate and `seed`, for it does not record them.

    Args:
        tag: of the run to take from a file of several benchmark runs.
        index: of the run to take, from 0, among those with the tag if there is one.
        seed: what the run had as --seed; SGLang's default is 42.

    Raises:
        ValueError: not a trace; the text names file and line, and what is wrong.
    """
    lines = _read(Path(path))
    first, start = next(lines, (0, {}))
    if not first:
        raise ValueError(f"{path}: empty")
    if "timestamp" in start:
        return _load_mooncake(Path(path), chain([(first, start)], lines))
    if "request_rate" in start:
        return _load_benchmark(Path(path), chain([(first, start)], lines), tag, index, seed)
    raise ValueError(
        f"{path}, line {first}: neither a Mooncake trace ({', '.join(_MOONCAKE_KEYS)}) nor a "
        "result of sglang.benchmark.serving (request_rate, input_lens, output_lens)"
    )


def mooncake_lines(arrivals: Sequence[Arrival]) -> Iterator[str]:
    """A Mooncake trace, line by line: milliseconds with their fractions, in the given order.

    Without `hash_ids`, which no reader needs. SGLang's own `mooncake` dataset builds its prompts
    from those alone and ignores `input_length`, so this is for tools that honour it.
    """
    for seconds, *lengths in arrivals:
        milliseconds = round(seconds * 1000, 6)
        at = int(milliseconds) if milliseconds.is_integer() else milliseconds
        values = (at, *lengths)
        yield json.dumps(dict(zip(_MOONCAKE_KEYS, values, strict=True))) + "\n"


def write_mooncake(path: str | Path, arrivals: Sequence[Arrival]) -> None:
    """Write a Mooncake trace (`mooncake_lines`)."""
    with Path(path).open("w") as file:
        file.writelines(mooncake_lines(arrivals))


def _read(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line numbers, from 1, and objects of a JSONL file, without its empty lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
            if not isinstance(found, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object")
            yield number, found


def _load_mooncake(path: Path, lines: Iterator[tuple[int, Mapping[str, Any]]]) -> list[Arrival]:
    found = []
    for number, record in lines:
        try:
            at, size, output = (record[key] for key in _MOONCAKE_KEYS)
        except KeyError as error:
            raise ValueError(f"{path}, line {number}: no {error.args[0]}") from None
        if type(at) not in (int, float) or not 0 <= at < math.inf:
            raise ValueError(f"{path}, line {number}: timestamp {at!r} is not milliseconds")
        for key, value in (("input_length", size), ("output_length", output)):
            _check_tokens(f"{path}, line {number}: {key}", value)
        found.append(Arrival(at, size, output))
    found.sort(key=lambda arrival: arrival.seconds)  # milliseconds until the next line
    start = found[0].seconds
    return [Arrival((at - start) / 1000, size, output) for at, size, output in found]


def _load_benchmark(
    path: Path,
    lines: Iterator[tuple[int, Mapping[str, Any]]],
    tag: str | None,
    index: int | None,
    seed: int,
) -> list[Arrival]:
    number, run = _choose(path, list(lines), tag, index)
    where = f"{path}, line {number}"
    # `sglang-tknp simulate` also says what refused requests wanted, and when each arrived.
    inputs, outputs = run.get("input_lens"), run.get("wanted_output_lens", run.get("output_lens"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError(f"{where}: no input_lens and output_lens; run with --output-details")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{where}: {len(inputs)} input_lens for {len(outputs)} output_lens")
    for request, (size, output) in enumerate(zip(inputs, outputs, strict=True)):
        _check_tokens(f"{where}: input_lens of request {request}", size)
        _check_tokens(f"{where}: output_lens of request {request} (0 if it failed)", output)
    arrivals = [Arrival(0.0, *lengths) for lengths in zip(inputs, outputs, strict=True)]
    known = run.get("arrivals")
    if isinstance(known, list) and len(known) == len(arrivals):
        return [a._replace(seconds=at) for a, at in zip(arrivals, known, strict=True)]
    return poisson(arrivals, _rate(where, run), seed)


def _choose(
    path: Path, runs: list[tuple[int, Mapping[str, Any]]], tag: str | None, index: int | None
) -> tuple[int, Mapping[str, Any]]:
    """The one run that tag and index name; ValueError says which there are."""
    found = [(number, run) for number, run in runs if tag is None or run.get("tag") == tag]
    if index is not None:
        found = found[index : index + 1] if index >= 0 else []
    if len(found) != 1:
        tags = ", ".join(f"{run.get('tag')} (line {number})" for number, run in runs)
        raise ValueError(
            f"{path}: {len(found) or 'no'} runs match tag {tag} and index {index}; there are {tags}"
        )
    return found[0]


def _rate(where: str, run: Mapping[str, Any]) -> float:
    """Requests a second; ValueError where the arrivals do not follow from rate and seed."""
    rate: Any = run.get("request_rate")
    dataset = run.get("dataset_name")
    if type(rate) not in (int, float) or not rate > 0:
        raise ValueError(f"{where}: request_rate {rate!r}, so its arrivals are not known")
    if dataset == "mooncake":
        raise ValueError(f"{where}: its arrivals are those of a Mooncake trace; load that file")
    if rate < math.inf and dataset in _DRAWS_FIRST:
        raise ValueError(
            f"{where}: dataset {dataset} draws from the generator before the arrivals do, so they "
            "cannot be regenerated; use --dataset-name custom, or --request-rate inf"
        )
    return float(rate)


def _check_tokens(what: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{what} is {value!r}, not a number of tokens above 0")
