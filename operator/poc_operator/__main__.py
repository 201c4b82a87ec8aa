# SPDX-License-Identifier: Apache-2.0
"""``python -m poc_operator``: run the operator."""

import argparse
import gc
import logging
import sys

import kopf
from yarl import URL

from poc_operator.credentials import RATE_LIMIT
from poc_operator.fleets.resolve import TOKEN_SECRET
from poc_operator.handlers import objects, process  # noqa: F401 - importing registers the handlers
from poc_operator.leases import LEASE_SECONDS, LEAST_LEASE_SECONDS
from vllm_poc.logs import bind_handlers
from vllm_poc.wire.messages import MAX_LEASE_SECONDS
from vllm_poc.wire.partition import MAX_NONCE

#: Large rounds are planned in threads. While one plans, each system call of the event loop costs it so long. Python's
#: own 5 ms would make a hundred answers of pods half a second late.
SWITCH_SECONDS = 0.0005


def gateway_url(text: str) -> str:
    """Return the option's value; ArgumentTypeError if it is no address of a server."""
    try:
        url = URL(text)
        right = url.scheme in ("http", "https") and url == url.origin()
    except ValueError:
        right = False
    if not right:
        raise argparse.ArgumentTypeError(f'"{text}" is not like http://HOST:PORT')
    return text


def rate_limit(text: str) -> int:
    """Return the option's value; ArgumentTypeError if it is no number of nonces."""
    if not text.isdecimal() or not 0 < int(text) <= MAX_NONCE:
        raise argparse.ArgumentTypeError(f'"{text}" is no whole number from 1 to {MAX_NONCE}')
    return int(text)


def lease_seconds(text: str) -> int:
    """Return the option's value; ArgumentTypeError if it is no time that a lease can have."""
    if not text.isdecimal() or not LEAST_LEASE_SECONDS <= int(text) <= MAX_LEASE_SECONDS:
        raise argparse.ArgumentTypeError(
            f'"{text}" is no whole number from {LEAST_LEASE_SECONDS} to {MAX_LEASE_SECONDS}'
        )
    return int(text)


def main() -> None:
    """Parse the command line and run until told to stop."""
    parser = argparse.ArgumentParser(prog="poc_operator", description="Runs PoCRounds on vLLM pods.")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        help="watch this namespace; may be repeated (default: all namespaces)",
    )
    parser.add_argument("--health-port", type=int, default=8080, help="port of GET /healthz (default: 8080)")
    parser.add_argument("--metrics-port", type=int, default=8081, help="port of GET /metrics (default: 8081)")
    parser.add_argument(
        "--lease-namespace",
        help="namespace of the Lease that lets one operator act at a time (default: the pod's, or the kubeconfig's)",
    )
    parser.add_argument(
        "--identity",
        help="name in the Lease, never of two processes at once: a process takes over from a dead one of its name "
        "without waiting (default: the host's name and a random word)",
    )
    parser.add_argument(
        "--pod-token-secret",
        metavar="NAME",
        default=TOKEN_SECRET,
        help="name of the Secret, in each namespace of pods, whose key token these get as a bearer token, and that is "
        f"made for fleets where it does not exist (default: {TOKEN_SECRET})",
    )
    parser.add_argument(
        "--worker-image",
        metavar="IMAGE",
        help="image of the pods of fleets that name none (default: none, so fleets must name theirs)",
    )
    parser.add_argument(
        "--gateway-url",
        type=gateway_url,
        help="http://HOST:PORT of the gateway: pods deliver there, and it forwards to the rounds' callback addresses "
        "(default: none, pods deliver to these themselves)",
    )
    parser.add_argument(
        "--max-nonces-per-second",
        type=rate_limit,
        default=RATE_LIMIT,
        help="nonces per second that no pod exceeds: results and counters beyond are not believed "
        f"(default: {RATE_LIMIT})",
    )
    parser.add_argument(
        "--pod-lease-seconds",
        type=lease_seconds,
        default=LEASE_SECONDS,
        help="seconds for which pods compute on if no operator asks them; after this time, and up to a quarter more, "
        f"the slot of a pod that cannot be reached moves on (default: {LEASE_SECONDS})",
    )
    parser.add_argument("--log-format", choices=["json", "plain"], default="json")
    options = parser.parse_args()
    kopf.configure(
        verbose=None,
        log_format=kopf.LogFormat.JSON if options.log_format == "json" else kopf.LogFormat.PLAIN,
    )
    bind_handlers(logging.getLogger())
    # "Handler ... succeeded" for every event of every pod and every probe says nothing to anybody.
    for noisy in ("aiohttp.access", "kopf.activities", "kopf.objects"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    gc.freeze()  # what is imported stays
    sys.setswitchinterval(SWITCH_SECONDS)
    kopf.run(
        memo=kopf.Memo(options=options),
        standalone=True,
        namespaces=options.namespace,
        clusterwide=not options.namespace,
    )


if __name__ == "__main__":
    main()
