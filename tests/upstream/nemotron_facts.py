"""What a process of its own finds out about our Nemotron: `report` prints it for the tests."""

import json
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.quantization.fp8 import Fp8Config
from transformers import AutoConfig, AutoModelForCausalLM, NemotronConfig
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from sglang_tknp.estimate import estimate_model_bytes
from sglang_tknp.model_ext.nemotron import NemotronLayerNorm, NemotronModel
from sglang_tknp.shapes import shape
from tests.tiny import random_prompts
from tests.upstream.nemotron_stages import Stages, build, place, publish
from tests.upstream.process import MARK

ONE_STAGE, STAGES = (5,), ((2, 3), (1, 3, 1))
PROMPT, DECODED = 40, 6


def report(folder: Path) -> None:
    """`folder` holds tiny checkpoints, one folder for each."""
    variants = sorted(folder.iterdir())
    publish(variants[0])
    found = {
        "logits": {variant.name: logits(variant) for variant in variants},
        "refusal": refusal(variants[0]),
        "norm": norm_error(),
        "heads": heads(variants[0]),
        "fp8": fp8_projections(variants[0]),
        "340B": largest(),
    }
    print(MARK + json.dumps(found), flush=True)


def logits(folder: Path) -> dict[str, Any]:
    """A prefill and decode steps of one sequence, beside transformers' and between stages."""
    (ids,) = random_prompts(3, [PROMPT + DECODED])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    one, one_copy = run_stages(folder, ONE_STAGE, ids)
    others = [run_stages(folder, blocks, ids) for blocks in STAGES]
    return {
        "error": (one - expected).abs().max().item(),
        "spread": expected.std().item(),
        "stages_are_equal": [torch.equal(one, other) for other, _ in others],
        "extra_parameters": [number - one_copy for _, number in others],
    }


def run_stages(folder: Path, blocks: tuple[int, ...], ids: list[int]) -> tuple[torch.Tensor, int]:
    stages = Stages(folder, blocks)
    rows = [stages.logits(ids[:PROMPT], 0)]
    rows += [stages.logits([ids[i]], i) for i in range(PROMPT, len(ids))]
    return torch.cat(rows), stages.num_parameters()


def refusal(folder: Path) -> str:
    model = build(AutoConfig.from_pretrained(folder))
    try:
        model.load_weights([("model.layers.0.mlp.gate_proj.weight", torch.empty(1))])
    except ValueError as error:
        return str(error)
    return "loaded"


def norm_error() -> float:
    """bfloat16, where it matters that the one is added before the product."""
    torch.manual_seed(0)
    norms = [cls(256, dtype=torch.bfloat16) for cls in (NemotronLayerNorm, NemotronLayerNorm1P)]
    weight, bias = (torch.randn(256, dtype=torch.bfloat16) for _ in "wb")
    rows = torch.randn(8, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(weight)
            norm.bias.copy_(bias)
        ours, theirs = (norm(rows) for norm in norms)
    return (ours - theirs).abs().max().item()


def heads(folder: Path) -> dict[str, list[int]]:
    """Query and KV heads of one rank, and query heads of all ranks that share a request."""
    config, found = AutoConfig.from_pretrained(folder), {}
    for tp_size, dp_size in ((1, 1), (2, 1), (4, 1), (4, 2)):
        with place(tp_size=tp_size, attn_dp_size=dp_size):
            attention = NemotronModel(config, None, "model").layers[0].self_attn
        all_heads = tp_size // dp_size * attention.o_proj.weight.shape[1] // config.head_dim
        found[f"{tp_size}/{dp_size}"] = [
            attention.attn.tp_q_head_num,
            attention.attn.tp_k_head_num,
            all_heads,
        ]
    return found


def fp8_projections(folder: Path) -> list[str]:
    """Which parameters a quantised checkpoint turns to FP8, of the first layer."""
    quant_config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="static")
    model = build(AutoConfig.from_pretrained(folder), quant_config=quant_config)
    params = model.model.layers[0].named_parameters()
    return sorted(name for name, p in params if p.dtype == torch.float8_e4m3fn)


def largest() -> dict[str, Any]:
    """Nemotron-4 340B on the meta device, bfloat16: bytes built and bytes estimated."""
    config = NemotronConfig(**shape("nemotron-4-340b"))
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = build(config)
    attention = model.model.layers[95].self_attn
    return {
        "built": sum(p.nbytes for p in model.parameters()),
        "estimated": estimate_model_bytes(config.to_dict(), 2).one_copy,
        "rotary": [attention.rotary_emb.head_size, attention.rotary_emb.rotary_dim],
        "logits": list(model.lm_head.weight.shape),
    }
