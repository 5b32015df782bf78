# The names of __init__.py for type checkers, which cannot look inside its table.
from lastbit.integrations.airflow.hook import LastbitHook as LastbitHook
from lastbit.integrations.airflow.link import LastbitBatchLink as LastbitBatchLink
from lastbit.integrations.airflow.operators import (
    LastbitCancelBatchOperator as LastbitCancelBatchOperator,
    LastbitOpenBatchOperator as LastbitOpenBatchOperator,
    LastbitSealBatchOperator as LastbitSealBatchOperator,
)
from lastbit.integrations.airflow.runs import run_key as run_key
from lastbit.integrations.airflow.sensor import LastbitBatchSensor as LastbitBatchSensor
from lastbit.integrations.airflow.trigger import LastbitBatchTrigger as LastbitBatchTrigger

__all__: list[str]
