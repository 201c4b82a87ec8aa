# SPDX-License-Identifier: Apache-2.0
"""Pods, the operator and the API server take the same callback addresses, and results can be posted to all of them."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from yarl import URL

from poc_operator.apis.v1alpha1.round import PoCRound
from tests.support.checks.admission import admitted
from tests.unit.poc_operator.apis.test_specs import COMMON, a_round
from vllm_poc.server.callbacks.delivery import shown
from vllm_poc.wire.messages import MAX_CALLBACK_URL, MAX_HOST, CallbackUrl

POD = TypeAdapter[Any](CallbackUrl)
LABELS = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True) | st.sampled_from(
    [
        "",
        "xn--a",
        "XN--bcher-kva",
        "b\u00fccher",
        "a" * 63,
        "a" * 64,
        "0x7f",
        "127",
        "a b",
        "%41",
        "\uff41",
        "a\\b",
        "-a",
        "a-",
    ]
)
NAMES = st.lists(LABELS, min_size=1, max_size=6).map(".".join) | st.integers(245, 260).map(
    lambda length: ("a." * length)[: length - 1] + "a"
)
ADDRESSES = (
    st.ip_addresses(v=4).map(str)
    | st.ip_addresses(v=6).map(lambda address: f"[{address}]")
    | st.sampled_from(
        [
            *("1.2.3.400", "01.2.3.4", "127.1", "2130706433", "0x7f000001", "1.2.3.4.", "[::1", "[zz]", "[1::2::3]"),
            *("[]", "[fe80::1%25eth0]", "[fe80::1%eth0]", "[::ffff:1.2.3.4]", "::1", "[v1.a]", "[12345::]"),
            "[1:2:3:4:5:6:7::]",
        ]
    )
)
PORTS = st.sampled_from(
    ["", ":", ":0", ":1", ":080", ":80", ":443", ":65535", ":65536", ":99999", ":-1", ":a", ":8\u0660"]
)
#: Without a NUL, at which a string ends for what evaluates the rules here.
PATHS = st.sampled_from(
    [
        "",
        "/",
        "/a/b",
        "/a b",
        "/%20",
        "/%zz",
        "/a@b",
        "/a:1",
        "//",
        "/../x",
        "/xn--a",
        "/b.xn--a",
        "/\u00e9",
        "/\n",
        "\n",
        *("\\", "/a\\b", "?", "?a=b", "#", "#f", "/?#", "/'()*", " ", "/" + "a" * 1000),
    ]
)
SCHEMES = st.sampled_from(
    ["http://", "https://", "http://", "HTTP://", "http:/", "http:", "ftp://", "//", "", " http://"]
)
USERS = st.sampled_from(
    ["", "", "", "user@", "user:secret@", "u%20:@", ":@", "@", "a@b@", "a:b:c@", "a/b@", "a?@", "\u00e9@"]
)
#: User and password that the pods take, and the operator's API does not.
WELL_FORMED = {"user@", "user:secret@", "u%20:@", ":@", "a:b:c@"}


def pod_takes(url: str) -> bool:
    try:
        POD.validate_python(url)
    except ValidationError:
        return False
    return True


def operator_takes(url: str) -> bool:
    try:
        a_round(callbackURL=url)
    except ValidationError:
        return False
    return True


def api_server_takes(url: str) -> bool:
    nodes = {"first": 0, "last": 0, "count": 1}
    _, flaws = admitted(PoCRound, {**COMMON, "nodes": nodes, "rTarget": "1.4", "callbackURL": url})
    return not flaws


@settings(max_examples=600, deadline=None)
@given(scheme=SCHEMES, user=USERS, host=NAMES | ADDRESSES, port=PORTS, path=PATHS)
@example(scheme="http://", user="", host="a." * 126 + "a", port="", path="")
@example(scheme="http://", user="", host="a." * 126 + "aa", port="", path="")
@example(scheme="http://", user="", host="my_api", port=":9100", path="/")
@example(scheme="http://", user="", host="a.b", port="", path="/xn--a")
@example(scheme="http://", user="", host="[::ffff:0:0]", port="", path="")
def test_all_of_them_agree(scheme: str, user: str, host: str, port: str, path: str) -> None:
    url = f"{scheme}{host}{port}{path}"
    taken = operator_takes(url)
    assert (pod_takes(url), api_server_takes(url)) == (taken, taken)
    if user:
        with_user = f"{scheme}{user}{host}{port}{path}"
        assert not operator_takes(with_user) or "/" in user
        assert api_server_takes(with_user) == operator_takes(with_user)
        if user in WELL_FORMED:
            assert pod_takes(with_user) == taken
        elif taken and "/" not in user:
            assert not pod_takes(with_user)


@settings(max_examples=300, deadline=None)
@given(user=st.sampled_from(["", *sorted(WELL_FORMED)]), host=NAMES | ADDRESSES, port=PORTS, path=PATHS)
def test_what_is_taken_can_be_posted_to(user: str, host: str, port: str, path: str) -> None:
    url = f"http://{user}{host}{port}{path}"
    if not pod_takes(url):
        return
    receiver = str(POD.validate_python(url)).rstrip("/")
    posted = URL(f"{receiver}/generated")
    assert posted.host is not None
    assert posted.host.lower() == host.lower().strip("[]") or ":" in host
    assert posted.port == int(port[1:] or 80)
    assert posted.path.endswith("/generated")
    assert "@" not in shown(receiver).removesuffix(path)
    assert operator_takes(shown(receiver)), "the gateway puts it into a round's spec"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"http://{'a.' * 126}aa/", f"the host name has {MAX_HOST + 1} characters"),
        ("http://b\u00fccher/", "b\u00fccher is an internationalised host name"),
        ("http://a.xn--bcher-kva/", "a.xn--bcher-kva is an internationalised host name"),
        ("http://[fe80::1%25eth0]/", "[fe80::1%25eth0] has a zone"),
        ("http://[::ffff:102:304]/", "[::ffff:102:304] is an IPv4 address: write it as 1.2.3.4"),
        ("http://h:0/", "and a port of 1 to 65535"),
        ("http://h:65536/", "and a port of 1 to 65535"),
        ("http://h:/", "and a port of 1 to 65535"),
        ("http://a@b@h/", "must be an http:// or https:// URL"),
        ("http://127.1/", "must be an http:// or https:// URL"),
        ("http://h/" + "a" * MAX_CALLBACK_URL, f"use an address of at most {MAX_CALLBACK_URL}"),
    ],
)
def test_the_message_names_what_is_wrong(url: str, message: str) -> None:
    with pytest.raises(ValidationError) as found:
        POD.validate_python(url)
    assert message in str(found.value)
