# SPDX-License-Identifier: Apache-2.0
"""What the operator sees: pods, what they report, and what the gateway has. Data only.

Clients make it, plans read it. What is stored in the API server does not belong here but into ``apis``; how things
are asked belongs into ``clients``.
"""
