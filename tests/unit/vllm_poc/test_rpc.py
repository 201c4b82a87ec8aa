# SPDX-License-Identifier: Apache-2.0
"""The specification of a pass survives its way to the workers, and tells kinds of work apart."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_poc.rpc import PassSpec, batch_request
from vllm_poc.wire.messages import RoundRequest

ROUND = {"block_hash": "b", "block_height": 1, "public_key": "k"}
ARTIFACT = ROUND | {"params": {"model": "m", "seq_len": 64}}
DISTANCE = ROUND | {"r_target": 1.4}


@st.composite
def rounds(draw: st.DrawFn) -> RoundRequest:
    body: dict[str, Any] = dict(ROUND)
    if draw(st.booleans()):
        body["params"] = {"model": "m", "seq_len": draw(st.integers(1, 4096)), "k_dim": draw(st.integers(1, 64))}
    else:
        body |= {"r_target": 1.4, "seq_len": draw(st.integers(1, 4096)), "use_layer_hooks": draw(st.booleans())}
        body["use_sign_flips"] = draw(st.none() | st.booleans())
    return RoundRequest.model_validate(body | {"poc_stronger_rng": draw(st.booleans())})


@given(request=rounds(), nonces=st.lists(st.integers(0, 2**31 - 1), max_size=5))
def test_a_message_keeps_the_specification(request: RoundRequest, nonces: list[int]) -> None:
    message = batch_request(request, nonces, 4, ahead=[nonces])
    spec = PassSpec.of(json.loads(json.dumps(message)))
    assert spec == PassSpec.of_round(request) == PassSpec.of(spec.fields())
    assert (message["nonces"], message["ahead"]) == (nonces, [nonces])


@pytest.mark.parametrize("other", ["block_hash", "public_key"])
def test_rounds_that_differ_in_seeds_alone_share_a_specification(other: str) -> None:
    mine, theirs = RoundRequest.model_validate(ARTIFACT), RoundRequest.model_validate(ARTIFACT | {other: "x"})
    assert PassSpec.of_round(mine) == PassSpec.of_round(theirs)


def test_what_changes_the_forward_pass_changes_the_specification() -> None:
    bodies: list[dict[str, Any]] = [
        ARTIFACT,
        ARTIFACT | {"poc_stronger_rng": True},
        ARTIFACT | {"params": {"model": "m", "seq_len": 65}},
        ARTIFACT | {"params": {"model": "m", "seq_len": 64, "k_dim": 4}},
        DISTANCE | {"seq_len": 64},
        DISTANCE | {"seq_len": 64, "use_layer_hooks": True},
        DISTANCE | {"seq_len": 64, "use_layer_hooks": True, "use_sign_flips": True},
    ]
    assert len({PassSpec.of_round(RoundRequest.model_validate(body)) for body in bodies}) == len(bodies)
