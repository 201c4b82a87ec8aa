# SPDX-License-Identifier: Apache-2.0
"""``python -m poc_operator.cli``, which is ``kubectl poc``."""

from poc_operator.cli.program import main

main()
