# SPDX-License-Identifier: Apache-2.0
"""How long tests wait beside other work."""

import os

#: How many times as long as usual servers, objects of the cluster, requests and tests may take.
PATIENCE = float(os.environ.get("PATIENCE", "1"))
