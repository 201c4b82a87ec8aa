# SPDX-License-Identifier: Apache-2.0
"""What tests send, store and expect: rounds, deliveries, requests, known answers."""
