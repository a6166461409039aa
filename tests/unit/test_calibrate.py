"""`calibrate`: what nccl-tests print becomes constants, with where they are from."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sglang_tknp.launch.planner import calibrate, hardware
from sglang_tknp.launch.planner.nccl_fit import fit_line
from sglang_tknp.launch.planner.nccl_output import read_run

SIZES = [4096 << n for n in range(13)]  # 4 KiB to 16 MiB
Time = Callable[[int], float]  # bytes to microseconds


def line(latency: float, gigabytes: float) -> Time:
    return lambda size: latency + size / gigabytes / 1e3


def nccl(
    test: str, hosts: int, per_host: int, time: Time, *, graph: int = 20, named: bool = True
) -> str:
    """In the format of nccl-tests 2.17, as `-b 4K -e 16M -f 2 -g 1 -G 20` prints it."""
    ranks = hosts * per_host
    bus = 2 * (ranks - 1) / ranks if test == "all_reduce_perf" else 1.0
    lines = [f"# Collective test starting: {test}"] if named else []
    lines += [
        "# nThread 1 nGpus 1 minBytes 4096 maxBytes 16777216 step: 2(factor) warmup iters: 5 "
        f"iters: 20 agg iters: 1 validation: 1 graph: {graph}",
        "#",
        "# Using devices",
    ]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid  {6900 + rank} on  node-{rank // per_host} device "
        f"{rank % per_host:2} [0000:0{rank % per_host}:00] NVIDIA H100 80GB HBM3"
        for rank in range(ranks)
    ]
    gap = " " * 62
    lines += [
        "#",
        f"#{gap}out-of-place                       in-place          ",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong"
        "     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)       "
        "     (us)  (GB/s)  (GB/s)       ",
    ]
    for size in SIZES:
        us = time(size)
        speed = size / us / 1e3
        cells = f"{us:8.2f}  {speed:6.2f}  {speed * bus:6.2f}      0"
        in_place = f"{2 * us:8.2f}  {speed / 2:6.2f}  {speed * bus / 2:6.2f}    N/A"
        lines.append(f"{size:12}  {size // 4:12}     float     sum      -1{cells}{in_place}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.3456", "#", ""]
    return "\n".join(lines)


def calibrated(*arguments: str | Path) -> hardware.Hardware:
    parser = argparse.ArgumentParser()
    calibrate.add_arguments(parser)
    text = calibrate.run(parser.parse_args([str(a) for a in arguments]))
    return hardware.parse(text, "test")


def save(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def value(machine: hardware.Hardware, name: str) -> float:
    return machine.constants[name].value


def test_allreduce_in_a_node_from_out_of_place_columns(tmp_path: Path) -> None:
    file = save(tmp_path, "node.txt", nccl("all_reduce_perf", 1, 8, line(6.5, 140)))
    machine = calibrated("--nccl", file)
    assert value(machine, "node_allreduce_latency") == pytest.approx(6.5, rel=0.02)
    assert value(machine, "node_allreduce_bandwidth") == pytest.approx(140, rel=0.02)
    constant = machine.constants["node_allreduce_latency"]
    assert constant.status == "measured"
    for word in ("node.txt", "all_reduce_perf", "8 x NVIDIA H100", "CUDA graph", "13 points"):
        assert word in constant.source
    base = hardware.load("h100-sxm")
    same = [n for n in hardware.CONSTANTS if machine.constants[n] == base.constants[n]]
    assert set(hardware.CONSTANTS) - set(same) == {
        "node_allreduce_latency",
        "node_allreduce_bandwidth",
    }


def test_allreduce_over_two_and_four_nodes_gives_the_doubling(tmp_path: Path) -> None:
    files = [
        save(tmp_path, f"{n}.txt", nccl("all_reduce_perf", n, 8, line(25 + 30 * k, 110)))
        for k, n in ((1, 2), (2, 4))
    ]
    machine = calibrated("--nccl", *files)
    assert value(machine, "cross_allreduce_latency") == pytest.approx(25, rel=0.03)
    assert value(machine, "cross_allreduce_doubling") == pytest.approx(30, rel=0.03)
    assert value(machine, "cross_allreduce_bandwidth") == pytest.approx(110, rel=0.02)
    assert "2, 4 nodes" in machine.constants["cross_allreduce_doubling"].source


def test_allreduce_over_two_nodes_alone_keeps_the_base_doubling(tmp_path: Path) -> None:
    file = save(tmp_path, "two.txt", nccl("all_reduce_perf", 2, 8, line(70, 110)))
    machine = calibrated("--nccl", file)
    base = hardware.load("h100-sxm").constants["cross_allreduce_doubling"]
    assert machine.constants["cross_allreduce_doubling"] == base
    assert value(machine, "cross_allreduce_latency") == pytest.approx(20, rel=0.05)


def test_quick_network_leaves_nothing_below_zero(tmp_path: Path) -> None:
    file = save(tmp_path, "two.txt", nccl("all_reduce_perf", 2, 8, line(18, 110)))
    machine = calibrated("--nccl", file)
    assert value(machine, "cross_allreduce_latency") == pytest.approx(0, abs=0.1)
    assert value(machine, "cross_allreduce_doubling") == pytest.approx(18, rel=0.03)


def test_messages_between_two_hosts_and_the_exchange(tmp_path: Path) -> None:
    file = save(tmp_path, "p2p.txt", nccl("sendrecv_perf", 2, 1, line(17, 42), graph=0))
    machine = calibrated("--nccl", file)
    assert value(machine, "message_latency") == pytest.approx(17, rel=0.02)
    assert value(machine, "message_bandwidth") == pytest.approx(42, rel=0.02)
    assert value(machine, "exchange_latency") == pytest.approx(17, rel=0.02)
    assert "no CUDA graph" in machine.constants["message_latency"].source


def test_older_output_without_name_and_root_column_and_with_mpi_labels(tmp_path: Path) -> None:
    text = nccl("all_reduce_perf", 1, 8, line(6, 140), named=False)
    text = text.replace("   redop    root     time", "   redop     time", 1).replace(
        "#wrong", "error"
    )
    text = text.replace("sum      -1", "sum").replace("Group  0 ", "")
    text = "".join(f"[1,0]<stdout>:{row}\n" for row in text.splitlines())
    machine = calibrated("--nccl", save(tmp_path, "old.txt", text))
    assert value(machine, "node_allreduce_latency") == pytest.approx(6, rel=0.02)


def test_outliers_widen_the_range_and_hardly_move_the_value(tmp_path: Path) -> None:
    def time(size: int) -> float:
        return line(6, 140)(size) * (5 if size == 16 << 10 else 1)

    file = save(tmp_path, "node.txt", nccl("all_reduce_perf", 1, 8, time))
    constant = calibrated("--nccl", file).constants["node_allreduce_latency"]
    assert constant.value == pytest.approx(6, rel=0.1)
    assert constant.high is not None and constant.high > 25


def test_fit_recovers_a_line_from_noise() -> None:
    rng = np.random.default_rng(1)
    sizes = np.array(SIZES * 3, dtype=float)
    seconds = (20e-6 + sizes / 40e9) * rng.normal(1, 0.03, len(sizes))
    fitted = fit_line(sizes, seconds)
    assert fitted.latency[0] == pytest.approx(20e-6, rel=0.05)
    assert fitted.bandwidth[0] == pytest.approx(40e9, rel=0.05)
    assert fitted.latency[1] < fitted.latency[0] < fitted.latency[2]


def test_numbers_of_the_user(tmp_path: Path) -> None:
    machine = calibrated(
        "--set", "exchange_latency=35", "gpus_per_node=4", "--source", 'our "NDR" pair \\ 2 nodes'
    )
    assert machine.exchange_latency == pytest.approx(35e-6)
    assert machine.node_size == 4
    assert machine.constants["exchange_latency"].source == 'our "NDR" pair \\ 2 nodes'
    assert machine.constants["exchange_latency"].status == "user"
    assert machine.name == "h100-sxm-calibrated"
    assert machine.presets == {"dcp_span": "node"}


def test_numbers_of_the_user_come_before_measured_ones(tmp_path: Path) -> None:
    file = save(tmp_path, "p2p.txt", nccl("sendrecv_perf", 2, 1, line(17, 42)))
    machine = calibrated("--nccl", file, "--set", "exchange_latency=50", "--source", "own timer")
    assert value(machine, "exchange_latency") == 50


def bench_report(**constants: object) -> str:
    report = {
        "command": "python bench/hardware.py",
        "date": "2026-11-30",
        "machine": {"cpu": "Toy CPU", "cores": 2},
        "constants": constants,
    }
    return json.dumps(report)


def test_bench_report_with_its_origin(tmp_path: Path) -> None:
    fields = {"value": 9.5, "unit": "us", "low": 9.0, "high": 11.0, "how": "smallest product"}
    file = save(tmp_path, "hardware.json", bench_report(gemm_fixed=fields))
    constant = calibrated("--bench", file, "--name", "toy").constants["gemm_fixed"]
    assert (constant.value, constant.low, constant.high) == (9.5, 9.0, 11.0)
    for word in ("smallest product", "hardware.json", "2026-11-30", "bench/hardware.py", "Toy CPU"):
        assert word in constant.source


def test_every_built_in_file_survives_a_round_trip() -> None:
    for name in hardware.built_in():
        machine = hardware.load(name)
        assert hardware.parse(calibrate.to_toml(machine, "copy"), name) == machine


GOOD = nccl("all_reduce_perf", 1, 8, line(6, 140))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GOOD.replace("# Out of bounds values : 0 OK", "# Out of bounds values : 3 FAILED"),
            "wrong",
        ),
        (nccl("all_reduce_perf", 1, 4, line(6, 140)), "gpus_per_node=4"),
        (nccl("all_gather_perf", 1, 8, line(6, 140)), "all_gather_perf"),
        (nccl("sendrecv_perf", 1, 8, line(6, 140)), "two hosts"),
        (nccl("sendrecv_perf", 2, 1, line(6, 140), named=False), "which test"),
        (re.sub("# +Rank.*\n", "", GOOD), "no `# Rank` lines"),
        ("\n".join(GOOD.splitlines()[:14]), "no rows"),
        (GOOD + GOOD, "its own file"),
        (GOOD.replace("Rank  1 ", "Rank  0 "), "MPI=1"),
        (GOOD.replace("    16777216  ", "     4194304  "), "must be bytes"),
        ("\n".join(GOOD.splitlines()[:17]), "-b 4K -e 16M"),
        (GOOD.replace("      0 ", "      7 ", 1), "#wrong is 7"),
    ],
)
def test_unusable_output_names_the_file_and_the_fix(
    tmp_path: Path, text: str, message: str
) -> None:
    file = save(tmp_path, "run.txt", text)
    with pytest.raises(ValueError, match="run.txt") as error:
        calibrated("--nccl", file)
    assert message in str(error.value)


def test_error_names_the_line(tmp_path: Path) -> None:
    lines = GOOD.splitlines()
    lines[20] = lines[20][:50] + " torn line here"
    with pytest.raises(ValueError, match="line 21"):
        read_run(save(tmp_path, "run.txt", "\n".join(lines)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to calibrate"),
        (["--set", "exchange_latency=35"], "--source"),
        (["--source", "x"], "--set"),
        (["--set", "exchange=35", "--source", "x"], "constants are gpus_per_node"),
        (["--set", "gemm_fixed=five", "--source", "x"], "in us"),
        (["--set", "gemm_fixed=inf", "--source", "x"], "cannot stand"),
        (["--set", "gemm_fixed=-5", "--source", "x"], "zero or more"),
        (["--set", "gemm_efficiency_8bit=84", "--source", "x"], "at most 1"),
        (["--nccl", "absent.txt"], "no file absent.txt"),
        (["--base", "h100", "--set", "gemm_fixed=5", "--source", "x"], "h100-sxm"),
    ],
)
def test_unusable_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        calibrated(*arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1"),
        ("{}", "constants"),
        (bench_report(gemm_fixed={"value": 1, "unit": "ms", "how": "x"}), "should be us"),
        (bench_report(gemm={"value": 1, "unit": "us", "how": "x"}), "known constant"),
    ],
)
def test_unusable_bench_report(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match="hardware.json") as error:
        calibrated("--bench", save(tmp_path, "hardware.json", text))
    assert message in str(error.value)
