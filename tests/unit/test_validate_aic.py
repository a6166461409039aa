"""X1: measured steps of another engine. Rows are those of aiconfigurator-core 0.12.0."""

from importlib import util
from pathlib import Path

import pytest

from sglang_tknp.launch.planner import hardware, validate_aic

# Three of the package's rows (Apache-2.0, NVIDIA): TP, batch, seconds per output token.
MEASURED = [(2, 8, 19.194e-3), (4, 32, 18.386e-3), (8, 64, 16.489e-3)]


def table(folder: Path, **changed: str) -> Path:
    wanted = validate_aic.WANTED | changed
    lines = [",".join([*wanted, "tp_size", "batch_size", "silicon_tpot_ms"])]
    lines += [
        ",".join([*wanted.values(), str(tp), str(batch), str(seconds * 1e3)])
        for tp, batch, seconds in MEASURED
    ]
    path = folder / "silicon_sample.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_measured_steps_are_predicted_within_the_tolerance(tmp_path: Path) -> None:
    rows = validate_aic.compare(table=table(tmp_path))
    assert [(row.tp_size, row.batch, row.measured) for row in rows] == MEASURED
    assert {row.context for row in rows} == {5120}
    assert validate_aic.mean_error(rows) < validate_aic.TOLERANCE


def test_a_quicker_machine_is_predicted_quicker(tmp_path: Path) -> None:
    file = table(tmp_path)
    h100, h200 = (validate_aic.compare(hardware.load(n), file) for n in ("h100-sxm", "h200-sxm"))
    for slow, quick in zip(h100, h200, strict=True):
        # Reading is 4.8 / 3.35 as quick at most, and latencies stay.
        assert slow.predicted / 1.5 < quick.predicted < slow.predicted / 1.1


def test_other_models_rows_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows of meta-llama/Llama-3.1-70B"):
        validate_aic.compare(table=table(tmp_path, system="h200_sxm"))


def test_without_the_package_the_message_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validate_aic, "MODULE", "no_such_module")
    with pytest.raises(ModuleNotFoundError, match=r"sglang-tknp\[validate\]"):
        validate_aic.compare()


@pytest.mark.skipif(util.find_spec("aiconfigurator_core") is None, reason=validate_aic.INSTALL)
def test_all_rows_of_the_package() -> None:
    rows = validate_aic.compare()
    assert len(rows) == 15
    assert validate_aic.mean_error(rows) <= validate_aic.TOLERANCE
