"""Proves that flags, environment variables and the configuration carry the same settings."""

import argparse
import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tknp.config import (
    DEFAULT_EXCHANGE_TIMEOUT,
    ENV_PREFIX,
    OWNER_POLICIES,
    TknpConfig,
    add_cli_args,
    from_cli_args,
)

POSITIVE = st.floats(min_value=0, exclude_min=True, max_value=86400, allow_nan=False)
CONFIGS = st.builds(
    TknpConfig,
    enable=st.booleans(),
    layer_blocks=st.none() | st.text("0123456789,", min_size=1),
    exchange_timeout=POSITIVE,
    device_memory_gb=st.none() | POSITIVE,
    owner_policy=st.sampled_from(OWNER_POLICIES),
    expected_output_tokens=st.none() | st.integers(1, 1 << 30),
    max_overtakes=st.integers(0, 1000),
    prefix_slack=st.none() | st.integers(0, 1 << 30),
    force_slots=st.booleans(),
    uneven_layouts=st.integers(0, 1000),
)
FLAGS = [
    "--enable-tknp",
    "--tknp-layer-blocks",
    "--tknp-exchange-timeout",
    "--tknp-device-memory-gb",
    "--tknp-owner-policy",
    "--tknp-expected-output-tokens",
    "--tknp-max-overtakes",
    "--tknp-prefix-slack",
    "--tknp-force-slots",
    "--tknp-uneven-layouts",
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in fields(TknpConfig):
        # Set first, so that the end of a test takes back what `to_env` wrote meanwhile.
        monkeypatch.setenv(ENV_PREFIX + field.name.upper(), "")
        monkeypatch.delenv(ENV_PREFIX + field.name.upper())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_cli_args(made)
    return made


@given(config=CONFIGS, stale=CONFIGS)
def test_the_environment_carries_every_setting(config: TknpConfig, stale: TknpConfig) -> None:
    env: dict[str, str] = {}
    stale.to_env(env)
    config.to_env(env)
    assert TknpConfig.from_env(env) == config
    assert all(key.startswith(ENV_PREFIX) and value for key, value in env.items())


def test_the_variables_names_and_values() -> None:
    env = {"OTHER": "1"}
    TknpConfig(
        enable=True,
        layer_blocks="16,14",
        exchange_timeout=2.5,
        device_memory_gb=8,
        owner_policy="kv-used",
        expected_output_tokens=512,
        max_overtakes=0,
        prefix_slack=0,
    ).to_env(env)
    assert env == {
        "OTHER": "1",
        "SGLANG_TKNP_ENABLE": "1",
        "SGLANG_TKNP_LAYER_BLOCKS": "16,14",
        "SGLANG_TKNP_EXCHANGE_TIMEOUT": "2.5",
        "SGLANG_TKNP_DEVICE_MEMORY_GB": "8",
        "SGLANG_TKNP_OWNER_POLICY": "kv-used",
        "SGLANG_TKNP_EXPECTED_OUTPUT_TOKENS": "512",
        "SGLANG_TKNP_MAX_OVERTAKES": "0",
        "SGLANG_TKNP_PREFIX_SLACK": "0",
    }


def test_nothing_set_means_off_and_defaults() -> None:
    assert TknpConfig.from_env({}) == TknpConfig()
    assert TknpConfig.from_env({ENV_PREFIX + "ENABLE": "0"}).enable is False
    assert TknpConfig.from_env({ENV_PREFIX + "LAYER_BLOCKS": ""}).layer_blocks is None
    assert TknpConfig().exchange_timeout == DEFAULT_EXCHANGE_TIMEOUT == 120


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TKNP_DEVICE_MEMORY_GB", "3")
    assert TknpConfig.from_env().device_memory_gb == 3
    monkeypatch.setenv("SGLANG_TKNP_ENABLE", "1")
    TknpConfig(layer_blocks="1,2").to_env()
    assert TknpConfig.from_env() == TknpConfig(layer_blocks="1,2")


def test_a_time_out_of_more_than_a_day_is_a_hang() -> None:
    with pytest.raises(ValueError, match="--tknp-exchange-timeout=inf must be at most 86400"):
        TknpConfig(exchange_timeout=float("inf"))


@pytest.mark.parametrize("value", ["yes", "2", "on"])
def test_a_switch_is_never_read_as_off(value: str) -> None:
    with pytest.raises(ValueError, match=f"SGLANG_TKNP_ENABLE='{value}' must be 1 or 0"):
        TknpConfig.from_env({"SGLANG_TKNP_ENABLE": value})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_time_out_must_be_positive(value: float) -> None:
    message = (
        f"--tknp-exchange-timeout={value:g} must be a positive number of seconds; leave it out "
        "for 120"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TknpConfig(exchange_timeout=value)


@pytest.mark.parametrize("value", [0.0, -2.5, float("nan")])
def test_a_memory_size_must_be_positive(value: float) -> None:
    message = f"--tknp-device-memory-gb={value:g} must be a positive number of GiB; leave it out"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        TknpConfig(device_memory_gb=value)


@pytest.mark.parametrize("name", ["EXCHANGE_TIMEOUT", "DEVICE_MEMORY_GB"])
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^SGLANG_TKNP_{name}='soon' must be a number$"):
        TknpConfig.from_env({ENV_PREFIX + name: "soon"})


def test_flags_become_the_configuration() -> None:
    args = parser().parse_args(
        ["--enable-tknp", "--tknp-layer-blocks", "3,1", "--tknp-exchange-timeout", "7"]
        + ["--tknp-device-memory-gb", "1.5"]
    )
    assert from_cli_args(args) == TknpConfig(
        enable=True, layer_blocks="3,1", exchange_timeout=7, device_memory_gb=1.5
    )
    assert from_cli_args(parser().parse_args([])) == TknpConfig()


@given(config=CONFIGS)
def test_flags_default_to_the_environment(config: TknpConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in [field.name.upper() for field in fields(TknpConfig)]:
            patch.delenv(ENV_PREFIX + name, raising=False)
        env: dict[str, str] = {}
        config.to_env(env)
        for key, value in env.items():
            patch.setenv(key, value)
        assert from_cli_args(parser().parse_args([])) == config


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TKNP_LAYER_BLOCKS", "1,1")
    args = parser().parse_args(["--tknp-layer-blocks", "2,2"])
    assert from_cli_args(args).layer_blocks == "2,2"


def test_help_explains_every_flag() -> None:
    text = " ".join(parser().format_help().split())
    group = text[text.index("Decode Token Parallelism (sglang-tknp)") :]
    for flag in FLAGS:
        explanation = group[group.index(flag) + len(flag) :]
        assert len(explanation.split("--")[0].split()) >= 4, f"{flag} is not explained"
    assert len(FLAGS) == len(fields(TknpConfig))
    assert "--attn-dp-size N" in group
    assert "Default: 120." in group
    assert "in groups of N, one for each owner, so a number below N gives none" in group
