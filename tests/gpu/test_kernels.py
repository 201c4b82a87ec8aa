# SPDX-License-Identifier: Apache-2.0
"""The fused kernels round as the unfused operations do, which are written out here."""

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment")
pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")

from torch import Tensor  # noqa: E402
from torch import dtype as DType  # noqa: E402, N812
from torch.nn.functional import silu  # noqa: E402

from vllm_poc.kernels import joint_norm, layers, random_normal  # noqa: E402
from vllm_poc.maths import sampling  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16]
#: Share of elements that may be rounded the other way where a sum has another order, or a logarithm another last digit.
OTHERWISE = 0.002
EPSILON = 1e-6
#: The first two are no whole steps of 128; the last does not fit into registers.
LENGTHS = [100, 1000, 1024, 1920, 5120, 7168]
GROUP = 128


def random(*shape: int, dtype: DType, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def unit(n: int) -> Tensor:
    vector = random(n, dtype=torch.float32, seed=2)
    return vector / vector.norm()


def assert_same(found: Tensor, expected: Tensor, *, otherwise: float = 0.0) -> None:
    """All are equal, but for a share of neighbours."""
    differing = (found != expected).float().mean().item()
    assert differing <= otherwise, f"{differing:.2%} of the elements differ"
    one_step = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=one_step, atol=one_step)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    exact = x.float()
    scaled = exact * torch.rsqrt(exact.pow(2).mean(dim=-1, keepdim=True) + EPSILON)
    return scaled.to(weight.dtype) * weight


def quantise(x: Tensor, *, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(dim=-1).clamp(min=1e-10) / torch.tensor(448.0, device="cuda")  # not times its inverse
    if powers_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales.clamp(min=1e-10))))
    return (groups / scales[..., None]).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn), scales


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@pytest.mark.parametrize("seeds", [(5,), (3, 8)])
@pytest.mark.parametrize("n", [7, 1000, 65_537])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_normal_numbers(seeds: tuple[int, ...], n: int, dtype: DType) -> None:
    words = torch.randint(2**32, seeds, device="cuda")
    found, expected = (torch.full((*seeds, n), torch.nan, device="cuda", dtype=dtype) for _ in range(2))
    random_normal.fill_normal(found, words)
    sampling.fill_stepwise(expected, words)
    if dtype is torch.float32:  # not every last digit of a logarithm or cosine is the same
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    else:
        assert_same(found, expected, otherwise=OTHERWISE)


def test_as_many_normal_numbers_as_a_large_models_head_has() -> None:
    words = torch.tensor([5], device="cuda")
    found, expected = (torch.full((1, 8192 * 16_384), torch.nan, device="cuda") for _ in range(2))
    random_normal.fill_normal(found, words)
    sampling.fill_stepwise(expected, words)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_reflection(n: int, dtype: DType) -> None:
    x, vector = random(3000, n, dtype=torch.float32), unit(n)
    x = (x - (x @ vector)[:, None] * vector).to(dtype)
    x[:, 0] = 0  # becomes twice the sum, which is next to nothing, so that each of its digits shows
    expected = sampling.reflect(x, vector)
    layers.reflect(x, vector)
    assert_same(x, expected, otherwise=0.0 if n % 8 == 0 else OTHERWISE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_norm(n: int, dtype: DType) -> None:
    x, weight = random(300, n, dtype=dtype), random(n, dtype=dtype, seed=3)
    assert_same(layers.norm(x, weight, EPSILON), norm(x, weight), otherwise=0.0 if n % 128 == 0 else OTHERWISE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("reflected", [False, True])
def test_sum_and_norm(n: int, dtype: DType, reflected: bool) -> None:
    x, residual, weight = (random(3000, n, dtype=dtype, seed=seed) for seed in (4, 5, 6))
    weight, vector = weight[0].contiguous(), unit(n) if reflected else None
    left, right = (part if vector is None else sampling.reflect(part, vector) for part in (x, residual))
    total = left.float() + right.float()
    layers.add_norm(x, residual, weight, EPSILON, vector)
    assert_same(residual, total.to(dtype), otherwise=0.0 if n % 8 == 0 or not reflected else OTHERWISE)
    assert_same(x, norm(total, weight), otherwise=0.0 if n % 128 == 0 else OTHERWISE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [7, 3000, 3072])
def test_gate(n: int, dtype: DType) -> None:
    x = random(300, 2 * n, dtype=dtype)
    # The quotient's last digit is not always that of PyTorch, which 11 bits may show.
    otherwise = OTHERWISE if dtype is torch.float16 else 0.0
    assert_same(layers.gated(x), silu(x[:, :n]) * x[:, n:], otherwise=otherwise)


def test_rows_of_a_wider_matrix() -> None:
    wide, weight = random(301, 3 * 1024, dtype=torch.bfloat16), random(1024, dtype=torch.bfloat16, seed=3)
    before = wide.clone()
    x, residual = wide[:, :1024], wide[:, 1024:2048]
    total = x.float() + residual.float()
    layers.add_norm(x, residual, weight, EPSILON)
    assert_same(residual, total.to(torch.bfloat16))
    assert_same(x, norm(total, weight))
    assert torch.equal(wide[:, 2048:], before[:, 2048:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 2, 128), (5, 1, 64), (3, 2, 8)])
def test_norm_and_rotation(q_heads: int, kv_heads: int, head_dim: int, dtype: DType) -> None:
    tokens, width = 201, (q_heads + 2 * kv_heads) * head_dim
    qkv, positions = random(tokens, width, dtype=dtype), torch.arange(tokens, device="cuda") % 64
    q_weight, k_weight = random(head_dim, dtype=dtype, seed=7), random(head_dim, dtype=dtype, seed=8)
    cos_sin = random(64, head_dim, dtype=dtype, seed=9)
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    heads = qkv.clone().view(tokens, -1, head_dim)
    queries, keys, values = heads.split((q_heads, kv_heads, kv_heads), dim=1)
    layers.norm_and_rotate(qkv, positions, cos_sin, q_weight, k_weight, q_heads=q_heads, epsilon=EPSILON)
    found = qkv.view(tokens, -1, head_dim).split((q_heads, kv_heads, kv_heads), dim=1)
    otherwise = 0.0 if head_dim == 128 else OTHERWISE
    assert_same(found[0], rotate(norm(queries, q_weight), cos, sin), otherwise=otherwise)
    assert_same(found[1], rotate(norm(keys, k_weight), cos, sin), otherwise=otherwise)
    assert torch.equal(found[2], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns", "aligned columns"])
@pytest.mark.parametrize("n", [128, 4096, 5120])
def test_quantisation(n: int, layout: str, powers_of_two: bool, dtype: DType) -> None:
    rows, groups = 301, n // GROUP
    magnitude = 2.0 ** torch.randint(-12, 8, (rows, groups, 1), device="cuda")
    x = (random(rows, n, dtype=torch.float32).unflatten(-1, (-1, GROUP)) * magnitude).flatten(-2).to(dtype)
    x[0, :GROUP] = 0
    x[1, :GROUP] = torch.linspace(-56, 56, GROUP, device="cuda")  # 448 / 8: the scale is a power of two
    strides = {"rows": (groups, 1), "columns": (1, rows), "aligned columns": (1, 304)}[layout]
    scales = torch.empty_strided((rows, groups), strides, device="cuda")
    found = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    layers.quantise(x, found, scales, epsilon=1e-10, powers_of_two=powers_of_two)
    expected, expected_scales = quantise(x, powers_of_two=powers_of_two)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "rotated"), [(48, 8, 64), (6, 1, 128), (3, 2, 32)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_joint_norm_and_rotation(q_heads: int, kv_heads: int, rotated: int, ranks: int, dtype: DType) -> None:
    tokens, head_dim = 201, 128 if rotated > 32 else 32 + 16
    sizes = [heads * head_dim for heads in (q_heads, kv_heads, kv_heads)]
    qkv, positions = random(tokens, sum(sizes), dtype=dtype), torch.arange(tokens, device="cuda") % 64
    weights = [random(size, dtype=torch.float32, seed=seed) for seed, size in enumerate(sizes[:2], start=7)]
    cos_sin = random(64, rotated, dtype=dtype, seed=9)
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    *normed, values = qkv.clone().split(sizes, dim=-1)
    means = joint_norm.mean_squares(qkv, q_size=sizes[0], kv_size=sizes[1])
    exact = torch.stack([part.double().pow(2).mean(dim=-1) for part in normed], dim=-1)
    torch.testing.assert_close(means.double(), exact, rtol=1e-6, atol=0)
    joint_norm.norm_and_rotate(
        qkv, ranks * means, positions, cos_sin, *weights, ranks=ranks, head_dim=head_dim, epsilon=EPSILON
    )
    *found, untouched = qkv.split(sizes, dim=-1)
    assert torch.equal(untouched, values)
    for part, mean, weight, result in zip(normed, means.unbind(dim=-1), weights, found, strict=True):
        scaled = (part.float() * torch.rsqrt(mean + EPSILON)[:, None] * weight).to(dtype)
        first, rest = scaled.view(tokens, -1, head_dim).split((rotated, head_dim - rotated), dim=-1)
        expected = torch.cat((rotate(first, cos, sin), rest), dim=-1).flatten(1)
        assert_same(result, expected, otherwise=OTHERWISE)
