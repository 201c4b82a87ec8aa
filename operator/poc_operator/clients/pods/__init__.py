# SPDX-License-Identifier: Apache-2.0
"""The pods' REST API, as our pods speak it and as those of the protocol's reference implementation do."""
