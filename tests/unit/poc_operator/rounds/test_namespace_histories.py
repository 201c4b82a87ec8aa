# SPDX-License-Identifier: Apache-2.0
"""Random histories of a namespace in which pods load, crash, lie and are replaced, and deadlines are short."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.unit.poc_operator.build import HISTORIES
from tests.unit.poc_operator.rounds.namespace_histories import GROUPS, Histories
from tests.unit.poc_operator.rounds.namespace_pods import FOREIGN, GRACE_SECONDS, Lie
from vllm_poc.wire.answers import PowState
from vllm_poc.wire.messages import InitGenerateRequest

MOST_PODS = 5


class NamespaceHistories(Histories):
    """What pods do, and what is done to them."""

    @rule(data=st.data(), loads=st.sampled_from([0, 5, 50]))
    @precondition(lambda self: self.world.pods)
    def pod_restarts(self, data: st.DataObject, loads: int) -> None:
        self.world.restart(self._pod(data), loads)
        self.world.tell_of_pods()

    @rule(data=st.data())
    @precondition(lambda self: self.world.pods)
    def pod_crashes_again_and_again(self, data: st.DataObject) -> None:
        pod = self._pod(data)
        self.world.restart(pod)
        pod.crashes = True
        self.world.tell_of_pods()

    @rule(data=st.data())
    @precondition(lambda self: self.world.pods)
    def pod_fails(self, data: st.DataObject) -> None:
        pod = self._pod(data)
        if pod.slot is not None:
            pod.state, pod.astray = PowState.FAILED, False

    @rule(data=st.data(), hears=st.booleans(), answers=st.booleans())
    @precondition(lambda self: self.world.pods)
    def pod_can_be_reached_or_not(self, data: st.DataObject, hears: bool, answers: bool) -> None:
        pod = self._pod(data)
        pod.hears, pod.answers = hears, answers

    @rule(data=st.data(), fails=st.booleans(), refuses=st.booleans(), lie=st.sampled_from([None, *Lie]))
    @precondition(lambda self: self.world.pods)
    def pod_fails_its_probe_or_refuses_or_lies(
        self, data: st.DataObject, fails: bool, refuses: bool, lie: Lie | None
    ) -> None:
        pod = self._pod(data)
        pod.probe_fails, pod.refuses, pod.lie = fails, refuses, lie
        self.world.tell_of_pods()

    @rule(data=st.data(), drains=st.booleans(), disrupted=st.booleans(), cut_off=st.booleans())
    @precondition(lambda self: self.world.pods)
    def pod_is_deleted(self, data: st.DataObject, drains: bool, disrupted: bool, cut_off: bool) -> None:
        """On a Kubernetes node that is cut off nobody learns of it, and the pod computes on."""
        pod = self._pod(data)
        pod.disrupted = disrupted
        if cut_off:
            pod.hears = False
        self.world.delete_pod(
            pod, None if cut_off else self.world.seconds + GRACE_SECONDS, drains=drains and not cut_off
        )

    @rule(data=st.data(), replaced=st.booleans(), loads=st.sampled_from([0, 30]))
    @precondition(lambda self: self.world.pods)
    def pod_vanishes(self, data: st.DataObject, replaced: bool, loads: int) -> None:
        """As after a deletion by force. A new one may take its name."""
        pod = self._pod(data)
        self.world.remove_pod(pod)
        if replaced:
            self.world.add_pod(pod.group, name=pod.name, loads=loads)

    @rule(group=GROUPS, knows_leases=st.sampled_from([True, True, True, False]), loads=st.sampled_from([0, 30]))
    @precondition(lambda self: len(self.world.pods) < MOST_PODS)
    def pod_appears(self, group: str | None, knows_leases: bool, loads: int) -> None:
        self.world.add_pod(group, knows_leases=knows_leases, loads=loads)

    @rule(data=st.data(), group=GROUPS, is_worker=st.booleans())
    @precondition(lambda self: self.world.pods)
    def pod_is_relabelled(self, data: st.DataObject, group: str | None, is_worker: bool) -> None:
        pod = self._pod(data)
        pod.group, pod.is_worker = group, is_worker
        self.world.tell_of_pods()

    @rule(data=st.data(), height=st.integers(5, 9))
    @precondition(lambda self: self.world.pods)
    def pod_is_given_foreign_work(self, data: st.DataObject, height: int) -> None:
        pod = self._pod(data)
        if pod.slot is None and not pod.refuses:
            pod.start(_foreign_work(height), self.world.seconds)

    @rule(data=st.data())
    @precondition(lambda self: self.world.pods)
    def foreign_work_ends(self, data: st.DataObject) -> None:
        self.world.stop(self._pod(data), FOREIGN)


def _foreign_work(height: int) -> InitGenerateRequest:
    return InitGenerateRequest(
        block_hash="cd" * 32,
        block_height=height,
        public_key="other",
        batch_size=32,
        node_id=0,
        node_count=1,
        group_id=0,
        n_groups=1,
        round_id=FOREIGN,
        r_target=1.4,
        seq_len=64,
    )


TestNamespaceHistories = NamespaceHistories.TestCase
TestNamespaceHistories.settings = settings(max_examples=HISTORIES, stateful_step_count=40, deadline=None)
