# SPDX-License-Identifier: Apache-2.0
"""Every route of this release of vLLM is known: it makes the engine compute, or keeps it from that, or neither.

So is every method of its workers that may take memory or weights away, which ``/collective_rpc`` calls by name.
"""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from vllm_poc.server.vllm_routes import COMMANDS, INFERENCE_PATHS

#: What neither makes the engine compute nor keeps it from that, in any release from 0.23 to 0.32.
_TEXTS = {"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/messages/render", "/v1/responses/render"}
_TEMPLATES = {f"/v1/{api}/{what}" for api in ("chat/completions", "completions") for what in ("render", "derender")}
_STOPS = {"/abort_requests", "/inference/v1/abort_requests", "/v1/responses/{response_id}/cancel"}
_CACHES = {"/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache"}
_CONNECTIONS = {"/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/update_weight_version"}
#: PoC computes without any.
_ADAPTERS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
#: Of servers that PoC refuses to run on.
_REFUSED = {"/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance/apply"}
_MORE = {"/ping", "/start_profile", "/stop_profile", "/cohere/v2/chat/render"}
OTHERS = _TEXTS | _TEMPLATES | _STOPS | _CACHES | _CONNECTIONS | _ADAPTERS | _REFUSED | _MORE
#: Methods of workers by which PoC has to wait or to look anew, and those that may be called beside it.
_HOLDING = {"sleep", "discard", "wake_up", "checkpoint_prepare", "checkpoint_restore", "reset_weights"}
_LOADING = {"load_model", "reload_weights", "update_weights"}
_UPDATING = {"start_weight_update", "start_draft_weight_update", "finish_weight_update"}
_HARMLESS = {"compute_weight_checksums", "reset_mm_cache", "reset_encoder_cache", "sleep_mode_backend"}
_TRANSFERRING = {"init_weight_transfer_engine", "shutdown_weight_transfer_engine", "supports_draft_weight_updates"}
METHODS = _HOLDING | _LOADING | _UPDATING | _HARMLESS | _TRANSFERRING
_MAY_HOLD = re.compile("(^|_)(sleep|wake|discard|suspend|resume|checkpoint|weight|load|reset)")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Another server of vLLM's, which has no middleware.
NOT_SERVED = "api_server.py"


def test_every_route_is_known() -> None:
    paths = {path for module in modules() for path in posted(module)}
    assert {"/v1/chat/completions", "/v1/messages", "/inference/v1/generate", "/tokenize"} <= paths
    assert sorted(paths - INFERENCE_PATHS - COMMANDS - OTHERS) == []


def test_every_method_of_workers_that_may_take_something_away_is_known() -> None:
    found = {
        name
        for module in ("gpu_worker", "cpu_worker", "worker_base")
        for name in methods((vllm() / f"v1/worker/{module}.py").read_text())
    }
    assert {"sleep", "wake_up", "load_model"} <= found
    assert sorted({name for name in found if _MAY_HOLD.search(name)} - METHODS) == []


def test_what_a_method_defines_for_itself_is_no_method() -> None:
    """In some releases ``update_weights`` has functions within, which nobody can call by name."""
    load = "if True:\n  def load(self):\n   def within(): ..."
    source = f"class Worker:\n {load}\n async def wake(self): ...\ndef outside(): ..."
    assert sorted(methods(source)) == ["load", "wake"]


def vllm() -> Path:
    """Return vLLM's folder."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def methods(source: str) -> Iterator[str]:
    """Yield the names of the public methods of a module's classes."""
    for kind in ast.walk(ast.parse(source)):
        if isinstance(kind, ast.ClassDef):
            for node in _outside_functions(kind):
                if isinstance(node, _FUNCTIONS) and not node.name.startswith("_"):
                    yield node.name


def _outside_functions(owner: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(owner):
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from _outside_functions(node)


def modules() -> list[Path]:
    """Return vLLM's modules that may have routes."""
    entrypoints = vllm() / "entrypoints"
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
