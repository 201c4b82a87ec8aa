# SPDX-License-Identifier: Apache-2.0
"""What is stored goes on to its receiver, in order, until it is accepted or refused for good."""
