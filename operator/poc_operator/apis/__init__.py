# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API of the operator, one package per version.

It is the one source of the API: ``make generate`` writes the CRDs, the chart's copies of them and the reference
pages from these models, and ``make verify`` fails when those files differ. Data and what follows from it alone
belong here. Decisions, clients and anything that knows of pods do not.
"""
