# SPDX-License-Identifier: Apache-2.0
"""Chat may have adapters, a KV connector or drafts: PoC computes what it computes without them, and disturbs none."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError

import pytest

from tests.support.builders.batches import a_batch
from tests.vllm.device import ON_GPU, skip_without_drafts
from tests.vllm.families import FAMILIES, is_servable
from tests.vllm.server import serving
from tests.vllm.test_chat import PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.client import Client

NONCES = range(16)
LENGTHS = (1, 4, 17, 64, 130)
ADAPTER = "adapter"
#: So many chats are sent, one after another, until PoC has run between the tokens of one. A busy machine may need some.
CHATS = 20
#: Long enough to fill a block of the cache, which connectors take whole.
LONG = "You may obtain a copy of the License at the usual place. " * 24


class Connected(NamedTuple):
    """A server with an adapter and a KV connector, and where that keeps chat's keys and values."""

    client: Client
    storage: Path

    def stored(self) -> dict[str, str]:
        """Return a checksum of each file, by its path."""
        files = [file for file in self.storage.rglob("*") if file.is_file()]
        return {str(file): sha256(file.read_bytes()).hexdigest() for file in files}


def an_example(storage: Path) -> dict[str, Any]:
    """Return the configuration of a connector that keeps chat's keys and values in files."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }


def several(storage: Path) -> dict[str, Any]:
    """Return that of a connector which is two of these."""
    two = [an_example(storage / "first"), an_example(storage / "second")]
    extra = {"connectors": two}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.fixture(scope="module", params=[an_example, pytest.param(several, marks=pytest.mark.long)])
def connected(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Connected]:
    from tests.vllm.adapters import write_adapter  # noqa: PLC0415 - needs transformers

    folder = tmp_path_factory.mktemp("beside")
    storage = folder / "storage"
    for place in ("first", "second"):
        (storage / place).mkdir(parents=True)
    write_adapter(model_folder / "qwen3-tiny", folder / ADAPTER)
    flags = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={folder / ADAPTER}"]
    flags += ["--kv-transfer-config", json.dumps(request.param(storage))]
    with serving(model_folder / "qwen3-tiny", folder / "server.log", [*FAMILIES["qwen3"], *flags]) as client:
        yield Connected(client, storage)


def test_a_server_with_adapters_and_a_connector_computes_what_one_without_does(
    qwen3: Client, connected: Connected
) -> None:
    client = connected.client
    assert client.worker("poc_describe")["refusal"] is None
    for seq_len in LENGTHS:
        assert client.artifacts(NONCES, seq_len=seq_len) == qwen3.artifacts(NONCES, seq_len=seq_len)
    assert client.distances(NONCES) == qwen3.distances(NONCES)


def test_adapters_of_running_chats_do_not_show(qwen3: Client, connected: Connected) -> None:
    """Neither while such a chat runs, nor in what follows it; and the adapter is chat's again after PoC."""
    client, request = connected.client, a_batch(list(NONCES), seq_len=64)
    expected = qwen3.computed(request)[0]
    answer = client.chat(PROMPTS[0], model=ADAPTER)
    assert answer != client.chat(PROMPTS[0]) == qwen3.chat(PROMPTS[0]), "the adapter must change what chat says"
    assert client.computed(request)[0] == expected
    ask, computed = partial(client.chat, PROMPTS[1], model=ADAPTER, tokens=400), list[object]()
    alone = ask()
    with ThreadPoolExecutor(1) as beside:
        for _ in range(CHATS):
            chat, found = beside.submit(ask), list[object]()
            while not chat.done():
                found.append(client.computed(request)[0])
            assert chat.result() == alone
            computed += found[1:-1]  # the first may have ended before the chat began, and the last after its end
            if computed:
                break
    assert computed, "PoC must have run between the tokens of one of these chats"
    assert all(found == expected for found in computed)
    assert client.chat(PROMPTS[0], model=ADAPTER) == answer


def test_rounds_are_of_the_base_model_alone(connected: Connected) -> None:
    with pytest.raises(HTTPError) as refused:
        connected.client.start(params={"model": ADAPTER, "seq_len": 64, "k_dim": 12})
    answer = json.load(refused.value)
    assert (refused.value.code, answer["reason"]) == (409, "ModelMismatch")


def test_the_connector_keeps_what_chat_computes_and_nothing_of_poc(qwen3: Client, connected: Connected) -> None:
    client = connected.client
    answer = client.chat(LONG)
    stored = connected.stored()
    assert stored, "the connector must keep a prompt of more than a block"
    client.worker("poc_test_order_saves")
    try:
        for seq_len in LENGTHS:
            client.artifacts(NONCES, seq_len=seq_len)
    finally:
        ordered = client.worker("poc_test_end_orders")
    assert ordered, "the orders must have outlived PoC"
    assert connected.stored() == stored
    assert client.chat(LONG) == answer == qwen3.chat(LONG), "found by the connector, or computed"


DRAFTS = {"method": "mtp", "num_speculative_tokens": 1}


def latent_drafts() -> dict[str, str]:
    """Return what makes the layer that drafts take the target's backend: where it may have one of its own, it has."""
    from vllm.config import SpeculativeConfig  # noqa: PLC0415 - needs vLLM

    has_own = "attention_backend" in SpeculativeConfig.__dataclass_fields__
    return {"attention_backend": "CPU_MLA"} if has_own and not ON_GPU else {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "family"), [("DeepseekV3ForCausalLM", "deepseek"), ("Glm4MoeForCausalLM", "qwen3-moe")]
)
def test_layers_that_draft_change_no_result_and_poc_none_of_chats_tokens(
    target: str, family: str, model_folder: Path, tmp_path: Path
) -> None:
    """The target's forward pass is the same, and the layer behind it runs for chat alone."""
    from tests.vllm.drafting import write_drafting  # noqa: PLC0415 - needs transformers

    skip_without_drafts()
    if not is_servable(family):
        pytest.skip("this release of vLLM has no latent attention for CPU")
    model, flags = tmp_path / "model", [*FAMILIES[family]]
    write_drafting(model_folder / "qwen3-tiny", model, target)
    with serving(model, tmp_path / "plain.log", flags) as plain:
        expected = [plain.artifacts(NONCES, seq_len=seq_len) for seq_len in LENGTHS]
        distances, answer = plain.distances(NONCES), plain.chat(LONG)
    flags += ["--speculative-config", json.dumps(DRAFTS | (latent_drafts() if family == "deepseek" else {}))]
    with serving(model, tmp_path / "drafting.log", flags) as drafting:
        assert drafting.worker("poc_describe")["refusal"] is None
        assert [drafting.chat(LONG), drafting.chat(LONG)] == [answer] * 2
        filled, held = drafting.worker("poc_test_kv_checksum"), drafting.worker("poc_test_held")
        assert [drafting.artifacts(NONCES, seq_len=seq_len) for seq_len in LENGTHS] == expected
        assert drafting.distances(NONCES) == distances
        assert drafting.worker("poc_test_kv_checksum") == filled
        assert drafting.worker("poc_test_held") == held
        assert drafting.chat(LONG) == answer
        assert drafting.metric("vllm:spec_decode_num_draft_tokens_total") > 0, "chat must have had drafts"
