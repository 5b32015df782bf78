"""The awaited classes are those that `make twins` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import async_twins

ORIGINAL = '''class Groups:
    """Groups."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def all(self) -> Iterator[Group]:
        """All groups, as `Groups` has them."""
        return self._driver.iterate(_all)

    @property
    def kept(self) -> Groups:
        return Groups(self._driver)

    def get(self, name: str) -> Group:
        return self._driver.run(_get, name)

    def names(self) -> tuple[str, ...]:
        return tuple(self.get(name).name[0] for name in ("a", "b"))

    def ids(self) -> list[str]:
        for ids in self._driver.iterate(_ids):
            latest = ids
        return self._driver.run(_newest, latest)[0].ids

    again = get

'''
TWIN = '''
class AsyncGroups:
    """Groups, awaited."""

    __slots__ = ("_driver",)

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    def all(self) -> AsyncIterator[Group]:
        """All groups, as `Groups` has them."""
        return self._driver.iterate(_all)

    @property
    def kept(self) -> AsyncGroups:
        return AsyncGroups(self._driver)

    async def get(self, name: str) -> Group:
        return await self._driver.run(_get, name)

    async def names(self) -> tuple[str, ...]:
        return tuple((await self.get(name)).name[0] for name in ("a", "b"))

    async def ids(self) -> list[str]:
        async for ids in self._driver.iterate(_ids):
            latest = ids
        return (await self._driver.run(_newest, latest))[0].ids

    again = get
'''


def test_all_twins_are_current() -> None:
    assert async_twins.stale() == [], "run `make twins`"


def test_a_twin_awaits_what_the_original_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "groups.py"
    file.write_text(ORIGINAL + '\nclass AsyncGroups:\n    """Groups, awaited."""\n')
    monkeypatch.setattr(async_twins, "TWINS", {"Groups": str(file)})
    monkeypatch.setattr(async_twins, "ROOT", tmp_path)
    assert async_twins.stale() == ["Groups"]
    assert async_twins.written("Groups") == ORIGINAL + TWIN
