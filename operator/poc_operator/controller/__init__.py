# SPDX-License-Identifier: Apache-2.0
"""The moving parts: one process, one loop per object.

- ``manager``: what the process has once: connections, the pod cache, a loop for each object until it is released.
- ``failing_objects``: one bad object harms nobody: an exception in a loop becomes a condition of its object, which is
  tried again less and less often.
- ``reconciler``: one object's loop: read, observe, plan, record, act; the same for all kinds.
- ``stored_object``: the object as its watch tells of it, and the writing of its status.
- ``kinds``: what differs: what is asked beside the pods, and which plan is made.
- ``observing``: what is asked and remembered so that a plan sees the world; ``actions``: what plans order.
- ``untold_pods``: pods that exist and that the watch has yet to tell of.
- ``other_rounds``: what rounds know of each other, so that they queue for pods.
- ``reaper``: stops in pods what no round needs any more. ``uninstall``: suspends all before the operator goes.
- ``fleets``: keeps the objects of fleets, which ``fleet_surroundings`` reads. ``fleet_health`` looks whether their pods
  get on, ``self_checks`` what they compute, and ``fleet_updates`` replaces them. ``fleet_refs`` gives rounds the pods.
- ``leader_election``, ``health``, ``metrics``, ``logs``: what the process owes its cluster.

What to do is decided in the plans, how to ask stands in ``clients``, kopf is in ``handlers``::

    handlers (kopf) ──► manager ──► reconciler ──► observe ──► plan ──► record ──► act
                                        ▲                                          │
                                        └────────── wake: answers, pods, spec ─────┘
"""
