# SPDX-License-Identifier: Apache-2.0
"""Installing the operator and a fleet, on the local cluster or on the user's: shared by the demo and the tests."""
