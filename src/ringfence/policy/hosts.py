"""Host patterns in network rules: one parser, one matcher.

Guards against patterns that mean more than their writer saw: a name compared by its ending (`notallowed.test`
for `allowed.test`), an address written so that readers disagree (`0x7f.1`, `2130706433`), letters that only look
alike, a wildcard over a whole top-level domain, and the cloud metadata services, which no policy may open.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from ringfence.errors import PolicyError

METADATA_HOSTS = frozenset(
    {
        "metadata.google.internal",
        "metadata.goog",
        "metadata",
        "instance-data",
        "instance-data.ec2.internal",
        "metadata.azure.internal",
        "metadata.tencentyun.com",
    }
)
METADATA_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in (
        "169.254.0.0/16",
        "fe80::/10",
        "fd00:ec2::/32",
        "100.100.100.200/32",
        "168.63.129.16/32",
        "192.0.0.192/32",
    )
)
"""Where clouds hand out credentials: AWS, Google, Azure, Alibaba, Oracle, and all link-local addresses."""

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.ASCII)


class HostPattern(NamedTuple):
    """A canonical pattern: lower-case name, `*.` plus a name, or an IP address; and the ports it may name."""

    host: str
    port: int | None

    @property
    def is_address(self) -> bool:
        return _address(self.host) is not None


def parse_host(text: str) -> HostPattern:
    """The pattern in `text`: `host`, `host:port`, `*.host`, `[ipv6]:port`.

    Raises:
        PolicyError: it is not a host, is too wide, or names a cloud metadata service.
    """
    rest, port = text.strip(), None
    if "://" in rest or "/" in rest:
        raise PolicyError(f"{text!r} is not a host", hint="write host or host:port; paths go into `paths`")
    bracket = re.fullmatch(r"\[([^\]]+)\](?::([0-9]+))?", rest)
    if bracket:
        rest, port_text = bracket[1], bracket[2]
    elif rest.count(":") == 1:
        rest, _, port_text = rest.partition(":")
    else:
        port_text = None
    if port_text is not None:
        if not re.fullmatch(r"[0-9]{1,5}", port_text, re.ASCII) or not 1 <= int(port_text) <= 65535:
            raise PolicyError(f"{port_text!r} in {text!r} is not a port", hint="ports go from 1 to 65535")
        port = int(port_text)
    host = rest.lower().removesuffix(".")
    address = _address(host)
    if address is not None:
        _refuse_metadata(text, host, address)
        return HostPattern(str(address), port)
    if not host.isascii():
        raise PolicyError(
            f"the host {text!r} holds letters outside ASCII, which can look like others",
            hint="write its ASCII form (xn--...)",
        )
    name = host.removeprefix("*.")
    labels = name.split(".")
    if host in ("*", "") or "*" in name:
        raise PolicyError(
            f"the host pattern {text!r} is too wide or has a wildcard in the middle",
            hint="name the hosts, or a domain of theirs as *.example.org",
        )
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise PolicyError(f"{text!r} is not a host name", hint="write a name such as api.example.org")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        # "The last label is a number" is how the URL standard tells addresses; only the plain form is read here.
        raise PolicyError(
            f"{text!r} is not a plain IP address", hint="write it as four decimal numbers, 192.0.2.7"
        )
    if host.startswith("*.") and len(labels) < 2:
        raise PolicyError(
            f"the host pattern {text!r} covers a whole top-level domain",
            hint="name the hosts or their domain",
        )
    _refuse_metadata(text, host, None)
    return HostPattern(host, port)


def host_matches(pattern: str, host: str) -> bool:
    """Whether a canonical `pattern` covers `host`. `*.example.org` covers every name below it, at any depth, and
    not `example.org` itself; comparison is by whole labels, without regard to case or a final dot."""
    name = host.lower().removesuffix(".")
    address = _address(name.strip("[]"))
    if address is not None:
        return pattern == str(address)
    if pattern.startswith("*."):
        return name.endswith(pattern[1:]) and len(name) > len(pattern) - 1
    return name == pattern


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _refuse_metadata(
    text: str, host: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None
) -> None:
    hit = any(host_matches(host, name) for name in METADATA_HOSTS)
    if address is not None:
        hit = any(address.version == network.version and address in network for network in METADATA_NETWORKS)
    if hit:
        raise PolicyError(
            f"{text!r} is a cloud metadata service or link-local address, which no policy can open",
            hint="hand the sandbox what it needs as a file or an injected header",
        )
