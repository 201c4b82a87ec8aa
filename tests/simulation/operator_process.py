# SPDX-License-Identifier: Apache-2.0
"""The operator as an ordinary process of this machine."""

import sys
from pathlib import Path

from hack.cluster.layout import admin_kubeconfig
from tests.simulation.gateway import Gateway
from tests.simulation.kept_process import KeptProcess
from tests.support.builders.secrets import ENVIRONMENT
from tests.support.servers.http_server import free_port


class OperatorProcess(KeptProcess):
    """Runs ``python -m poc_operator`` for one namespace."""

    def __init__(self, namespace: str, log: Path, *options: str, gateway: Gateway | None = None) -> None:
        metrics = free_port()
        ports = (f"--health-port={free_port()}", f"--metrics-port={metrics}")
        scope = (f"--namespace={namespace}", f"--lease-namespace={namespace}", "--log-format=plain")
        variables = {"KUBECONFIG": str(admin_kubeconfig())}
        if gateway is not None:
            options += (f"--gateway-url={gateway.url}",)
            secrets = ("POC_GATEWAY_OPERATOR_TOKEN", "POC_GATEWAY_CALLBACK_KEY")
            variables |= {name: ENVIRONMENT[name] for name in secrets}
        argv = (sys.executable, "-m", "poc_operator", *scope, *ports, *options)
        super().__init__(argv, variables, log)
        self.metrics_url = f"http://127.0.0.1:{metrics}/metrics"
