# SPDX-License-Identifier: Apache-2.0
"""Programs of this repository. An older Python reads this file too, so it is written for one."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the reason for this file
    found = "{} is Python {}.{}".format(sys.executable, *sys.version_info[:2])
    sys.exit("error: this needs Python 3.11 or newer, and " + found + ": run it with a newer one, such as python3.11.")
