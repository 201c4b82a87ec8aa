# SPDX-License-Identifier: Apache-2.0
"""What chat's benchmark makes of its measurements."""

from benchmarks.chat_figures import Answers, Measured, Nonces, Side, table
from benchmarks.chat_load import Streamed


def side(first_token: float) -> Side:
    return Side(chats=[[Streamed(0, 0, first_token, 2)], [Streamed(3, 3, 3 + first_token, 5)]])


def test_figures_are_those_beside_poc_against_those_of_the_idle_server() -> None:
    measured = Measured(idle=side(0.25), beside=side(0.75), alone=Nonces(8, 2.0), between=Nonces(6, 2.0))
    measured.answers = Answers(compared=5, changed=1)
    figures = measured.figures()
    assert figures["first_token"]["added_p99"] == 0.5
    assert (figures["nonces"]["alone"], figures["nonces"]["share"]) == (4, 0.75)
    assert "1 of 5 answers have other tokens beside PoC" in table(figures)


def test_figures_of_a_round_that_ended_no_batch_are_there_too() -> None:
    figures = Measured(idle=side(0.25), beside=side(0.75), alone=Nonces(0, 2.0)).figures()
    assert (figures["nonces"]["share"], figures["first_token"]["added_p99"]) == (0, 0.5)
