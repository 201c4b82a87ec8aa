# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.builders.known_answers import BLOCK_HASH, PUBLIC_KEY, UNIT_ABS
from tests.unit.vllm_poc.maths import decode_oracle as oracle

torch = pytest.importorskip("torch", reason="torch is not installed: run in the worker environment")

from torch import Tensor  # noqa: E402

from tests.support.builders.tensors import DEVICE  # noqa: E402
from vllm_poc.maths import decode  # noqa: E402
from vllm_poc.maths.decode import Salt  # noqa: E402
from vllm_poc.maths.sampling import hashes, input_seeds, normal, seed, token_ids, token_seed, unit_normal  # noqa: E402

pytestmark = pytest.mark.torch

BASE = 2349069873
HIDDEN = 3072
INPUT, PICK, TOKEN = Salt.INPUT, Salt.PICK, Salt.TOKEN

words = st.integers(min_value=0, max_value=2**32 - 1)
indices = st.integers(min_value=-1, max_value=15)


def row(value: int) -> Tensor:
    return torch.tensor([value])


def book() -> Tensor:
    """Some points: no test of a formula needs the network's."""
    return unit_normal(torch.arange(16), 256)


def test_base_seed() -> None:
    assert input_seeds(BLOCK_HASH, PUBLIC_KEY, 0, strong_rng=False) == (BASE,)


@pytest.mark.parametrize(
    ("step", "previous", "salted", "token"),
    [
        (1, 0, (2409335898, 1769471309, 3861394997), 81236),
        (1, 15, (952172017, 2591022057, 1192706343), 96241),
        (2, 7, (2509724030, 4004003558, 190994027), 2542),
        (256, 3, (3165219090, 2245647238, 3219240079), 115786),
    ],
)
def test_known_step_seeds_and_token_ids(step: int, previous: int, salted: tuple[int, ...], token: int) -> None:
    got = [decode.step_seeds(row(BASE), row(previous), step=step, salt=salt).item() for salt in (INPUT, PICK, TOKEN)]
    assert tuple(got) == salted
    ids = decode.step_token_ids(row(BASE), row(previous), step=step, vocabulary=129_280)
    assert (ids.tolist(), ids.dtype) == ([token], torch.int32)


def test_salts_are_the_networks() -> None:
    assert (int(INPUT), int(PICK), int(TOKEN)) == (0x0D, 0x91, 0x57)


def test_known_token_ids_of_the_prefill() -> None:
    known = token_seed(BLOCK_HASH, PUBLIC_KEY, 0)
    assert known == 1129504604
    assert token_ids(row(known), 6, 129_280).tolist() == [[102473, 48738, 60079, 77002, 93430, 86556]]


def in_hash_order(picked: Tensor, seeds: Tensor) -> list[int]:
    scores = hashes(seeds, HIDDEN)[0]
    return sorted(picked[0].tolist(), key=lambda index: int(scores[index]))


def test_known_picks_at_step_0() -> None:
    known = decode.prefill_pick_seed(BLOCK_HASH, PUBLIC_KEY, 0)
    assert known == 4241331422
    picked = decode.picks(row(known), hidden=HIDDEN)
    ordered = in_hash_order(picked, row(known))
    assert ordered[:8] == [2658, 513, 432, 2970, 2753, 2321, 1258, 297]
    assert (ordered[255], len(ordered), sum(ordered)) == (2541, 256, 385573)
    assert sorted(ordered)[:8] == [11, 12, 51, 76, 87, 108, 110, 113]
    assert picked[0, -1] == 2541


def test_known_picks_at_step_1() -> None:
    picked = decode.step_picks(row(BASE), row(0), step=1, hidden=HIDDEN)
    ordered = in_hash_order(picked, decode.step_seeds(row(BASE), row(0), step=1, salt=PICK))
    assert ordered[:8] == [1433, 2091, 1640, 966, 2150, 2773, 143, 1187]
    assert (ordered[255], len(ordered), sum(ordered)) == (423, 256, 393957)
    assert sorted(ordered)[:8] == [8, 26, 37, 58, 65, 67, 68, 83]


@pytest.mark.parametrize(
    ("router", "known", "starts"),
    [(0, 1050998627, [131, 63, 48]), (1, 2537772806, [23, 210, 44]), (61, 417097478, [174, 194, 72])],
)
def test_known_routes(router: int, known: int, starts: list[int]) -> None:
    assert decode.route_seed(BLOCK_HASH, 0, router) == known
    got = decode.route_starts(torch.tensor([known] * 3), torch.tensor([0, 1, 256]), experts=256)
    assert got.tolist() == starts


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (1050998627, [3335849603, 2585339967, 1709294384]),
        (2537772806, [4258909207, 2726324434, 2615149100]),
        (417097478, [1008014510, 2443433922, 1857991240]),
    ],
)
def test_known_hashes_of_routes(known: int, words: list[int]) -> None:
    got = decode.route_starts(torch.tensor([known] * 3), torch.tensor([0, 1, 256]), experts=2**32)
    assert got.tolist() == words


def test_reflections_of_a_nonce_differ_from_those_of_its_block() -> None:
    assert seed(f"{BLOCK_HASH}_nonce0_layer_0_householder") == 1336060581
    assert seed(f"{BLOCK_HASH}_layer_0_householder") == 220863737
    got = decode.nonce_layer_vectors(
        block_hash=BLOCK_HASH, nonces=[3, 0], num_layers=2, hidden=8, device=torch.device(DEVICE)
    )
    assert got.shape == (2, 2, 8)
    torch.testing.assert_close(got[1, 0], unit_normal(torch.tensor(1336060581), 8), rtol=0, atol=UNIT_ABS)


@given(
    base=words,
    previous=st.integers(min_value=-(2**31), max_value=2**31),
    step=st.integers(1, 2**31 - 1),
    data=st.data(),
)
def test_step_seeds_agree_with_the_oracle(base: int, previous: int, step: int, data: st.DataObject) -> None:
    salt = data.draw(st.sampled_from(Salt))
    got = decode.step_seeds(row(base), row(previous), step=step, salt=salt)
    assert got.tolist() == [oracle.step_seed(base, previous, step, int(salt))]


@given(rows=st.lists(st.tuples(words, indices, st.integers(1, 512)), min_size=1, max_size=8))
def test_rows_of_a_batch_do_not_influence_each_other(rows: list[tuple[int, int, int]]) -> None:
    bases, previous, steps = torch.tensor(rows).unbind(dim=1)
    together = decode.step_seeds(bases, previous, step=steps, salt=INPUT).tolist()
    assert together == [oracle.step_seed(base, prev, step, 0x0D) for base, prev, step in rows]


@settings(max_examples=15, deadline=None)
@given(base=words, hidden=st.integers(min_value=256, max_value=700))
def test_picks_are_the_smallest_hashes(base: int, hidden: int) -> None:
    got = decode.picks(row(base), hidden=hidden)[0].tolist()
    by_hash = oracle.picks_in_hash_order(base, hidden)
    assert got == [*sorted(by_hash[:-1]), by_hash[-1]]


def test_a_model_with_too_few_coordinates_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden size 255 is below 256"):
        decode.picks(row(1), hidden=255)


def test_step_inputs_are_normal_numbers_of_the_step() -> None:
    out = torch.empty((1, 64), dtype=torch.bfloat16)
    decode.fill_step_inputs(out, row(BASE), row(7), step=2)
    assert torch.equal(out, normal(row(2509724030), 64).to(torch.bfloat16))


@settings(max_examples=25, deadline=None)
@given(start=words, hidden=st.integers(min_value=256, max_value=600), scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_snap_agrees_with_the_oracle(start: int, hidden: int, scale: float) -> None:
    states = normal(row(start), hidden) * scale
    picked = decode.picks(row(start), hidden=hidden)
    got = decode.snap(states, picked, book())
    expected = oracle.scores(states[0].tolist(), picked[0].tolist(), book().tolist())
    torch.testing.assert_close(got.scores[0].tolist(), expected, rtol=0, atol=1e-5)
    best = expected.index(max(expected))
    assert expected[int(got.points)] >= expected[best] - 1e-5


def query_between(first: int, second: int) -> tuple[Tensor, Tensor]:
    """A hidden state whose picks lie between two points, a little nearer to the first."""
    query = 0.51 * book()[first] + 0.49 * book()[second]
    return query.unsqueeze(0), torch.arange(256).unsqueeze(0)


def test_margin_of_a_claim_is_the_gap_of_its_score() -> None:
    got = decode.snap(*query_between(3, 7), book())
    assert got.points.tolist() == [3]
    best, second = got.scores[0].topk(2).values.tolist()
    assert decode.claimed_margins(got.scores, row(7)).item() == pytest.approx(best - second)
    assert decode.claimed_margins(got.scores, row(3)).item() == 0
    assert decode.claimed_margins(got.scores, got.scores.argmin(dim=1)).item() > 0.025


@given(claim=st.integers(min_value=-300, max_value=300).filter(lambda claim: not 0 <= claim < 16))
def test_margin_of_a_claim_that_is_no_index_is_the_largest(claim: int) -> None:
    scores = decode.snap(*query_between(3, 7), book()).scores
    assert decode.claimed_margins(scores, row(claim)).tolist() == [2.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_has_no_point_and_leaves_others_alone(bad: float) -> None:
    states, picked = (part.repeat(2, 1) for part in query_between(3, 7))
    states[0, 5] = bad
    got = decode.snap(states, picked, book())
    assert got.points.tolist() == [-1, 3]
    assert got.scores[0].tolist() == [0.0] * 16


def test_the_first_of_equal_points_wins() -> None:
    same = torch.zeros(16, 256)
    same[:, 9] = 1.0  # exact products
    assert decode.snap(same[:1], torch.arange(256).unsqueeze(0), same).points.tolist() == [0]


@pytest.mark.parametrize(("tau", "expected"), [(0.0, [0, 1, 0, 0, 1]), (0.05, [0, 1, 0, 0, 0])])
def test_steps_that_mismatch_are_those_of_the_parity_list(tau: float, expected: list[int]) -> None:
    apart = decode.disagreements(torch.tensor([3, 3, -1, 7, 7]), torch.tensor([3, 4, 4, 7, 2]))
    margins = torch.tensor([0.5, 0.5, 0.5, 0.01, 0.001])
    assert (apart & (margins > tau)).int().tolist() == expected


@given(data=st.data(), experts=st.integers(min_value=1, max_value=300))
def test_route_logits_agree_with_the_oracle(data: st.DataObject, experts: int) -> None:
    top_k = data.draw(st.integers(min_value=1, max_value=min(experts, 16)))
    starts = data.draw(st.lists(st.integers(min_value=0, max_value=experts - 1), min_size=1, max_size=3))
    got = decode.route_logits(torch.tensor(starts), experts=experts, top_k=top_k, dtype=torch.float32)
    assert got.tolist() == [oracle.route_logits(start, experts, top_k) for start in starts]


def test_route_logits_in_bfloat16_keep_the_order_of_the_chosen() -> None:
    got = decode.route_logits(row(254), experts=256, top_k=8, dtype=torch.bfloat16)[0]
    assert got.topk(8).indices.tolist() == [254, 255, 0, 1, 2, 3, 4, 5]
    assert got[254].item() == 108
    assert got[100].item() == -9984


@pytest.mark.parametrize("top_k", [0, 9])
def test_more_choices_than_experts_are_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match=rf"top_k {top_k} must lie in 1\.\.8"):
        decode.route_logits(row(0), experts=8, top_k=top_k, dtype=torch.float32)
