"""Run one system: start its server, ask for its KV, send it every point, stop it."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare_results import Record, request_rows, summary
from compare_toy import Toy
from compare_workloads import SLO_MS_PER_TOKEN, Point, agreement_prompts, client_args

from sglang_tknp.launch.quickstart import QuickstartError, healthy, last_lines, running

START_SECONDS = 180
POINT_SECONDS = 400
CLIENT = Path(__file__).parent / "compare_client.py"
AGREEMENT_TOKENS = 64


class RunError(RuntimeError):
    """A system did not start, or a run did not end well; the message says which."""


@dataclass(frozen=True)
class Server:
    port: int
    folder: Path  # server.log, client.log, client.jsonl and SGLang's own records

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            return json.load(reply)

    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            ids: list[int] = json.load(reply)["output_ids"]
        return ids

    def records(self) -> list[Record]:
        """Of all requests that ended so far."""
        texts = [file.read_text() for file in sorted(self.folder.glob("records/*.log"))]
        whole = [text[: text.rfind("\n") + 1] for text in texts]  # the last may be half written
        return [json.loads(line) for text in whole for line in text.splitlines()]


@contextlib.contextmanager
def environment(extra: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def serving(flags: Sequence[str], env: Mapping[str, str], server: Server) -> Iterator[None]:
    """A server that is ready, gone when the block is left."""
    records = ["--export-metrics-to-file", "--export-metrics-to-file-dir"]
    address = ["--host", "127.0.0.1", "--port", str(server.port)]
    command = [sys.executable, "-m", "sglang.launch_server", *flags, *address]
    command += [*records, str(server.folder / "records")]
    log = server.folder / "server.log"
    with environment(env):
        with running(command, log) as process:
            deadline = time.monotonic() + START_SECONDS
            while not ("is fired up" in log.read_text() and healthy(server.port, "/health", 2)):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RunError(f"the server did not start{last_lines(log)}")
                time.sleep(0.5)
            yield


class Client:
    """SGLang's benchmark client in a process of its own (compare_client.py)."""

    def __init__(self, log: Path) -> None:
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(CLIENT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def expect(self, word: str, limit: float) -> None:
        assert self.process.stdout
        with ThreadPoolExecutor(1) as pool:
            line = pool.submit(self.process.stdout.readline)
            try:
                said = line.result(timeout=limit).strip()
            except TimeoutError:
                self.process.kill()  # ends the read as well
                said = f"nothing in {limit:.0f} s"
        if said != word:
            raise RunError(f"the client said {said!r} where {word!r} was due")

    def run(self, args: Sequence[str]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(args) + "\n")
        self.process.stdin.flush()
        self.expect("done", POINT_SECONDS)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def run_system(
    flags: Sequence[str],
    env: Mapping[str, str],
    points: Sequence[Point],
    toy: Toy,
    model: Path,
    server: Server,
) -> dict[str, Any]:
    """KV, greedy outputs, and for each point its summary and the rows of its requests."""
    server.folder.mkdir(parents=True, exist_ok=True)
    client = Client(server.folder / "client.log")  # imports while the server starts
    start = time.monotonic()
    try:
        with serving(flags, env, server):
            client.expect("ready", START_SECONDS)
            seconds = time.monotonic() - start
            greedy = greedy_outputs(server, toy)
            runs = []
            for point in points:
                runs.append(run_point(point, toy, model, server, client))
                show(runs[-1])
            kv = kv_capacity(server.get("/server_info"))
    except QuickstartError as error:
        raise RunError(str(error)) from error
    finally:
        client.close()
    return {"start_seconds": round(seconds, 1), "kv_tokens": kv, "greedy": greedy, "runs": runs}


def show(run: Mapping[str, Any]) -> None:
    """One line of progress."""
    name, found = run["point"]["name"], run["summary"]
    print(f"  {name}: {found['throughput']:.1f} tokens/s in {found['duration']:.0f} s", flush=True)


def greedy_outputs(server: Server, toy: Toy) -> list[list[int]]:
    """Also what warms the server up: no run is the first."""
    prompts = agreement_prompts(toy)
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: server.generate(prompt, AGREEMENT_TOKENS), prompts))


def run_point(
    point: Point, toy: Toy, model: Path, server: Server, client: Client
) -> dict[str, Any]:
    release = time.time()
    args = client_args(point, toy, model, server.port, server.folder)
    client.run(args)
    found = json.loads((server.folder / "client.jsonl").read_text().splitlines()[-1])
    if found["completed"] != point.requests:
        raise RunError(f"{point.name}: {found['completed']} requests completed")
    rows = request_rows(wait_records(server, release, point.requests))
    return {
        "point": {**asdict(point), "rate": str(point.rate), "name": point.name},
        "command": without_paths(["python -m sglang.benchmark.serving", *args], model, server),
        "summary": summary(rows, found, SLO_MS_PER_TOKEN),
        "slo_attainment_of_client": found.get("slo_attainment"),
        "requests": rows,
    }


def without_paths(words: Sequence[str], model: Path, server: Server) -> str:
    """A command that means the same on any machine."""
    text = " ".join(words)
    return text.replace(str(model), model.name).replace(f"{server.folder}/", "")


def wait_records(server: Server, release: float, count: int) -> list[Record]:
    """Of the requests since `release`. SGLang writes some a moment after their last answer."""
    for _ in range(50):
        records = [one for one in server.records() if one["request_received_ts"] >= release]
        if len(records) == count:
            return records
        time.sleep(0.1)
    raise RunError(f"{len(records)} records of {count} requests")


def kv_capacity(info: Mapping[str, Any]) -> list[int]:
    """KV tokens of every replica or owner; one number for TP and PP, whose ranks share requests."""
    return [state["memory_usage"]["token_capacity"] for state in info["internal_states"]]
