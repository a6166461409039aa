"""Where a TKNP step of the comparison's toy goes, per node: the why of compare.py's numbers.

    python bench/compare_profile.py

One server, 4 and 20 requests at once, with the sections of bench/step_plugin. Medians in ms per
decode step go to bench/results/compare-profile.json.
"""

import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compare_run import Server, serving
from compare_systems import Pool, Settings, server_env, server_flags
from compare_toy import Toy, prepare_toy
from exchange import machine
from step_pools import PLUGIN

from sglang_tknp.launch.models import default_cache_dir

RESULTS = Path(__file__).parent / "results" / "compare-profile.json"
REQUESTS, TOKENS, NODES = (4, 20), 100, 2
Sections = dict[str, float]


def profile(server: Server, file: Path, requests: int) -> list[Sections]:
    """Of every node, while all requests decode; the first and last steps left out."""
    files = [Path(f"{file}.{node}") for node in range(NODES)]
    starts = [one.stat().st_size for one in files]
    prompts = [[3 + (i * 37 + j * 11) % 2000 for j in range(32)] for i in range(requests)]
    with ThreadPoolExecutor(requests) as pool:
        list(pool.map(lambda prompt: server.generate(prompt, TOKENS), prompts))
    return [medians(one, start, requests) for one, start in zip(files, starts, strict=True)]


def medians(file: Path, start: int, requests: int) -> Sections:
    steps = [json.loads(line) for line in file.read_bytes()[start:].decode().splitlines()]
    full = [step for step in steps if sum(step.pop("rows")) == requests][5:-5]
    names = sorted({name for step in full for name in step})
    return {
        name: round(1e3 * statistics.median(step.get(name, 0.0) for step in full), 2)
        for name in names
    }


def main() -> None:
    toy = Toy()
    model = prepare_toy(toy, default_cache_dir())
    settings = Settings(model=model, device_memory_gb=toy.device_memory_gb())
    with tempfile.TemporaryDirectory() as folder:
        file, server = Path(folder) / "profile", Server(30176, Path(folder))
        env = server_env("tknp", settings, [str(PLUGIN)]) | {"TKNP_STEP_PROFILE": str(file)}
        with serving(server_flags("tknp", Pool(), settings), env, server):
            found = {str(count): profile(server, file, count) for count in REQUESTS}
    result = {"command": "python bench/compare_profile.py", "machine": machine(), "ms": found}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    for count, nodes in found.items():
        for node, sections in enumerate(nodes):
            print(f"{count} requests, node {node}: {sections}")


if __name__ == "__main__":
    main()
