"""Allowed targets of webhooks: the URL's form, and public addresses."""

from __future__ import annotations

import pytest

from core.webhooks.addresses import Target, Unfit, is_public, parse


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://example.com", Target("https", "example.com", 443, "/", "example.com")),
        ("http://Example.com:8080/a/b?c=d", Target("http", "example.com", 8080, "/a/b?c=d", "Example.com:8080")),
        ("HTTPS://hooks_1.example.com./", Target("https", "hooks_1.example.com.", 443, "/", "hooks_1.example.com.")),
        ("http://93.184.216.34/x", Target("http", "93.184.216.34", 80, "/x", "93.184.216.34")),
        ("https://[2606:2800::1]:444/", Target("https", "2606:2800::1", 444, "/", "[2606:2800::1]:444")),
        ("https://xn--bcher-kva.example/", Target("https", "xn--bcher-kva.example", 443, "/", "xn--bcher-kva.example")),
    ],
)
def test_a_url_is_split_into_its_parts(url: str, target: Target) -> None:
    """Scheme and host in lower case, with the default port."""
    assert parse(url) == target


@pytest.mark.parametrize(
    "url",
    [
        *("", "example.com", "/hook", "//example.com/", "ftp://example.com/", "file:///etc/passwd", "gopher://x/"),
        *("javascript:alert(1)", "http:///x", "http://", "http://:80/", "http://?x", "http://#x", "https:example.com"),
        *("http://user@example.com/", "http://user:pw@example.com/", "http://@example.com/", "http://:@example.com/"),
        *("http://example.com\\@127.0.0.1/", "http://127.0.0.1\\.example.com/", "http://exa mple.com/"),
        *("http://example.com/\n", "http://exam\tple.com/", "http://example.com/\x00", "http://bücher.example/"),
        *("http://example.com:0/", "http://example.com:65536/", "http://example.com:x/", "http://example.com:-1/"),
        *("http://example..com/", "http://.example.com/", "http://exa%6dple.com/", "http://a,b/", "http://[::1"),
        *("http://example.com/#fragment", "http://example.com#@evil/", "http://" + "a" * 64 + ".com/"),
        "http://example.com/" + "x" * 2048,
        # Spellings of IPv4 addresses that parsers interpret differently.
        *("http://127.1/", "http://2130706433/", "http://0x7f.1/", "http://0x7f000001/", "http://0177.0.0.1/"),
        *("http://127.0.0.01/", "http://127.0.0.1./", "http://1.2.3.4.5/", "http://256.1.1.1/", "http://0/"),
        *("http://example.0x/", "http://１２７.0.0.1/", "http://127。0。0。1/", "http://0x/", "http://1.1.1.0x1/"),
        *("http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[::g]/", "http://[127.0.0.1]/", "http://[]/"),
        *("http://[v1.x]/", "http://::1/", "http://[::1]x/"),
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    """Even with private addresses allowed: this is about the form."""
    with pytest.raises(Unfit, match="expected"):
        parse(url)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254"),
        *("0.0.0.0", "0.1.2.3", "100.64.0.1", "100.127.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "198.18.0.1"),
        *("198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1"),
        *("255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "febf::1", "fec0::1", "fc00::1", "fd00::1"),
        *("ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "::127.0.0.1", "::8.8.8.8"),
        *("64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::1", "2002:7f00:1::", "2002:808:808::1", "2001::1"),
        *("2001:0:7f00:1::", "2001:db8::1", "2001:10::1", "2001:20::1", "3fff::1", "100::1", "5f00::1", "4000::1"),
    ],
)
def test_special_addresses_are_not_public(address: str) -> None:
    """Loopback, private, link-local, shared, multicast, reserved, and IPv6 that carries IPv4."""
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("8.8.8.8", "93.184.216.34", "172.15.255.255", "172.32.0.1", "100.63.255.255", "100.128.0.1", "223.255.255.1"),
        *("2606:2800:220:1::1", "2001:4860:4860::8888", "2a00:1450::1", "2001:200::1"),
    ],
)
def test_ordinary_addresses_are_public(address: str) -> None:
    """Up to the edges of the special ranges."""
    assert is_public(address)
