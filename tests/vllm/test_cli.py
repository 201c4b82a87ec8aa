# SPDX-License-Identifier: Apache-2.0
"""The command line around vLLM's own."""

import argparse
import importlib
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.fakes.engine import DECODE_FACTS, FACTS
from tests.support.patience import PATIENCE
from tests.vllm.server import FLAGS, command_environment
from vllm_poc.cli import (
    COMMAND_MODULE,
    EXTENSION_CLASS,
    MIDDLEWARE,
    PARSER_MODULES,
    UsageError,
    _parser_module,
    main,
    parse_as_server,
    server_arguments,
    summary,
)
from vllm_poc.rpc import DecodeFacts
from vllm_poc.settings import Settings
from vllm_poc.start_checks import StartError, check_version


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """What vLLM's API server makes of the translated command line."""
    return parse_as_server(server_arguments(words))


def test_without_enable_poc_it_is_plain_vllm() -> None:
    options = parsed(["m", "--port", "1"])
    assert (options.model, options.port) == ("m", 1)
    assert (options.worker_extension_cls, options.middleware) == ("", [])


def test_enable_poc_adds_extension_and_middleware() -> None:
    options = parsed(["--model", "m", "--enable-poc"])
    assert (options.model, options.worker_extension_cls, options.middleware) == ("m", EXTENSION_CLASS, [MIDDLEWARE])


def test_it_listens_on_the_addresses_of_both_ip_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(["m", "--enable-poc"]).host == "::"
    assert parsed(["m", "--enable-poc", "--host", "127.0.0.1"]).host == "127.0.0.1"
    assert parsed(["m"]).host is None

    def no_ipv6(*_: object) -> None:
        raise OSError("Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", no_ipv6)
    assert parsed(["m", "--enable-poc"]).host is None


@pytest.mark.parametrize("flag", [None, "--enable-poc", "--enable_poc"])
@pytest.mark.parametrize(
    "words",
    [
        ["m"],
        ["m", "--port", "1"],
        ["--port", "1", "m"],
        ["--port=1", "m", "--enforce-eager"],
        ["--enforce-eager", "m"],
        ["--enforce-eager", "--", "m"],
        ["--model", "m"],
        ["--model=m", "--port", "1"],
    ],
    ids=" ".join,
)
def test_the_model_is_found_wherever_the_words_stand(words: list[str], flag: str | None) -> None:
    end = words.index("--") if "--" in words else len(words)
    places = range(end + 1) if flag is not None else [0]
    for place in places:
        before = words[place - 1] if place else ""
        if before in {"--port", "--model"}:
            continue  # it would part an option from its value
        options = parsed([*words[:place], *([flag] if flag else []), *words[place:]])
        assert options.model == "m"
        assert options.worker_extension_cls == (EXTENSION_CLASS if flag else "")
        assert options.port == (1 if "1" in " ".join(words) else 8000)


def test_a_flag_behind_the_end_of_options_is_none() -> None:
    with pytest.raises(SystemExit):
        server_arguments(["m", "--", "--enable-poc"])


def test_a_model_that_is_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="named twice, by m and by --model"):
        server_arguments(["--enable-poc", "m", "--model", "other"])


@pytest.mark.parametrize(
    "words",
    [["--enable-poc"], ["--enable-poc", "--served-model-name", "llama", "meta/llama"]],
    ids=["none", "swallowed"],
)
def test_a_server_of_a_model_that_nobody_named_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="no model is named: give it first"):
        server_arguments(words)


def test_a_misspelt_setting_ends_the_start_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_POC_TOKENS", "s3cret")
    with pytest.raises(UsageError, match=r"VLLM_POC_TOKENS is not a setting: did you mean VLLM_POC_TOKEN[?]"):
        server_arguments(["m", "--enable-poc"])


def test_a_file_without_a_token_ends_the_start_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_POC_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(UsageError, match=r"VLLM_POC_TOKEN_FILE: .* cannot be read .*: mount the Secret there"):
        server_arguments(["m", "--enable-poc"])


@pytest.mark.parametrize("flag", [[], ["--poc-open"], ["--poc_open"]], ids=str)
@pytest.mark.parametrize("before", [None, "0"])
def test_poc_open_is_the_variable_of_that_name(
    monkeypatch: pytest.MonkeyPatch, flag: list[str], before: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **({"VLLM_POC_OPEN": before} if before else {})})
    started: list[tuple[list[str], bool]] = []

    def start(*_: object, **__: object) -> None:
        started.append((sys.argv[1:], Settings.from_environment(os.environ).open))

    monkeypatch.setattr(runpy, "run_module", start)
    monkeypatch.setattr(sys, "argv", ["vllm_poc"])
    main(["serve", *flag, "m", "--enable-poc"])
    ((words, is_open),) = started
    assert is_open == bool(flag)
    assert parse_as_server(words).model == "m", "vLLM does not know the flag"


def test_poc_open_without_poc_is_refused() -> None:
    with pytest.raises(UsageError, match="--poc-open is about PoC's routes, which --enable-poc adds"):
        server_arguments(["m", "--poc-open"])


@pytest.mark.parametrize("flag", [["--worker-extension-cls", "x.Y"], ["--worker_extension_cls=x.Y"]])
def test_a_second_extension_class_is_refused(flag: list[str]) -> None:
    with pytest.raises(UsageError, match="leave yours out"):
        server_arguments(["m", "--enable-poc", *flag])


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        (["--data-parallel-size", "2"], "--data-parallel-size"),
        (["--data_parallel_size=2"], "--data-parallel-size"),
        (["-dp", "2"], "--data-parallel-size"),
        (["--data-parallel-rank", "0"], "--data-parallel-rank"),
        (["--data-parallel-hybrid-lb"], "--data-parallel-hybrid-lb"),
        (["--api-server-count", "2"], "--api-server-count"),
        (["-asc=2"], "--api-server-count"),
    ],
    ids=str,
)
def test_several_servers_or_engines_are_refused(words: list[str], culprit: str) -> None:
    with pytest.raises(UsageError, match=f"leave {culprit} out, and start several pods"):
        server_arguments(["m", "--enable-poc", *words])
    assert server_arguments(["m", *words]) == ["m", *words, "--model", "m"], "without PoC it is plain vLLM"


def test_a_config_file_is_looked_into(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("data-parallel-size: 2\n")
    with pytest.raises(UsageError, match="leave --data-parallel-size out"):
        server_arguments(["m", "--enable-poc", "--config", str(config)])


@pytest.mark.parametrize(
    ("words", "model", "port"),
    [
        (["--config", "FILE", "--enable-poc"], "of-the-file", 1),
        (["--enable-poc", "--config", "FILE"], "of-the-file", 1),
        (["--enforce-eager", "--config", "FILE", "--enable-poc", "--max-model-len", "64"], "of-the-file", 1),
        (["--port", "2", "--config", "FILE", "--enable-poc"], "of-the-file", 2),
        (["m", "--enable-poc", "--config", "FILE"], "m", 1),
        (["--config", "FILE", "--enable-poc", "--port", "2", "m"], "m", 2),
        (["--config", "FILE", "--enable-poc", "--model", "m"], "m", 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_config_file_may_stand_anywhere_and_the_command_line_wins(
    words: list[str], model: str, port: int, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: of-the-file\nport: 1\nserved-model-name: [a, b]\nenforce-eager: true\n")
    options = parsed([str(config) if word == "FILE" else word for word in words])
    assert (options.model, options.port) == (model, port)
    assert (options.worker_extension_cls, options.middleware) == (EXTENSION_CLASS, [MIDDLEWARE])
    assert (options.served_model_name, options.enforce_eager) == (["a", "b"], True)


def test_a_config_file_may_name_the_model_that_vllm_would_take_by_itself(tmp_path: Path) -> None:
    config, own = tmp_path / "config.yaml", parse_as_server([]).model
    config.write_text(f"model: {own}\n")
    assert parsed(["--config", str(config), "--enable-poc"]).model == own
    config.write_text("port: 1\n")
    with pytest.raises(UsageError, match="no model is named"):
        server_arguments(["--config", str(config), "--enable-poc"])


def test_data_parallelism_by_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    with pytest.raises(UsageError, match="leave VLLM_DP_SIZE out"):
        server_arguments(["m", "--enable-poc"])


def test_the_server_in_rust_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(StartError, match="leave VLLM_USE_RUST_FRONTEND out"):
        server_arguments(["m", "--enable-poc"])


def test_a_server_of_grpc_alone_is_refused_with_poc_and_is_vllms_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--grpc starts no HTTP server"):
        server_arguments(["m", "--enable-poc", "--grpc"])
    asked: list[argparse.Namespace] = []
    command = importlib.import_module(COMMAND_MODULE).ServeSubcommand
    monkeypatch.setattr(command, "cmd", staticmethod(asked.append))
    main(["serve", "m", "--grpc"])
    assert [(options.grpc, options.model) for options in asked] == [(True, "m")]


def test_a_node_without_an_api_server_must_not_be_the_first() -> None:
    with pytest.raises(UsageError, match=r"--headless .* set --node-rank on the others"):
        server_arguments(["m", "--enable-poc", "--headless"])


def test_another_node_of_a_replica_has_the_extension_and_no_routes() -> None:
    words = ["--tensor-parallel-size=2", "--nnodes=2", "--node-rank=1", "--master-addr=a", "--headless"]
    options = parsed(["m", "--enable-poc", *words])
    assert (options.headless, options.nnodes, options.node_rank) == (True, 2, 1)
    assert options.worker_extension_cls == EXTENSION_CLASS
    assert (options.middleware, options.host) == ([], None)


def test_one_api_server_with_a_sharded_model_passes() -> None:
    words = ["-tp", "2", "--pipeline-parallel-size", "2", "-asc", "1"]
    options = parsed(["m", "--enable-poc", *words])
    assert (options.model, options.tensor_parallel_size, options.pipeline_parallel_size) == ("m", 2, 2)


def test_a_wrong_setting_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_POC_FLUSH_SECONDS", "soon")
    with pytest.raises(UsageError, match=r"VLLM_POC_FLUSH_SECONDS: .*valid number"):
        server_arguments(["m", "--enable-poc"])


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"PK", "has the SHA-256 .* use the network's file")],
    ids=["no file", "another file"],
)
def test_a_codebook_that_is_not_the_networks_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    path = tmp_path / "sphere_codebook.pt"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("VLLM_POC_DECODE_CODEBOOK", str(path))
    monkeypatch.setenv("VLLM_POC_DECODE_RESERVE_BYTES", "1000")
    with pytest.raises(UsageError, match=f"^VLLM_POC_DECODE_CODEBOOK: codebook {path} {message}"):
        server_arguments(["m", "--enable-poc"])


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (None, "; the decode scheme with 64 MiB for its chains"),
        ("It is not proven with llama.", "; without the decode scheme: It is not proven with llama"),
    ],
)
def test_a_check_tells_of_the_decode_scheme(refusal: str | None, told: str) -> None:
    decode: DecodeFacts = {**DECODE_FACTS, "refusal": refusal, "reserve_bytes": 2**26}
    assert summary({**FACTS, "decode": decode}).endswith(told)
    assert "decode" not in summary(FACTS)


@pytest.mark.parametrize("version", ["0.23.0", "0.25.1", "0.32.0", "0.32.1.dev3+cpu"])
def test_known_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.22.9", "0.9", "dev"])
def test_older_versions_are_refused_with_the_remedy(version: str) -> None:
    with pytest.raises(StartError, match=r"made for vLLM 0\.23 to .*: take one of them"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.33.0", "1.0.0"])
def test_newer_versions_are_warned_of(version: str) -> None:
    # vLLM's loggers do not reach the one that pytest looks at.
    with patch("vllm_poc.start_checks._log.warning") as warning:
        check_version(version)
    assert version in warning.call_args.args


@pytest.mark.parametrize("place", PARSER_MODULES)
def test_vllms_parser_is_found_where_any_release_has_it(place: str) -> None:
    with patch.dict(sys.modules, dict.fromkeys(PARSER_MODULES, None) | {place: _parser_module()}):
        assert parse_as_server(["m", "--port", "1"]).port == 1


def test_a_release_with_the_parser_elsewhere_is_refused_with_the_remedy() -> None:
    with (
        patch.dict(sys.modules, dict.fromkeys(PARSER_MODULES, None)),
        pytest.raises(UsageError, match=r"not known here: take a release from 0\.23 to "),
    ):
        server_arguments(["m", "--enable-poc"])


@pytest.mark.parametrize("words", [["start"], ["serve", "m", "--enable-poc", "--worker-extension-cls", "x.Y"]])
def test_a_bad_command_line_exits_with_2(words: list[str]) -> None:
    argv = [sys.executable, "-m", "vllm_poc", *words]
    done = subprocess.run(argv, env=command_environment(), capture_output=True, timeout=100 * PATIENCE, check=False)
    assert done.returncode == 2
    assert b"error: " in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "status", "answer"),
    [
        ([], 0, "PoC runs here: the "),
        pytest.param(
            ["--runner", "pooling"],
            1,
            "PoC does not run here: Qwen3ForEmbedding generates nothing under --runner pooling",
            marks=pytest.mark.long,
        ),
        (["--tokenizer", "nowhere", "--config-format", "mistral"], 1, "PoC does not run here: vLLM's engine does not"),
        (["--data-parallel-size", "2"], 2, "error: PoC needs one API server"),
    ],
    ids=["runs", "refused", "does not start", "bad flags"],
)
def test_a_check_says_whether_poc_would_run(model_folder: Path, flags: list[str], status: int, answer: str) -> None:
    argv = [sys.executable, "-m", "vllm_poc", "check", str(model_folder / "qwen3-tiny"), *FLAGS, "--enforce-eager"]
    done = subprocess.run(
        [*argv, *flags], env=command_environment(), capture_output=True, text=True, timeout=280 * PATIENCE, check=False
    )
    assert (done.returncode, answer in done.stdout + done.stderr) == (status, True), done.stderr[-2000:]
    assert ("sequences of up to 1024 tokens; attention by " in done.stdout) == (status == 0)
    # And which pass, and why: a CPU has the plain one.
    assert ("the plain pass" in done.stdout) == (status == 0)
    assert ("\nPoC computes with vLLM's own operations: " in done.stdout) == (status == 0)
