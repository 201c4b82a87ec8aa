# SPDX-License-Identifier: Apache-2.0
"""Pods that are gone, and how long they are remembered."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.controller.observing import MEMORY_SECONDS, PodCache
from poc_operator.observed import PodView
from tests.unit.poc_operator.build import a_pod, a_round, a_slot, a_status


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_deleted_pod_is_forgotten_at_once() -> None:
    cache = PodCache(Clock())
    cache.put(a_pod("a"))
    assert cache.remove(a_pod("a"))
    assert not cache.remove(a_pod("a"))
    assert cache.matching(a_round()) == []


def test_rounds_learn_that_the_cluster_took_a_pod_away_even_if_it_tells_only_once() -> None:
    clock = Clock()
    cache = PodCache(clock)
    cache.put(a_pod("a"))
    taken = dataclasses.replace(a_pod("a"), disrupted=True)
    assert cache.remove(taken)
    assert cache.matching(a_round()) == [dataclasses.replace(taken, gone=True)]
    clock.now = MEMORY_SECONDS
    assert cache.matching(a_round()) == []


@pytest.mark.parametrize(("state", "held"), [(state, state.active) for state in SlotState])
def test_a_pod_that_is_not_selected_is_found_while_it_may_compute(state: SlotState, held: bool) -> None:
    cache = PodCache(Clock())
    cache.put(a_pod("a", labels={}))
    cache.put(a_pod("b", labels={}))
    cache.put(a_pod("c"))
    round_ = a_round(a_status(a_slot("a", state), a_slot("c", state, group=1), a_slot("never-seen", state, group=2)))
    assert [pod.uid for pod in cache.matching(round_)] == ["c"]
    assert [pod.uid for pod in cache.holding(round_)] == (["a"] if held else [])


LABELS = st.dictionaries(st.sampled_from("kl"), st.sampled_from("xy"), max_size=2)
CHANGES = st.tuples(
    st.sampled_from("abc"), st.sampled_from(["ns", "other"]), LABELS, st.sampled_from(["put", "remove"])
)


@given(changes=st.lists(CHANGES, max_size=20), wanted=LABELS)
def test_what_is_selected_is_what_a_look_at_every_pod_would_find(
    changes: list[tuple[str, str, dict[str, str], str]], wanted: dict[str, str]
) -> None:
    cache, known = PodCache(Clock()), dict[str, PodView]()
    for name, namespace, labels, change in changes:
        pod = a_pod(name, namespace=namespace, labels=labels)
        if change == "put":
            assert cache.put(pod) is (known.get(name) != pod)
            known[name] = pod
        else:
            assert cache.remove(pod) is (known.pop(name, None) is not None)
    selector = LabelSelector(match_labels=wanted)
    found = {pod.uid: pod for pod in cache.selected("ns", selector)}
    assert found == {pod.uid: pod for pod in known.values() if pod.namespace == "ns" and selector.matches(pod.labels)}
    assert {pod.uid: pod for pod in cache.everywhere()} == {pod.uid: pod for pod in known.values()}
