"""Proves `sglang-tknp` from its command line: what it prints, writes, refuses and exits with."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_tknp.launch import cli
from sglang_tknp.launch.planner import hardware, trace

PLAN = ["plan", "--model", "llama-3.1-405b-fp8", "--input-len", "32768"]
SIMULATE = ["simulate", "--model", "llama-3.1-405b-fp8"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    out = capsys.readouterr()
    return code, out.out, out.err


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (1, "")
    assert err.startswith("sglang-tknp: ") and err.count("\n") == 1
    return err


def test_it_starts_without_torch_and_sglang() -> None:
    script = (
        "import sys; from sglang_tknp.launch import cli; cli.make_parser(); "
        "print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'torch', 'sglang', 'matplotlib', 'jinja2', 'tqdm', 'pandas', 'scipy'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_plan_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *PLAN, "--concurrency", "128")
    assert (code, err) == (0, "")
    assert out.startswith("assumed\n")
    for expected in ("4 x 27", "recommendation", "Choice: TKNP", "Crossover: ", "--enable-tknp"):
        assert expected in out


def test_plan_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*PLAN, "--concurrency", "16", "--json", "--layouts", "tknp,dp", "--nodes", "8")
    code, out, _ = run(capsys, *argv)
    found = json.loads(out)
    assert code == 0
    assert [row["name"] for row in found["layouts"]] == ["tknp", "dp"]
    assert found["assumptions"]["num_nodes"] == 8
    assert found["recommendation"]["name"] == "dp"


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *PLAN, "--concurrency", "8", "--set", "usable_memory=10")
    assert code == 1
    assert "sglang-tknp: Nothing fits" in err and "Nothing fits" in out
    slo = ("--slo-per-token-ms", "1", "--layouts", "tknp,dp")
    code, _, err = run(capsys, *PLAN, "--concurrency", "8", *slo)
    assert code == 3
    assert "no layout meets it" in err
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan"])
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([*PLAN], "--input-len needs --concurrency or --request-rate as well"),
        (["plan", "--model", "llama-3.1-8b"], "a workload is missing"),
        ([*PLAN, "--concurrency", "0"], "--concurrency=0 must be 1 or more"),
        ([*PLAN, "--concurrency", "4", "--output-len", "0"], "--output-len=0 must be 1 or more"),
        ([*PLAN, "--concurrency", "4", "--request-rate", "1"], "leave it out"),
        ([*PLAN, "--concurrency", "4", "--num-requests", "1"], "--num-requests goes with"),
        ([*PLAN, "--request-rate", "-1"], "--request-rate=-1 must be positive"),
        ([*PLAN, "--request-rate", "inf"], "--request-rate=inf must be positive and finite"),
        ([*PLAN, "--concurrency", "4", "--trace", "x"], "--input-len=32768: --trace has its own"),
        ([*PLAN, "--concurrency", "4", "--nodes", "0"], "--nodes=0 must be 1 or more"),
        ([*PLAN, "--concurrency", "4", "--set", "x=1"], "--set x: no such constant"),
        ([*PLAN, "--concurrency", "4", "--set", "gemm_fixed"], "write NAME=VALUE"),
        ([*PLAN, "--concurrency", "4", "--set", "gemm_fixed=-1"], "must be zero or more"),
        ([*PLAN, "--concurrency", "4", "--tp-per-node", "0"], "--tp-per-node=0 must be 1 or more"),
        (
            [*PLAN, "--concurrency", "4", "--tp-per-node", "3"],
            "use 1, 2, 4, 8, 16, 32, 64, 128 with --tp-per-node",
        ),
        ([*PLAN, "--concurrency", "4", "--pp-overlap", "2"], "--pp-overlap=2 must lie"),
        ([*PLAN, "--concurrency", "4", "--slo-per-token-ms", "0"], "--slo-per-token-ms=0 must"),
        ([*PLAN, "--concurrency", "4", "--slo-target", "2"], "--slo-target=2 must be above 0"),
        ([*PLAN, "--concurrency", "4", "--layouts", "tknp,ep"], "no layout is named ep"),
        ([*PLAN, "--concurrency", "4", "--kv-tokens-per-node", "many"], "for example dp=58000"),
        ([*PLAN, "--concurrency", "4", "--kv-tokens-per-node", "ep=5"], "for example dp=58000"),
        ([*PLAN, "--concurrency", "4", "--hardware", "abacus"], "--hardware=abacus is neither"),
        (["plan", "--model", "gpt-9", "--input-len", "1"], "--model-path=gpt-9 is neither"),
        ([*SIMULATE, "--trace", "gone.jsonl"], "gone.jsonl"),
        (
            [*SIMULATE, "--input-len", "9", "--concurrency", "1", "--page-size", "0"],
            "--page-size=0",
        ),
        ([*SIMULATE, "--input-len", "9", "--concurrency", "1", "--layout", "x"], "named x"),
        (["trace", "fixed"], "trace fixed needs --input-len"),
        (["trace", "mixed", "--num-requests", "0"], "--num-requests=0 must be 1 or more"),
    ],
)
def test_senseless_settings_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], complaint: str
) -> None:
    assert complaint in refused(capsys, *argv)


def test_experts_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["X"], "num_experts": 8, "hidden_size": 64}))
    argv = ("plan", "--model", str(config), "--input-len", "9", "--concurrency", "1")
    assert "its config.json has num_experts" in refused(capsys, *argv)


def test_a_measured_capacity_tells_the_memory_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*PLAN, "--concurrency", "8", "--json", "--layouts", "tknp,dp", "--no-bands")
    _, plain, _ = run(capsys, *argv)
    _, measured, _ = run(capsys, *argv, "--kv-tokens-per-node", "850000")
    tknp, dp = json.loads(measured)["layouts"]
    assert tknp["kv_tokens_by_owner"] == [850_000] * 4
    before = json.loads(plain)["layouts"]
    token = json.loads(plain)["assumptions"]["model"]["kv_token_bytes"]
    # The same bytes less on every node, whatever its layout.
    less = [old["kv_tokens_by_owner"][0] for old in before]
    fullest = min(before[0]["kv_tokens_by_owner"])
    assert dp["kv_tokens_by_owner"][0] == pytest.approx(less[1] - (fullest - 850_000), abs=1)
    assert token == 504 * 1024


def test_simulate_writes_the_benchmarks_line_and_every_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = (*SIMULATE, "--input-len", "32768", "--request-rate", "2", "--num-requests", "40")
    out_dir = tmp_path / "run"
    code, out, err = run(
        capsys, *argv, "--output-dir", str(out_dir), "--tag", "t", "--slo-per-token-ms", "100"
    )
    assert code == 0
    assert out.startswith("assumed\n") and "completion throughput" in out
    assert "wrote" in err
    line = json.loads((out_dir / "result.jsonl").read_text())
    assert (line["tag"], line["completed"], line["request_rate"]) == ("t", 40, 2)
    assert line["goodput_slos_ms"] == {"e2el": 102_400}
    rows = list(csv.DictReader((out_dir / "requests.csv").open()))
    assert len(rows) == 40
    for row in rows:
        times = [float(row[n]) for n in ("arrival_s", "admit_s", "first_token_s", "finish_s")]
        assert times == sorted(times)
        assert row["owner"] in "0123"
    run(capsys, *argv, "--output-dir", str(out_dir))
    assert len((out_dir / "result.jsonl").read_text().splitlines()) == 2  # appended
    _, again, _ = run(capsys, *argv, "--json")
    assert json.loads(again)["output_throughput"] == line["output_throughput"]


def test_simulate_of_what_no_owner_holds_fails(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*SIMULATE, "--input-len", "2000000", "--concurrency", "2")
    code, _, err = run(capsys, *argv)
    assert code == 1
    assert "nothing fits: The request needs 2001024 KV tokens" in err


def test_a_trace_goes_round(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    argv = ("trace", "mixed", "--request-rate", "1", "-o", str(file))
    code, out, err = run(capsys, *argv)
    assert (code, out) == (0, "")
    assert "128 requests" in err and "mean 32898" in err
    expected = trace.poisson(trace.paper_mixed(1024, 42), 1.0, 42)
    assert trace.load(file) == [pytest.approx(arrival) for arrival in expected]
    code, out, _ = run(capsys, *SIMULATE, "--trace", str(file))
    assert code == 0
    assert "128 requests of mixed.jsonl" in out


def test_traces_of_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    length = ("--num-requests", "6", "--input-len", "100", "--output-len", "5")
    burst = ("trace", "burst", *length, "--per-burst", "2", "--seconds-between", "3")
    _, out, _ = run(capsys, *burst)
    assert [json.loads(line)["timestamp"] for line in out.splitlines()] == [
        0,
        0,
        3e3,
        3e3,
        6e3,
        6e3,
    ]
    _, out, _ = run(capsys, "trace", "poisson", *length, "--request-rate", "2")
    times = [json.loads(line)["timestamp"] for line in out.splitlines()]
    assert times[0] == 0 and times == sorted(times) and len(set(times)) == 6
    _, out, err = run(capsys, "trace", "fixed", *length, "--json")
    found = json.loads(out)
    assert (found["count"], found["mean"], err) == (6, 100, "")
    assert found["requests"][5] == {"seconds": 0, "input_tokens": 100, "output_tokens": 5}


def test_calibrate_by_hand(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    argv = ("calibrate", "--set", "exchange_latency=35", "--source", "our switch", "-o", str(file))
    code, _, _ = run(capsys, *argv)
    assert code == 0
    constant = hardware.load(str(file)).constants["exchange_latency"]
    assert constant.value == 35 and "our switch" in constant.source
    code, out, _ = run(capsys, *PLAN, "--concurrency", "4", "--hardware", str(file), "--json")
    assert code == 0
    found = json.loads(out)["assumptions"]["hardware"]["constants"]["exchange_latency"]
    assert found["value"] == 35


def test_validate_prints_the_table_and_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "validate")
    assert (code, err) == (0, "")
    assert out.startswith("assumed\n")
    for number in range(1, 28):
        assert f"\nV{number} " in out
    assert out.count("  fitted  ") == 2  # in the head, and V21
    assert "known miss" in out


def test_validate_fails_where_a_number_lies_outside(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the one fitted number TKNP over DP is not 2.06."""
    code, out, err = run(capsys, "validate", "--hardware", "h100-sxm", "--json")
    assert code == 1
    assert err.startswith("sglang-tknp: outside their tolerance: V21")
    found = json.loads(out)
    assert found["fitted"] == []
    assert {c["id"] for c in found["checks"]} == {f"V{n}" for n in range(1, 28)}
    assert len(found["known_misses"]) >= 6


def test_figures_are_written_and_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "figures", "--only", "5", "-o", str(tmp_path / "f"), "--json")
    assert code == 0
    assert [Path(name).name for name in json.loads(out)] == [
        "figure-5.png",
        "figure-5.svg",
        "figure-5.csv",
    ]
    assert "no figure 2 is simulated" in refused(capsys, "figures", "--only", "2", "--json")


def test_a_report_is_one_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    argv = ("report", *PLAN[1:], "--concurrency", "8", "--layouts", "tknp,dp", "-o", str(page))
    code, out, _ = run(capsys, *argv)
    assert (code, out) == (0, f"wrote {page}\n")
    text = page.read_text()
    assert "Choice: DP" in text and "exchange_latency" in text
    assert "<script" not in text


def test_missing_extras_say_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    argv = ("figures", "--only", "5", "-o", str(tmp_path), "--json")
    assert "pip install" in refused(capsys, *argv)
    argv = ("report", *PLAN[1:], "--concurrency", "8", "-o", str(tmp_path / "r.html"))
    assert "pip install" in refused(capsys, *argv)


def test_the_fit_can_be_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "validate", "--fit", "--json")
    assert code == 0
    recorded = hardware.load("h100-paper").constants["exchange_latency"].value
    assert json.loads(out) == {"exchange_latency": pytest.approx(recorded, abs=0.11)}
