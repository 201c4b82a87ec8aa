# SPDX-License-Identifier: Apache-2.0
"""``poc.gonka.ai/v1alpha1``: one module per kind, and what the kinds share.

========== =================== ============================================================
kind       module              job
========== =================== ============================================================
PoCRound       ``round``       compute new nonces for a block and a key
PoCValidation  ``validation``  recompute the nonces that somebody claims, and judge them
PoCCalibration ``calibration`` find the ``rTarget`` that makes a wanted share of nonces valid
PoCFleet       ``fleet``       keep the vLLM pods of a model; ``fleet_pod`` has the pods' fields
========== =================== ============================================================

``schema`` has the marks that a model carries for its CRD, ``meta`` names and metadata, ``work`` the parts of spec and
status that all kinds have, ``conditions`` and ``reasons`` what programs and people read of the outcome.
"""
