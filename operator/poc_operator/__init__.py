# SPDX-License-Identifier: Apache-2.0
"""The operator: it takes PoCRounds, PoCValidations and PoCCalibrations from what is to what should be.

- ``apis``: the kinds as typed models; CRDs and reference pages are made of them.
- ``observed``: what is seen of pods and of the gateway: data.
- ``planning``: what the plans of all kinds share.
- ``rounds``, ``validations``, ``calibrations``: what to do next, one package per kind: pure functions.
- ``clients``: all I/O: the API server, pods, the gateway. They know no plan.
- ``controller``: the moving parts: a loop per object, leader election, health, metrics.
- ``handlers``: kopf wiring.
- ``cli``: ``kubectl poc``, a program of its own.

A package imports only those above it; import-linter holds that.
"""
