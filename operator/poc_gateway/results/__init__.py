# SPDX-License-Identifier: Apache-2.0
"""What is stored, for people and programs: rounds, artifacts as JSON lines, CSV or Parquet, a summary."""
