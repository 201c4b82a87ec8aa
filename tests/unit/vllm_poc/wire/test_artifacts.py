# SPDX-License-Identifier: Apache-2.0
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders.known_answers import ANSWERS
from vllm_poc.wire.artifacts import decode_vector, encode_vector

KNOWN = ANSWERS["encode_vector"]

halves = st.floats(width=16, allow_nan=False, allow_infinity=False)


def test_encoding() -> None:
    assert encode_vector(KNOWN["values"]) == KNOWN["vector_b64"]
    packed = struct.pack(f"<{len(KNOWN['f16_bits'])}H", *KNOWN["f16_bits"])
    assert struct.unpack(f"<{len(KNOWN['values'])}e", packed) == decode_vector(KNOWN["vector_b64"], 12)


def test_decoding() -> None:
    assert decode_vector(KNOWN["vector_b64"], 12) == pytest.approx(KNOWN["decoded"], rel=1e-7)


@pytest.mark.parametrize("entry", ANSWERS["artifact_from_hidden"])
@pytest.mark.parametrize("order", ["cuda_topk_order", "ascending_hash_order"])
def test_encoding_of_artifacts(entry: dict[str, dict[str, object]], order: str) -> None:
    vector = entry[order]["vector_f32"]
    assert isinstance(vector, list)
    assert encode_vector(vector) == entry[order]["vector_b64"]


@given(values=st.lists(halves, min_size=1, max_size=64))
def test_fp16_numbers_survive_the_wire(values: list[float]) -> None:
    assert list(decode_vector(encode_vector(values), len(values))) == values


@given(values=st.lists(st.floats(min_value=-1, max_value=1), min_size=1, max_size=16))
def test_rounding_is_to_the_nearest(values: list[float]) -> None:
    assert decode_vector(encode_vector(values), len(values)) == pytest.approx(values, rel=2**-11, abs=2**-25)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.0, float("nan")], "nan at position 1"),
        ([float("-inf")], "-inf at position 0"),
        ([65520.0], "beyond the fp16 range"),
    ],
)
def test_what_cannot_be_sent_is_refused(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_vector(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("?!", "not base64"),
        ("AAA", "not base64"),
        ("\u00e4AAA", "not base64"),
        ("", "holds 0 bytes, but k_dim 2 takes 4"),
        ("AAAAAAAA", "holds 6 bytes, but k_dim 2 takes 4"),
        ("AAAAfg==", "nan at position 1"),
        ("AAAAfA==", "inf at position 1"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_vector(text, 2)
