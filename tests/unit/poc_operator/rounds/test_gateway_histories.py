# SPDX-License-Identifier: Apache-2.0
"""The random histories again, where pods deliver to a gateway that may know more than they do, or not answer."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.unit.poc_operator.build import HISTORIES
from tests.unit.poc_operator.rounds.test_histories import Histories


class GatewayHistories(Histories):
    """What may happen with a gateway, beside everything else; the same must hold."""

    @initialize()
    def a_gateway_exists(self) -> None:
        self.world.use_gateway()

    @rule(answers=st.booleans())
    def gateway_answers_or_not(self, answers: bool) -> None:
        self.world.gateway_answers = answers

    @rule(data=st.data(), nonces=st.integers(1, 20))
    @precondition(lambda self: self.world.pods)
    def answer_to_a_delivery_is_lost(self, data: st.DataObject, nonces: int) -> None:
        """The gateway has what the pod will deliver again, or never, since it dies first."""
        pod = self._a_pod(data)
        if pod.slot is not None:
            pod.next, pod.stalled_seconds = pod.next + nonces, 0.0
            self.world.received[pod.slot] |= set(range(pod.delivered, pod.next))


TestGatewayHistories = GatewayHistories.TestCase
TestGatewayHistories.settings = settings(max_examples=HISTORIES, stateful_step_count=50, deadline=None)
