# SPDX-License-Identifier: Apache-2.0
"""The served model as PoC sees it: its layers, its attention's metadata, its forward pass on given embeddings.

Each of vLLM's internals is looked up by feature, not by version number. One that is not found becomes an
`UnsupportedModelError`, so that a new vLLM release ends in a sentence and not in wrong numbers.

What else reads vLLM's internals is in this package and in `vllm_poc.worker.passes`; docs/develop/porting.md lists all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context, set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors

from vllm_poc.worker.model.base_model import BaseModel
from vllm_poc.worker.model.placement import Placement
from vllm_poc.worker.model.ranks import Ranks
from vllm_poc.worker.model.scratch import BatchShape, ChatMemory, UnsupportedModelError, cache_group

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    #: vLLM's own, whose two generations have the same attributes here.
    VllmModelRunner: TypeAlias = GPUModelRunner

#: Hidden states of the last stage, or what another stage hands on, by name.
StageOutput: TypeAlias = Tensor | dict[str, Tensor]

# Where the models keep their decoder layers, first match wins.
_LAYER_PATHS = ("model.layers", "transformer.h", "layers")
# Where wrappers around a language model keep them. The network's plugin looks for layers in the places above alone, so
# that no layer of these is reflected, on any of the network's nodes.
_WRAPPED_PATH = "language_model.model.layers"
# Types of models that are served by such wrappers.
_WRAPPED = {"gemma3", "glm5_next", "glm5_next_text", "qwen2_5_vl"}
# Types of caches that hold keys and values as they are.
_UNROUNDED = {"auto", "float16", "bfloat16"}
# Types of models that choose the experts of some layers by token id, and for which the network gives nonces token ids.
_ROUTED_BY_TOKEN = {"deepseek_v4"}


class StageInputs(NamedTuple):
    """What a stage of the model reads of a batch.

    ``embeddings`` ``[nonces, seq_len, hidden]`` are None on later stages of a pipeline; ``tokens``, int32
    ``[nonces, seq_len]``, are None unless the model chooses experts by them.
    """

    embeddings: Tensor | None
    tokens: Tensor | None


class AttentionPlan(NamedTuple):
    """What the model is told about a batch: its positions, and two things by attention layer's name.

    ``positions`` are ``[tokens]``, or ``[dimensions, tokens]`` where the model has positions of several dimensions.

    ``slot_mapping`` int64 ``[tokens]`` says where in the KV cache a token's key and value go.
    """

    shape: BatchShape
    positions: Tensor
    metadata: dict[str, Any]
    slot_mapping: dict[str, Tensor]


class ModelAdapter:
    """vLLM's model runner as PoC sees it. UnsupportedModelError if it lacks what PoC needs.

    ``chat_peak`` is what the activations of chat's largest forward pass take, in bytes.
    """

    def __init__(self, runner: GPUModelRunner, chat_peak: int = 0) -> None:
        self.chat_peak = chat_peak
        self.model: nn.Module = runner.get_model()
        self.device: torch.device = runner.device
        self.dtype: torch.dtype = runner.vllm_config.model_config.dtype
        wrapped = getattr(runner.vllm_config.model_config.hf_config, "model_type", "") in _WRAPPED
        #: Whether the network reflects what the layers of this model make, where a round asks for that.
        self.reflects = not wrapped
        self.stack = _layer_stack(self.model, (_WRAPPED_PATH,) if wrapped else _LAYER_PATHS)
        self.groups = [cache_group(runner, group) for groups in runner.attn_groups for group in groups]
        self.ranks = Ranks()
        #: Number of token ids if the model chooses experts by them, else None.
        self.vocabulary = token_vocabulary(runner.vllm_config.model_config)
        self._config = runner.vllm_config
        self._base_model = BaseModel(runner)
        # With async scheduling, vLLM's first model runner prepares a batch while copies of the last one's inputs are on
        # their way, and this makes it wait for them: builders fill memory of the CPU that such copies read. The second
        # one has memory for each batch. Both build in the thread that also runs PoC's calls, and on one stream.
        self._input_prep: Callable[[], AbstractContextManager[None]] = getattr(
            runner, "synchronize_input_prep", nullcontext
        )

    @property
    def layers(self) -> list[nn.Module]:
        """All decoder layers, with placeholders for those of other stages."""
        return list(self.stack)

    @property
    def own_layers(self) -> list[nn.Module]:
        """The decoder layers of this stage."""
        return [layer for layer in self.stack if not isinstance(layer, PPMissingLayer)]

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts, to which it sends each token."""
        return bool(self.experts)

    @property
    def counts_experts(self) -> bool:
        """Whether vLLM counts how many tokens each expert has, to place experts by that."""
        return self._base_model.counts_experts

    @property
    def experts(self) -> int:
        """How many experts a layer has on all ranks together; 0 without experts."""
        return int(self._config.model_config.get_num_experts() or 0)

    @property
    def attention_layers(self) -> dict[str, Attention]:
        """All attention layers of this stage, by vLLM's name."""
        return {name: layer for group in self.groups for name, layer in group.layers.items()}

    @property
    def chat_memory(self) -> ChatMemory:
        """What chat keeps for later tokens: that of all layers with a cache, also of a model that only drafts."""
        context = self._config.compilation_config.static_forward_context
        builders = {next(iter(group.layers)): group.builder for group in self.groups}
        return ChatMemory({name: layer for name, layer in context.items() if hasattr(layer, "kv_cache")}, builders)

    @property
    def attention_modules(self) -> list[nn.Module]:
        """Those of them that are called with queries, keys and values, and return what they make."""
        return [layer for layer in self.attention_layers.values() if isinstance(layer, Attention)]

    @property
    def borders(self) -> frozenset[int]:
        """Numbers of tokens behind which attention treats a sequence in another way: blocks, windows, chunks."""
        return frozenset(border for group in self.groups for border in group.borders)

    @property
    def is_quantised(self) -> bool:
        """Whether weights, or the KV cache, are rounded to fewer bits than the model's dtype has."""
        cache = self._config.cache_config.cache_dtype
        return bool(self._config.model_config.quantization) or cache not in _UNROUNDED

    @property
    def model_type(self) -> str:
        """The name of the model's kind in its configuration; empty if it has none."""
        return str(getattr(self._config.model_config.hf_config, "model_type", ""))

    @property
    def experts_per_token(self) -> int:
        """How many experts compute a token; 0 if the configuration does not say."""
        return int(getattr(self._config.model_config.hf_text_config, "num_experts_per_tok", 0) or 0)

    @property
    def attention_kernels(self) -> list[str]:
        """Names of the classes that compute attention; those of another GPU or setting round differently."""
        return _class_names(getattr(layer, "impl", layer) for layer in self.attention_layers.values())

    @property
    def expert_kernels(self) -> list[str]:
        """Names of the classes that compute experts; empty without experts, or if they have none of their own."""
        methods = (getattr(module, "quant_method", None) for module in self.model.modules())
        kernels = (getattr(method, "moe_kernel", None) for method in methods)
        return _class_names(kernel.impl.fused_experts for kernel in kernels if kernel is not None)

    def received(self, tokens: int) -> dict[str, Tensor]:
        """Return zeros in place of what the stage before would send for so many tokens."""
        if self.ranks.has_first_layer:
            return {}
        return dict(self.model.make_empty_intermediate_tensors(tokens, self.dtype, self.device).tensors)

    def plan(self, shape: BatchShape, place: Placement | None = None) -> AttentionPlan:
        """Describe the batch to all attention layers: causal, sequence i in blocks of its own.

        Sequences begin with the batch, unless their ``place`` says that tokens of theirs are in the cache already.

        The builders are chat's, so this waits for chat's inputs as vLLM's next batch would, and that waits for these.
        """
        before = place.before if place is not None else 0
        positions = shape.positions(self.device, before)
        plan = AttentionPlan(shape, self.positions(shape, before), {}, {})
        with self._input_prep():
            for group in self.groups:
                metadata, slot_mapping = group.plan(shape, positions, place)
                plan.metadata.update(dict.fromkeys(group.layers, metadata))
                plan.slot_mapping.update(dict.fromkeys(group.layers, slot_mapping))
        return plan

    def positions(self, shape: BatchShape, before: int = 0) -> Tensor:
        """Return the positions of a batch as the model reads them: those of text are the same in each dimension."""
        kind, positions = self._config.model_config, shape.positions(self.device, before)
        return positions.expand(getattr(kind, "mrope_num_dims", 3), -1).contiguous() if kind.uses_mrope else positions

    def forward(self, inputs: StageInputs, received: dict[str, Tensor], plan: AttentionPlan) -> StageOutput:
        """Run this stage of the model, on ``inputs`` or what the stage before made.

        Overwrites either. The last stage returns the output of the final norm ``[tokens, hidden]``, the others what
        the next one goes on with.
        """
        with self.computing(plan), model_inputs(self.model, inputs) as arguments:
            before = IntermediateTensors(received) if received else None
            output = self.model(positions=plan.positions, intermediate_tensors=before, **arguments)
        made: StageOutput = output.tensors if isinstance(output, IntermediateTensors) else output
        return made

    @contextmanager
    def computing(self, plan: AttentionPlan, context: ForwardContext | None = None) -> Iterator[ForwardContext]:
        """Let the base model compute the batch of this plan while the context lasts.

        Yields what vLLM keeps of a forward pass. A pass that goes on brings its ``context``, with the number of the
        next layer of experts, say.
        """
        if context is None:
            # Compiled code expects token ids and knows nothing of the layer hooks.
            kept = set_forward_context(
                plan.metadata,
                self._config,
                num_tokens=plan.shape.tokens,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                slot_mapping=plan.slot_mapping,
                skip_compiled=True,
            )
        else:
            context.attn_metadata, context.slot_mapping = plan.metadata, plan.slot_mapping
            kept = override_forward_context(context)
        with kept, self._base_model.alone():
            yield get_forward_context()


def token_vocabulary(config: ModelConfig) -> int | None:
    """Return the number of token ids if the model chooses experts by token id, as the network knows it, else None."""
    routed = getattr(config.hf_config, "model_type", None) in _ROUTED_BY_TOKEN
    return int(config.hf_config.vocab_size) if routed else None


def token_embeddings(model: nn.Module) -> list[nn.Module]:
    """Return the layers that look something up by token id; none on the later stages of a pipeline."""
    return [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]


def takes_embeddings(model: nn.Module) -> bool:
    """Whether the model's forward pass has an argument for embeddings."""
    return "inputs_embeds" in inspect.signature(model.forward).parameters


@contextmanager
def model_inputs(model: nn.Module, inputs: StageInputs) -> Iterator[dict[str, Tensor | None]]:
    """Yield the arguments by which one forward pass reads ``inputs``.

    A model without an argument for embeddings looks up token 0 everywhere, and while the context lasts its embedding
    layer returns the embeddings instead. What the model does to its own embeddings it then does to these.
    """
    embeddings, tokens = (part.flatten(0, 1) if part is not None else None for part in inputs)
    if takes_embeddings(model):
        yield {"input_ids": tokens, "inputs_embeds": embeddings}
        return
    if embeddings is None:
        yield {"input_ids": tokens}
        return
    (layer,) = token_embeddings(model)
    with layer.register_forward_hook(lambda *_: embeddings):
        zeros = torch.zeros(len(embeddings), dtype=torch.int64, device=embeddings.device)
        yield {"input_ids": zeros if tokens is None else tokens}


def _layer_stack(model: nn.Module, paths: Sequence[str]) -> nn.ModuleList:
    roots = [getattr(model, "model", None), model]
    for root in filter(None, roots):
        for path in paths:
            found = _submodule(root, path)
            if isinstance(found, nn.ModuleList):
                return found
    places = ", ".join(paths)
    raise UnsupportedModelError(
        f"PoC finds no decoder layers in {type(model).__name__} at {places}: serve another model."
    )


def _submodule(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _class_names(objects: Iterable[object]) -> list[str]:
    return sorted({type(found).__name__ for found in objects})
