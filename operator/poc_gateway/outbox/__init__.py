# SPDX-License-Identifier: Apache-2.0
"""What is stored goes on to its receiver, in order, until it is accepted or refused for good.

What belongs here: the ledger of what is to be sent, by subject (`ledger` of artifacts, `endings` of what expires or is
given up, `callback_ledger`), and its `states`, the tasks that forward and expire (`forward`), one of them for a round
(`round_sender`) or an address of callbacks (`callback_sender`), one post and what its answer means, such as 503
(`post`), where a post may go (`guard`), when (`pace`), the routes that tell of it (`listing`, `routes`), and what they
ask of another process (`commands`).
What does not: checking what arrives (`poc_gateway.ingest`), and what is made of it for people (`poc_gateway.query`).

An artifact of a round with a receiver; of one without, only "arrived"::

    arrived ──> next in its slot's order ──┬──> accepted
       │                    ^              ├──> expired, abandoned
       │            tried again after      ├──> failed: waits for the next try
       │               a failure ──────────┘
       │
       └──> late item (arrived behind its slot's order) ──┬──> accepted: its row is deleted
                    ^                                     ├──> expired, abandoned
                    └───────── replay ──── dead letter <──┴── refused for good, alone in its payload

A callback, a verdict or the result of a job: "waiting" until it is delivered, refused, expired or abandoned; "kept"
without a receiver.
"""
