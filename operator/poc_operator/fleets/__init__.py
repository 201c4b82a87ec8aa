# SPDX-License-Identifier: Apache-2.0
"""What a PoCFleet consists of: presets, the objects that it needs, and what to do next about them. Pure.

================ =========================================================================================
module           decides
================ =========================================================================================
``resolve``      model, flags and GPUs of one fleet, by its spec, the presets and the cluster's products
``merge``        what a strategic merge patch makes of the pods' template, and whether objects differ
``render``       all objects, as they should be
``groups``       replicas that span several Kubernetes nodes: their workers, and which leaders may be replaced
``strangers``    which objects and pods with the fleet's name or label belong to others
``download``     what to do so that a model is in the cache before pods need it
``stages``       where each pod is on its way to serving
``progress``     whether a pod's engine gets anything done
``healing``      what to do about pods that do not, and about GPUs whose memory fails
``self_check``   what pods compute for a self-check, and which of them computes something else
``checked_pods`` which pods are asked for a self-check, what the status says of them, and who is barred
``update``       which pods of an old revision are replaced now, and how far an update is
``forecast``     what keeps pods from being replaced: work under way, and rounds that are near
``rollback``     why a template has failed, what comes back instead, and what differs
``conditions``   what holds of the fleet
``plan``         what to do about objects that differ, and the status
================ =========================================================================================

No I/O belongs here: ``clients.kube.fleet_objects`` reads and writes the objects, ``controller.fleets`` has the loop.
"""
