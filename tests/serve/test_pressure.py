"""Owners that took more than they can hold, and owners that hold a prefix.

One pool that reserves next to nothing for outputs, and that SGLang's own test switch makes retract
requests all the time. It also places by current context, and by prefix.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.client import PROMPTS, generate, generate_all, greedy, owners, tokens
from tests.serve.server import Server, serve, tknp_args
from tests.tiny import random_prompts

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pool(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = {
        "max_total_tokens": 1502,
        "tknp_owner_policy": "kv-used",
        "tknp_expected_output_tokens": 4,
        "tknp_prefix_slack": 5000,
    }
    log = tmp_path_factory.mktemp("pressure") / "log"
    env = {"SGLANG_TEST_RETRACT": "1"}
    with serve(tknp_args(checkpoint("llama"), 2, **flags), log, env) as server:
        yield server


def states(server: Server) -> list[Any]:
    found = [state["tknp"] for state in server.get_json("/server_info")["internal_states"]]
    return sorted(found, key=lambda state: state["node"])


def test_retracted_requests_keep_owner_and_tokens(pool: Server, stock_tokens: Any) -> None:
    before = sum(state["ledger"]["sent"] for state in states(pool))
    replies = generate_all(pool, PROMPTS)
    assert tokens(replies) == stock_tokens("llama", 1)
    assert owners(replies) == {0, 1}
    retractions = sum(reply["meta_info"]["num_retractions"] for reply in replies)
    ledgers = [state["ledger"] for state in states(pool)]
    assert sum(ledger["retractions"] for ledger in ledgers) >= retractions > 0
    assert all(ledger["reserved"] == ledger["drifts"] == 0 for ledger in ledgers)
    sent = sum(ledger["sent"] for ledger in ledgers) - before
    assert sent == len(PROMPTS), "a retracted request stays where it is"


def test_an_owner_that_holds_the_prefix_wins(pool: Server) -> None:
    """Of two idle owners the first gets a request, unless the second has seen its beginning."""
    prompt, other = random_prompts(11, [600, 600])
    short = {"sampling_params": greedy(2)}

    def owner_of(ids: list[int], **extra: Any) -> Any:
        info = generate(pool, ids, **short, **extra)["meta_info"]
        return info["dp_rank"], info["cached_tokens"]

    assert owner_of(prompt, routed_dp_rank=1) == (1, 0)
    assert owner_of(other)[0] == 0
    owner, cached = owner_of([*prompt, 5, 6, 7])
    assert owner == 1 and cached >= 512
    assert states(pool)[0]["controller"]["prefix_hits"] == 1
    assert "Cache flushed" in pool.post("/flush_cache", {})
    assert owner_of([*prompt, 5, 6, 7]) == (0, 0)
