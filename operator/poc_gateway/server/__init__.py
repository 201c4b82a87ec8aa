# SPDX-License-Identifier: Apache-2.0
"""The process and its ports: what is served where, what a request must pass, and whether the gateway is well.

What belongs here: the life of the process, the apps, `middleware` (bounds, tokens, media types), health, and what is
told of requests: `telemetry` and `gauges`. One of several processes owns the database (`owner`), or all others stand by
(`standby`). What does not: any route with a subject of its own. This package knows all others, and none of them knows
it; what all of them share (`poc_gateway.settings`, `poc_gateway.errors`, `poc_gateway.metrics`) stands beside them.
"""
