"""Requests don't fill the log of a program that logs at INFO."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from lastbit import AsyncClient, Client


def test_requests_are_logged_at_debug(service_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "httpx"), caplog.at_level(logging.DEBUG, "lastbit.http"):
        with Client(service_url) as client:
            client.open(items=1)
        assert [(record.name, record.levelname) for record in caplog.records] == [("lastbit.http", "DEBUG")]
        assert f"POST {service_url}/v1/batches" in caplog.text
        assert "201 Created" in caplog.text


def test_async_requests_are_logged_at_debug(service_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def request() -> None:
        async with AsyncClient(service_url) as client:
            await client.open(items=1)

    with caplog.at_level(logging.INFO):
        asyncio.run(request())
    assert caplog.records == []


def test_requests_of_the_program_are_logged_as_before(service_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        with Client(service_url) as client:
            client.open(items=1)
        httpx.get(f"{service_url}/health")
    assert [record.name for record in caplog.records] == ["httpx"]
