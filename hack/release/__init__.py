# SPDX-License-Identifier: Apache-2.0
"""What a release is made of, built without a container daemon; the same sources give the same bytes."""
