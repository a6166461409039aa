"""Quick start: a real model on a TKNP pool of CPU nodes, and one answered chat request.

`python -m sglang_tknp.launch.quickstart` (what `make serve` runs) serves until Ctrl-C; `--once`
(what `make demo` runs) stops after the answer.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_tknp.launch.models import default_cache_dir, prepare_smollm2

START_SECONDS = 300
STOP_SECONDS = 10
QUESTION = "What is the capital of France?"


class QuickstartError(RuntimeError):
    """The quick start cannot go on; the message says why and what to do."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang_tknp.launch.quickstart", description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop after one answered request")
    parser.add_argument("--nodes", type=int, default=2, help="nodes of the pool (default 2)")
    parser.add_argument("--port", type=int, default=30000, help="HTTP port (default 30000)")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of SmolLM2-135M-Instruct")
    parser.add_argument("--verbose", action="store_true", help="show the server's log")
    return parser.parse_args(argv)


def server_command(model: Path, nodes: int, port: int) -> list[str]:
    flags = f"--enable-tknp --tp-size {nodes} --attn-dp-size {nodes} --tknp-device-memory-gb 2"
    flags += f" --host 127.0.0.1 --port {port} --context-length 2048 --max-running-requests 32"
    launch = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    return launch + flags.split()


def check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise QuickstartError(
                f"port {port} is taken ({error.strerror}): use another, for example "
                f"`make serve PORT={port + 1}`"
            ) from error


@contextlib.contextmanager
def running(command: list[str], log: Path | None) -> Iterator[subprocess.Popen[bytes]]:
    """The server in a process group of its own, which is gone when the block is left."""
    out = log.open("wb") if log else None
    process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SGLang's orderly stop first, and whatever is left of its process group by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: Path | None, count: int = 30) -> str:
    if log is None:
        return ""
    lines = log.read_text(errors="replace").splitlines()[-count:]
    return "\n" + "\n".join(lines)


def healthy(port: int, path: str, timeout: float) -> bool:
    with contextlib.suppress(OSError):
        reply = urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout)
        return bool(reply.status == 200)
    return False


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path | None) -> None:
    """Until the pool has generated a token, with the seconds so far on the terminal."""
    start = time.monotonic()
    while True:
        seconds = time.monotonic() - start
        check_alive(process, log)
        if healthy(port, "/health", 2) and healthy(port, "/health_generate", 30):
            print(f"\rThe pool is ready after {seconds:.0f} s.            ")
            return
        if seconds > START_SECONDS:
            raise QuickstartError(f"not ready after {START_SECONDS} s{last_lines(log)}")
        if sys.stdout.isatty():
            print(f"\rStarting the pool: {seconds:.0f} s", end="", flush=True)
        time.sleep(1)


def check_alive(process: subprocess.Popen[bytes], log: Path | None) -> None:
    if process.poll() is not None:
        raise QuickstartError(f"the server ended, exit code {process.returncode}{last_lines(log)}")


def ask(port: int) -> tuple[str, int]:
    """One chat request: the answer, and the node that owned the request."""
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)
    choice = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=32,
        extra_body={"return_meta_info": True},  # SGLang's own addition to a response
    ).choices[0]
    meta_info = (choice.model_extra or {}).get("meta_info") or {}
    return (choice.message.content or "").strip(), int(meta_info["dp_rank"])


def run(args: argparse.Namespace) -> None:
    check_port(args.port)
    model = args.model or prepare_smollm2()
    log = None if args.verbose else default_cache_dir() / "server.log"
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"Starting {args.nodes} nodes, about a minute; log: {log}", flush=True)
    with running(server_command(model, args.nodes, args.port), log) as process:
        wait_ready(process, args.port, log)
        answer, owner = ask(args.port)
        print(f"Question: {QUESTION}\nAnswer:   {answer}\nOwner:    node {owner}", flush=True)
        if args.once:
            return
        print(
            f"\nServing on http://127.0.0.1:{args.port} until Ctrl-C. Try:\n"
            f"  curl -s http://127.0.0.1:{args.port}/v1/chat/completions "
            "-H 'Content-Type: application/json' -d "
            '\'{"messages": [{"role": "user", "content": "Name three rivers."}], "model": "x"}\'',
            flush=True,
        )
        while process.poll() is None:
            time.sleep(0.5)
        check_alive(process, log)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # So that the server's end in `running` also happens when this program is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(args)
    except KeyboardInterrupt:
        print("\nStopped.")
    except (QuickstartError, FileNotFoundError) as error:
        sys.stderr.write(f"sglang-tknp: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
