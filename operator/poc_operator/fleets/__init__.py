# SPDX-License-Identifier: Apache-2.0
"""What a PoCFleet consists of: presets, the objects that it needs, and what to do next about them. Pure.

============ =========================================================================================
module       decides
============ =========================================================================================
``resolve``  model, flags and GPUs of one fleet, by its spec, the presets and the cluster's products
``merge``    what a strategic merge patch makes of the pods' template, and whether objects differ
``render``   all objects, as they should be
``plan``     what to do about objects that differ, and the status
``update``   which pods of an old revision are replaced now, and how far an update is
``forecast`` what keeps pods from being replaced: work under way, and rounds that are near
``rollback`` which template has failed, what comes back instead, and what differs
============ =========================================================================================

No I/O belongs here: ``clients.kube.fleets`` reads and writes the objects, ``controller.fleets`` has the loop.
"""
