# SPDX-License-Identifier: Apache-2.0
"""One file for each change of the schema, in the order of their numbers."""
