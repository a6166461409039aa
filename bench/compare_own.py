"""A user's own model in the comparison, on the machine as it is: no pretended memory, no ratios."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare_workloads import Point

from sglang_tknp.launch.model_source import find_model
from sglang_tknp.launch.planner.model import PlannedModel, planned


@dataclass(frozen=True)
class OwnModel:
    """What a study asks of its model; stands where compare_toy.Toy stands for a toy."""

    model: PlannedModel
    input_tokens: int
    output_tokens: int

    @property
    def heads(self) -> int:
        return self.model.num_heads

    @property
    def kv_heads(self) -> int:
        return self.model.num_kv_heads

    @property
    def tied(self) -> bool:
        return self.model.sizes.tied

    @property
    def vocab(self) -> int:
        return self.model.vocab_size

    @property
    def context_length(self) -> int:
        return self.input_tokens + self.output_tokens + 64

    def device_memory_gb(self) -> None:
        return None

    def lengths(self, context: int) -> tuple[int, int]:
        return self.input_tokens, self.output_tokens

    def about(self) -> dict[str, Any]:
        lengths = {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens}
        return {"model": self.model.name, **lengths}


def own_model(path: Path, input_tokens: int, output_tokens: int) -> OwnModel:
    """Raises ValueError for what is no dense decoder on this machine, or senseless lengths."""
    if input_tokens < 1 or output_tokens < 2:
        raise ValueError(
            f"--input-len={input_tokens} --output-len={output_tokens}: 1 and 2 at least"
        )
    return OwnModel(planned(find_model(str(path))), input_tokens, output_tokens)


def own_points(model: OwnModel, concurrency: list[int], rounds: int) -> tuple[Point, ...]:
    return tuple(
        Point("fixed", n, context=model.input_tokens, repeats=rounds) for n in sorted(concurrency)
    )


def about_toy(toy: Any) -> dict[str, Any]:
    """For the JSON."""
    return toy.about() if isinstance(toy, OwnModel) else asdict(toy)
