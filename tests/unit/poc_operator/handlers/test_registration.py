# SPDX-License-Identifier: Apache-2.0
"""The program registers all its handlers with kopf: without one of them it would run and do nothing."""

import json
import os
import subprocess
import sys

from poc_operator.controller.kinds import PLANNERS

#: Run in a process of its own: what another test imports must not count.
PROGRAM = """
import json, kopf, poc_operator.__main__
registry = kopf.get_default_registry()
activities = [(str(handler.activity), handler.id) for handler in registry._activities.get_all_handlers()]
print(json.dumps({
    "activities": [kind for kind, _ in activities],
    "daemons": [handler.id for handler in registry._spawning.get_all_handlers()],
    "events": [handler.id for handler in registry._watching.get_all_handlers()],
    "changes": [handler.id for handler in registry._changing.get_all_handlers()],
}))
"""


def test_the_program_registers_every_handler() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", PROGRAM]
    found = json.loads(subprocess.run(program, check=True, capture_output=True, env=environment).stdout)
    plurals = [kind.resource.KIND.plural for kind in PLANNERS]
    assert len(plurals) == 3
    assert {"startup", "cleanup"} <= {kind.rsplit(".", 1)[-1].lower() for kind in found["activities"]}
    assert found["daemons"] == [], "the loops are the manager's"
    assert found["events"] == [*(f"event-{plural}" for plural in plurals), "event-pocfleets", "pod_event"]
    assert found["changes"] == [f"hold-{plural}" for plural in plurals]
