"""For hardware.py: one rank's kernels, each over buffers that together exceed every cache."""

import statistics
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
from torch.nn.functional import linear

Call = Callable[[int], object]  # of the number of the repeat, to take other buffers each time
LEAST_SECONDS, FEWEST_CALLS = 0.3, 11
READ_BYTES = 512 << 20
ROTATED_BYTES = 256 << 20  # of weights or KV in turn; the largest cache seen is a tenth of it

# (N, K) of SmolLM2's products: QKV, output, gate and up, down. And two of Llama 3.1 8B.
SMOLLM2 = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LLAMA_8B = ((6144, 4096), (4096, 14336))
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
DTYPE = torch.bfloat16


def seconds(call: Call, device: str) -> float:
    """One call, the fastest quarter's slowest; on a GPU, the median of calls in a CUDA graph.

    Others may share the cores: what they take makes times longer, never shorter.
    """
    call(0)
    if device == "cuda":
        return _graph_seconds(call)
    times: list[float] = []
    while sum(times) < LEAST_SECONDS or len(times) < FEWEST_CALLS:
        start = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - start)
    return statistics.quantiles(times, n=4)[0]


def _graph_seconds(call: Call, calls: int = 50, repeats: int = 9) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            call(number)
    times = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 1e-3 / calls)
    return statistics.median(times)


def read_bandwidth(device: str) -> list[float]:
    """Bytes per second of three ways to read a large array once."""
    plain = torch.ones(READ_BYTES // 4, device=device)
    matrix = plain.view(-1, 16384)
    narrow = torch.ones(READ_BYTES // 2 // 16384, 16384, dtype=DTYPE, device=device)
    vector, row = torch.ones(16384, device=device), narrow[:1].clone()
    ways: Iterable[Call] = (
        lambda _: plain.sum(),
        lambda _: torch.mv(matrix, vector),
        lambda _: linear(row, narrow),
    )
    return [READ_BYTES / seconds(way, device) for way in ways]


def products(device: str, rows_list: Iterable[int], *, fp8: bool = False) -> list[dict[str, float]]:
    """Times of x [rows, K] times weights [N, K], bfloat16 or FP8 as the engine multiplies them."""
    found = []
    for n, k in (*SMOLLM2, *LLAMA_8B):
        item = 1 if fp8 else DTYPE.itemsize
        count = -(-ROTATED_BYTES // (n * k * item))
        weights = [torch.randn(n, k, dtype=DTYPE, device=device) for _ in range(count)]
        if fp8:
            weights = [weight.to(torch.float8_e4m3fn) for weight in weights]
        for rows in rows_list:
            x = torch.randn(rows, k, dtype=DTYPE, device=device)
            call = _fp8_product(x, weights, device) if fp8 else _product(x, weights)
            taken = seconds(call, device)
            found.append({"rows": rows, "n": n, "k": k, "bytes": n * k * item, "seconds": taken})
    return found


def _product(x: torch.Tensor, weights: list[torch.Tensor]) -> Call:
    return lambda number: linear(x, weights[number % len(weights)])


def _fp8_product(x: torch.Tensor, weights: list[torch.Tensor], device: str) -> Call:
    """On a CPU, the platform's own; on a GPU, the activations' quantisation is left out."""
    scale = torch.ones((), device=device)
    if device == "cuda":
        narrow = x.to(torch.float8_e4m3fn)
        return lambda number: torch._scaled_mm(
            narrow, weights[number % len(weights)].t(), scale, scale, out_dtype=DTYPE
        )
    from sglang_tknp.fp8_cpu import product

    scales = torch.ones(weights[0].shape[0], 1)
    widths = [weights[0].shape[0]]
    return lambda number: product(x, weights[number % len(weights)], scales, widths, None, None)


def attention(
    device: str, batches: Iterable[int], contexts: Iterable[int]
) -> list[dict[str, float]]:
    """Decode attention of one layer of SmolLM2: as servers on this device run it."""
    batches, contexts = list(batches), list(contexts)
    tokens = max(batches) * max(contexts)
    row_bytes = 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    layers = -(-ROTATED_BYTES // (tokens * row_bytes))
    shape = (layers, tokens, KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
    found = []
    for batch in batches:
        for context in contexts:
            q = torch.randn(batch, HEADS * HEAD_DIM, dtype=DTYPE, device=device)
            lengths = torch.full((batch,), context, device=device)
            where = torch.arange(batch * context, device=device).view(batch, context)
            make = _flash_attention if device == "cuda" else _native_attention
            taken = seconds(make(q, keys, values, where, lengths), device)
            size = batch * context * row_bytes
            found.append({"batch": batch, "context": context, "bytes": size, "seconds": taken})
    return found


def _native_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: torch.Tensor,
    lengths: torch.Tensor,
) -> Call:
    """SGLang's torch_native backend, by its public forward_decode, on pools that hold tensors."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def write(layer: SimpleNamespace, location: object, k: torch.Tensor, v: torch.Tensor) -> None:
        keys[layer.layer_id, where[:, -1]], values[layer.layer_id, where[:, -1]] = k, v

    pool = SimpleNamespace(
        get_key_buffer=lambda layer: keys[layer],
        get_value_buffer=lambda layer: values[layer],
        set_kv_buffer=write,
    )
    runner = SimpleNamespace(
        device="cpu",
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=where),
    )
    backend = TorchNativeAttnBackend(runner)
    batch = SimpleNamespace(
        out_cache_loc=where[:, -1],
        req_pool_indices=torch.arange(len(q)),
        seq_lens=lengths,
        encoder_lens=None,
    )
    layers = [
        SimpleNamespace(
            layer_id=number,
            tp_q_head_num=HEADS,
            tp_k_head_num=KV_HEADS,
            qk_head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
            scaling=HEAD_DIM**-0.5,
            is_cross_attention=False,
            sliding_window_size=None,
        )
        for number in range(len(keys))
    ]
    k, v = (torch.randn(len(q), KV_HEADS, HEAD_DIM, dtype=DTYPE) for _ in range(2))
    return lambda number: backend.forward_decode(q, k, v, layers[number % len(layers)], batch)


def _flash_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: torch.Tensor,
    lengths: torch.Tensor,
) -> Call:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    query = q.view(len(q), 1, HEADS, HEAD_DIM)
    sizes, pages = lengths.to(torch.int32), where.to(torch.int32)
    return lambda number: flash_attn_with_kvcache(
        query,
        keys[number % len(keys)].unsqueeze(1),
        values[number % len(keys)].unsqueeze(1),
        cache_seqlens=sizes,
        page_table=pages,
        causal=True,
    )


def elementwise(device: str, rows_list: Iterable[int]) -> list[dict[str, float]]:
    """A layer's two norms with their residuals, rotary embedding and activation, by SGLang."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import get_rope

    norm = RMSNorm(HIDDEN).to(device=device, dtype=DTYPE)
    activation = SiluAndMul()
    rope = get_rope(HEAD_DIM, HEAD_DIM, 8192, 10000, True, dtype=DTYPE).to(device)
    found = []
    for rows in rows_list:
        x, residual = (torch.randn(rows, HIDDEN, dtype=DTYPE, device=device) for _ in range(2))
        gate = torch.randn(rows, 2 * INNER, dtype=DTYPE, device=device)
        q = torch.randn(rows, HEADS * HEAD_DIM, dtype=DTYPE, device=device)
        k = torch.randn(rows, KV_HEADS * HEAD_DIM, dtype=DTYPE, device=device)
        positions = torch.arange(rows, device=device)
        taken = 2 * seconds(lambda _, x=x, r=residual: norm(x, r), device)
        taken += seconds(lambda _, gate=gate: activation(gate), device)
        taken += seconds(lambda _, p=positions, q=q, k=k: rope(p, q, k), device)
        # What costs.py counts: a norm reads and writes a row; the activation, three halves.
        size = rows * (4 * HIDDEN + 3 * INNER) * DTYPE.itemsize
        found.append({"rows": rows, "bytes": size, "seconds": taken})
    return found
