# SPDX-License-Identifier: Apache-2.0
"""What ``helm test`` runs in a pod: the CRDs are served, and operator and gateway answer.

It needs nothing but Python, and ends with 1 and one line for each thing that is not so when the time is up.
"""

import argparse
import json
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

#: Seconds that one request may take, and between two tries.
REQUEST_SECONDS = 5.0
PAUSE_SECONDS = 1.0
GROUP = "/apis/poc.gonka.ai/v1alpha1"


def problems(options: argparse.Namespace) -> Iterator[str]:
    """Yield what is not as it should be, each with what to do."""
    for resource in options.resource:
        for namespace in options.namespace or [""]:
            where = f"/namespaces/{namespace}" if namespace else ""
            said = _ask(f"{options.api}{GROUP}{where}/{resource}?limit=1", options.account)[0]
            if said == "404":
                yield f"the API server does not serve {resource}: install the CRDs, as crds.enabled does"
            elif said != "200":
                yield f"the API server answers {said} for {resource}"
    yield from _operator(options)
    if options.gateway_url:
        said = _ask(f"{options.gateway_url}/readyz")[0]
        if said != "200":
            yield f"the gateway answers {said} at {options.gateway_url}/readyz: see the log of its pod"


def _operator(options: argparse.Namespace) -> Iterator[str]:
    query = urllib.parse.urlencode({"labelSelector": options.operator_selector})
    said, body = _ask(f"{options.api}/api/v1/namespaces/{options.operator_namespace}/pods?{query}", options.account)
    if said != "200":
        yield f"the API server answers {said} for the operator's pods"
        return
    addresses = [pod["status"]["podIP"] for pod in json.loads(body)["items"] if pod["status"].get("podIP")]
    answers = [_ask(f"http://{_host(address)}:{options.health_port}/healthz")[0] for address in addresses]
    if "200" not in answers:
        said = ", ".join(answers) or "nothing, as it has no pod with an address"
        yield f"the operator answers {said}: see its Deployment and the log of its pod"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _ask(url: str, account: str = "") -> tuple[str, bytes]:
    """Return the status, or why there is none, and the body; with the token in the folder ``account``."""
    request = urllib.request.Request(url)  # noqa: S310 - the chart names the address
    context = None
    if account:
        request.add_header("Authorization", f"Bearer {Path(account, 'token').read_text().strip()}")
        if url.startswith("https:"):
            context = ssl.create_default_context(cafile=str(Path(account, "ca.crt")))
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS, context=context) as answer:  # noqa: S310
            return str(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        return str(error.code), b""
    except OSError as error:
        return f"nothing ({error})", b""


def main() -> None:
    """Look until all is well or the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--api", default="https://kubernetes.default.svc")
    parser.add_argument("--account", default="/var/run/secrets/kubernetes.io/serviceaccount")
    parser.add_argument("--resource", action="append", default=[])
    parser.add_argument("--namespace", action="append", default=[])
    parser.add_argument("--operator-namespace", required=True)
    parser.add_argument("--operator-selector", required=True)
    parser.add_argument("--health-port", type=int, default=8080)
    parser.add_argument("--gateway-url", default="")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    while found := list(problems(options)):
        if time.monotonic() >= end:
            sys.exit("\n".join(found))
        time.sleep(PAUSE_SECONDS)
    answering = "operator and gateway answer" if options.gateway_url else "the operator answers"
    sys.stdout.write(f"the CRDs are served, and {answering}\n")


if __name__ == "__main__":
    main()
