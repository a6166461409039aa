"""Read what nccl-tests (`all_reduce_perf`, `sendrecv_perf`) printed: who ran and how long."""

import re
from dataclasses import dataclass, field
from pathlib import Path

TESTS = ("all_reduce_perf", "sendrecv_perf")
# What mpirun --tag-output and srun --label put before every line.
LABEL = re.compile(r"^\s*(?:\[[\d,]+\](?:<\w+>:?)?|\d+:)\s*(?=[#\d])")
RANK = re.compile(
    r"#\s+Rank\s+(?P<rank>\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(?P<host>\S+)"
    r"\s+device\s+\d+\s+\[[^\]]*\]\s*(?P<gpu>.*)"
)
WRONG_SIZES = 0.05  # of algbw: more means that a column is not what its name says


@dataclass(slots=True, kw_only=True)
class NcclRun:
    """One run: times are out of place, as decode's all-reduces are."""

    file: str  # its base name
    test: str  # one of TESTS
    hosts: list[str] = field(default_factory=list)  # one per rank
    gpu: str = ""
    settings: str = ""  # the line with minBytes, iterations and graph
    sizes: list[int] = field(default_factory=list)  # bytes
    seconds: list[float] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        return len(set(self.hosts))

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @property
    def graph(self) -> bool:
        """With -G: replayed as a CUDA graph, as servers decode."""
        found = re.search(r"graph: (\d+)", self.settings)
        return found is not None and found[1] != "0"


def read_run(path: Path) -> NcclRun:
    """Read one file of output.

    Raises:
        ValueError: it is no complete output of one of TESTS; the message names file, line and fix.
    """
    if not path.is_file():
        raise ValueError(f"--nccl: there is no file {path}; save the test's output with `| tee`")
    lines = [LABEL.sub("", line) for line in path.read_text(errors="replace").splitlines()]
    run = NcclRun(file=path.name, test="")
    columns: list[str] = []
    ratios: list[float] = []  # bus over algorithm bandwidth: tells the collective
    for number, line in enumerate(lines, 1):
        where = f"{path.name}, line {number}"
        if found := RANK.match(line):
            _add_rank(run, int(found["rank"]), found["host"], found["gpu"], where)
        elif "minBytes" in line:
            run.settings = line.lstrip("# ")
        elif re.match(r"#\s+size\s+count", line):
            columns = line.lstrip("# ").split()
        elif re.match(r"\s*\d+\s+\d+\s+\w+\s", line):
            _add_row(run, line.split(), columns, ratios, where)
        elif "Out of bounds values" in line and "OK" not in line:
            raise ValueError(f"{where}: the test computed wrong results; do not use its times")
    if not run.hosts or not run.sizes:
        missing = "`# Rank` lines" if not run.hosts else "rows of sizes and times"
        raise ValueError(
            f"{path.name} has no {missing}, so it is no output of {' or '.join(TESTS)}; save all "
            "of what the test prints, from `# nThread` on"
        )
    run.test = _name_test("\n".join(lines), path.name, run, ratios)
    return run


def _add_rank(run: NcclRun, rank: int, host: str, gpu: str, where: str) -> None:
    if rank != len(run.hosts):
        raise ValueError(
            f"{where}: rank {rank} follows {len(run.hosts)} ranks. Either the file holds several "
            "runs (give each its own file), or nccl-tests was built without MPI=1, so that every "
            "process ran alone"
        )
    run.hosts.append(host)
    run.gpu = gpu.strip()


def _add_row(
    run: NcclRun, cells: list[str], columns: list[str], ratios: list[float], where: str
) -> None:
    if "time" not in columns:
        raise ValueError(f"{where}: times without the line `# size count ... time` before them")
    at = columns.index("time")
    try:
        size, micros = int(cells[0]), float(cells[at])
        algbw, busbw = float(cells[at + 1]), float(cells[at + 2])
        wrong = cells[at + 3]
    except (IndexError, ValueError):
        raise ValueError(
            f"{where}: expected numbers in {' '.join(columns)}, found `{' '.join(cells)}`; the "
            "line is torn, so save the output of one process only"
        ) from None
    if wrong not in ("N/A", "0", "0e+00") and float(wrong) > 0:
        raise ValueError(f"{where}: #wrong is {wrong}; repair the network before measuring it")
    if algbw >= 1 and abs(size / micros / 1e3 / algbw - 1) > WRONG_SIZES:
        raise ValueError(
            f"{where}: {size} bytes in {micros:g} us are not {algbw:g} GB/s; sizes must be bytes "
            "and times microseconds, as nccl-tests prints them"
        )
    if size > 0 and micros > 0:
        run.sizes.append(size)
        run.seconds.append(micros * 1e-6)
    if algbw >= 1:
        ratios.append(busbw / algbw)


def _name_test(text: str, file: str, run: NcclRun, ratios: list[float]) -> str:
    """By its own word, the file's name, or else the ratio of the bandwidths."""
    for source in (text, file):
        named = [test for test in TESTS if test.removesuffix("_perf") in source]
        if len(named) == 1:
            return named[0]
        if others := set(re.findall(r"\w+_perf", source)) - set(TESTS) if not named else None:
            raise ValueError(f"{file} is of {', '.join(sorted(others))}; give {' or '.join(TESTS)}")
    if run.ranks > 2 and ratios:
        ratio = sorted(ratios)[len(ratios) // 2]
        expected = {"all_reduce_perf": 2 * (run.ranks - 1) / run.ranks, "sendrecv_perf": 1.0}
        for test, value in expected.items():
            if abs(ratio / value - 1) < 0.02:
                return test
    raise ValueError(
        f"{file}: which test is this? Neither its text nor its name says {' or '.join(TESTS)}; "
        "rename the file so that it does"
    )
