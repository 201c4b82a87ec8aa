# SPDX-License-Identifier: Apache-2.0
"""What a PoCFleet consists of: presets, the objects that it needs, and what to do next about them. Pure.

================ =========================================================================================
module           decides
================ =========================================================================================
``resolve``      model, flags and GPUs of one fleet, by its spec, the presets and the cluster's products
``merge``        what a strategic merge patch makes of the pods' template, and whether objects differ
``render``       all objects, as they should be
``self_check``   what pods compute for a self-check, and which of them computes something else
``checked_pods`` which pods are asked for a self-check, what the status says of them, and who is barred
``plan``         what to do about objects that differ, and the status
================ =========================================================================================

No I/O belongs here: ``clients.kube.fleets`` reads and writes the objects, ``controller.fleets`` has the loop.
"""
