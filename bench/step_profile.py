"""For step.py: where the time of a decode step goes, per node, as a table and a picture."""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from step_pools import NODES, PLUGIN, make_prompts, serving

CONTEXTS = (128, 1024, 4096)
BATCH = 4
TOKENS = 40
# In the order of a step. "Other root" is a node's wait for rows while the other one is the root.
SECTIONS = {
    "scheduler": "scheduler",
    "inputs": "ids and positions",
    "dense": "dense",
    "attention": "attention",
    "exchange post": "exchange, posting",
    "exchange wait": "exchange, waiting",
    "other root": "other node is root",
    "handoff": "handoff",
    "logits": "logits",
    "host": "the rest of TKNP",
}
Profile = dict[int, list[dict[str, float]]]  # context -> per node, milliseconds per section


def measure_profile(port: int, folder: Path) -> Profile:
    files = [folder / f"profile.{rank}" for rank in range(NODES)]
    env = {"PYTHONPATH": str(PLUGIN), "TKNP_STEP_PROFILE": str(folder / "profile")}
    found: Profile = {}
    with serving(port, env, tknp=True) as client:
        for context in CONTEXTS:
            prompts = make_prompts(BATCH, context)
            client.generate(prompts, 2, None)
            sizes = [file.stat().st_size for file in files]
            client.generate(prompts, TOKENS, None)
            time.sleep(0.5)
            found[context] = [medians(f, size) for f, size in zip(files, sizes, strict=True)]
    return found


def medians(file: Path, start: int) -> dict[str, float]:
    """Of the full steps among the lines behind `start`; first and last ones left out."""
    with file.open() as stream:
        stream.seek(start)
        steps: list[dict[str, Any]] = [json.loads(line) for line in stream]
    full = [step for step in steps if sum(step["rows"]) == BATCH][2:-2]
    return {
        name: round(statistics.median(step.get(name, 0.0) for step in full) * 1e3, 3)
        for name in SECTIONS
    }


def format_profile(profile: Profile) -> str:
    lines = [f"ms per decode step, SmolLM2, N={NODES}, T=1, batch {BATCH}"]
    columns = [(context, node) for context in profile for node in range(NODES)]
    head = "".join(f"{f'{c} / node {n}':>16}" for c, n in columns)
    lines.append(f"{'context / node':22}{head}")
    for name, label in SECTIONS.items():
        cells = "".join(f"{profile[c][n][name]:16.2f}" for c, n in columns)
        lines.append(f"{label:22}{cells}")
    totals = "".join(f"{sum(profile[c][n].values()):16.2f}" for c, n in columns)
    lines.append(f"{'all':22}{totals}")
    return "\n".join(lines)


def draw_profile(profile: Profile, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"{c} tokens, node {n}" for c in profile for n in range(NODES)]
    nodes = [node for context in profile.values() for node in context]
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    colours = pyplot.get_cmap("tab10").colors
    left: Sequence[float] = [0.0] * len(nodes)
    for (name, label), colour in zip(SECTIONS.items(), colours, strict=True):
        widths = [node[name] for node in nodes]
        axes.barh(labels, widths, left=left, label=label, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(f"ms per decode step (SmolLM2, two CPU nodes of one rank, batch {BATCH})")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
