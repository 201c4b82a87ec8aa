# SPDX-License-Identifier: Apache-2.0
"""Every route of this release of vLLM is known: it makes the engine compute, or it does not."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from vllm_poc.server.vllm_routes import INFERENCE_PATHS

#: What neither prefills nor decodes, by the beginnings of the paths.
OTHERS = (
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/messages/render", "/v1/responses/"),
    *("/v1/chat/completions/render", "/v1/chat/completions/derender", "/v1/completions/render"),
    *(
        "/v1/completions/derender",
        "/cohere/v2/chat/render",
        "/ping",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ),
    *("/abort_requests", "/inference/v1/abort_requests", "/pause", "/resume", "/sleep", "/wake_up", "/start_profile"),
    *("/stop_profile", "/reset_", "/collective_rpc", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
    *("/fault_tolerance/", "/release_kv_cache_memory"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/update_weight", "/start_weight_update"),
    *("/start_draft_weight_update", "/finish_weight_update", "/weight_checker"),
)
#: Another server of vLLM's, which has no middleware.
NOT_SERVED = "api_server.py"


def test_every_route_is_known() -> None:
    paths = {path for module in modules() for path in posted(module)}
    assert {"/v1/chat/completions", "/v1/messages", "/inference/v1/generate", "/tokenize"} <= paths
    assert sorted(path for path in paths - INFERENCE_PATHS if not path.startswith(OTHERS)) == []


def modules() -> list[Path]:
    """Return vLLM's modules that may have routes."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    entrypoints = Path(spec.origin).parent / "entrypoints"
    return [module for module in sorted(entrypoints.rglob("*.py")) if module != entrypoints / NOT_SERVED]


def posted(module: Path) -> Iterator[str]:
    """Yield the paths of a module's routes that are posted to, or are WebSockets."""
    for node in ast.walk(ast.parse(module.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        path = node.args[0]
        if not isinstance(path, ast.Constant) or not str(path.value).startswith("/"):
            continue
        methods = next((ast.unparse(word.value) for word in node.keywords if word.arg == "methods"), "")
        if node.func.attr in {"post", "websocket"} or "POST" in methods:
            yield str(path.value)
