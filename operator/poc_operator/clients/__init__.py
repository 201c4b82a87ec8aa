# SPDX-License-Identifier: Apache-2.0
"""All I/O of the operator: ``kube`` (the API server), ``pods`` (their REST API), ``gateway`` (what it has stored).

The three are siblings and do not know each other; ``errors`` and ``http`` are common. A client makes one request and
says what came of it. When to ask, and what to do about an answer, is for ``controller`` and the plans.
"""
