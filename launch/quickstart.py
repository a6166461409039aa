"""Quick start: a real model on a TKNP pool of CPU nodes, and one answered chat request.

`python -m sglang_tknp.launch.quickstart` (what `make serve` runs) serves until Ctrl-C; `--once`
(what `make demo` runs) stops after the answer.
"""

import argparse
import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_tknp import compat
from sglang_tknp.launch.models import (
    MissingPackageError,
    default_cache_dir,
    prepare_smollm2,
    require,
)

START_SECONDS = 300
STOP_SECONDS = 10
QUESTION = "What is the capital of France?"
# Runs a command that the kernel ends (SIGTERM) once its parent is gone, even by SIGKILL.
END_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
)
CURL = """\
  curl -s http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' \
-d '{{"model": "default", "max_tokens": 64, \
"messages": [{{"role": "user", "content": "Name three rivers."}}]}}'"""


class QuickstartError(RuntimeError):
    """The quick start cannot go on; the message says why and what to do."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang_tknp.launch.quickstart", description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop after one answered request")
    parser.add_argument("--nodes", type=int, default=2, help="nodes of the pool (default 2)")
    parser.add_argument("--port", type=int, default=30000, help="HTTP port (default 30000)")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of SmolLM2-135M-Instruct")
    parser.add_argument("--verbose", action="store_true", help="the server's log on the terminal")
    return parser.parse_args(argv)


def server_command(model: Path, nodes: int, port: int) -> list[str]:
    flags = f"--enable-tknp --tp-size {nodes} --attn-dp-size {nodes}"
    if compat.cpu_platform_active():
        flags += " --tknp-device-memory-gb 2"
    flags += f" --host 127.0.0.1 --port {port} --context-length 2048 --max-running-requests 32"
    launch = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    return launch + flags.split()


def check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise QuickstartError(
                f"port {port} cannot be used ({error}); choose another, for example "
                "`make serve PORT=31000` or --port 31000"
            ) from error


@contextlib.contextmanager
def running(command: list[str], log: Path | None) -> Iterator[subprocess.Popen[bytes]]:
    """The server in a process group of its own, which is gone when the block is left."""
    if sys.platform == "linux":
        command = [sys.executable, "-ISc", END_WITH_PARENT, *command]
    with log.open("wb") if log else contextlib.nullcontext() as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SGLang's orderly stop first, then whatever is left of its process group by force."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
    finally:  # also when a second Ctrl-C ends that wait
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_lines(log: Path | None, count: int = 30) -> str:
    if log is None:
        return ""
    lines = log.read_text(errors="replace").splitlines()[-count:]
    return f"; the end of {log}:\n" + "\n".join(lines)


def healthy(port: int, path: str, timeout: float) -> bool:
    try:
        url = f"http://127.0.0.1:{port}{path}"
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def check_alive(process: subprocess.Popen[bytes], log: Path | None) -> None:
    if process.poll() is not None:
        raise QuickstartError(f"the server ended, exit code {process.returncode}{last_lines(log)}")


def show_progress(seconds: float, log: Path) -> None:
    """One line, written over and over: the time so far and the log's last line."""
    last = log.read_text(errors="replace").rstrip().splitlines()[-1:]
    line = f"Starting: {seconds:.0f} s  {''.join(last)}"
    shown = "".join(c if c.isprintable() else " " for c in line)
    print(f"\r\x1b[K{shown[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path | None) -> None:
    """Until the pool has generated a token, with the seconds so far on the terminal."""
    start = time.monotonic()
    terminal_log = log if sys.stdout.isatty() else None
    shown = 0.0
    while not (healthy(port, "/health", 2) and healthy(port, "/health_generate", 30)):
        check_alive(process, log)
        seconds = time.monotonic() - start
        if seconds > START_SECONDS:
            raise QuickstartError(f"not ready after {START_SECONDS} s{last_lines(log)}")
        if terminal_log:
            show_progress(seconds, terminal_log)
        elif seconds - shown >= 10:
            shown = seconds
            print(f"Starting: {seconds:.0f} s", flush=True)
        time.sleep(0.5)
    clear = "\r\x1b[K" if terminal_log else ""
    print(f"{clear}Ready after {time.monotonic() - start:.0f} s.", flush=True)


def ask(port: int) -> tuple[str, int]:
    """One chat request: the answer, and the node that owned the request."""
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)
    try:
        choice = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=32,
            extra_body={"return_meta_info": True},  # SGLang's own addition to a response
        ).choices[0]
    except openai.OpenAIError as error:
        raise QuickstartError(f"the server did not answer a chat request: {error}") from error
    meta_info = (choice.model_extra or {}).get("meta_info") or {}
    if "dp_rank" not in meta_info:
        raise QuickstartError(f"the response names no owner node, only {sorted(meta_info)}")
    return (choice.message.content or "").strip(), int(meta_info["dp_rank"])


def open_log(args: argparse.Namespace) -> Path | None:
    if args.verbose:
        return None
    log = default_cache_dir() / f"server-{args.port}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return log


def run(args: argparse.Namespace) -> None:
    require("openai")
    check_port(args.port)
    model = args.model or prepare_smollm2()
    log = open_log(args)
    where = f"; its log: {log}" if log else ""
    print(f"Starting a pool of {args.nodes} nodes, about a minute{where}", flush=True)
    with running(server_command(model, args.nodes, args.port), log) as process:
        wait_ready(process, args.port, log)
        answer, owner = ask(args.port)
        print(f"Question: {QUESTION}\nAnswer:   {answer}")
        print(f"Owner:    node {owner} of 0..{args.nodes - 1}", flush=True)
        if not args.once:
            print(f"\nServing until Ctrl-C. Try:\n{CURL.format(port=args.port)}", flush=True)
            serve_on(process, log)
    print("Stopped.", flush=True)


def serve_on(process: subprocess.Popen[bytes], log: Path | None) -> None:
    process.wait()
    check_alive(process, log)


def bypass_proxies() -> None:
    """The server is on this machine: no proxy of the user's may see the requests to it."""
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))


def end_orderly(signum: int, _frame: object) -> None:
    sys.exit(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # An exception in each case, so that `running` ends the server. A shell's `&` ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, end_orderly)
    signal.signal(signal.SIGHUP, end_orderly)
    bypass_proxies()
    try:
        run(args)
    except KeyboardInterrupt:
        print("\nStopped.")
    except (QuickstartError, MissingPackageError) as error:
        sys.stderr.write(f"\nsglang-tknp: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
