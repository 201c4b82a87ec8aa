# SPDX-License-Identifier: Apache-2.0
"""vLLM's small operations as single kernels.

vLLM has such kernels of its own only in code that it compiles, which PoC cannot use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention

from vllm_poc.kernels import joint_norm
from vllm_poc.kernels import layers as kernels
from vllm_poc.kernels.router import exact_product
from vllm_poc.worker.passes.plain import Patch

if TYPE_CHECKING:
    from typing import TypeAlias

    NormedAttention: TypeAlias = Qwen3Attention | Qwen3MoeAttention

#: A layer's method, its kernel, and one within that.
_DEPTH = 3
#: Both have the same forward pass.
_NORMED_ATTENTION = (Qwen3Attention, Qwen3MoeAttention)


def is_plain_norm(module: nn.Module | None) -> bool:
    """Whether a module is a root mean square norm as `vllm_poc.kernels.layers` has it."""
    return type(module) is RMSNorm and _is_whole(module)


def _is_whole(norm: RMSNorm) -> bool:
    return norm.variance_size_override is None and bool(norm.has_weight)


def is_exact_router(module: nn.Module) -> bool:
    """Whether a module is a router with weights and results in float32."""
    if type(module).__name__ != "GateLinear" or module.bias is not None or module.out_dtype is not torch.float32:
        return False
    weight = getattr(module, "weight", None)
    return weight is not None and weight.dtype is torch.float32 and weight.is_contiguous()


def operations(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, and the operations of quantised layers, which are in objects that are none."""
    return [*model.modules(), *(part for module in model.modules() for part in _hidden(module, _DEPTH))]


def operation_patches(modules: Sequence[nn.Module], reflected: Mapping[nn.Module, Tensor]) -> Iterator[Patch]:
    """Replace what single kernels can do. Norms in ``reflected`` reflect what they get along their vector first."""
    for module in modules:
        if is_plain_norm(module):
            yield Patch(module, "_forward_method", partial(_norm, module, reflected.get(module)))
        elif type(module) is SiluAndMul:
            yield Patch(module, "_forward_method", kernels.gated)
        elif type(module) in _NORMED_ATTENTION and _rotates_whole_heads(module):
            yield Patch(module, "forward", partial(_attention, module))
        elif type(module).__name__ == "MiniMaxM2Attention" and _rotates_normed_heads(module):
            yield Patch(module, "forward", partial(_joint_attention, module))
        elif is_exact_router(module):
            yield Patch(module, "forward", partial(_routed, module, module.forward))
        elif isinstance(module, CustomOp) and type(module).forward_cuda is not CustomOp.forward_cuda:
            yield Patch(module, "_forward_method", module.forward_cuda)


def _hidden(owner: object, depth: int) -> Iterator[nn.Module]:
    for part in vars(owner).values():
        if isinstance(part, CustomOp):
            yield part
        elif depth and not isinstance(part, nn.Module) and type(part).__module__.startswith("vllm.model_executor"):
            yield from _hidden(part, depth - 1) if hasattr(part, "__dict__") else ()


def _norm(
    module: RMSNorm, vector: Tensor | None, x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    weight, epsilon = module.weight, module.variance_epsilon
    if residual is not None:
        kernels.add_norm(x, residual, weight, epsilon, vector)
        return x, residual
    if vector is not None:
        kernels.reflect(x, vector)
    return kernels.norm(x.reshape(-1, x.shape[-1]), weight, epsilon).view(x.shape)


def _rotates_whole_heads(module: NormedAttention) -> bool:
    rotary = module.rotary_emb
    whole = type(rotary) is RotaryEmbedding and rotary.is_neox_style and rotary.rotary_dim == module.head_dim
    return whole and is_plain_norm(module.q_norm) and is_plain_norm(module.k_norm)


def _attention(module: NormedAttention, positions: Tensor, hidden_states: Tensor) -> Tensor:
    qkv, _ = module.qkv_proj(hidden_states)
    kernels.norm_and_rotate(
        qkv,
        positions,
        module.rotary_emb.cos_sin_cache,
        module.q_norm.weight,
        module.k_norm.weight,
        q_heads=module.num_heads,
        epsilon=module.q_norm.variance_epsilon,
    )
    output: Tensor
    output, _ = module.o_proj(module.attn(*qkv.split([module.q_size, module.kv_size, module.kv_size], dim=-1)))
    return output


def _rotates_normed_heads(module: nn.Module) -> bool:
    """Whether one norm has all heads of queries and one those of keys, and the first columns of each are rotated."""
    rotary, norms = module.rotary_emb, (module.q_norm, module.k_norm)
    joint = all(type(norm).__name__ == "MiniMaxText01RMSNormTP" for norm in norms)
    rest = module.head_dim - rotary.rotary_dim
    powers = rest & (rest - 1) == 0 and rotary.rotary_dim & (rotary.rotary_dim - 1) == 0
    same = module.q_norm.variance_epsilon == module.k_norm.variance_epsilon
    return joint and powers and same and type(rotary) is RotaryEmbedding and bool(rotary.is_neox_style)


def _joint_attention(module: nn.Module, positions: Tensor, hidden_states: Tensor) -> Tensor:
    qkv, _ = module.qkv_proj(hidden_states)
    ranks = module.q_norm.tp_world
    means = joint_norm.mean_squares(qkv, q_size=module.q_size, kv_size=module.kv_size)
    if ranks > 1:  # a flat tensor, since vLLM has ways for matrices that are for 16 bits alone
        means = tensor_model_parallel_all_reduce(means.flatten()).view_as(means)
    joint_norm.norm_and_rotate(
        qkv,
        means,
        positions,
        module.rotary_emb.cos_sin_cache,
        module.q_norm.weight,
        module.k_norm.weight,
        ranks=ranks,
        head_dim=module.head_dim,
        epsilon=module.q_norm.variance_epsilon,
    )
    output: Tensor
    output, _ = module.o_proj(module.attn(*qkv.split([module.q_size, module.kv_size, module.kv_size], dim=-1)))
    return output


def _routed(
    module: nn.Module, original: Callable[[Tensor], Tensor | tuple[Tensor, None]], x: Tensor
) -> Tensor | tuple[Tensor, None]:
    if x.dtype is not torch.bfloat16:
        return original(x)
    logits = exact_product(x, module.weight)
    return (logits, None) if module.return_bias else logits
