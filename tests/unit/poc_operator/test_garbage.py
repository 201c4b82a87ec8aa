# SPDX-License-Identifier: Apache-2.0
"""How often the operator's process looks for garbage.

In processes of their own: Python searches through all objects once a quarter of them are new, so that what other tests
have left behind would decide.
"""

import os
import subprocess
import sys

#: More than a turn of the largest round makes.
OBJECTS = 500_000

SEARCHES = f"""
import gc
from poc_operator.__main__ import collect_garbage_rarely

def full_collections():
    return gc.get_stats()[2]["collections"]

{{before}}
gc.collect()
collections = full_collections()
made = [[number] for number in range({OBJECTS})]
print(full_collections() - collections)
"""


def searches(*, before: str) -> int:
    """Return how often a process searches through all objects, after it has done what ``before`` says."""
    program = SEARCHES.format(before=before)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout)


def test_a_turn_does_not_search_through_all_objects() -> None:
    assert searches(before="") > 0, "as Python does by default"
    assert searches(before="collect_garbage_rarely()") == 0
