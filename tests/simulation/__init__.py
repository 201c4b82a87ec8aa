# SPDX-License-Identifier: Apache-2.0
"""A fleet of simulated vLLM pods on the local cluster.

kwok makes the pods Ready on addresses of 127.1.0.0/16, and this process plays what a machine with GPUs would: the
kubelet (`kubelet.py`) and, in each pod, the real server of the PoC routes over a fake engine (`session.py`). The API
server, the scheduler, the controllers and the operator's process are real. `python3 -m tests.simulation` runs a fleet
to try things on.
"""
