"""SGLang's features through TKNP, with the official client: the same answers as stock SGLang.

Every case is a function of a server's URL. All cases run against a stock server, then against a
TKNP pool of two nodes of the same model, and their results must be equal. One start each.
"""

import json
import math
import re
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import openai
import pytest

from tests.serve.client import PROMPTS, generate, greedy
from tests.serve.server import Server, base_args, serve, tknp_args

pytestmark = pytest.mark.serve

TEXT = "The quick brown fox jumps over the lazy dog. "


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120)


def complete(server: Server, **extra: Any) -> Any:
    arguments = {"prompt": TEXT, "max_tokens": 24, "temperature": 0, **extra}
    return client(server).completions.create(model="default", **arguments)


def chat(server: Server, **extra: Any) -> Any:
    arguments = {"max_tokens": 24, "temperature": 0, **extra}
    messages = [{"role": "user", "content": TEXT}]
    return client(server).chat.completions.create(model="default", messages=messages, **arguments)


def case_completion(server: Server) -> Any:
    reply = complete(server)
    return reply.choices[0].text, reply.usage.completion_tokens


def case_chat(server: Server) -> Any:
    return chat(server).choices[0].message.content


def case_streaming(server: Server) -> Any:
    parts = [event.choices[0].text for event in complete(server, stream=True) if event.choices]
    assert len(parts) > 5, "a stream of one part is no stream"
    assert "".join(parts) == complete(server).choices[0].text
    return "".join(parts)


def case_stop_string(server: Server) -> Any:
    whole = complete(server).choices[0].text
    reply = complete(server, stop=[whole[5:7]])
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text == whole[: whole.index(whole[5:7])]
    return reply.choices[0].text


def case_narrow_sampling_is_greedy(server: Server) -> Any:
    """A temperature with one candidate left: top-k 1, a tiny top-p, a min-p that only one meets."""
    expected = generate(server, PROMPTS[1])["output_ids"]
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        parameters = greedy(temperature=0.8, sampling_seed=7, **narrow)
        reply = generate(server, PROMPTS[1], sampling_params=parameters)
        assert reply["output_ids"] == expected, narrow
    return expected


def case_sampling_frequencies(server: Server) -> Any:
    """Sampled first tokens follow the model's own probabilities of its top five."""
    probe = generate(server, PROMPTS[4], sampling_params=greedy(1), **logprobs(5))
    top = {t: math.exp(lp) for lp, t, _ in probe["meta_info"]["output_top_logprobs"][0]}
    parameters = greedy(1, temperature=1.0, top_k=5)
    with ThreadPoolExecutor(16) as pool:
        replies = pool.map(
            lambda _: generate(server, PROMPTS[4], sampling_params=parameters), range(240)
        )
    drawn = [reply["output_ids"][0] for reply in replies]
    assert set(drawn) <= set(top)
    total = sum(top.values())
    for token, probability in top.items():
        share = probability / total
        margin = 5 * math.sqrt(share * (1 - share) / len(drawn)) + 1e-9
        assert abs(drawn.count(token) / len(drawn) - share) < margin, (token, share)
    return sorted(top)


def case_penalties_and_bias(server: Server) -> Any:
    penalised = complete(server, frequency_penalty=1.5, presence_penalty=0.5)
    body = {"sampling_params": greedy(repetition_penalty=1.3)}
    repeated = generate(server, PROMPTS[2], **body)["output_ids"]
    biased = complete(server, logit_bias={"100": 100.0}, max_tokens=6)
    return penalised.choices[0].text, repeated, biased.choices[0].text


def logprobs(num_top: int, **extra: Any) -> dict[str, Any]:
    return {"return_logprob": True, "top_logprobs_num": num_top, **extra}


def pairs(values: Any) -> Any:
    """[(logprob, token)...] of SGLang's [(logprob, token, text)...]."""
    return [(logprob, token) for logprob, token, *_ in values or []]


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two results differ; logprobs may by what the shape of a batch leaves."""
    if isinstance(expected, dict | list | tuple) and len(found) == len(expected):
        keys = expected if isinstance(expected, dict) else range(len(expected))
        nested = (differences(found[k], expected[k], f"{path}[{k!r}]") for k in keys)
        return [line for lines in nested for line in lines]
    if isinstance(expected, float) and isinstance(found, float):
        return (
            [] if math.isclose(found, expected, abs_tol=2e-3) else [f"{path}: {found} {expected}"]
        )
    return [] if found == expected else [f"{path}: {found!r} instead of {expected!r}"]


def case_output_logprobs(server: Server) -> Any:
    info = generate(server, PROMPTS[3], **logprobs(3))["meta_info"]
    return pairs(info["output_token_logprobs"]), [
        [token for _, token in pairs(top)] for top in info["output_top_logprobs"]
    ]


def case_input_logprobs(server: Server) -> Any:
    """Input logprobs of a prompt longer than a chunk, while other requests run beside it."""
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(generate, server, prompt, **logprobs(2, logprob_start_len=0))
            if index % 2
            else pool.submit(generate, server, prompt)
            for index, prompt in enumerate(PROMPTS[:8])
        ]
        infos = [future.result()["meta_info"] for future in futures]
    assert [len(info.get("input_token_logprobs", ())) for info in infos] == [
        len(prompt) if index % 2 else 0 for index, prompt in enumerate(PROMPTS[:8])
    ]
    return [pairs(info.get("input_token_logprobs")) for info in infos]


def case_openai_logprobs(server: Server) -> Any:
    content = chat(server, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    return [(entry.token, entry.logprob) for entry in content]


def case_many_choices(server: Server) -> Any:
    choices = complete(server, n=3).choices
    assert len(choices) == 3
    return [choice.text for choice in choices]


def case_batched_generate(server: Server) -> Any:
    body = {"input_ids": PROMPTS[:6], "sampling_params": [greedy() for _ in range(6)]}
    replies = server.post("/generate", body)
    return [reply["output_ids"] for reply in replies]


def case_regex(server: Server) -> Any:
    reply = complete(server, extra_body={"regex": r"[a-c]{4}-[0-9]{3}"})
    assert re.fullmatch(r"[a-c]{4}-[0-9]{3}", reply.choices[0].text)
    return reply.choices[0].text


def case_json_schema(server: Server) -> Any:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    kind = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
    text = chat(server, response_format=kind, max_tokens=64).choices[0].message.content
    assert set(json.loads(text)) == {"a", "b"}
    return text


def case_health_and_flush(server: Server) -> Any:
    assert server.get("/health").status == 200
    assert server.get("/health_generate", timeout=30).status == 200
    generate(server, PROMPTS[7])
    assert "Cache flushed" in server.post("/flush_cache", {})
    reply = generate(server, PROMPTS[7])
    assert reply["meta_info"]["cached_tokens"] == 0
    return reply["output_ids"]


CASES: list[Callable[[Server], Any]] = [
    function for name, function in sorted(globals().items()) if name.startswith("case_")
]


def run_cases(server: Server) -> dict[str, Any]:
    """Results by case; all failures of one server are told together, since a start is slow."""
    results, failures = {}, []
    for case in CASES:
        try:
            results[case.__name__] = case(server)
        except Exception:
            failures.append(f"{case.__name__}: {traceback.format_exc(limit=-2)}")
    assert not failures, "\n".join(failures)
    return results


def check_aborts(server: Server) -> None:
    """By a lost connection and by /abort_request: the KV is free again, and the pool serves on."""
    stream = complete(server, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(
            server.post,
            "/generate",
            {"input_ids": PROMPTS[2], "sampling_params": greedy(900), "rid": "stopped"},
        )
        time.sleep(1)
        server.post("/abort_request", {"rid": "stopped"})
        assert long.result(timeout=30)["meta_info"]["finish_reason"]["type"] == "abort"
    wait_until_idle(server)


def wait_until_idle(server: Server, limit: float = 20) -> None:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        loads = server.get_json("/v1/loads?include=core")["loads"]
        if all(load["num_running_reqs"] + load["num_waiting_reqs"] == 0 for load in loads):
            return
        time.sleep(0.2)
    raise AssertionError(f"requests still run after {limit} s: {loads}")


def check_metrics(server: Server) -> None:
    text = server.get("/metrics").read().decode()
    for node in (0, 1):
        assert re.search(rf'^sglang:tknp_node_kv_tokens{{.*node="{node}".*}} \d', text, re.M)
        kind = "scatter"
        pattern = rf'^sglang:tknp_exchange_bytes_total{{kind="{kind}",node="{node}"}} ([0-9.e+]+)'
        match = re.search(pattern, text, re.M)
        assert match and float(match.group(1)) > 0, pattern


def check_idle_is_idle(server: Server) -> None:
    """A pool of two nodes takes less than a fifth of a core. bench/idle.py has its latency."""

    def ticks() -> int:
        total = 0
        for pid in server.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total

    time.sleep(2)
    before, seconds = ticks(), 8
    time.sleep(seconds)
    assert (ticks() - before) / 100 / seconds < 0.2


def check_pause(server: Server) -> None:
    """A paused pool keeps requests, on every node, and goes on with them."""
    server.post("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(generate, server, PROMPTS[1], routed_dp_rank=r) for r in (0, 1)]
        time.sleep(2)
        assert not any(request.done() for request in waiting)
        server.post("/continue_generation", {})
        first, second = (request.result(timeout=30)["output_ids"] for request in waiting)
    assert first == second


def check_embeddings_are_refused(server: Server) -> None:
    body = {"input_embeds": [[0.0] * 64] * 3, "sampling_params": greedy(2)}
    with pytest.raises(HTTPError) as failure:
        server.post("/generate", body)
    assert failure.value.code == 400
    assert b"input_embeds" in failure.value.read()


def check_weight_update_is_refused(server: Server) -> None:
    with pytest.raises(HTTPError) as failure:
        server.post("/update_weights_from_disk", {"model_path": server.command[4]})
    assert b"--enable-tknp does not support weight updates" in failure.value.read()


@pytest.mark.timeout(600)
def test_features_equal_stock(checkpoint: Any, tmp_path: Any) -> None:
    model = checkpoint("llama-untied")
    flags = {"enable_metrics": True}
    with serve(base_args(model, **flags), tmp_path / "stock.log") as server:
        expected = run_cases(server)
    # On padded slots: what samplers see of a batch must not depend on its empty places.
    with serve(tknp_args(model, 2, tknp_force_slots=True, **flags), tmp_path / "log") as server:
        check_idle_is_idle(server)
        assert not differences(run_cases(server), expected)
        check_aborts(server)
        check_metrics(server)
        check_pause(server)
        check_embeddings_are_refused(server)
        check_weight_update_is_refused(server)
        assert not differences(run_cases(server), expected)
