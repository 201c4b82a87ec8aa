# SPDX-License-Identifier: Apache-2.0
"""The client of the pods' REST API."""
