"""Proves that our Nemotron computes what transformers' does, in one stage and in several.

The model's own maths, without a server: attention is a plain one here. tests/serve/test_parity.py
runs it in servers, alone and through TKNP.
"""

from typing import Any

import pytest

from tests.tiny import make_tiny
from tests.upstream.process import result_of, run_python

pytestmark = pytest.mark.upstream

VARIANTS: dict[str, dict[str, Any]] = {
    "as-nemotron-4": {"partial_rotary_factor": 0.5},
    # Every option away from its default.
    "all-options": {
        "attention_bias": True,
        "mlp_bias": True,
        "norm_eps": 0.3,
        "rope_theta": 500.0,
        "tie_word_embeddings": True,
    },
}
REPORT = """
import sys
from pathlib import Path
from tests.upstream.nemotron_facts import report
report(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("nemotron")
    for name, changes in VARIANTS.items():
        make_tiny("nemotron", folder / name, **changes)
    return dict(result_of(run_python(REPORT, str(folder))))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(facts: dict[str, Any], variant: str) -> None:
    """float32, every row of a prefill and of decode steps one by one."""
    found = facts["logits"][variant]
    assert found["error"] < 1e-4 * found["spread"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_compute_the_same_bits(facts: dict[str, Any], variant: str) -> None:
    assert facts["logits"][variant]["stages_are_equal"] == [True, True]


def test_stages_hold_one_copy_and_a_tied_head(facts: dict[str, Any]) -> None:
    extra = {name: found["extra_parameters"] for name, found in facts["logits"].items()}
    assert extra == {"as-nemotron-4": [0, 0], "all-options": [512 * 64] * 2}


def test_the_norm_rounds_as_transformers(facts: dict[str, Any]) -> None:
    assert facts["norm"] == 0


def test_heads_are_split_over_attention_ranks(facts: dict[str, Any]) -> None:
    """8 query and 2 KV heads, by TP size and attention DP size."""
    assert facts["heads"] == {
        "1/1": [8, 2, 8],
        "2/1": [4, 1, 8],
        "4/1": [2, 1, 8],  # each KV head on two ranks
        "4/2": [4, 1, 8],
    }


def test_a_quantised_checkpoint_quantises_the_four_projections(facts: dict[str, Any]) -> None:
    assert facts["fp8"] == [
        "mlp.down_proj.weight",
        "mlp.up_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.qkv_proj.weight",
    ]


def test_a_tensor_that_no_stage_holds_is_refused(facts: dict[str, Any]) -> None:
    assert facts["refusal"] == (
        "the checkpoint's model.layers.0.mlp.gate_proj.weight is no parameter of "
        "NemotronForCausalLM"
    )


def test_nemotron_4_340b_builds_with_the_estimated_bytes(facts: dict[str, Any]) -> None:
    found = facts["340B"]
    assert found["built"] == found["estimated"] == 2 * 341_029_195_776
    assert found["rotary"] == [192, 96]
    assert found["logits"] == [256000, 18432]
