# SPDX-License-Identifier: Apache-2.0
"""What an answer must look like, whatever was asked."""
