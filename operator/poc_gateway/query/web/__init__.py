# SPDX-License-Identifier: Apache-2.0
"""The web page: what a host and an SRE see of fleets and rounds, live and read-only.

    API server ──> seen ─┐
    database ────> seen ─┴─> overview, attention ──> feed ──> routes ──> one stream for each viewer
                             history (rate, chat) ──┘

What belongs here: the page's files in ``static``, what it is told, and who may watch at once. One look at the database
and at the API server serves all viewers. What does not: any change, and any question that only this page could ask of
a pod: the page shows what the operator and the gateway know already.
"""
