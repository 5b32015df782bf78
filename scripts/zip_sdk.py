"""Build dist/lastbit.zip: the SDK in the form of Spark's --py-files. The same input gives the same bytes."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EPOCH = (1980, 1, 1, 0, 0, 0)


def build(target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in sorted((ROOT / "lastbit").rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts:
                info = zipfile.ZipInfo(source.relative_to(ROOT).as_posix(), EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, source.read_bytes())


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    print(f"wrote {sys.argv[1]}", file=sys.stderr)  # noqa: T201
