# SPDX-License-Identifier: Apache-2.0
"""The protocol's formulas, batched over nonces. Needs torch, not vLLM.

    sampling             seeds, hashes, normal numbers, inputs, reflections
    artifact, distance   from a last hidden state to what a protocol delivers
    decode               the decode scheme: what chains one step to the next, and the points that it snaps to

No state and no device of its own: where tensors live and when they are made is the worker's business.
"""
