# SPDX-License-Identifier: Apache-2.0
"""``kubectl poc``: what people ask of fleets and rounds, from their own machine, with their own rights.

It reads objects, Events, pods and their logs from the API server, and the gateway and the pods through the API
server's proxy, so that nothing has to be forwarded. ``cluster`` is the only module that connects; ``gateway_proxy`` and
``pod_metrics`` ask through it. ``overview``, ``explanation``, ``loading``, ``preflight`` and ``redaction`` are pure:
they make sentences and tables of what was seen. The commands stand in ``program`` and in the modules whose names end
with ``commands``.

The operator's plans, its process and its clients do not belong here: a plugin must start within a second.
"""

#: The version of the plugin, which is that of the distribution.
VERSION = "0.1.0"
