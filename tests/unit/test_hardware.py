"""Proves that a hardware file is read in its units, and a wrong one refused with the fix."""

from pathlib import Path

import pytest

from sglang_tknp.launch.planner import hardware
from sglang_tknp.launch.planner.hardware import CONSTANTS, STATUSES

H100 = (Path(hardware.__file__).parent / "machines" / "h100-sxm.toml").read_text()


def changed(old: str, new: str) -> str:
    assert old in H100
    return H100.replace(old, new, 1)


@pytest.mark.parametrize("name", hardware.built_in())
def test_every_built_in_file_says_where_each_number_is_from(name: str) -> None:
    machine = hardware.load(name)
    assert machine.name == name
    assert machine.description
    assert list(machine.constants) == list(CONSTANTS)
    for constant in machine.constants.values():
        assert constant.status in STATUSES
        assert len(constant.source) > 8


def test_numbers_come_in_base_units() -> None:
    machine = hardware.load("h100-sxm")
    assert machine.usable_memory == 70 * 2**30  # GiB are not GB
    assert machine.memory_bandwidth == 3350e9
    assert machine.step_overhead == pytest.approx(1.5e-3)
    assert machine.node_size == 8


def test_the_papers_file_is_h100_but_for_the_one_fitted_number() -> None:
    given, paper = hardware.load("h100-sxm"), hardware.load("h100-paper")
    differ = {n for n in CONSTANTS if given.constants[n] != paper.constants[n]}
    assert differ == {"exchange_latency"}
    assert [text.split(" = ")[0] for text in paper.fitted()] == ["exchange_latency"]
    assert given.fitted() == []
    assert {c.status for c in given.constants.values()} <= {
        "datasheet",
        "measured",
        "derived",
        "prior",
    }


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("[constants.gemm_fixed]", "[constants.gem_fixed]", "unknown constants gem_fixed"),
        ('unit = "GiB"', 'unit = "GB"', 'has unit "GB", and it is read in "GiB"'),
        ("value = 3350", "value = -1", "memory_bandwidth = -1 GB/s must be positive"),
        ("value = 3350", "value = nan", "must be positive"),
        ("value = 3350", 'value = "fast"', "is no number"),
        ("value = 3350", "value = true", "is no number"),
        ("value = 8\n", "value = 7.5\n", "gpus_per_node = 7.5 must be whole"),
        ('status = "datasheet"', 'status = "guess"', 'has status "guess"'),
        ("value = 70.0", "value = 80.0", "lies outside its own range"),
        ("low = 66.5", "lowest = 66.5", "has unknown ['lowest']"),
        ("[constants.gpus_per_node]", "[constants.gpus_per_node", "is not TOML"),
    ],
)
def test_wrong_files_are_refused(old: str, new: str, complaint: str) -> None:
    with pytest.raises(ValueError) as error:
        hardware.parse(changed(old, new), "mine.toml")
    assert complaint in str(error.value)
    assert "mine.toml" in str(error.value)


def test_a_missing_constant_is_named() -> None:
    lines = [f"[constants.{name}]\nvalue = 1" for name in CONSTANTS if name != "gemm_fixed"]
    with pytest.raises(ValueError, match=r"lacks gemm_fixed; copy them from"):
        hardware.parse("\n".join(lines), "mine.toml")
    with pytest.raises(ValueError, match="needs value, unit, source and status"):
        hardware.parse("\n".join([*lines, "[constants.gemm_fixed]"]), "mine.toml")


def test_an_efficiency_is_a_part_of_the_peak() -> None:
    text = changed("value = 0.84\nlow = 0.73\nhigh = 0.87", "value = 1.2")
    with pytest.raises(ValueError, match="gemm_efficiency_8bit = 1.2 is a part of the peak"):
        hardware.parse(text, "mine.toml")


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--hardware=b300 is neither .*h100-sxm.* nor"):
        hardware.load("b300")
    mine = tmp_path / "mine.toml"
    mine.write_text(changed('name = "h100-sxm"', 'name = "mine"'))
    assert hardware.load(str(mine)).name == "mine"


def test_changed_values_say_so_and_have_no_range() -> None:
    machine = hardware.load("h100-sxm").with_values("command line", exchange_latency=35)
    constant = machine.constants["exchange_latency"]
    assert (constant.value, constant.status, constant.source) == (35, "user", "command line")
    assert constant.low is None
    assert machine.exchange_latency == pytest.approx(35e-6)
    with pytest.raises(ValueError, match="exchange_latency = -3 us must be zero or more"):
        hardware.load("h100-sxm").with_values("command line", exchange_latency=-3)
