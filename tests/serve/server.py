"""Start a real SGLang server for tests: its own process group, a time limit, its log on failure."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 240


def free_port() -> int:
    """Below the ephemeral ports, which a starting server's own connections take.

    SGLang's attention DP also uses some ports from port + 233 on.
    """
    while True:
        port = random.randrange(20000, 31000)
        with contextlib.ExitStack() as stack:
            try:
                for number in (port, *range(port + 233, port + 245)):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", number))
            except OSError:
                continue
            return port


class Server:
    """One launched server. `url` is ready after `wait_ready`."""

    def __init__(
        self,
        args: list[str],
        log: Path,
        env: dict[str, str] | None = None,
        *,
        prefix: Sequence[str] = (),
        launch: Sequence[str] = ("-m", "sglang.launch_server"),
        host: str = "127.0.0.1",
    ) -> None:
        """`prefix` runs the command elsewhere, as `ip netns exec` does."""
        self.port = free_port()
        self.url = f"http://{host}:{self.port}"
        self.log = log
        command = [*prefix, sys.executable, *launch, *args]
        command += ["--host", host, "--port", str(self.port)]
        self.command = command
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**clean, **(env or {})},
            )

    def wait_ready(self, limit: float = START_SECONDS) -> None:
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"server ended with {self.process.returncode}:\n{self.tail()}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                if self.get("/health").status == 200 and "is fired up" in self.log.read_text():
                    return
            time.sleep(0.5)
        raise AssertionError(f"server not ready after {limit:.0f} s:\n{self.tail()}")

    def get(self, path: str, timeout: float = 10) -> Any:
        return urllib.request.urlopen(self.url + path, timeout=timeout)

    def get_json(self, path: str) -> Any:
        return json.load(self.get(path))

    def post(self, path: str, body: Any, timeout: float = 120) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            text = reply.read()
        is_json = "json" in (reply.headers["Content-Type"] or "")
        return json.loads(text) if is_json else text.decode()

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def pids(self) -> list[int]:
        """Every live process of this server (its session), zombies left out."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(stat.parent.name))
        return found

    def stop(self) -> None:
        deadline = time.monotonic() + 20
        while self.pids() and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        self.process.wait(timeout=20)


@contextlib.contextmanager
def serve(args: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A ready server; ended, with all of its processes, on leaving."""
    server = Server(args, log, env)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def check_native(server: Server) -> None:
    """SGLang, or we, have the model's class: it would run transformers' code otherwise."""
    assert "falling back to Transformers" not in server.log.read_text()


def base_args(model: Path, **flags: Any) -> list[str]:
    """Flags that every test server wants; `tp_size=2` becomes `--tp-size 2`, True a bare flag."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "context_length": 1024,
        "max_running_requests": 32,
        "chunked_prefill_size": 64,
        "tknp_device_memory_gb": 0.25,
        "random_seed": 1,
        "log_level": "info",
    }
    args = ["--model-path", str(model)]
    for name, value in {**defaults, **flags}.items():
        if value is None or value is False:
            continue
        args.append("--" + name.replace("_", "-"))
        if value is not True:
            args.append(str(value))
    return args


def tknp_args(model: Path, nodes: int, ranks: int = 1, **flags: Any) -> list[str]:
    defaults = {"enable_tknp": True, "tp_size": nodes * ranks, "attn_dp_size": nodes}
    return base_args(model, **{**defaults, **flags})
