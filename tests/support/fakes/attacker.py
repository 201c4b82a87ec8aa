# SPDX-License-Identifier: Apache-2.0
"""A client that posts as fast as it can, from an address of its own, and waits for no answer before the next."""

import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from yarl import URL

#: Loopback, and not where others of this machine come from.
ADDRESS = "127.0.0.2"
_AT_ONCE = 50
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@dataclass
class Attack:
    """What was sent and answered; ``answers`` counts statuses."""

    sent: int = 0
    seconds: float = 0.0
    answers: Counter[int] = field(default_factory=Counter)


def post(url: URL, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return the bytes of a request."""
    fields = {"Host": f"{url.host}:{url.port}", "Content-Type": "application/json", **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def attacking(url: URL, requests: Sequence[bytes], connections: int = 4) -> Iterator[Attack]:
    """Send the requests over and over, until the block ends; ``Attack`` is complete then."""
    attack, end, lock = Attack(), threading.Event(), threading.Lock()

    def send(number: int) -> None:
        turn = number
        while not end.is_set():
            try:
                turn = _talk(url, requests, turn, end, attack, lock)
            except OSError:
                turn += 1  # what the gateway breaks off is tried anew

    threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(connections)]
    begin = monotonic()
    for thread in threads:
        thread.start()
    try:
        yield attack
    finally:
        end.set()
        for thread in threads:
            thread.join(30)
        attack.seconds = monotonic() - begin


def _talk(
    url: URL, requests: Sequence[bytes], turn: int, end: threading.Event, attack: Attack, lock: threading.Lock
) -> int:
    with socket.create_connection((url.host or "", url.port or 80), timeout=5, source_address=(ADDRESS, 0)) as one:
        reading = threading.Thread(target=_read, args=(one, attack, lock), daemon=True)
        reading.start()
        while not end.is_set():
            request = requests[turn % len(requests)]
            count = _AT_ONCE if len(request) < 10_000 else 1
            one.sendall(request * count)
            turn += 1
            with lock:
                attack.sent += count
        one.shutdown(socket.SHUT_WR)
        reading.join(5)
    return turn


def _read(connection: socket.socket, attack: Attack, lock: threading.Lock) -> None:
    try:
        while data := connection.recv(65_536):
            with lock:
                attack.answers.update(int(status) for status in _STATUS.findall(data))
    except OSError:
        return
