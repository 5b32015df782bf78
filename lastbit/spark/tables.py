"""The rows that one committed version of a Delta or Iceberg table added, so that `ack` acks what was committed. The
frame that was written may be computed again, with other rows, and a table has other writers.

The driver gets the list of the version's data files from deltalake or PyIceberg, and Spark reads these files, which are
Parquet. So the cluster needs no connector for the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from lastbit.errors import InvalidArgument


def delta_rows(
    path: str,
    version: int,
    *,
    storage_options: Mapping[str, str] | None = None,
    spark: SparkSession | None = None,
) -> DataFrame:
    """The rows in the files that `version` added to the Delta table at `path`, without the columns that partition it.

    An update, a merge or a compaction writes rows again that the table already had; to ack those again is harmless.
    `path` and `storage_options` are deltalake's, and Spark reads the files under the same `path`. `spark`: by default
    the active session.

    Raises `InvalidArgument` if the rows can't be read from the files alone: the table maps its columns to other names,
    or one of these files has a deletion vector.
    """
    from deltalake import DeltaTable

    if version < 0:
        raise InvalidArgument(f"a version is 0 or more, not {version!r}")
    options = dict(storage_options or {})
    table = DeltaTable(path, version=version, storage_options=options)
    if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        raise InvalidArgument(f"{path} has column mapping; read it with Spark's connector for Delta")
    files = _delta_files(table)
    if version > 0:
        files -= _delta_files(DeltaTable(path, version=version - 1, storage_options=options))
    if "deletionVectors" in (table.protocol().reader_features or ()):
        for batch in table.deletion_vectors():
            for address in batch.column("filepath").to_pylist():
                if any(unquote(address).endswith(file) for file in files):
                    raise InvalidArgument(
                        f"version {version} of {path} has deletion vectors; read it with Spark's connector for Delta"
                    )
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    partitioned = table.metadata().partition_columns
    schema = StructType([field for field in schema if field.name not in partitioned])
    # A shallow clone has absolute paths of another table's files.
    paths = [file if "://" in file else f"{path.rstrip('/')}/{file}" for file in files]
    return _read(paths, schema, spark)


def iceberg_rows(table: Any, snapshot_id: int, *, spark: SparkSession | None = None) -> DataFrame:
    """The rows in the files that a snapshot added to `table`, a PyIceberg table.

    An overwrite or a compaction writes rows again that the table already had; to ack those again is harmless. Spark
    reads the files at the addresses in the table's metadata. `spark`: by default the active session.

    Raises `InvalidArgument` if there is no such snapshot, and if the rows can't be read from the data files alone: the
    snapshot also added delete files, or its data files are not Parquet.
    """
    from pyiceberg.manifest import FileFormat, ManifestContent, ManifestEntryStatus

    snapshot = table.snapshot_by_id(snapshot_id)
    if snapshot is None:
        raise InvalidArgument(f"the table has no snapshot {snapshot_id}")
    manifests = [m for m in snapshot.manifests(table.io) if m.added_snapshot_id == snapshot_id]
    if any(manifest.content != ManifestContent.DATA for manifest in manifests):
        raise InvalidArgument(f"snapshot {snapshot_id} has delete files; read it with Spark's connector for Iceberg")
    entries = [entry for manifest in manifests for entry in manifest.fetch_manifest_entry(table.io)]
    files = [entry.data_file for entry in entries if entry.status == ManifestEntryStatus.ADDED]
    for file in files:
        if file.file_format != FileFormat.PARQUET:
            raise InvalidArgument(f"snapshot {snapshot_id} has files in {file.file_format.value}, not Parquet")
    return _read([file.file_path for file in files], _iceberg_schema(table, snapshot) if not files else None, spark)


def _delta_files(table: Any) -> set[str]:
    return {unquote(path) for path in table.get_add_actions().column("path").to_pylist()}


def _iceberg_schema(table: Any, snapshot: Any) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = table.schema() if snapshot.schema_id is None else table.schemas()[snapshot.schema_id]
    return from_arrow_schema(schema.as_arrow())


def _read(paths: list[str], schema: StructType | None, spark: SparkSession | None) -> DataFrame:
    session = spark or SparkSession.builder.getOrCreate()
    if not paths:
        return session.createDataFrame([], schema)
    reader = session.read if schema is None else session.read.schema(schema)
    return reader.parquet(*paths)
