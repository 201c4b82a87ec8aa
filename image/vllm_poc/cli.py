# SPDX-License-Identifier: Apache-2.0
"""Start vLLM with PoC, or see first whether that would do.

serve MODEL …   vLLM's API server with all its flags, plus PoC with --enable-poc; without that flag, plain vLLM
check MODEL …   say whether PoC would run on the server that these flags start, and how
download MODEL  download the model's files into the cache that vLLM reads
"""

import argparse
import asyncio
import importlib
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from vllm_poc import download
from vllm_poc.logs import get_logger
from vllm_poc.rpc import ModelFacts
from vllm_poc.server.admission import deployment_refusal
from vllm_poc.server.engine import VllmEngine
from vllm_poc.settings import PREFIX, Settings, SettingsError
from vllm_poc.start_checks import (
    FIRST_RELEASE,
    LAST_RELEASE,
    StartError,
    check_front_end,
    check_token_file,
    check_version,
    vllm_version,
)

EXTENSION_CLASS = "vllm_poc.worker.extension.PocWorkerExtension"
MIDDLEWARE = "vllm_poc.server.app.PocMiddleware"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
#: Has the part of vLLM's command that starts engine workers without an API server, or with one of gRPC.
COMMAND_MODULE = "vllm.entrypoints.cli.serve"
#: Flags of ``serve`` in addition to vLLM's own, accepted in any position.
FLAGS = frozenset({"--enable-poc", "--poc-open"})
#: Where vLLM has the parser of its API server: from 0.33 on, from 0.29 on, and before.
PARSER_MODULES = tuple(f"vllm.entrypoints.{package}.cli_args" for package in ("common", "launchers", "openai"))

_log = get_logger(__name__)


class UsageError(StartError):
    """One sentence for the person who starts the server."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exit status 2 with one sentence for a bad command line."""
    command, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if command == "serve":
            arguments = server_arguments(words)
        elif command == "check":
            check(words)
            return
        elif command == "download":
            download.run(words)
            return
        else:
            _help(command)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a command line program
        sys.exit(2)
    # Not the `vllm` command: it wants a distribution of that name, which the CPU build is not.
    os.environ.update(variables(words))
    parsed = parse_as_server(arguments)
    if parsed.headless or getattr(parsed, "grpc", False):
        importlib.import_module(COMMAND_MODULE).ServeSubcommand.cmd(parsed)
        return
    sys.argv = [SERVER_MODULE, *arguments]
    runpy.run_module(SERVER_MODULE, run_name="__main__", alter_sys=True)


def _help(command: str) -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_poc", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    followed = "followed by the flags of vLLM's API server, or by those of a download"
    parser.add_argument("command", choices=["serve", "check", "download"], help=followed)
    parser.parse_args([command])  # --help, or an error that names the command
    raise AssertionError("argparse has left")


def server_arguments(words: Sequence[str]) -> list[str]:
    """Translate the words behind ``serve`` into the API server's. StartError if PoC cannot run with them."""
    flags, options, positionals = _split(words)
    poc = "--enable-poc" in flags
    if not poc and "--poc-open" in flags:
        raise UsageError(
            "--poc-open is about PoC's routes, which --enable-poc adds: add that, or leave --poc-open out."
        )
    if poc:
        settings = _checked_settings()
        check_front_end(os.environ)
        check_version(_vllm_version())
    parsed = parse_as_server([*options, *positionals])
    model = _model(parsed, options)
    if not poc:
        return [*options, *model, *positionals]
    _check_options(parsed)
    _check_model(parsed, options)
    _check_codebook(settings)
    hooks = ["--worker-extension-cls", EXTENSION_CLASS]
    if not parsed.headless:
        hooks += ["--middleware", MIDDLEWARE, *_host(parsed)]
    return [*options, *model, *hooks, *positionals]


def check(words: Sequence[str]) -> None:
    """Start the engine that ``serve`` with these words would start, and print what it finds out about its model.

    A sentence says why the pass is not fused, if it is not.

    With dummy weights, unless the words choose a ``--load-format``: no weights are downloaded.
    Exit status 1 if PoC does not run there. StartError if ``serve`` would refuse the words.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # what is printed is the answer
    parsed = parse_as_server(server_arguments(["--enable-poc", *words]))
    try:
        facts = asyncio.run(_facts(parsed))
    except Exception as error:  # of all kinds; vLLM has logged what its processes say
        sys.exit(f"PoC does not run here: vLLM's engine does not start with these flags: {error}")
    if facts["refusal"] is not None:
        sys.exit(f"PoC does not run here: {facts['refusal']}")
    print(f"PoC runs here: {summary(facts)}.", *facts["findings"], sep="\n")  # noqa: T201 - a command line program


async def _facts(parsed: argparse.Namespace) -> ModelFacts:
    arguments = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(parsed)
    if arguments.load_format == "auto":
        arguments.load_format = "dummy"
    usage = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER  # whose defaults it takes
    client = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(
        arguments, usage_context=usage
    )
    try:
        settings = Settings.from_environment(os.environ)
        engine = VllmEngine(client, frozenset(), call_seconds=settings.engine_seconds)
        return await engine.facts(settings.decode_setup)
    finally:
        client.shutdown()


def summary(facts: ModelFacts) -> str:
    """Return on one line how PoC runs on a model."""
    found = [
        f"the {'fused' if facts['fused'] else 'plain'} pass with vLLM {_vllm_version()}",
        f"{facts['num_layers']} layers of {facts['hidden_size']}",
        f"sequences of up to {min(facts['max_model_len'], facts['max_batch_tokens'])} tokens",
        *(f"{part} by {', '.join(facts[part])}" for part in ("attention", "experts") if facts[part]),
        f"{facts['scratch_bytes'] / 2**20:.0f} MiB of memory beside vLLM's",
    ]
    if "decode" in facts:
        refusal, reserve = facts["decode"]["refusal"], facts["decode"]["reserve_bytes"]
        kept = f"the decode scheme with {reserve / 2**20:.0f} MiB for its chains"
        found.append(kept if refusal is None else f"without the decode scheme: {refusal.rstrip('.')}")
    return "; ".join(found)


def variables(argv: Sequence[str]) -> dict[str, str]:
    """Return the settings that our flags stand for, by their variables: the middleware reads these alone."""
    flags, _, _ = _split(argv)
    return {f"{PREFIX}OPEN": "1"} if "--poc-open" in flags else {}


def _vllm_version() -> str:
    try:
        return vllm_version()
    except ImportError as error:
        raise UsageError(f"vLLM cannot be imported ({error}): run this in an image that has it.") from None


def _checked_settings() -> Settings:
    # Here and not only in the server, which would fail after minutes of loading.
    try:
        settings = Settings.from_environment(os.environ)
        check_token_file(settings)
    except SettingsError as error:
        raise UsageError(str(error)) from None
    return settings


def _check_codebook(settings: Settings) -> None:
    # As above. PyTorch is there, since vLLM is.
    if settings.decode_codebook is None:
        return
    try:
        importlib.import_module("vllm_poc.maths.decode").load_codebook(Path(settings.decode_codebook))
    except ValueError as error:
        raise UsageError(f"{PREFIX}DECODE_CODEBOOK: {error}.") from None


def _check_options(options: argparse.Namespace) -> None:
    if options.worker_extension_cls:
        raise UsageError("--enable-poc sets --worker-extension-cls itself, and vLLM takes only one: leave yours out.")
    if getattr(options, "grpc", False):
        raise UsageError("--grpc starts no HTTP server, and PoC's routes are in that: leave --grpc out.")
    if options.headless and not options.node_rank:
        raise UsageError(
            "--headless starts no API server, and PoC's routes are in it: leave it out on the first Kubernetes node, "
            "and set --node-rank on the others."
        )
    if (refusal := deployment_refusal(options, os.environ)) is not None:
        raise UsageError(refusal)


def _check_model(parsed: argparse.Namespace, words: Sequence[str]) -> None:
    # vLLM would serve a model of its own choice, under whatever name was given, and its results would be taken for
    # those of the model that was meant.
    if getattr(parsed, "model_tag", None) is None and parse_as_server(words, model=None).model is None:
        raise UsageError(
            "no model is named: give it first, as in 'serve MODEL --enable-poc'. "
            "Behind an option that takes several values it would be one of them."
        )


def parse_as_server(words: Sequence[str], **defaults: object) -> argparse.Namespace:
    """Return what vLLM's API server makes of its command line, with its own defaults but these.

    UsageError without vLLM, SystemExit if the command line is wrong.
    """
    # vLLM's own parser knows which words are values of options, abbreviations, underscores and --config. Its imports
    # cost no time: the server needs them.
    try:
        arguments = importlib.import_module("vllm.utils.argparse_utils")
    except ImportError as error:
        raise UsageError(f"vLLM cannot be imported ({error}): run this in an image that has it.") from None
    options = _parser_module()
    parser = options.make_arg_parser(arguments.FlexibleArgumentParser(prog="python3 -m vllm_poc serve"))
    parser.set_defaults(**defaults)
    parsed: argparse.Namespace = parser.parse_args(list(words))
    return parsed


def _parser_module() -> ModuleType:
    for name in PARSER_MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(f"{error.name}"):
                raise  # it is there, and lacks something else
        else:
            if hasattr(module, "make_arg_parser"):
                return module
    raise UsageError(
        f"vLLM {vllm_version()} has the parser of its API server in a place that is not known here: "
        f"take a release from {FIRST_RELEASE} to {LAST_RELEASE}."
    )


def _split(words: Sequence[str]) -> tuple[set[str], list[str], list[str]]:
    """Return our flags, the other words up to ``--``, and that with all words behind it, which are positional."""
    end = words.index("--") if "--" in words else len(words)
    flags = {word: word.replace("_", "-") for word in words[:end] if word.replace("_", "-") in FLAGS}
    return set(flags.values()), [word for word in words[:end] if word not in flags], list(words[end:])


def _model(parsed: argparse.Namespace, options: Sequence[str]) -> list[str]:
    """Return the option that names the positional model: the API server reads ``--model`` alone."""
    if (model := getattr(parsed, "model_tag", None)) is None:
        return []
    if _names_model(options):
        raise UsageError(f"the model is named twice, by {model} and by --model: leave one of them out.")
    return ["--model", model]


def _host(parsed: argparse.Namespace) -> list[str]:
    """Return the option that binds the addresses of both IP versions, unless an address is named.

    vLLM's default is IPv4 alone, and in a cluster of IPv6 nobody would reach the pod.
    """
    if parsed.host is not None or getattr(parsed, "uds", None) is not None:
        return []
    try:
        with socket.socket(socket.AF_INET6) as probe:  # as vLLM makes its own
            probe.bind(("::", 0))
            takes_both = not probe.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    except OSError:
        return []
    return ["--host", "::"] if takes_both else []


def _names_model(words: Sequence[str]) -> bool:
    return any(word == "--model" or word.startswith("--model=") for word in words)
