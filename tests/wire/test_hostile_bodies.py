# SPDX-License-Identifier: Apache-2.0
"""Bodies up to the limit that are made to cost much: refused by a short answer, and they hold nobody up."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders.fuzz import ODD_VALUES
from tests.support.servers.pod import DISTANCE, SLOT, Pod
from tests.wire.test_stalls import TRIES, longest_seconds, unlooked, watched
from vllm_poc.server.bodies import decode
from vllm_poc.server.errors import MAX_ERRORS, InvalidBodyError
from vllm_poc.settings import Settings
from vllm_poc.wire.answers import ErrorResponse
from vllm_poc.wire.generate import MAX_REQUEST_NONCES
from vllm_poc.wire.messages import API_PREFIX

LIMIT = Settings().body_bytes
#: A request that would be answered, as far as it goes.
OPEN = json.dumps(DISTANCE | {"nonces": [1], "wait": True})[:-1]
#: The same of chains; what a chain may be counts for the bytes alone.
CLAIMS = f'{OPEN},"validation":{{"artifacts":[{{}}'
STEPS = ",".join(["7"] * 257)
PROOF = '{"public_key":"p","block_hash":"o","block_height":1,"nonces":[1],"dist":['
#: Longest answer to any of them.
LONGEST_ANSWER = 10_000


def filled(start: str, unit: str, end: str, *, size: int = LIMIT) -> bytes:
    first, each, last = start.encode(), unit.encode(), end.encode()
    return first + each * ((size - len(first) - len(last)) // len(each)) + last


def fields(count: int) -> str:
    return ",".join(f'"{number:x}":1' for number in range(count))


def enforced(count: int, steps: str) -> str:
    return ",".join(f'"{nonce}":[{steps}]' for nonce in range(count))


LARGE: dict[str, tuple[str, bytes]] = {
    "numbers in a list of lists": ("generate", filled(f'{OPEN},"x":[[1', ",1", "]]}")),
    "lists": ("generate", filled(f'{OPEN},"x":[[]', ",[]", "]}")),
    "lists in a list of lists": ("generate", filled(f'{OPEN},"x":[[[]', ",[]", "]]}")),
    "objects": ("generate", filled(f'{OPEN},"x":[{{}}', ",{}", "]}")),
    "objects in objects": ("generate", filled(f'{OPEN},"x":[1', ',{"a":{"a":[1]}}', "]}")),
    "fields": ("generate", f"{OPEN},{fields(1_400_000)}}}".encode()),
    "fields of params": ("generate", f'{{"params":{{{fields(1_400_000)}}}}}'.encode()),
    "duplicate fields": ("generate", filled(OPEN, ',"a":1', "}")),
    "a text": ("generate", filled(f'{OPEN},"x":"', "a", '"}')),
    "a text of escapes": ("generate", filled(f'{OPEN},"x":"', "\\u00e9", '"}')),
    "a text of wide characters": ("generate", filled(f'{OPEN},"x":"', "\U0001f600", '"}')),
    "texts": ("generate", filled(f'{OPEN},"x":[""', ',","', "]}")),
    "a name": ("generate", filled(f'{OPEN},"', "\\n", '":1}')),
    "an integer": ("generate", filled(f'{OPEN},"x":', "1", "}")),
    "integers": ("generate", filled(f'{OPEN},"x":[1', "," + "9" * 4_200, "]}")),
    "a decimal": ("generate", filled(f'{OPEN},"x":1.', "1", "}")),
    "spaces": ("generate", filled(OPEN, " ", "}")),
    "lines and an error": ("generate", filled(OPEN, "\n", "]")),
    "depth of lists": ("generate", filled("", "[", "")),
    "depth of objects": ("generate", filled("", '{"a":', "")),
    "nonces": ("generate", filled(f'{OPEN[:-15]},"nonces":[1', ",1", "]}")),
    "wrong nonces": ("generate", filled(f'{OPEN},"nonces":[-1', ",-1", "]}", size=3 * MAX_REQUEST_NONCES)),
    "wrong artifacts": ("generate", filled('{"validation":{"artifacts":[1', ",{}", "]}}", size=3 * MAX_REQUEST_NONCES)),
    "wrong distances": ("validate", filled(f"{PROOF}0", ',"a"', "]}", size=4 * MAX_REQUEST_NONCES)),
    "chains": ("generate", filled(CLAIMS, f',{{"nonce":1,"vector_b64":"","k_points_steps":[{STEPS}]}}', "]}}")),
    "a chain": ("generate", filled(f'{OPEN},"k_points_steps":[1', ",1", "]}")),
    "chains of lists": ("generate", filled(CLAIMS, ',{"k_points_steps":[[1]]}', "]}}")),
    "empty chains": ("generate", filled(f'{OPEN},"x":[1', ',{"k_points_steps":[]}', "]}")),
    "enforced chains": ("generate", f'{OPEN},"enforced_k_steps":{{{enforced(22_000, STEPS)}}}}}'.encode()),
    "wrong enforced chains": ("generate", f'{OPEN},"enforced_k_steps":{{{enforced(100_000, "[]")}}}}}'.encode()),
    "enforced chains of others": ("generate", filled(OPEN, ',"enforced_k_steps":{"enforced_k_steps":[1]}', "}")),
    "distances": ("validate", filled(f"{PROOF}0", ",1.5", "]}")),
    "not a number": ("validate", filled(f"{PROOF}0", ",NaN", "]}", size=4 * MAX_REQUEST_NONCES)),
    "infinity": ("validate", filled(f"{PROOF}0", ",Infinity", "]}", size=9 * MAX_REQUEST_NONCES)),
    "a callback address": ("generate", filled(f'{OPEN},"url":"http://a/', "a", '"}', size=60_000)),
    "a block hash": ("generate", filled(f'{OPEN},"block_hash":"', "é", '"}', size=60_000)),
    "no UTF-8": ("generate", b"\xff" * LIMIT),
    "no UTF-8 in a text": ("generate", filled(f'{OPEN},"x":"', "a", "")[:-1000] + b"\xff" * 1000),
    "UTF-16": ("generate", ('{"a":"' + "x" * (LIMIT // 2 - 20) + '"}').encode("utf-16")),
    "zeros": ("generate", bytes(LIMIT)),
}
#: As many as are read on the event loop, or nearly.
SMALL: dict[str, tuple[str, bytes]] = {
    f"{name}, {size} bytes": (route, body)
    for size in (16_000, 65_000)
    for name, route, body in (
        ("wrong nonces", "generate", filled(f'{OPEN},"nonces":[-1', ",-1", "]}", size=size)),
        ("wrong distances", "validate", filled(f"{PROOF}0", ',"a"', "]}", size=size)),
        ("fields of params", "generate", f'{{"params":{{{fields(size // 9)}}}}}'.encode()),
        ("depth", "generate", filled("", "[", "", size=size)),
        ("digits", "generate", filled(f'{OPEN},"x":', "1", "}", size=size)),
        ("no UTF-8", "generate", filled(f'{OPEN},"x":"', "a", "", size=size) + b'\xff"}'),
    )
}


@pytest.fixture
def pod(pod: Pod) -> Iterator[Pod]:
    with unlooked():
        yield pod


@pytest.mark.parametrize("name", LARGE | SMALL)
async def test_hostile_bodies_hold_nobody_up(pod: Pod, name: str) -> None:
    route, body = (LARGE | SMALL)[name]
    assert len(body) <= LIMIT
    await pod.post("init/validate", DISTANCE | SLOT)
    found = []
    for _ in range(TRIES):
        async with watched() as longest:
            answer = await pod.http.post(f"{API_PREFIX}/{route}", content=body, timeout=60)
        assert answer.status_code in (200, 400, 422), answer.text[:200]
        assert len(answer.content) < LONGEST_ANSWER
        if answer.status_code != 200:
            error = ErrorResponse.model_validate(answer.json())
            assert error.detail != "There was an error parsing the body"
            assert len(error.errors) <= MAX_ERRORS
        found.append(longest.seconds)
        if longest.seconds < longest_seconds():
            return
    raise AssertionError(f"longest stalls of {TRIES} tries: {found}")


def values() -> st.SearchStrategy[object]:
    texts = st.text(max_size=600) | st.sampled_from(
        ["", ",", "]", "},", '"', "\\", "[{", "é" * 600, "\U0001f600" * 300]
    )
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=30) | st.dictionaries(texts, inner, max_size=8), max_leaves=60
    )


@given(value=values(), indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans())
def test_bodies_are_read_as_json_says(value: object, indent: int | None, ascii_only: bool) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "replace")
    assert decode(body) == json.loads(body)


@given(value=values(), data=st.data())
def test_what_is_wrong_is_found_where_json_finds_it(value: object, data: st.DataObject) -> None:
    """A body in which something is cut out or put in is read as ``json.loads`` reads it, or refused as that refuses."""
    text = json.dumps(value)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 3)))
    changed = text[:start] + data.draw(st.sampled_from(["", ",", "]", "}", "[", '"', "1", ":", " ", "\\"])) + text[end:]
    try:
        expected = json.loads(changed)
    except json.JSONDecodeError:
        with pytest.raises(json.JSONDecodeError):
            decode(changed.encode())
    else:
        assert decode(changed.encode()) == expected


@pytest.mark.parametrize("count", [1, 100, 5_000, 50_000])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", " : ")])
@pytest.mark.parametrize("each", [*ODD_VALUES[:10], "},", "a]", {"n": 1, "v": "}],["}, {"n": {"n": [1]}}], ids=repr)
def test_long_lists_are_read_as_json_says(count: int, separators: tuple[str, str], each: object) -> None:
    nested = isinstance(each, dict) and isinstance(each["n"], dict)
    value = [each] * (min(count, 900) if nested else count)
    body = json.dumps({"a": value, "b": 1}, separators=separators).encode()
    assert decode(body) == json.loads(body)


@pytest.mark.parametrize("text", ["[" * 51 + "]" * 51, "[" + "9" * 4_301 + "]", '"' + "a" * 65_536 + '"'])
def test_what_exceeds_a_limit_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(InvalidBodyError) as found:
        decode(text.encode())
    assert found.value.errors[0]["msg"].startswith("the body has ")


def test_chains_are_limited_by_the_bodys_bytes_alone() -> None:
    claims = [{"nonce": nonce, "k_points_steps": [nonce % 16] * 257} for nonce in range(20_000)]
    forced = {str(nonce): [nonce % 16] for nonce in range(MAX_REQUEST_NONCES)}
    text = json.dumps({"a": claims, "enforced_k_steps": forced}, separators=(",", ":")).encode()
    assert len(text) < LIMIT
    found = decode(text)
    assert isinstance(found, dict)
    assert found["a"] == [{"nonce": nonce, "k_points_steps": bytes([nonce % 16] * 257)} for nonce in range(20_000)]
    assert found["enforced_k_steps"] == {nonce: bytes(steps) for nonce, steps in forced.items()}


@pytest.mark.parametrize(
    "chain", [[256], [-1], [1.5], ["7"], ["]"], [None], [True], [[7]], {"7": 7}, "7", 7, None], ids=repr
)
def test_what_is_no_chain_of_bytes_is_read_as_it_is(chain: object) -> None:
    body = {"k_points_steps": chain, "enforced_k_steps": {"5": chain}}
    assert decode(json.dumps(body).encode()) == body


def test_a_byte_order_mark_is_passed_over() -> None:
    assert decode(b"\xef\xbb\xbf[1]") == [1]
