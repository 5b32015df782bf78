"""Checks the URLs and addresses of webhooks. A client that can create a webhook can make this service send requests.
They must not reach the service's own machine, its private network, or the cloud's metadata address.

All checks are pure. `parse` checks the URL's syntax so strictly that no two parsers can read it differently.
`is_public` checks one address. The sender resolves the name, checks *every* address, and connects to one of these
addresses: a second lookup could return others.

Names are resolved only to send. A request that creates a webhook would wait for the servers of its client's choice, and
its response would tell which names exist in our network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

LONGEST_URL: Final = 2048
NOT_PUBLIC: Final = (
    "an address that is not public; LASTBIT_WEBHOOKS_ALLOW_PRIVATE=true in the service's environment allows it"
)
"""The message for every refused address, with the setting of the service and its dispatchers. Naming the address would
reveal details of our network."""
NOT_FOUND: Final = f"the host can't be resolved, or has {NOT_PUBLIC}"
"""The message for every refused name. A client may choose names, so it must not learn which of them exist here."""


class Unfit(Exception):  # shown to clients and logged, so it names no address
    """The service may not send webhooks to this URL or address."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed URL. `host` is a name or an address without brackets; `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str
    authority: str
    """The value of the Host header."""


_NAME: Final = re.compile(r"(?=.{1,254}\Z)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?", re.IGNORECASE)
_NUMERIC: Final = re.compile(r"(.*\.)?(0x[0-9a-f]*|[0-9]+)\.?", re.IGNORECASE)
"""Hosts whose last label is a number: they are IPv4 addresses in some notation, never names."""


def parse(url: str) -> Target:
    """Parse a webhook's URL. Raises `Unfit`."""
    if len(url) > LONGEST_URL or not re.fullmatch(r"[\x21-\x7e]+", url):
        raise Unfit(f"expected a URL of at most {LONGEST_URL:,} visible ASCII characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise Unfit("expected a URL like https://example.com/hooks") from None
    if parts.scheme not in ("http", "https"):
        raise Unfit("expected a URL that begins with https:// or http://")
    if "@" in parts.netloc:
        raise Unfit("expected a URL without a user name or password")
    if "#" in url:
        raise Unfit("expected a URL without a fragment")
    if port == 0:
        raise Unfit("expected a port from 1 to 65535")
    if re.fullmatch(r"\[[^\]]*\](:[0-9]*)?", parts.netloc):
        _address(IPv6Address, host)
    elif _NUMERIC.fullmatch(host):
        _address(IPv4Address, host)
    elif not _NAME.fullmatch(host):
        raise Unfit("expected a URL with a host name")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    default = 443 if parts.scheme == "https" else 80
    return Target(parts.scheme, host, port or default, path, parts.netloc)


def _address(kind: type[IPv4Address] | type[IPv6Address], host: str) -> None:
    """Raise `Unfit` unless the address has its usual form: parsers disagree about `127.1`, `0x7f.1`, `2130706433`."""
    try:
        kind(host)
    except ValueError:
        raise Unfit("expected a host name, or an address in its usual form") from None
    if "%" in host:
        raise Unfit("expected an address without a zone")


_RESERVED: Final = """
    0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12
    192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15
    198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4
"""
_IPV4: Final = tuple(map(ip_network, _RESERVED.split()))
"""Special-purpose addresses, from the IANA registry: this network, private, carrier-grade NAT, loopback, link-local,
protocols, documentation, 6to4 relays, benchmarks, multicast, reserved and broadcast."""
_GLOBAL_UNICAST: Final = ip_network("2000::/3")
"""Contains all public IPv6 addresses, but not loopback, link-local, unique local, multicast, IPv4-mapped and NAT64."""
_IPV6: Final = tuple(ip_network(network) for network in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
"""Special purposes within it: protocols and Teredo, documentation, 6to4 (which can embed any IPv4 address)."""


def is_address(host: str) -> bool:
    """Whether the host of a parsed URL is an address, and not a name."""
    return ":" in host or _NUMERIC.fullmatch(host) is not None


def is_private(host: str) -> bool:
    """Whether the host of a parsed URL is not public, whatever a resolver says: an address, or a name for this
    machine."""
    if is_address(host):
        return not is_public(host)
    return f".{host.rstrip('.')}".endswith(".localhost")


def is_public(address: str) -> bool:
    """Whether an address from a resolver is on the public internet."""
    parsed = ip_address(address)
    if isinstance(parsed, IPv4Address):
        return not any(parsed in network for network in _IPV4)
    return parsed in _GLOBAL_UNICAST and not any(parsed in network for network in _IPV6)
