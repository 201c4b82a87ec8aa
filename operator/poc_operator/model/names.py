# SPDX-License-Identifier: Apache-2.0
"""Names that users and the API server see."""

GROUP = "poc.gonka.ai"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "PoCRound"
PLURAL = "pocrounds"
FINALIZER = f"{GROUP}/operator"
COMPONENT = "vllm-poc-operator"
