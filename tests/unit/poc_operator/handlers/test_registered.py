# SPDX-License-Identifier: Apache-2.0
"""The program registers what kopf has to call: without its startup the operator connects to nothing and looks well."""

import json
import subprocess
import sys

from hack.images.site import ROOT
from poc_operator.controller.kinds import PLANNERS

_PROGRAM = """
import json, kopf, poc_operator.__main__
registry = kopf.get_default_registry()
activities = {str(handler.activity): handler.id for handler in registry._activities.get_all_handlers()}
daemons = [str(handler.selector) for handler in registry._spawning.get_all_handlers()]
print(json.dumps({"activities": activities, "daemons": daemons}))
"""


def test_startup_cleanup_probe_and_a_daemon_for_each_kind() -> None:
    # A process of its own, since any other test may have imported the handlers.
    argv = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(
        argv,
        cwd=ROOT / "operator",
        env={"PYTHONPATH": f"{ROOT}/operator:{ROOT}/image"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = json.loads(done.stdout)
    assert {"startup", "cleanup", "probe"} <= {activity.rpartition(".")[2].lower() for activity in found["activities"]}
    for kind in PLANNERS:
        assert any(kind.resource.KIND.plural in daemon for daemon in found["daemons"])
