"""Mutants: the code broken on purpose, each in one known way, and the test that must then fail.

`python -m tests.guarantees.mutants [NAME …]` runs each mutant's test against it and prints KILLED or SURVIVED; it exits
with 1 if any survives. A test that can't fail protects no guarantee.

A mutant replaces text in the source of one function, which is compiled again in its module. LASTBIT_MUTANT names the
mutant to apply, in the test's process and in the processes that the test starts.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import enum
import functools
import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "LASTBIT_MUTANT"
NO_TESTS = 5
"""pytest's exit code if it has selected no test."""


@dataclass(frozen=True)
class Mutant:
    """`where` is module:function or module:Class.method. `old` occurs in its source exactly once and is replaced by
    `new`; so are the further pairs of `also`. `test` is the file and the name of the test that must fail."""

    name: str
    where: str
    old: str
    new: str
    test: str
    also: tuple[tuple[str, str], ...] = ()
    only: str | None = None
    """The database whose statements or locks it breaks; None if it breaks all of them."""
    together_with: tuple[str, ...] = ()
    """The names of mutants of other functions that are applied with it."""

    def put_in_place(self) -> None:
        for name in self.together_with:
            named(name).put_in_place()
        owner, name, function = self.build()
        setattr(owner, name, function)

    def build(self) -> tuple[object, str, object]:
        """The object that owns the function, the function's name, and the broken function."""
        module_name, _, path = self.where.partition(":")
        module = importlib.import_module(module_name)
        *classes, name = path.split(".")
        owner: object = module
        for class_name in classes:
            owner = getattr(owner, class_name)
        source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        for old, new in ((self.old, self.new), *self.also):
            if source.count(old) != 1:
                raise AssertionError(f"{self.name}: {old!r} occurs {source.count(old)} times in {self.where}")
            source = source.replace(old, new)
        source = "from __future__ import annotations\n" + source
        namespace: dict[str, object] = {}
        exec(compile(source, f"<mutant {self.name}>", "exec"), vars(module), namespace)
        return owner, name, namespace[name]


_RACES = "test_races.py::"
_TWO_LAST = _RACES + "test_exactly_one_of_two_last_acks_in_different_groups_completes_the_batch"
_TWICE = _RACES + "test_a_last_item_delivered_twice_is_complete_for_both_workers_and_newly_for_one"
_SEAL = _RACES + "test_either_the_last_ack_or_the_seal_completes_the_batch"
_EXTEND = _RACES + "test_an_extend_gets_its_numbers_before_the_seal_or_not_at_all"
_EXPIRE = _RACES + "test_an_ack_saves_an_idle_batch_from_expiry_or_is_rejected"
_CANCEL = _RACES + "test_an_ack_comes_before_the_cancel_or_is_rejected"
_PURGE = _RACES + "test_a_purge_that_dies_between_chunks_leaves_no_rows_and_counts_nothing_twice"
_EXTENDS = _RACES + "test_two_extends_with_one_key_issue_the_same_numbers_once"
_DIGESTS = _RACES + "test_two_extends_with_one_key_for_other_things_issue_the_numbers_of_one"
_LOST = "test_lost_answers.py::"
_TRACES = "../http/test_traces.py::"
_OPENS = _RACES + "test_two_opens_with_one_key_make_one_batch"
_TOLERANCE = "test_tolerance.py::"
_DEADLINES = "test_deadlines.py::"
_UPDATE = "test_update.py::"
_ONE_KEY = _UPDATE + "test_two_requests_with_one_key_append_one_event"
_JUDGES = _UPDATE + "test_an_update_judges_the_failures_by_the_new_tolerance"
_WRITES = "test_writes.py::"
_GROWING = "test_growing.py::"
_EXPLORED = "../explorer/test_explorer.py::test_earlier_findings_stay_fixed"
_REPAIR = "test_repair.py::"
_DETECTED = "test_damage_is_detected_and_repaired_from_the_bits"
_RETRY = _RACES + "test_only_retries_of_the_completing_request_get_newly_again"

_CRASH = "test_crashes.py::test_a_retry_after_a_crash_at_any_point_matches_the_model"
_HALF_DONE = "test_crashes.py::test_the_janitor_finishes_what_a_crash_left_half_done"
_MACHINE = "test_machine.py::test_any_sequence_of_requests_and_crashes_matches_the_model"
_COMBINER = "test_combiner.py::"
_LOCK_ORDER = "test_lock_order.py::"
_FAILURES = "test_failures.py::"
_ANCESTOR = "test_ancestor.py::"

_FOLLOW = "test_feed.py::test_a_reader_sees_every_position_in_order_whatever_the_writers_do"
_TREE = "test_nesting.py::test_a_tree_of_batches_completes_level_by_level_though_its_consumers_die"

_RESOLVED_ITEM = "test_nesting.py::test_an_item_that_its_child_has_resolved_is_not_held_though_the_debt_was_not_removed"

_WORLDS = "test_tallies.py::test_every_total_matches_the_model_despite_all_failures"
_WRITERS = "test_tallies.py::test_writers_of_the_same_messages_count_each_once_and_meet_no_deadlock"
_COUNTER = "counter = (tally, key, topic, partition, generation)"
_BUFFER = "test_tallies.py::test_a_buffer_acks_a_message_only_after_its_answer"
_SDK = "../sdk/"
_ANY = _SDK + "test_any_answer.py::"
_CANCELLED = _SDK + "test_cancellation.py::test_calls_cancelled_at_any_moment_cost_no_connection"
_QUEUES = "../integrations/"
_CONSUMER = _QUEUES + "rabbitmq/test_consumer.py::"
_REORDERED = _QUEUES + "test_fan_out.py::test_reruns_in_any_order_lose_no_message"
_KAFKA = _QUEUES + "kafka/test_kafka.py::"
_TASKIQ = _QUEUES + "taskiq/test_middleware.py::"
_RQ = _QUEUES + "rq/test_endings.py::"
_STREAMS = "../streams/"
_WINDOW = _STREAMS + "test_window_machine.py::test_a_window_matches_a_set_of_outstanding_offsets"
_SNAPSHOT = _STREAMS + "test_snapshot.py::"
_ORDERED = _STREAMS + "test_ordered.py::"
_DIES = _STREAMS + (
    "test_killed.py::test_a_stream_whose_process_dies_at_any_point_is_handled_at_least_once_and_in_order"
)

_PAYMENTS = "test_parents.py::"
_LOCKED_PARENT = _PAYMENTS + "test_a_locked_parent_delays_only_the_call_that_ended_its_child"

_GALERA = "test_galera.py::"

_PROCESSES = "test_processes.py::"
_ANY_ORDER = "test_events_in_any_order_with_repeats_issue_one_command"
_HTTP_PROCESSES = "../http/test_processes.py::"
_LATE = "test_a_late_event_does_not_restart_a_finished_instance"
_REUSED = "test_a_step_that_another_event_issues_again_refuses_the_handling"
_PRUNED = "test_a_redelivered_event_that_was_pruned_is_a_repeat"

_READS = "../storage/test_reads.py::"
_LAST = "../storage/test_last_statements.py::"
_DELETED = "../storage/test_ranges.py::test_a_batch_deleted_while_it_is_read_is_read_completely"

_JOURNAL = "test_journal.py::"
_TURNS = "test_cache.py::test_processes_that_alternate_on_a_group_see_each_others_bits"

_DROPPED = "test_cache.py::test_the_cache_is_dropped_when_"
_OTHER_SERVER = _DROPPED + "a_proxy_leads_to_another_server"

_WAITING = "../http/test_long_polls.py::"
_JANITOR = "../storage/test_janitor.py::"
_DELIVERIES = "../storage/test_deliveries.py::"
_SEARCH = "../storage/test_search.py::"

_LOCK = "batch, now = lock(tx, batch_id)"
_LOCKED = "ORDER BY id{dialect.for_update()}"
_UNLOCKED = "ORDER BY id"
_PLAIN = "batch, now = get(tx, batch_id), tx.scalar(sa.select(tables.utc_now()))"

_READ_EARLY = (
    "*([_lock(tx, direct)] if direct else []),",
    "*([] if little else [_look(tx, batches)]), *([_lock(tx, direct)] if direct else []),",
)
_READ_EARLY_TOO = (
    (
        "completion.select(tx, batches, locking) if little else _look(tx, batches),",
        "*([completion.select(tx, batches, locking)] if little else []),",
    ),
    ("state = FlushState({})", "state = FlushState({} if little else _seen(tx, next(results)))"),
    ("state.seen = _seen(tx, next(results))", "pass"),
)

_FREE_JSON = "../http/test_free_json.py::"

_CHAOS = "../chaos/test_chaos.py::test_no_answer_contradicts_the_database_whatever_is_killed"
_CHAOS_LOSING = "../chaos/test_chaos.py::test_nobody_notices_that_answers_to_commits_are_lost"
_CHAOS_GROWING = "../chaos/test_chaos.py::" + (
    "test_batches_that_grow_keep_every_answered_ack_while_flushes_wait_for_their_groups"
)

MUTANTS = [
    # Fan-outs.
    Mutant(
        "a-rerun-is-not-compared",
        "lastbit.integrations._fan_out:_steps",
        "None if digest is None else digest.after(messages)",
        "None",
        _REORDERED,
    ),
    Mutant(
        "a-chunk-vouches-only-for-itself",
        "lastbit.integrations._digests:Digest.after",
        "for message in messages:",
        "self._hash = hashlib.blake2b(digest_size=16)\n    for message in messages:",
        _REORDERED,
    ),
    Mutant(
        "a-rerun-sends-before-it-has-compared",
        "lastbit.integrations._fan_out:_steps",
        "if number >= first_unsent:",
        "if True:",
        _REORDERED,
    ),
    Mutant(
        "a-digest-depends-on-the-process",
        "lastbit.integrations._digests:_written",
        'b"".join(sorted(map(_written, value)))',
        'b"".join(map(_written, value))',
        _QUEUES + "test_digests.py::test_another_process_computes_the_same_digest",
    ),
    Mutant(
        "values-are-written-without-their-lengths",
        "lastbit.integrations._digests:_measured",
        'b"%b%d:%b" % (kind, len(content), content)',
        "kind + content",
        _QUEUES + "test_digests.py::test_other_messages_have_other_digests",
    ),
    Mutant(
        "what-a-library-makes-for-each-message-is-compared",
        "lastbit.integrations.dramatiq:_identity",
        "return message.queue_name,",
        "return message.message_id,",
        _QUEUES + "test_reruns.py::test_a_rerun_sends_what_was_not_sent",
    ),
    # Queues.
    Mutant(
        "an-unhandled-message-is-acked",
        "lastbit.integrations._workers:Workers._process",
        "Outcome.ERROR",
        "Outcome.DONE",
        _CONSUMER + "test_a_message_whose_handler_raises_is_requeued",
    ),
    Mutant(
        "a-message-is-acked-before-its-item",
        "lastbit.integrations._workers:Workers._resolve",
        "item = delivery.item\n",
        "item = delivery.item\n    delivery.settle(_outcome(failure))\n",
        _CONSUMER + "test_a_stop_leaves_messages_to_their_redelivery_while_lastbit_is_away",
    ),
    Mutant(
        "a-rejected-item-ends-the-consumer",
        "lastbit.integrations._workers:Workers._not_resolved",
        'is_rejection(error, delivery.item or "")',
        "False",
        _CONSUMER + "test_the_message_of_a_rejected_item_does_not_come_back",
    ),
    Mutant(
        "a-worker-ends-without-a-word",
        "lastbit.integrations._workers:Workers._work",
        "except BaseException as error:",
        "except _Raised as error:",
        _QUEUES + "test_workers.py::test_an_error_of_the_end_of_a_message_ends_the_consumer",
    ),
    Mutant(
        "an-outage-needs-a-new-thread",
        "lastbit.integrations._workers:Workers.__init__",
        "self._again.start()",
        "pass",
        _QUEUES + "test_workers.py::test_acks_are_sent_again_though_no_thread_can_be_started",
    ),
    Mutant(
        "a-consumer-goes-on-with-some-of-its-threads",
        "lastbit._threads:join_started",
        "if thread.ident is not None:",
        "if True:",
        _QUEUES + "sqs/test_consume.py::test_a_consumer_that_may_start_too_few_threads_ends",
    ),
    Mutant(
        "a-partition-without-a-thread-is-not-released",
        "lastbit.streams.group:ConsumerGroup._begin",
        "self._do(step)",
        "pass",
        _SDK + "test_groups.py::test_a_worker_that_may_start_too_few_threads_releases_its_partitions",
    ),
    Mutant(
        "a-worker-removes-messages-whose-items-it-cannot-resolve",
        "lastbit.integrations.dramatiq:LastbitMiddleware.before_worker_boot",
        "raise MiddlewareError(",
        "raise RuntimeError(",
        _QUEUES + "dramatiq/test_middleware.py::test_a_worker_that_can_resolve_no_items_does_not_start",
    ),
    Mutant(
        "a-thread-that-could-not-be-started-counts-as-running",
        "lastbit.integrations._delayed:DelayedCalls.start",
        "thread = threading.Thread(",
        "self._thread = thread = threading.Thread(",
        _QUEUES + "test_delayed.py::test_a_thread_that_could_not_be_started_is_started_with_the_next_call",
    ),
    Mutant(
        "an-ack-names-a-settled-tag",
        "lastbit.integrations.rabbitmq._messages:Tags.acks",
        "if tag > self._floor:",
        "if True:",
        _CONSUMER + "test_acks_name_no_tag_twice",
    ),
    Mutant(
        "an-offset-passes-an-item-that-is-pending",
        "lastbit.integrations._workers:Workers._resolve",
        "item = delivery.item\n",
        "item = delivery.item\n    delivery.settle(_outcome(failure))\n",
        _KAFKA + "test_a_stop_commits_no_offset_while_lastbit_is_away",
    ),
    Mutant(
        "a-record-is-given-up-at-its-first-error",
        "lastbit.integrations.kafka._consumer:Attempts.__call__",
        "attempt == self._options.attempts",
        "True",
        _KAFKA + "test_every_outcome_resolves_its_item",
    ),
    Mutant(
        "a-retried-task-is-resolved",
        "lastbit.integrations.taskiq:LastbitMiddleware.post_execute",
        "(run is not None and run.was_sent)",
        "False",
        _TASKIQ + "test_a_retried_task_stays_pending_until_its_last_run",
    ),
    Mutant(
        "a-task-without-a-result-fails",
        "lastbit.integrations.taskiq:LastbitMiddleware.post_execute",
        "isinstance(result.error, NoResultError)",
        "False",
        _TASKIQ + "test_a_task_without_result_stays_pending",
    ),
    Mutant(
        "a-task-that-the-worker-cancels-fails",
        "lastbit.integrations.taskiq:LastbitMiddleware.post_execute",
        "_is_cancelled()",
        "False",
        _TASKIQ + "test_a_task_that_the_worker_cancels_is_not_resolved",
    ),
    Mutant(
        "a-task-ends-before-its-item",
        "lastbit.integrations.taskiq:LastbitMiddleware._resolve",
        "await asyncio.sleep(PAUSE)",
        "return",
        _TASKIQ + "test_a_task_ends_only_when_the_service_is_back",
    ),
    Mutant(
        "a-finished-job-is-saved-without-a-note",
        "lastbit.integrations.rq:LastbitMixin.handle_job_success",
        "_unacked.note(self.connection, job.origin, item)",
        "pass",
        _RQ + "test_jobs_go_on_while_the_service_is_away",
    ),
    Mutant(
        "what-a-killed-worker-noted-is-not-acked",
        "lastbit.integrations.rq:reconcile",
        "resolved = _ack_noted(queue, client)",
        "resolved = 0",
        _RQ + "test_reconcile_resolves_what_ended_without_a_worker",
    ),
    Mutant(
        "cancelled-jobs-are-overlooked",
        "lastbit.integrations.rq:reconcile",
        "canceled.get_job_ids(cleanup=False)",
        "[]",
        _RQ + "test_reconcile_resolves_what_ended_without_a_worker",
    ),
    Mutant(
        "a-job-that-failed-in-the-producer-is-left",
        "lastbit.integrations.rq:_resolve",
        "status == JobStatus.FAILED",
        "False",
        _RQ + "test_a_queue_without_workers_resolves_at_once",
    ),
    # Requests over HTTP.
    Mutant(
        "a-delayed-report-frees-a-later-epoch",
        "core.consumer_groups.leases:_look",
        "not drained.isdisjoint({(number, epoch), (number, None)})",
        "any(number == each for each, _ in drained)",
        "test_consumer_groups.py::test_a_delayed_report_of_an_earlier_release_frees_nothing",
    ),
    Mutant(
        "a-worker-reports-drained-partitions-without-an-epoch",
        "lastbit.streams.group:beat",
        "step.drained",
        "[partition for partition, _ in step.drained]",
        "../sdk/test_protocol.py::test_a_worker_reports_the_epoch_that_it_has_drained",
    ),
    Mutant(
        "a-total-of-several-sources-leaves-the-range",
        "core.tallies:_judge",
        "notable & others.keys()",
        "set()",
        "../http/test_tallies.py::test_a_total_beyond_the_limit_is_refused_and_nothing_is_applied",
    ),
    Mutant(
        "concurrent-sources-pass-the-limit",
        "core.tallies:_totals",
        'dialect.sum_locked(results, "tallies", condition, "tally_key", names)',
        '[f"SELECT {results} FROM tallies WHERE {condition} GROUP BY tally_key"]',
        "test_tallies.py::test_two_concurrent_calls_bring_no_total_over_the_limit",
    ),
    Mutant(
        "a-source-that-returns-to-zero-is-not-checked",
        "core.tallies:_is_notable",
        "(before > 0) != (after > 0) or (before < 0) != (after < 0)",
        "(before < 0) != (after < 0)",
        "../http/test_tallies.py::test_a_source_that_returns_to_zero_brings_no_total_over_the_limit",
    ),
    Mutant(
        "a-total-is-read-as-long-as-others-change-it",
        "core.tallies:write",
        "others.keys() == earlier.keys()",
        "False",
        "test_tallies.py::test_a_total_that_others_keep_changing_does_not_keep_a_transaction_running",
    ),
    Mutant(
        "small-sources-pass-the-limit-between-two-checks",
        "core.tallies:_Others.check",
        "abs(total) + room >= INTEGER_LIMIT",
        "abs(total) >= INTEGER_LIMIT",
        "../http/test_tallies.py::test_a_total_stays_within_the_limit_however_its_sources_grow",
    ),
    Mutant(
        "a-key-is-no-part-of-a-path",
        "core.tallies:_by_counter",
        "key in NO_NAMES",
        "False",
        "../http/test_tallies.py::test_a_key_that_fits_no_url_is_refused",
    ),
    Mutant(
        "a-log-that-cannot-be-written-ends-the-combiner",
        "core.logs:_StandardError.flush",
        "suppress(OSError, ValueError)",
        "suppress(ValueError)",
        "../http/test_logs.py::test_a_log_that_cannot_be_written_stops_nothing",
    ),
    Mutant(
        "trailers-are-read-as-headers",
        "api.server.upgrades:Http1Protocol._ignore_trailers",
        "self.headers = []",
        "pass",
        "../http/test_access.py::test_a_token_in_a_trailer_does_not_count",
    ),
    Mutant(
        "a-transfer-coding-is-ignored",
        "api.server.upgrades:Http1Protocol._is_coding_known",
        "return not codings or",
        "return True or",
        "../http/test_fast_path.py::test_an_unknown_transfer_coding_is_refused",
    ),
    Mutant(
        "a-half-closed-connection-counts-as-closed",
        "api.server.connection:WatchedProtocol.eof_received",
        "not self.between",
        "True",
        "../http/test_fast_path.py::test_a_half_closed_connection_gets_its_answers",
    ),
    Mutant(
        "pipelined-requests-are-read-without-end",
        "api.server.connection:WatchedProtocol.on_response_complete",
        "if self.pipeline:",
        "if False:",
        "../http/test_limits.py::test_a_client_that_never_reads_answers_is_disconnected",
    ),
    Mutant(
        "a-page-of-another-site-may-ack",
        "api.acks.fast_path:AckProtocol._take",
        "if head.names_site and digest is None",
        "if False",
        "../http/test_fast_path.py::test_another_sites_page_cannot_ack",
    ),
    Mutant(
        "a-limited-token-may-fence",
        "api.routes.events:_fence",
        "caller.prefix is not None",
        "False",
        "../http/test_access.py::test_a_fence_of_a_limited_token_shows_no_consumer_group",
    ),
    Mutant(
        "json-of-any-depth-is-stored",
        "api.routes.free_json:text",
        "_is_deeper(value, DEPTH)",
        "False",
        _FREE_JSON + "test_json_nested_too_deeply_is_refused_and_accepted_json_is_returned",
    ),
    Mutant(
        "stored-json-is-parsed-to-be-returned",
        "api.routes.free_json:stored",
        'msgspec.Raw(text or "null")',
        'json.loads(text or "null")',
        _FREE_JSON + "test_stored_rows_with_deeper_json_are_returned",
    ),
    Mutant(
        "an-integer-beyond-all-floats-is-stored",
        "api.routes.free_json:text",
        "_LONG.search(content)",
        "False",
        _FREE_JSON + "test_json_that_some_parsers_refuse_is_not_stored",
    ),
    # The SDK.
    Mutant(
        "a-request-is-cancelled-wherever-it-is",
        "lastbit._in_flight:_Exit.leave",
        "if self._safe:",
        "if True:",
        _CANCELLED,
    ),
    Mutant(
        "a-stale-one-of-many-commits-is-taken-for-committed",
        "lastbit.streams._membership:Membership.committed",
        "if each.assignment in stale:",
        "if False:",
        _SDK + "test_groups.py::test_of_many_commits_a_stale_one_loses_only_its_partition",
    ),
    Mutant(
        "a-request-outlives-its-caller", "lastbit._in_flight:_Exit.leave", "if self._safe:", "if False:", _CANCELLED
    ),
    Mutant(
        "a-handshake-is-cancelled-and-its-connection-forgotten",
        "lastbit._in_flight:InFlight.close",
        "way_out.stream is not None",
        "False",
        _SDK + "test_cancellation.py::test_calls_cancelled_while_connecting_hold_a_bounded_number_of_connections",
    ),
    Mutant(
        "an-exit-in-a-callback-ends-the-acker",
        "lastbit.acker:_report_to_each",
        "except BaseException:  #",
        "except Exception:  #",
        _SDK + "test_acker.py::test_whatever_a_callback_raises_the_other_futures_finish",
    ),
    Mutant(
        "a-cancelled-future-ends-the-acker",
        "lastbit.acker:AsyncAcker._notify",
        "except BaseException as error",
        "except Exception as error",
        _SDK
        + "test_acker.py::test_whatever_an_awaited_on_completed_raises_reaches_the_futures_and_the_acker_continues",
    ),
    Mutant(
        "the-end-of-the-loop-is-taken-for-an-exception-of-on-completed",
        "lastbit.acker:AsyncAcker._is_ended",
        "task.cancelling() > 0",
        "False",
        _SDK + "test_acker.py::test_the_end_of_the_event_loop_leaves_no_future_waiting",
    ),
    Mutant(
        "a-thread-is-expected-after-a-fork",
        "lastbit._forks:is_forked",
        "process != _process",
        "False",
        _SDK + "test_acker.py::test_an_acker_of_the_parent_process_raises_in_the_child",
    ),
    Mutant(
        "an-interrupted-track-leaves-half-an-offset",
        "lastbit.streams.window:AckWindow.track",
        "del self._offsets[places:], self._since[places:], self._resolved[places:]",
        "pass",
        _SDK + "test_interruptions.py::test_an_interrupted_window_stays_right",
    ),
    Mutant(
        "an-interrupted-ack-holds-the-floor",
        "lastbit.streams.window:AckWindow.ack",
        "self._advance()  # no later",
        "pass  # no later",
        _SDK + "test_interruptions.py::test_an_interrupted_window_stays_right",
    ),
    Mutant(
        "a-thread-whose-start-was-interrupted-works",
        "lastbit.tallies.buffer:TallyBuffer._work",
        "self._thread is not threading.current_thread()",
        "False",
        _SDK + "test_interruptions.py::test_an_interrupted_buffer_flushes_everything",
    ),
    Mutant(
        "an-interrupted-acker-keeps-an-empty-round",
        "lastbit._coalescer:Coalescer.put",
        "self._rounds.append(_Round({kind: Waiting({item: future})}, {item: kind}))\n        return",
        "self._rounds.append(_Round())",
        _SDK + "test_interruptions.py::test_an_interrupted_acker_finishes_every_future",
    ),
    Mutant(
        "a-cancelled-buffer-hangs",
        "lastbit.tallies.buffer:AsyncTallyBuffer._work",
        "except BaseException as error",
        "except Exception as error",
        _SDK + "test_tallies.py::test_a_buffer_whose_task_is_cancelled_never_hangs",
    ),
    Mutant(
        "the-types-of-an-answer-are-trusted",
        "lastbit._protocol:Service.decoded",
        "_shapes.check(value)",
        "pass",
        _ANY + "test_one_wrong_value_anywhere_is_a_lastbit_error_or_harmless",
    ),
    Mutant(
        "the-places-of-a-problem-are-trusted",
        "lastbit._protocol:Service.error",
        "[place for place in places if isinstance(place, dict)] if isinstance(places, list) else []",
        "places or []",
        _ANY + "test_an_answer_with_any_status_headers_and_body_is_a_value_or_a_lastbit_error",
    ),
    Mutant(
        "a-date-beyond-all-years-is-raised",
        "lastbit.retry:_http_date",
        "(ValueError, OverflowError, TypeError, IndexError)",
        "ValueError",
        _ANY + "test_a_retry_after_that_is_not_a_date_is_ignored",
    ),
    # Everything at once.
    Mutant(
        "a-commit-that-failed-is-answered",
        "core.storage.database:Database._transaction",
        "self._judge(tx, error, committing=committing)\n                raise",
        "tx.invalidate()\n                if not committing:\n"
        "                    self._judge(tx, error, committing=False)\n                    raise",
        _CHAOS,
    ),
    Mutant(
        "some-completions-are-not-announced",
        "core.acks.completion:_announce",
        "if not verdicts:",
        "if not verdicts or verdicts[0].id % 4 == 0:",
        _CHAOS,
    ),
    Mutant(
        "each-call-with-a-key-gets-newly",
        "core.acks.completion:completed_for",
        "newly = newly or batch.completed_by == fingerprint",
        "newly = True",
        _CHAOS,
    ),
    Mutant(
        "a-lost-answer-forgets-the-debt-of-the-batch-that-its-call-completed",
        "core.acks.flush:flush",
        "owing |= {batch for batch, look in state.seen.items() if look.owes}",
        "pass",
        _CHAOS_LOSING,
        together_with=("a-lost-answer-runs-the-work-again", "a-repeat-does-not-pay-what-a-complete-batch-owes"),
    ),
    Mutant(
        "a-lost-answer-rejects-the-failure-that-cancelled-its-batch",
        "core.acks.ended:_outcome",
        "index < group_size and settled[number][index]",
        "False",
        _CHAOS_LOSING,
        together_with=("a-lost-answer-runs-the-work-again",),
    ),
    Mutant(
        "items-are-read-too-early-while-batches-grow",
        "core.acks.flush:_begin",
        *_READ_EARLY,
        _CHAOS_GROWING,
        also=_READ_EARLY_TOO,
    ),
    # The last two acks.
    Mutant(
        "completion-decided-on-a-plain-read",
        "core.acks.completion:write",
        'dialects.of(tx).for_update("id")',
        '""',
        _TWO_LAST,
    ),
    Mutant(
        "batches-are-looked-at-with-the-groups",
        "core.acks.flush:_begin",
        "batches, locking",
        "batches",
        _TWO_LAST,
    ),
    Mutant(
        "counts-are-judged-before-new-groups-are-written",
        "core.acks.completion:_judge",
        "pipeline.flush()\n            raise",
        "raise",
        _RETRY,
    ),
    # The tolerance of failures.
    Mutant(
        "a-tolerance-is-judged-on-a-plain-read",
        "core.acks.flush:_begin",
        "batches, locking",
        "batches",
        _TOLERANCE + "test_one_of_two_failures_in_different_groups_passes_the_tolerance",
    ),
    Mutant(
        "one-failure-more-is-tolerated",
        "core.batches.tolerance:Tolerance.is_passed",
        "failed > self.failures",
        "failed > self.failures + 1",
        _TOLERANCE + "test_a_batch_succeeds_exactly_up_to_its_tolerance",
    ),
    Mutant(
        "one-failure-less-is-tolerated",
        "core.batches.tolerance:Tolerance.is_passed",
        "failed > self.failures",
        "failed >= self.failures",
        _TOLERANCE + "test_a_batch_succeeds_exactly_up_to_its_tolerance",
    ),
    Mutant(
        "the-percentage-is-rounded",
        "core.batches.tolerance:Tolerance.is_passed",
        "failed * 100 > self.percentage * items",
        "failed > round(self.percentage / 100 * items)",
        _TOLERANCE + "test_a_batch_succeeds_exactly_up_to_its_tolerance",
    ),
    Mutant(
        "a-percentage-is-judged-before-the-seal",
        "core.batches.tolerance:Tolerance.is_passed",
        "return sealed and",
        "return",
        _TOLERANCE + "test_a_percentage_is_judged_when_the_batch_is_sealed",
    ),
    Mutant(
        "a-seal-judges-no-percentage",
        "core.batches.writing:_seal",
        "batch.tolerance.is_passed(batch.items, batch.failed, sealed=True)",
        "False",
        _TOLERANCE + "test_a_percentage_is_judged_when_the_batch_is_sealed",
    ),
    Mutant(
        "failures-pass-the-tolerance-again",
        "core.acks.completion:_judge",
        "is_passed and not row.exceeded",
        "is_passed",
        _TOLERANCE + "test_failures_pass_the_tolerance_once",
    ),
    Mutant(
        "the-event-of-passed-failures-is-written-twice",
        "core.acks.completion:Verdict.events",
        "return [name for name, happened in transitions.items() if happened]",
        "return [name for name, happened in transitions.items() if happened] * 2",
        _TOLERANCE + "test_failures_pass_the_tolerance_once",
    ),
    Mutant(
        "a-batch-succeeds-with-each-redrive",
        "core.acks.completion:_judge",
        "succeeded and (completed_now or not tolerance.succeeds(row.items, row.failed))",
        "succeeded",
        _TOLERANCE + "test_a_redrive_within_the_tolerance_makes_the_batch_succeed_once",
    ),
    Mutant(
        "a-child-cancelled-by-its-failures-owes-nothing",
        "core.acks.completion:_announce",
        "(verdict.complete or verdict.cancelled_now)",
        "verdict.complete",
        _TOLERANCE + "test_a_batch_is_cancelled_in_the_transaction_that_passes_its_tolerance",
    ),
    Mutant(
        "a-batch-is-cancelled-though-nothing-is-pending",
        "core.acks.completion:_judge",
        "bool(row.cancels) and state in LIVE",
        "bool(row.cancels)",
        _TOLERANCE + "test_a_batch_whose_last_item_fails_beyond_its_tolerance_is_complete",
    ),
    Mutant(
        "an-earlier-release-may-ignore-a-tolerance",
        "core.batches.writing:_open",
        "operation.opening.has_policies",
        "False",
        _TOLERANCE + "test_a_release_that_would_ignore_a_tolerance_must_be_gone",
    ),
    # Rotated secrets.
    Mutant(
        "only-the-newest-secret-signs",
        "core.webhooks.message:headers",
        "for secret in secrets)",
        "for secret in secrets[:1])",
        "test_rotation.py::test_the_databases_clock_ends_an_overlap",
    ),
    Mutant(
        "an-earlier-secret-is-valid-forever",
        "core.webhooks.rotation:_earlier",
        "if until > now]",
        "if True]",
        "test_rotation.py::test_the_databases_clock_ends_an_overlap",
    ),
    Mutant(
        "the-dispatchers-clock-judges-a-secret",
        "core.webhooks.deliveries:claim",
        "rotation.valid(row.secret, row.rotation, now)",
        "rotation.valid(row.secret, row.rotation, datetime.now(UTC))",
        "test_rotation.py::test_the_databases_clock_ends_an_overlap",
    ),
    Mutant(
        "the-services-clock-begins-an-overlap",
        "core.webhooks.rotation:rotate",
        "now = tables.clock(tx)",
        "now = datetime.now().astimezone()",
        "test_rotation.py::test_the_databases_clock_ends_an_overlap",
    ),
    Mutant(
        "a-repeat-rotates-again",
        "core.webhooks.rotation:rotate",
        'last.get("key") == idempotency_key',
        "False",
        "test_rotation.py::test_a_repeat_returns_the_same_secret",
    ),
    Mutant(
        "equal-rotations-at-once-dont-wait",
        "core.webhooks.rotation:rotate",
        ".with_for_update()",
        "",
        "test_rotation.py::test_equal_requests_at_once_rotate_once",
    ),
    Mutant(
        "a-rotation-ends-other-secrets-at-once",
        "core.webhooks.rotation:rotate",
        "*((old, min(until, end)) for old, until in _earlier(row.rotation, now))",
        "",
        "test_rotation.py::test_each_earlier_secret_has_its_own_end",
    ),
    Mutant(
        "a-rotation-doesnt-shorten-earlier-overlaps",
        "core.webhooks.rotation:rotate",
        "min(until, end)",
        "until",
        "test_rotation.py::test_each_earlier_secret_has_its_own_end",
    ),
    Mutant(
        "a-secret-is-rotated-beside-an-earlier-release",
        "core.webhooks.rotation:rotate",
        "not schema.serves_only(tx, SINCE)",
        "False",
        "test_rotation.py::test_nothing_is_rotated_while_an_earlier_release_may_run",
    ),
    # Callbacks.
    Mutant(
        "a-callback-gets-the-events-of-all-batches",
        "core.webhooks.callbacks:plan",
        "_webhooks.batch_id == _feed.batch_id",
        "sa.true()",
        "test_callbacks.py::test_a_dispatcher_that_dies_at_any_point_loses_no_callback",
    ),
    Mutant(
        "a-callback-gets-all-types",
        "core.webhooks.callbacks:plan",
        "if row.type in json.loads(row.types)",
        "if json.loads(row.types)",
        "test_callbacks.py::test_a_dispatcher_that_dies_at_any_point_loses_no_callback",
    ),
    Mutant(
        "no-event-is-kept-for-a-callback",
        "core.webhooks.callbacks:needed",
        "if exist(tx)",
        "if False",
        "test_callbacks.py::test_events_are_kept_until_they_are_planned_for_a_callback",
    ),
    Mutant(
        "a-removal-leaves-an-attempt-that-is-logged-meanwhile",
        "core.webhooks.subscriptions:remove",
        "tx.execute(sa.delete(tables.deliveries).where(_deliveries.id.in_(part)))\n"
        "        tx.execute(sa.delete(tables.delivery_attempts).where(_attempts.delivery_id.in_(part)))",
        "tx.execute(sa.delete(tables.delivery_attempts).where(_attempts.delivery_id.in_(part)))\n"
        "        tx.execute(sa.delete(tables.deliveries).where(_deliveries.id.in_(part)))",
        "test_webhooks.py::test_an_attempt_that_is_logged_during_a_removal_is_removed_too",
    ),
    Mutant(
        "retention-deletes-a-batch-whose-callback-was-not-planned",
        "core.batches.callbacks:is_owed",
        "for query in (not_planned, pending)",
        "for query in (pending,)",
        "test_callbacks.py::test_retention_keeps_a_batch_until_its_callback_was_sent",
    ),
    Mutant(
        "retention-deletes-a-batch-whose-callback-was-not-sent",
        "core.batches.callbacks:is_owed",
        "for query in (not_planned, pending)",
        "for query in (not_planned,)",
        "test_callbacks.py::test_retention_keeps_a_batch_until_its_callback_was_sent",
    ),
    Mutant(
        "a-callback-stays-active-while-its-batch-is-removed",
        "core.batches.purge:condemn",
        "callbacks.disable(tx, batch_id)",
        "pass",
        "test_callbacks.py::test_a_batch_that_is_being_deleted_sends_nothing_more",
    ),
    Mutant(
        "callbacks-to-one-host-have-lanes-of-their-own",
        "core.webhooks.deliveries:_choose",
        "lane = row.lane or row.webhook_id",
        "lane = row.webhook_id",
        "test_callbacks.py::test_callbacks_to_one_host_share_a_lane",
    ),
    Mutant(
        "an-earlier-release-may-get-callbacks",
        "core.batches.writing:_open",
        "operation.opening.has_policies",
        "False",
        "test_callbacks.py::test_a_release_that_would_mistreat_a_callback_must_be_gone",
    ),
    # The order of the locks.
    Mutant(
        "journaled-batches-are-locked-before-all-others",
        "core.acks.flush:_begin",
        "*([_lock(tx, direct)] if direct else []),",
        "*([completion.select(tx, journal_states, locking)] if journal_states else []), "
        "*([_lock(tx, direct)] if direct else []),",
        _LOCK_ORDER + "test_acks_and_extends_of_a_journaled_and_a_plain_batch_take_turns",
        also=(("state = FlushState({})", "state = FlushState({})\n    if journal_states: next(results)"),),
    ),
    Mutant(
        "a-group-is-inserted-before-its-batch-is-locked",
        "core.acks.flush:_write_groups",
        "return group_rows.insert(new)",
        "pipeline.later(*group_rows.insert(new))\n    return []",
        _LOCK_ORDER + "test_two_calls_that_create_a_group_take_turns",
    ),
    Mutant(
        "tallies-are-locked-after-batches",
        "core.writes:flush",
        "    applied = tallies.write(pipeline, [(apply.tally, apply.entries) for apply in applies])\n"
        "    writes = writing.write(pipeline, changes)\n",
        "    writes = writing.write(pipeline, changes)\n"
        "    applied = tallies.write(pipeline, [(apply.tally, apply.entries) for apply in applies])\n",
        _LOCK_ORDER + "test_all_verbs_that_share_a_transaction_keep_the_order",
    ),
    Mutant(
        "debts-are-locked-verb-by-verb",
        "core.batches.nesting:strike_out",
        "set(tx.scalars(query.with_for_update(skip_locked=skip_locked)))",
        "{due.child for due in debts}",
        _LOCK_ORDER + "test_debts_of_both_kinds_are_struck_out_in_the_order_of_the_children",
    ),
    Mutant(
        "positions-are-locked-as-they-are-changed",
        "core.consumer_groups.leases:sync",
        "_lock(tx, name, _positions.partition_no.in_(part))",
        "pass",
        "test_consumer_groups.py::test_a_replaced_worker_that_was_releasing_wakes_twice",
    ),
    # The journal.
    Mutant(
        "a-journaled-batch-is-not-locked",
        "core.acks.flush:_begin",
        "batches, locking",
        "batches, '' if journal_states else locking",
        _TWICE,
    ),
    Mutant(
        "a-call-from-before-the-journal-goes-on",
        "core.acks.completion:write",
        "row.journal_next or row.children",
        "row.children",
        _RACES + "test_an_item_delivered_twice_counts_once_though_its_batch_becomes_journaled_meanwhile",
    ),
    Mutant(
        "entries-of-other-processes-are-not-applied",
        "core.bits.journal:JournalState.take_in",
        "bits.ack_one(index)",
        "pass",
        _TURNS,
    ),
    Mutant(
        "entries-that-are-missing-are-overlooked",
        "core.bits.journal:catch_up",
        "len(entries) == next - state.next",
        "True",
        _TURNS,
    ),
    Mutant("what-is-not-journaled-yet-is-known", "core.bits.journal:catch_up", "next != 0 and ", "", _TREE),
    Mutant(
        "groups-written-by-others-are-not-read-again",
        "core.bits.journal:JournalState.take_in",
        "self.groups.pop(group, None)",
        "pass",
        _TURNS,
    ),
    Mutant(
        "a-fold-writes-what-has-changed-now",
        "core.bits.journal:write",
        "sorted({*due, *change.changed} if direct else due)",
        "sorted(change.changed if direct or due else ())",
        _JOURNAL + "test_the_journal_is_folded_when_it_is_full_and_when_the_batch_completes",
    ),
    Mutant(
        "entries-go-before-all-their-groups-are-folded",
        "core.bits.journal:JournalState.trim",
        "self.entries[0][0] < oldest and ",
        "len(self.entries) > 1 and ",
        _JOURNAL + "test_groups_are_folded_in_portions_in_their_order",
    ),
    Mutant(
        "an-entry-is-forgotten-that-named-a-group-before",
        "core.bits.journal:JournalState.name_groups",
        "if group not in self.unfolded:",
        "if group is not None:",
        _JOURNAL + "test_groups_are_folded_in_portions_in_their_order",
    ),
    Mutant(
        "redriven-items-are-entries",
        "core.acks.apply:_ack_few",
        "            redriven += 1\n            state.acked.pop(unit.batch, None)",
        "            redriven += 1",
        _JOURNAL + "test_changes_that_do_not_fit_an_entry_are_written_to_their_groups",
    ),
    # The last item, twice.
    Mutant("repeats-are-not-told", "core.acks.completion:write", "if repeats else {}", "if False else {}", _TWICE),
    Mutant(
        "items-are-read-before-the-groups-are-locked",
        "core.acks.flush:_begin",
        *_READ_EARLY,
        _GROWING + "test_a_batch_that_grows_while_a_bulk_ack_waits_keeps_every_answered_ack",
        also=_READ_EARLY_TOO,
    ),
    Mutant(
        "a-rejected-item-is-issued-before-the-counts-are-locked",
        "core.acks.completion:write",
        "any(batch in all_rows and all_rows[batch].items != items for batch, items in refusals.items())",
        "False",
        _EXPLORED,
    ),
    Mutant(
        "a-group-is-read-unchecked",
        "core.acks.flush:_load",
        "_check(key, group, state.issued(*key))",
        "pass",
        _GROWING + "test_a_group_whose_counts_differ_from_its_bits_is_reported_and_left_alone",
    ),
    Mutant(
        "bits-lost-are-recounted",
        "core.bits.bitfield:Group.check",
        "(resolved, failed) != (self.resolved_count, self.failed_count)",
        "False",
        _GROWING + "test_a_group_whose_counts_differ_from_its_bits_is_reported_and_left_alone",
    ),
    Mutant(
        "a-debt-stays-where-a-childs-row-is-locked-for-a-moment",
        "core.batches.nesting:strike_out",
        "skip_locked=skip_locked",
        "skip_locked=True",
        _EXPLORED,
    ),
    Mutant(
        "a-childs-key-is-looked-up-before-its-parent-is-locked",
        "core.batches.writing:write",
        "    found = _look(pipeline, opens, changes)\n",
        "",
        _EXPLORED,
        also=(
            (
                "    parents: dict[Open, Any] = {}\n",
                "    parents: dict[Open, Any] = {}\n    found = _look(pipeline, opens, changes)\n",
            ),
        ),
    ),
    # Repair.
    Mutant(
        "a-repaired-batch-is-not-journaled",
        "core.batches.repair:repair",
        "journal_next=batch.journal_next + 1",
        "journal_next=0",
        _REPAIR + "test_a_process_with_lost_bits_in_its_cache_does_not_bring_them_back",
    ),
    Mutant(
        "a-repair-of-a-journaled-batch-goes-unnoticed",
        "core.batches.repair:repair",
        "journal_next=batch.journal_next + 1",
        "journal_next=batch.journal_next",
        _REPAIR + "test_a_process_with_lost_bits_in_its_cache_does_not_bring_them_back",
    ),
    Mutant(
        "a-repair-forgets-the-journal",
        "core.batches.verify:groups",
        "journal_items = journal.recent(tx, batch.id, batch.group_size)",
        "journal_items: dict[int, list[int]] = {}",
        _REPAIR + "test_items_in_the_journal_are_kept",
    ),
    Mutant(
        "a-repair-locks-nothing",
        "core.batches.repair:repair",
        "batch, now = batches.lock(tx, batch_id)",
        "batch, now = batches.get(tx, batch_id), tx.scalar(sa.select(tables.utc_now()))",
        _REPAIR + "test_no_change_gets_between_the_recount_and_the_write",
    ),
    Mutant(
        "a-repaired-batch-stays-complete",
        "core.batches.repair:_values",
        "batch.complete and acked + failed < batch.items",
        "False",
        _REPAIR + "test_a_batch_that_was_complete_too_early_is_sealed_again_and_completes_as_another_event",
    ),
    Mutant(
        "a-repair-judges-no-reopened-batch",
        "core.batches.repair:_values",
        ', "parent_due": None}',
        ', "parent_due": None}\n        return values',
        _TOLERANCE + "test_a_repair_judges_a_batch_that_was_complete_too_early",
    ),
    Mutant(
        "a-second-completion-has-the-id-of-the-first",
        "core.batches.batch:events",
        'f":{batch.repairs}" if batch.repairs else ""',
        '""',
        _REPAIR + "test_a_batch_that_was_complete_too_early_is_sealed_again_and_completes_as_another_event",
    ),
    Mutant(
        "a-reopened-batch-looks-idle-since-its-completion",
        "core.batches.repair:_values",
        '"updated_at": max(batch.updated_at, now),',
        "",
        _REPAIR + "test_a_batch_that_was_complete_too_early_is_sealed_again_and_completes_as_another_event",
    ),
    Mutant(
        "a-repair-completes-nothing",
        "core.batches.repair:_values",
        "newly = completes(state, batch.items, acked, failed)",
        "newly = False",
        _REPAIR + "test_a_sealed_batch_with_nothing_pending_completes_and_a_retry_gets_the_same_answer",
    ),
    Mutant(
        "a-repair-keeps-the-hint-of-the-full-prefix",
        "core.batches.repair:_values",
        "min(batch.full_prefix, counts.full_prefix)",
        "batch.full_prefix",
        _REPAIR + "test_the_watermark_goes_back_to_the_first_lost_item",
    ),
    Mutant(
        "a-repair-forgets-failed-items",
        "core.batches.repair:_restored",
        "failed[list(stored_group.reasons)] = True",
        "pass",
        _REPAIR + "test_items_with_a_reason_are_failed_and_other_reasons_are_removed",
    ),
    Mutant(
        "a-repair-leaves-reasons-of-acked-items",
        "core.batches.repair:_recount",
        "for part in chunks(stray, LIST)",
        "for part in chunks([], LIST)",
        _REPAIR + "test_items_with_a_reason_are_failed_and_other_reasons_are_removed",
    ),
    Mutant(
        "a-repair-keeps-bits-of-items-never-issued",
        "core.batches.repair:_restored",
        "resolved[issued:] = False",
        "pass",
        _REPAIR + "test_damage_is_detected_and_repaired_from_the_bits",
    ),
    Mutant(
        "children-owe-a-repaired-parent-nothing",
        "core.batches.repair:owe_again",
        "if row.parent_number not in resolved",
        "if False",
        _REPAIR + "test_ended_children_pay_again_for_items_that_their_parent_lost",
    ),
    Mutant(
        "a-reopened-child-still-owes",
        "core.batches.repair:_values",
        ', "parent_due": None}',
        "}",
        _REPAIR + "test_a_child_that_was_complete_too_early_owes_nothing_until_it_is_complete",
    ),
    Mutant(
        "a-deadlock-ends-a-migration",
        "core.storage.schema:_is_in_use",
        ", errors.Fault.CONFLICT",
        ",",
        "../storage/test_postgresql.py::test_a_migration_that_deadlocks_with_a_transaction_begins_again",
    ),
    Mutant(
        "a-new-database-serves-earlier-releases",
        "core.storage.schema:_serve_only_this",
        "oldest=newest()",
        'oldest="0002"',
        "../storage/test_database.py::test_a_migration_killed_after_any_statement_is_finished_by_the_next",
    ),
    Mutant(
        "a-batch-is-repaired-beside-an-earlier-release",
        "core.batches.repair:prepare",
        "not schema.serves_only(tx, SINCE)",
        "False",
        _REPAIR + "test_no_batch_is_repaired_while_an_earlier_release_may_run",
    ),
    *(
        Mutant(
            f"verify-does-not-see-{name}",
            f"core.batches.verify:{where}",
            condition,
            "False",
            _REPAIR + test,
        )
        for name, where, condition, test in (
            ("a-cut-blob", "_faults", "group.width is not None and group.width < group.resolved_count", _DETECTED),
            ("lost-bits", "_faults", "group.resolved.count() != group.resolved_count", _DETECTED),
            ("lost-failures", "_faults", "group.failed.count() != group.failed_count", _DETECTED),
            ("failed-items-that-are-not-resolved", "_faults", "(group.failed & ~group.resolved).any()", _DETECTED),
            (
                "items-never-issued",
                "_faults",
                "group.resolved.count(1, issued) or group.failed.count(1, issued)",
                _DETECTED,
            ),
            ("a-hint-that-is-too-high", "Recount.verification", "batch.full_prefix > self._full", _DETECTED),
            (
                "stray-reasons",
                "_faults",
                "stray > 0",
                "test_items_with_a_reason_are_failed_and_other_reasons_are_removed",
            ),
            (
                "that-a-complete-batch-is-pending",
                "Recount.verification",
                "batch.state is State.COMPLETE and not all_resolved",
                "test_a_batch_that_was_complete_too_early_is_sealed_again_and_completes_as_another_event",
            ),
        )
    ),
    Mutant("groups-are-not-locked", "core.acks.flush:_for_update", "dialects.of(tx).for_update(*key)", '""', _TWICE),
    Mutant(
        "a-new-group-overwrites-anothers",
        "core.acks.flush:_write_groups",
        "group_rows.insert(new)",
        "group_rows.upsert(tx, new)",
        _RETRY,
    ),
    Mutant(
        "counts-move-by-the-items-sent",
        "core.acks.apply:_ack_few",
        "if was_pending:",
        "if not was_failed:",
        _TWICE,
    ),
    # The last ack and the seal.
    Mutant("seal-decides-on-a-plain-read", "core.batches.writing:_look", _LOCKED, _UNLOCKED, _SEAL),
    Mutant(
        "ack-judges-the-state-of-its-first-look",
        "core.acks.completion:write",
        "rows(tx, results[0])",
        "{each: row._replace(state=looked[each]) for each, row in rows(tx, results[0]).items()}",
        _SEAL,
        also=(
            (
                "    delta_rows, repeat_rows =",
                "    look = f'SELECT id, state FROM batches WHERE id IN ({_ids(deltas) or 0})'\n"
                "    looked = dict(tuple(row) for row in tx.exec_driver_sql(look))\n"
                "    delta_rows, repeat_rows =",
            ),
        ),
    ),
    # Extend and seal.
    Mutant(
        "a-completing-seal-leaves-the-journal",
        "core.batches.writing:_seal",
        "if batch.journal_next:",
        "if False:",
        _JOURNAL + "test_a_seal_that_completes_folds_the_journal",
    ),
    Mutant(
        "a-fold-by-a-seal-is-not-announced",
        "core.bits.folding:fold",
        "return state.next",
        "return journal_next",
        _JOURNAL + "test_a_seal_that_completes_folds_the_journal",
    ),
    Mutant("extend-decides-on-a-plain-read", "core.batches.writing:_look", _LOCKED, _UNLOCKED, _EXTEND),
    Mutant(
        "extend-judges-the-state-before-the-key",
        "core.batches.writing:_extend",
        "    key, count, digest = ",
        '    judge("extend", batch.id, batch.state)\n    key, count, digest = ',
        _EXTEND,
    ),
    # Ack and expire.
    Mutant(
        "expiry-is-not-judged-again-under-the-lock",
        "core.batches.expiry:expire",
        "reason = cause(batch, now, policy)",
        "reason = Cause.DEADLINE",
        _EXPIRE,
    ),
    Mutant(
        "a-locked-batch-ends-the-pass",
        "core.janitor:run_once",
        "except errors.LockTimeout:",
        "except ZeroDivisionError:",
        _JANITOR + "test_a_locked_batch_is_left_to_the_next_pass",
    ),
    Mutant(
        "a-batch-is-deleted-in-the-middle-of-a-redrive",
        "core.batches.expiry:_last_change",
        "max(batch.ended_at, batch.updated_at)",
        "batch.ended_at",
        _JANITOR + "test_a_batch_in_the_middle_of_a_redrive_is_kept",
    ),
    Mutant(
        "a-redrive-leaves-its-batch-to-the-janitor",
        "core.batches.redrive:_append",
        "batches.update(tx, batch_id, updated_at=batch.updated_at)",
        "pass",
        _JANITOR + "test_a_batch_in_the_middle_of_a_redrive_is_kept",
    ),
    Mutant(
        "a-last-change-is-not-judged-under-the-lock",
        "core.batches.expiry:remove",
        "now - _last_change(batch) < policy.keep",
        "now - batch.ended_at < policy.keep",
        _JANITOR + "test_a_redrive_just_before_the_deletion_prevents_it",
    ),
    Mutant(
        "the-janitor-looks-at-all-live-batches",
        "core.batches.expiry:_unseen",
        "_table.seen_updated_at <= until",
        "_table.seen_updated_at <= until + limit",
        _JANITOR + "test_a_pass_reads_batches_that_may_be_idle_and_not_all_live_ones",
    ),
    Mutant(
        "the-janitor-looks-at-busy-batches-again",
        "core.batches.expiry:due",
        "if active and not dry_run:",
        "if False:",
        _JANITOR + "test_a_pass_reads_batches_that_may_be_idle_and_not_all_live_ones",
    ),
    Mutant(
        "a-dry-run-notes-what-it-saw",
        "core.batches.expiry:due",
        "if active and not dry_run:",
        "if active:",
        _JANITOR + "test_a_pass_reads_batches_that_may_be_idle_and_not_all_live_ones",
    ),
    Mutant(
        "the-time-of-a-look-counts-as-a-change",
        "core.batches.expiry:_see",
        "seen_updated_at=_table.updated_at",
        "seen_updated_at=tables.utc_now()",
        _JANITOR + "test_batches_expire_in_the_first_pass_after_their_limit",
    ),
    Mutant(
        "batches-with-a-limit-of-their-own-are-not-looked-at",
        "core.batches.expiry:due",
        "(None, *_own_limits(database, state))",
        "(None,)",
        _JANITOR + "test_batches_expire_in_the_first_pass_after_their_limit",
    ),
    Mutant(
        "the-longest-of-their-own-limits-is-left-out",
        "core.batches.expiry:_own_limits",
        "yield above",
        "yield from () if above == 100 else (above,)",
        _JANITOR + "test_batches_expire_in_the_first_pass_after_their_limit",
    ),
    Mutant(
        "batches-that-were-seen-at-the-same-time-are-left-out",
        "core.batches.expiry:_unseen",
        "rows = list(tx.execute(same.order_by(_table.id).limit(PAGE)))",
        "rows = []",
        _JANITOR + "test_batches_expire_in_the_first_pass_after_their_limit",
    ),
    Mutant(
        "a-look-waits-for-busy-batches",
        "core.batches.expiry:_see",
        ".with_for_update(skip_locked=True)",
        ".with_for_update()",
        _JANITOR + "test_a_pass_notes_changes_without_waiting_for_busy_batches",
    ),
    Mutant(
        "the-janitor-looks-at-all-that-has-ended",
        "core.batches.expiry:half_deleted_or_due",
        ".where(_table.ended_at <= latest)",
        ".where(_table.ended_at.is_not(None))",
        _JANITOR + "test_a_pass_reads_due_batches_and_not_all_ended_ones",
    ),
    Mutant(
        "the-janitors-next-page-begins-too-late",
        "core.batches.expiry:half_deleted_or_due",
        "sa.or_(_table.ended_at > last.ended_at, _table.id > last.id)",
        "_table.ended_at > last.ended_at",
        _JANITOR + "test_batches_that_ended_at_the_same_time_are_deleted_in_pages",
    ),
    # Updates and redrives.
    Mutant(
        "an-update-judges-the-tolerance-on-a-plain-read",
        "core.batches.update:update",
        "batch, _ = batches.lock(tx, batch_id)",
        "batch = batches.get(tx, batch_id)",
        _UPDATE + "test_a_failure_and_a_lower_tolerance_exceed_a_batch_once_in_either_order",
    ),
    Mutant(
        "an-update-tolerates-one-failure-more",
        "core.batches.update:_judged",
        "not batch.passes_tolerance",
        "not replace(batch, failed=max(0, batch.failed - 1)).passes_tolerance",
        _JUDGES,
    ),
    Mutant(
        "an-update-tolerates-one-failure-less",
        "core.batches.update:_judged",
        "not batch.passes_tolerance",
        "not replace(batch, failed=batch.failed + 1).passes_tolerance",
        _JUDGES,
    ),
    Mutant(
        "an-update-exceeds-a-batch-again",
        "core.batches.update:_judged",
        '[] if batch.exceeded else ["failures_exceeded"]',
        '["failures_exceeded"]',
        _JUDGES,
    ),
    Mutant(
        "an-update-exceeds-a-batch-without-an-event",
        "core.batches.update:_judged",
        '[] if batch.exceeded else ["failures_exceeded"]',
        "[]",
        _JUDGES,
    ),
    Mutant(
        "a-child-that-an-update-cancels-owes-nothing",
        "core.batches.update:_judged",
        "None if batch.parent_batch is None else nesting.owed(succeeded=False)",
        "None",
        _UPDATE + "test_a_child_that_an_update_cancels_fails_its_parents_item",
    ),
    Mutant(
        "an-update-judges-its-deadline-by-the-services-clock",
        "core.batches.update:update",
        "now = tables.clock(tx)",
        "now = datetime.now().astimezone()",
        _UPDATE + "test_an_update_judges_its_deadline_by_the_databases_clock",
    ),
    Mutant(
        "an-earlier-release-may-ignore-an-updated-policy",
        "core.batches.update:update",
        "if patch.sets_policy:",
        "if False:",
        _UPDATE + "test_a_release_that_would_ignore_a_policy_must_be_gone",
    ),
    Mutant(
        "a-batch-expires-at-a-deadline-that-was-postponed",
        "core.batches.expiry:expire",
        "batch, now = batches.lock(tx, batch_id)",
        "batch, now = batches.get(tx, batch_id), tables.clock(tx)",
        _UPDATE + "test_an_overdue_batch_gets_a_later_deadline_or_expires",
        also=(("if lock_wait is not None:", "if False:"),),
    ),
    Mutant(
        "a-redrive-names-items-by-an-earlier-read",
        "core.batches.redrive:_append",
        "version is not None and version != _version(batch)",
        "False",
        _UPDATE + "test_a_redrive_names_the_items_that_failed_before_it_in_the_feed",
    ),
    Mutant(
        "a-redrive-compares-the-counts-on-a-plain-read",
        "core.batches.redrive:_append",
        "batch, now = batches.lock(tx, batch_id)",
        "batch = batches.get(tx, batch_id); now = batch.updated_at",
        _UPDATE + "test_a_redrive_names_the_items_that_failed_before_it_in_the_feed",
    ),
    Mutant(
        "a-key-redrives-again",
        "core.batches.once:Request.of",
        "idempotency_key or str(uuid.uuid4())",
        "str(uuid.uuid4())",
        _ONE_KEY,
    ),
    Mutant(
        "a-redrive-is-recognized-by-its-key-alone",
        "core.batches.once:Request.event",
        "row is not None and row.event_id != self.event_id",
        "False",
        "../http/test_failures.py::test_a_key_redrives_once",
    ),
    Mutant(
        "a-repeated-update-is-refused-as-the-batch-has-ended",
        "core.batches.update:update",
        "if request.event(tx) is not None:",
        "if batch.state in (State.OPEN, State.SEALED) and request.event(tx) is not None:",
        "../http/test_update.py::test_a_key_updates_once",
    ),
    # Deadlines.
    Mutant(
        "a-deadline-is-judged-on-a-plain-read",
        "core.batches.expiry:expire",
        "batch, now = batches.lock(tx, batch_id)",
        "batch, now = batches.get(tx, batch_id), tables.clock(tx)",
        _DEADLINES + "test_the_last_ack_comes_before_the_deadline_or_is_rejected",
        also=(("if lock_wait is not None:", "if False:"),),
    ),
    Mutant(
        "an-open-judges-its-deadline-by-the-services-clock",
        "core.batches.writing:_open",
        "tables.clock(pipeline.tx)",
        "datetime.now().astimezone()",
        _DEADLINES + "test_a_deadline_is_judged_by_the_databases_clock",
    ),
    Mutant(
        "overdue-batches-are-found-and-judged-by-the-services-clock",
        "core.batches.expiry:cause",
        "is_overdue(State(batch.state), batch.deadline, now=now)",
        "is_overdue(State(batch.state), batch.deadline, now=datetime.now().astimezone())",
        _DEADLINES + "test_a_deadline_is_judged_by_the_databases_clock",
    ),
    Mutant(
        "a-deadline-is-judged-again-by-idleness-alone",
        "core.batches.expiry:cause",
        "return Cause.DEADLINE",
        "pass",
        _DEADLINES + "test_a_busy_batch_expires_at_its_deadline_and_not_before",
    ),
    Mutant(
        "a-deadline-waits-for-the-children",
        "core.batches.expiry:expire",
        "reason is Cause.IDLE and nesting",
        "nesting",
        _DEADLINES + "test_a_parent_expires_though_its_children_live_and_a_child_fails_its_item",
    ),
    Mutant(
        "an-earlier-release-may-ignore-a-deadline",
        "core.batches.writing:_open",
        "operation.opening.has_policies",
        "False",
        _DEADLINES + "test_a_release_that_would_ignore_a_deadline_must_be_gone",
    ),
    Mutant(
        "overdue-batches-with-the-same-deadline-are-left-out",
        "core.batches.expiry:overdue",
        "sa.or_(_table.deadline > last.deadline, _table.id > last.id)",
        "_table.deadline > last.deadline",
        _DEADLINES + "test_all_overdue_batches_expire_whatever_their_number",
    ),
    Mutant(
        "expiry-does-not-lock",
        "core.batches.expiry:expire",
        "batch, now = batches.lock(tx, batch_id)",
        "batch, now = batches.get(tx, batch_id), tx.scalar(sa.select(tables.utc_now()))",
        _EXPIRE,
    ),
    Mutant(
        "an-ack-does-not-touch-updated-at",
        "core.acks.completion:_update",
        '[f"updated_at = {latest}(updated_at, {now})"]',
        '["updated_at = updated_at"]',
        _EXPIRE,
    ),
    # Ack and cancel.
    Mutant(
        "ack-does-not-judge-the-state-again-under-the-lock",
        "core.acks.completion:_judge",
        "row is None or row.state not in TAKES_ACKS",
        "row is None",
        _CANCEL,
    ),
    Mutant(
        "pending-is-read-in-no-snapshot",
        "core.service.batches:BatchService.ranges",
        "self._database.snapshot",
        "self._database.read",
        _DELETED,
    ),
    Mutant(
        "the-watermark-is-read-in-no-snapshot",
        "core.service.reads:ReadService._watermarks",
        "self._database.snapshot",
        "self._database.read",
        _DELETED,
    ),
    Mutant("cancel-decides-on-a-plain-read", "core.batches.batch:cancel", _LOCK, _PLAIN, _CANCEL),
    # Ack and purge.
    Mutant(
        "a-deletion-locks-the-feed-before-its-callback",
        "core.batches.purge:condemn",
        "batches.end(tx, batch, State.CANCELLED, now)",
        "batches.end(tx, batch, State.CANCELLED, now)\n        callbacks.disable(tx, batch_id)",
        "test_lock_order.py::test_a_deletion_disables_the_callback_before_it_locks_the_feed",
        also=(("if not owes:\n        callbacks.disable(tx, batch_id)", "if False:\n        pass"),),
    ),
    Mutant("purge-without-the-state-deleting", "core.batches.purge:condemn", "mark(tx, batch_id)", "pass", _PURGE),
    Mutant(
        "purge-removes-the-batch-row-first",
        "core.batches.purge:remove_chunk",
        "for table, key in _BY_BATCH:",
        "tx.execute(sa.delete(tables.batches).where(tables.batches.c.id == batch_id))\n"
        "    for table, key in _BY_BATCH:",
        _PURGE,
    ),
    Mutant(
        "the-janitor-forgets-what-is-half-deleted",
        "core.batches.expiry:half_deleted_or_due",
        "yield from _half_deleted(database)",
        "pass",
        _PURGE,
    ),
    # Extends with one key.
    Mutant(
        "extend-looks-its-key-up-without-the-lock",
        "core.batches.writing:_look",
        "    results = pipeline.ask(*texts) if texts else []\n",
        "    early = pipeline.ask(*looks) if looks else []\n"
        "    results = pipeline.ask(*texts) if texts else []\n"
        "    results[len(locks) : len(locks) + len(looks)] = early\n",
        "test_writes.py::test_a_retried_extend_gets_its_numbers_though_the_batch_was_sealed_while_it_waited",
    ),
    # The fast path of other verbs than acks.
    Mutant(
        "a-limited-token-opens-any-batch-on-the-fast-path",
        "api.fast_path:FastProtocol._call",
        "or caller.prefix is not None",
        "",
        "../http/test_access.py::test_another_clients_batch_looks_like_a_missing_one",
    ),
    Mutant(
        "a-role-is-not-needed-on-the-fast-path",
        "api.fast_path:FastProtocol._call",
        "or not caller.has(verb.rule.roles) ",
        "",
        "../http/test_access.py::test_each_role_can_call_exactly_the_routes_that_allow_it",
    ),
    Mutant(
        "a-page-of-another-site-may-open-a-batch",
        "api.fast_path:FastProtocol._call",
        "head.names_site or ",
        "",
        "../http/test_fast_verbs.py::test_both_paths_give_the_same_response",
    ),
    Mutant(
        "a-read-is-answered-by-an-earlier-statement",
        "core.service.reads:SharedReads._run",
        "        self._read([read for read, _ in part])\n",
        "        self._read([read for read, _ in part])\n"
        "        with self._wake:\n"
        "            late, self._waiting = self._waiting, []\n"
        "        for read, _ in late:\n"
        "            read.value = part[0][0].value\n"
        "        part += late\n",
        _READS + "test_a_read_is_not_answered_by_a_transaction_that_began_before_it",
    ),
    Mutant(
        "readers-share-one-error",
        "core.service.reads:SharedReads._read",
        "errors.copy_of(error)",
        "error",
        _READS + "test_a_failed_transaction_fails_the_reads_that_share_it",
    ),
    Mutant(
        "a-damaged-row-fails-the-reads-of-its-neighbours",
        "core.service.reads:SharedReads._read",
        "if len(questions) > 1 and",
        "if False and",
        _READS + "test_a_damaged_row_fails_only_the_reads_of_its_batch",
    ),
    Mutant(
        "shared-pages-are-read-without-a-snapshot",
        "core.feed:pages",
        "begin = [text] if (text := dialects.of(tx).begin_snapshot) else []",
        "begin: list[str] = []",
        _READS + "test_a_page_trimmed_while_it_is_read_is_read_completely",
    ),
    Mutant(
        "a-shared-page-begins-where-its-neighbour-does",
        "core.feed:pages",
        "for place in (start, end)",
        "for place in (joined[0][0], end)",
        _READS + "test_pages_that_share_a_transaction_are_those_that_are_read_alone",
    ),
    Mutant(
        "the-watermark-forgets-the-journal-of-the-first-groups",
        "core.batches.ranges:_pieces",
        "_touched(first_recent, ",
        "_touched({}, ",
        _READS + "test_watermarks_of_many_batches_are_those_of_each",
    ),
    # Threads.
    Mutant(
        "a-combiner-counts-on-a-thread-that-did-not-start",
        "core.commits.lanes:Lane.start",
        "self.thread = threads.start",
        "self.thread = threading.main_thread(); self.thread = threads.start",
        _PAYMENTS + "test_calls_go_on_after_the_system_allowed_no_more_threads",
    ),
    Mutant(
        "a-batch-set-aside-without-a-thread-ends-the-lane",
        "core.commits.aside:Aside._has_threads",
        "except errors.Unavailable:",
        "except ZeroDivisionError:",
        _COMBINER + "test_without_threads_for_it_a_locked_batch_fails_alone",
    ),
    Mutant(
        "a-payment-fails-a-committed-flush",
        "core.acks.parents:Payer.pay",
        "except errors.Unavailable as error:",
        "except ZeroDivisionError as error:",
        _PAYMENTS + "test_calls_go_on_after_the_system_allowed_no_more_threads",
    ),
    Mutant(
        "a-dispatcher-claims-without-a-thread-to-record",
        "core.dispatcher:Dispatcher._start_threads",
        "self._records.start()",
        "pass",
        _DELIVERIES + "test_a_thread_that_cannot_start_can_start_later",
    ),
    Mutant(
        "a-dispatcher-counts-on-a-thread-that-did-not-start",
        "core.dispatcher:Dispatcher._start_threads",
        "self._claimer = threads.start",
        "self._claimer = threading.main_thread(); self._claimer = threads.start",
        _DELIVERIES + "test_a_thread_that_cannot_start_can_start_later",
    ),
    Mutant(
        "a-second-sender-that-cannot-start-ends-the-first",
        "core.dispatcher:Dispatcher._take",
        "except errors.Unavailable:",
        "except ZeroDivisionError:",
        _DELIVERIES + "test_a_thread_that_cannot_start_can_start_later",
    ),
    Mutant(
        "a-result-that-is-not-accepted-keeps-its-claim",
        "core.dispatcher:Dispatcher._record",
        "self._free([claim])",
        "pass",
        _DELIVERIES + "test_a_result_that_is_not_accepted_frees_its_claim",
    ),
    Mutant(
        "a-receiver-that-raises-ends-the-combiner",
        "core.threads:deliver",
        "except Exception:",
        "except KeyError:",
        _COMBINER + "test_a_receiver_that_raises_costs_no_other_call_its_answer",
    ),
    Mutant(
        "a-receiver-that-raises-ends-the-reads",
        "core.threads:deliver",
        "except Exception:",
        "except KeyError:",
        _READS + "test_a_receiver_that_raises_costs_no_other_read_its_answer",
    ),
    Mutant(
        "a-receiver-that-raises-keeps-the-answers-of-others",
        "api.server.wakeups:pass_on",
        "except Exception:",
        "except KeyError:",
        "../http/test_limits.py::test_a_receiver_that_raises_costs_no_other_request_its_answer",
    ),
    Mutant(
        "a-check-of-connections-that-raises-is-the-last",
        "api.server.watchdog:Connections.watching",
        "timer = loop.call_later(CHECK_EVERY, check)  #",
        "#",
        "../http/test_limits.py::test_a_check_of_connections_that_raises_is_not_the_last",
        also=(
            (
                "self.check(loop.time())",
                "self.check(loop.time())\n        timer = loop.call_later(CHECK_EVERY, check)",
            ),
        ),
    ),
    # Operations that share a transaction.
    Mutant(
        "a-shared-operation-is-judged-by-the-row-as-it-was-read",
        "core.batches.writing:_change",
        "current[batch.id] = result.batch",
        "pass",
        _WRITES + "test_operations_on_one_batch_take_place_in_their_order",
    ),
    Mutant(
        "a-refused-extend-fails-its-neighbours",
        "core.batches.writing:_change",
        "except errors.CoreError as error:",
        "except ZeroDivisionError as error:",
        _WRITES + "test_a_refused_operation_does_not_affect_its_neighbours",
    ),
    Mutant(
        "a-key-that-comes-twice-opens-two-batches",
        "core.batches.writing:_open",
        "if key is not None and key in first_of:",
        "if False:",
        _WRITES + "test_opens_with_one_key_in_one_transaction_make_one_batch",
    ),
    Mutant(
        "the-ids-of-new-batches-are-confused",
        "core.storage.dialects.sqlite:SQLite.batch_ids",
        "sorted(row[0] for row in rows)",
        "sorted((row[0] for row in rows), reverse=True)",
        _WRITES + "test_shared_transactions_have_the_outcomes_of_separate_ones",
    ),
    Mutant(
        "a-servers-ids-of-new-batches-are-confused",
        "core.storage.dialects.mariadb:MariaDB.batch_ids",
        "sorted(row[0] for row in rows)",
        "sorted((row[0] for row in rows), reverse=True)",
        _WRITES + "test_many_callers_at_once_get_batches_of_their_own",
        only="mariadb",
    ),
    Mutant(
        "an-event-that-two-callers-append-stands-twice",
        "core.feed:write",
        "is_new = event.id not in positions",
        "is_new = True",
        _WRITES + "test_an_event_that_two_callers_append_stands_once",
    ),
    Mutant(
        "extend-does-not-compare-the-digests",
        "core.batches.writing:_extend",
        "digest != before_digest",
        "False",
        _DIGESTS,
    ),
    Mutant(
        "extend-does-not-keep-the-digest",
        "core.batches.writing:_change",
        "result.count, operation.digest",
        "result.count, None",
        _DIGESTS,
    ),
    Mutant(
        "extend-compares-with-a-chunk-that-has-no-digest",
        "core.batches.writing:_extend",
        "None not in (digest, before_digest) and",
        "",
        "../http/test_batches.py::test_an_extend_without_a_digest_leaves_its_repeats_free",
    ),
    Mutant(
        "extend-does-not-keep-its-key",
        "core.batches.writing:_change",
        'pipeline.later(*(head + ",".join(part) for part in packets(keys)))',
        "pass",
        _EXTENDS,
    ),
    # Opens with one key.
    Mutant(
        "open-does-not-look-for-its-key",
        "core.batches.writing:_open",
        "if key is not None and key in found.opened:",
        "if False:",
        _OPENS,
    ),
    Mutant(
        "open-gives-up-when-it-comes-second",
        "core.storage.statements:Pipeline._run",
        "if faults.is_duplicate(error):",
        "if False:",
        _OPENS,
    ),
    Mutant(
        "a-replayed-open-never-gets-newly",
        "core.batches.writing:_replayed",
        "newly = batch.completed_by == operation.fingerprint",
        "newly = False",
        _OPENS,
    ),
    # The trace context of an open.
    Mutant(
        "a-replay-with-another-context-conflicts",
        "core.batches.writing:_replayed",
        "batch.open_hash != operation.opening.fingerprint()",
        "batch.open_hash != operation.opening.fingerprint() or batch.trace != operation.trace",
        _TRACES + "test_a_replay_keeps_the_first_context_and_never_conflicts",
    ),
    Mutant(
        "a-replay-shows-its-own-context",
        "core.batches.writing:_replayed",
        "Opened(batch, 0, batch.open_count",
        "Opened(replace(batch, traceparent=operation.trace and operation.trace.traceparent), 0, batch.open_count",
        _TRACES + "test_a_replay_keeps_the_first_context_and_never_conflicts",
    ),
    Mutant(
        "the-fast-path-forgets-the-context",
        "api.fast_path:_open",
        "trace=call.trace",
        "trace=None",
        _TRACES + "test_the_context_of_an_open_is_stored_and_shown",
    ),
    Mutant(
        "events-forget-the-context",
        "core.batches.batch:events",
        "trace.headers() if trace is not None else {}",
        "{}",
        _TRACES + "test_the_context_of_an_open_is_stored_and_shown",
    ),
    # The retried completing request.
    Mutant(
        "newly-is-not-kept-with-the-key",
        "core.acks.completion:completed_for",
        "newly or batch.completed_by == fingerprint",
        "newly",
        _RETRY,
    ),
    Mutant(
        "every-request-with-a-key-gets-newly",
        "core.acks.completion:completed_for",
        "newly or batch.completed_by == fingerprint",
        "True",
        _RETRY,
    ),
    Mutant("the-key-alone-names-a-request", "core.acks.call:Call.fingerprint", ", self._content())", ")", _RETRY),
    Mutant(
        "a-deleted-batchs-acks-are-not-rejected",
        "core.acks.completion:_look_again",
        "raise faults.BeginAgain",
        "pass",
        _RACES + "test_a_repeat_whose_batch_is_deleted_meanwhile_is_rejected_as_unknown",
    ),
    # The last statements and the COMMIT in one packet.
    Mutant(
        "a-packet-that-ends-early-is-taken-for-a-commit",
        "core.storage.dialects.mariadb:MariaDB._send",
        "if len(rows) < len(texts):",
        "if False:",
        _LAST + "test_work_whose_packet_ends_before_the_commit_runs_again",
    ),
    Mutant(
        "a-statement-refused-before-the-commit-leaves-the-outcome-unknown",
        "core.storage.database:Database._judge",
        "committing = committing and not faults.is_before_commit(error)",
        "pass",
        _LAST + "test_a_statement_refused_before_the_commit_has_committed_nothing",
    ),
    Mutant(
        "a-refused-commit-is-taken-for-a-refused-statement",
        "core.storage.faults:is_before_commit",
        '(None, "COMMIT")',
        "(None,)",
        _LAST + "test_the_database_is_asked_for_the_outcome_of_a_refused_commit",
    ),
    Mutant(
        "a-connection-lost-with-its-commit-is-taken-for-a-refused-statement",
        "core.storage.faults:is_before_commit",
        "not error.connection_invalidated and ",
        "",
        _LOST + "test_a_connection_that_is_cut_at_the_last_packet_changes_nothing",
    ),
    # The answer to a COMMIT is lost.
    Mutant(
        "a-lost-answer-runs-the-work-again",
        "core.storage.database:Database._transaction",
        "if not self._was_committed(mark):",
        "if True:",
        _LOST + "test_writes_without_a_key_are_done_once_and_answered",
    ),
    Mutant(
        "a-lost-answer-counts-as-a-commit",
        "core.storage.database:Database._transaction",
        "if not self._was_committed(mark):",
        "if False:",
        _LAST + "test_work_whose_connection_was_lost_before_the_commit_runs_again",
    ),
    Mutant(
        "a-lost-answer-forgets-who-waits-for-the-feed",
        "core.storage.database:Database._transaction",
        "raise _Faulted(errors.Fault.OUTAGE, trouble.cause) from trouble.cause",
        "raise _Faulted(errors.Fault.OUTAGE, trouble.cause) from trouble.cause\n            done = done[0], None, []",
        _LOST + "test_a_lost_answer_changes_nothing",
    ),
    Mutant(
        "a-transaction-that-was-taken-for-lost-may-still-commit",
        "core.storage.commit_marks:settle",
        "{barred} ELSE",
        "commit_marks.mark ELSE",
        _LOST + "test_a_transaction_that_is_still_in_progress_is_barred",
        also=(("mark.writer, barred, keep_or_bar", "mark.writer, 0, keep_or_bar"),),
    ),
    Mutant(
        "a-barred-mark-is-written",
        "core.storage.commit_marks:statement",
        "THEN {number} END",
        "THEN {number} ELSE {number} END",
        _LOST + "test_a_transaction_that_is_still_in_progress_is_barred",
    ),
    Mutant(
        "a-transaction-without-writes-is-marked",
        "core.storage.statements:commit",
        "(tx.info[HAS_WRITTEN] or pipeline.will_write())",
        "True",
        _LOST + "test_a_transaction_without_writes_leaves_no_mark",
    ),
    Mutant(
        "writes-of-the-last-packet-are-not-marked",
        "core.storage.statements:commit",
        "(tx.info[HAS_WRITTEN] or pipeline.will_write())",
        "tx.info[HAS_WRITTEN]",
        _LOST + "test_a_connection_that_is_cut_at_the_last_packet_changes_nothing",
    ),
    Mutant(
        "a-connection-stays-one-writer",
        "core.storage.commit_marks:new",
        "last.number >= 2 * MOST",
        "False",
        _LOST + "test_a_row_has_a_bounded_number_of_versions",
    ),
    Mutant(
        "marks-are-kept-for-ever",
        "core.storage.commit_marks:forget",
        "tables.clock(tx) - KEEP",
        "tables.clock(tx) - 9 * KEEP",
        _LOST + "test_marks_of_closed_connections_are_removed",
    ),
    Mutant(
        "a-retry-does-not-pay-what-its-first-request-left-owing",
        "core.acks.flush:flush",
        "owing |= {batch for batch, look in state.seen.items() if look.owes}",
        "pass",
        _LOST + "test_a_clients_retry_pays_what_its_first_request_left_owing",
    ),
    Mutant(
        "a-repeat-does-not-pay-what-a-complete-batch-owes",
        "core.acks.completion:_look_again",
        "owes=bool(row.owes)",
        "owes=False",
        _LOST + "test_a_clients_retry_pays_what_its_first_request_left_owing",
    ),
    Mutant(
        "an-item-that-was-resolved-before-its-batch-ended-is-rejected",
        "core.acks.ended:_outcome",
        "index < group_size and settled[number][index]",
        "False",
        _LOST + "test_items_that_were_resolved_before_their_batch_ended_are_repeats",
    ),
    Mutant(
        "an-ack-of-a-failed-item-of-an-ended-batch-is-a-repeat",
        "core.acks.ended:_settled",
        "verb is Verb.FAIL or group.failed is None",
        "True",
        _LOST + "test_items_that_were_resolved_before_their_batch_ended_are_repeats",
    ),
    Mutant(
        "the-journal-of-an-ended-batch-is-not-read",
        "core.acks.ended:judge",
        "None if look.journal_next else ()",
        "()",
        _LOST + "test_items_that_were_resolved_before_their_batch_ended_are_repeats",
    ),
    Mutant(
        "a-seal-does-not-recognize-its-own-cancellation",
        "core.batches.writing:_seal",
        "batch.state is State.CANCELLED and batch.completed_by == fingerprint",
        "False",
        _LOST + "test_a_repeated_seal_finds_that_it_cancelled_its_batch",
    ),
    Mutant(
        "the-last-statements-of-a-failed-transaction-are-executed-by-the-next",
        "core.storage.database:Database._transaction",
        "(APPENDED, _AFTER, statements.LAST)",
        "(APPENDED, _AFTER)",
        _LAST + "test_a_transaction_has_ended_after_its_last_statements",
    ),
    Mutant(
        "a-reason-that-another-transaction-inserted-first-is-an-error",
        "core.acks.flush:_write_reasons",
        "in state.missing",
        "in ()",
        _RACES + "test_an_item_that_fails_twice_at_once_has_one_of_the_reasons",
    ),
    # Crashes: what one transaction must do is done in two.
    Mutant(
        "an-ack-commits-its-bits-before-its-counts",
        "core.acks.flush:flush",
        "_write_reasons(tx, state)",
        "_write_reasons(tx, state)\n    tx.commit()",
        _CRASH,
    ),
    Mutant(
        "an-extend-commits-its-numbers-before-its-key",
        "core.batches.writing:_change",
        "pipeline.later(*batch_rows.updates(dialect, changed))",
        "pipeline.later(*batch_rows.updates(dialect, changed))\n    pipeline.flush()\n    pipeline.tx.commit()",
        _CRASH,
    ),
    Mutant(
        "a-seal-that-completes-does-not-keep-its-key",
        "core.batches.writing:_seal",
        '{"state": State.COMPLETE, "ended_at": now, "completed_by": fingerprint}',
        '{"state": State.COMPLETE, "ended_at": now}',
        _CRASH,
    ),
    Mutant(
        "a-purge-forgets-the-reasons",
        "core.batches.purge:remove_chunk",
        "for table, key in _BY_BATCH:",
        "for table, key in _BY_BATCH[:-1]:",
        _HALF_DONE,
    ),
    # The model.
    Mutant(
        "a-failed-item-stays-failed", "core.bits.bitfield:Group.ack_one", "self.failed[index] = 0", "pass", _MACHINE
    ),
    Mutant(
        "reasons-outlive-a-redrive",
        "core.acks.apply:_forget_reason",
        "state.redriven.append((batch, number))",
        "pass",
        "../storage/test_ranges.py::test_a_reason_is_removed_when_its_item_is_acked",
    ),
    Mutant(
        "the-watermark-hint-runs-ahead",
        "core.acks.completion:_full_prefixes",
        "resolved < row.group_size",
        "resolved == 0",
        _MACHINE,
    ),
    Mutant(
        "a-group-without-holes-in-front-is-full",
        "core.bits.bitfield:Group._is_prefix",
        "in (-1, self.resolved_count)",
        "!= 0",
        "../storage/test_bitfield.py::test_bits_behave_as_two_sets",
    ),
    Mutant(
        "repeats-keep-a-batch-alive",
        "core.acks.apply:apply",
        "if not resolved_now and not redriven_now:",
        "if False:",
        _MACHINE,
    ),
    # The combiner.
    Mutant(
        "every-call-in-the-flush-gets-newly",
        "core.acks.completion:completed_for",
        "newly = delta.last_resolver.call is unit.call",
        "newly = True",
        _COMBINER + "test_merged_calls_share_one_flush_and_exactly_one_gets_newly",
    ),
    Mutant(
        "the-first-call-of-the-flush-gets-newly",
        "core.acks.apply:apply",
        "delta.last_resolver = unit",
        "delta.last_resolver = delta.last_resolver or unit",
        _COMBINER + "test_merged_calls_share_one_flush_and_exactly_one_gets_newly",
    ),
    Mutant(
        "stop-loses-waiting-calls",
        "core.commits.lanes:Lane._run",
        "if not units:",
        "if not units or self.stopping:",
        _COMBINER + "test_stop_answers_waiting_calls_and_refuses_new_ones",
    ),
    Mutant(
        "batches-take-no-turns",
        "core.commits.lanes:Lane.take",
        "turn = len(queue) if not self.queues else 1",
        "turn = len(queue)",
        _COMBINER + "test_a_hot_batch_does_not_delay_other_batches",
    ),
    Mutant(
        "a-broken-batch-fails-its-neighbours",
        "core.commits.combiner:Combiner._flush",
        "errors.batches_of(error).intersection(batches)",
        "frozenset(batches)",
        _COMBINER + "test_one_broken_batch_in_a_merged_flush_fails_alone",
    ),
    Mutant(
        "a-conflict-without-end-fails-its-neighbours",
        "core.commits.combiner:Combiner._flush",
        "errors.LockTimeout | errors.Contended",
        "errors.LockTimeout",
        _WRITES + "test_a_transaction_that_meets_a_conflict_each_time_fails_alone",
    ),
    Mutant(
        "a-stuck-batch-has-no-lane-of-its-own",
        "core.commits.combiner:Combiner._set_aside",
        "isinstance(error, errors.LockTimeout)",
        "False",
        _COMBINER + "test_a_row_locked_by_another_session_does_not_stall_other_batches",
    ),
    Mutant(
        "a-merged-flush-waits-briefly-for-the-feed",
        "core.storage.dialects.mariadb:_hurried",
        " and text != LOCK_HEAD",
        "",
        _COMBINER + "test_a_flush_that_waits_for_the_feed_stays_whole",
        only="mariadb",
    ),
    Mutant(
        "a-merged-flush-waits-briefly-for-the-feed-on-postgresql",
        "core.storage.dialects.postgresql:PostgreSQL.run",
        "text == LOCK_HEAD",
        "False",
        _COMBINER + "test_a_flush_that_waits_for_the_feed_stays_whole",
        only="postgresql",
    ),
    Mutant(
        "a-wait-for-the-feed-tears-the-flush",
        "core.storage.faults:_lock_wait",
        "error.statement == LOCK_HEAD",
        "False",
        _COMBINER + "test_a_flush_that_waits_for_the_feed_stays_whole",
    ),
    Mutant(
        "a-call-waits-for-the-feed-without-end",
        "core.storage.database:Database.write",
        "head_waits > HEAD_WAITS",
        "False",
        _COMBINER + "test_a_feed_that_stays_locked_is_an_outage",
    ),
    Mutant(
        "a-failed-batch-is-not-set-aside",
        "core.commits.aside:Aside.holds",
        "time.monotonic() - entry.failed_at < PROBATION",
        "False",
        _COMBINER + "test_a_batch_that_stays_locked_is_not_merged_again",
    ),
    Mutant(
        "a-broken-batch-is-merged-again",
        "core.commits.combiner:Combiner._set_aside",
        "for batch in culprits:\n            retries",
        "for batch in culprits if is_locked else ():\n            retries",
        _COMBINER + "test_a_broken_batch_stays_out_of_merged_flushes",
    ),
    Mutant(
        "a-broken-batch-is-tried-all-the-time",
        "core.commits.aside:Aside.failed",
        "entry.failed_at + PAUSE",
        "0.0",
        _COMBINER + "test_a_broken_batch_is_retried_with_pauses",
    ),
    Mutant(
        "a-repaired-batch-stays-set-aside",
        "core.commits.aside:Aside.committed",
        "return self._batches.pop(batch).queue",
        "self._batches[batch].failed_at = time.monotonic()",
        _COMBINER + "test_a_batch_that_stays_locked_is_not_merged_again",
    ),
    Mutant(
        "a-group-counts-for-each-call-that-names-it",
        "core.commits.lanes:Load.add",
        "groups.update(unit.groups())",
        "groups = groups | unit.groups()",
        _COMBINER + "test_calls_for_the_same_groups_share_a_flush_however_many_they_are",
    ),
    Mutant(
        "a-large-call-is-one-flush",
        "core.commits.lanes:Load.add",
        "self.cost + unit.cost > self._most_cost",
        "False",
        _COMBINER + "test_a_large_call_of_failures_is_split_and_other_calls_come_in_between",
    ),
    Mutant(
        "a-redrive-removes-all-reasons-at-once",
        "core.acks.flush:_cut",
        "total > budget",
        "False",
        _COMBINER + "test_a_redrive_removes_a_bounded_number_of_reasons_at_a_time",
    ),
    Mutant(
        "all-reasons-of-a-group-are-looked-for-to-the-next-one",
        "core.acks.flush:_remove_ranges",
        " ORDER BY number LIMIT {count}",
        "",
        _COMBINER + "test_reasons_of_neighbouring_groups_can_be_removed_and_written_concurrently",
        only="mariadb",
    ),
    Mutant(
        "the-rest-of-a-flush-is-lost",
        "core.commits.combiner:Combiner._attempt",
        "self._main.put_back(rests)",
        "[self._main.put(unit, pending) for unit, pending in rests if False]",
        _COMBINER + "test_a_redrive_removes_a_bounded_number_of_reasons_at_a_time",
    ),
    Mutant(
        "each-piece-of-a-mask-is-rejected-by-itself",
        "core.acks.call:AckResult._reject",
        "if rejection.group is not None:",
        "if False:",
        _COMBINER + "test_a_mask_that_is_rejected_in_pieces_is_rejected_once",
    ),
    Mutant(
        "the-queue-has-no-bound",
        "core.commits.combiner:Combiner.submit",
        "backlog.units + len(units) > self._max_waiting",
        "False",
        _COMBINER + "test_calls_above_the_bound_are_refused_and_waiting_calls_are_answered",
    ),
    Mutant(
        "refused-acks-are-committed",
        "core.commits.lanes:Lane.shorten",
        "queue.popleft() for",
        "queue[0] for",
        _COMBINER + "test_a_shortened_queue_refuses_the_oldest_calls_and_every_batch_keeps_its_share",
    ),
    Mutant(
        "acks-in-excess-are-queued",
        "core.commits.combiner:Combiner.is_full",
        "self._main.waiting < admission.limit",
        "True",
        _COMBINER + "test_a_shortened_queue_refuses_the_oldest_calls_and_every_batch_keeps_its_share",
    ),
    Mutant(
        "large-calls-have-no-bound",
        "core.commits.combiner:Combiner.submit",
        "backlog.bytes + size > self._max_bytes",
        "False",
        _COMBINER + "test_large_calls_are_refused_before_they_fill_the_memory",
    ),
    Mutant(
        "a-lost-commit-counts-as-done",
        "core.storage.database:Database._transaction",
        "self._judge(tx, error, committing=committing)",
        "if committing:\n                    tx.invalidate()\n                    return done\n"
        "                self._judge(tx, error, committing=committing)",
        _FAILURES + "test_connections_that_are_cut_at_the_commit",
    ),
    Mutant(
        "counts-are-clamped",
        "core.acks.completion:_judge",
        "_check(row, state, acked, failed, delta)",
        "acked = min(acked, row.items - failed)",
        _COMBINER + "test_a_batch_whose_counts_are_broken_fails_alone",
    ),
    # Bitfields in memory, and patches.
    Mutant(
        "a-cached-bitfield-is-used-without-the-rows-counts",
        "core.bits.cache:BitfieldCache.take",
        "if group is None or group.resolved_count != resolved_count or group.failed_count != failed_count:",
        "if group is None:",
        "test_cache.py::test_processes_that_alternate_on_a_group_see_each_others_bits",
    ),
    Mutant(
        "the-number-of-held-groups-only-grows",
        "core.bits.cache:BitfieldCache._drop",
        "self._state_groups -= len(state.groups)",
        "pass",
        "test_cache.py::test_a_commit_costs_the_same_however_many_batches_are_cached",
    ),
    Mutant(
        "held-bitfields-outlive-the-database",
        "core.bits.cache:BitfieldCache.clear",
        "self._groups.clear()",
        "pass",
        _DROPPED + "a_connection_breaks",
    ),
    Mutant(
        "each-new-connection-drops-the-cache",
        "core.storage.continuity:watch",
        "if origin != last:",
        "if True:",
        "test_cache.py::test_many_concurrent_readers_drop_no_cached_bitfield_and_reuse_their_connections",
    ),
    Mutant(
        "connections-of-a-crowd-are-thrown-away",
        "core.storage.engines:pool",
        '"pool_size": connections, "max_overflow": 0',
        '"pool_size": 10, "max_overflow": connections - 10',
        "test_cache.py::test_many_concurrent_readers_drop_no_cached_bitfield_and_reuse_their_connections",
    ),
    Mutant(
        "no-new-connection-drops-the-cache",
        "core.storage.continuity:watch",
        "if origin != last:",
        "if False:",
        _OTHER_SERVER,
    ),
    Mutant(
        "a-broken-connection-keeps-the-cache",
        "core.storage.continuity:watch",
        "if not isinstance(error, sa.exc.DisconnectionError):",
        "if False:",
        _DROPPED + "a_connection_breaks",
    ),
    Mutant(
        "a-connections-first-use-drops-the-cache",
        "core.storage.engines:replace_old_connections",
        "record.info[_USED] == created",
        "False",
        "../storage/test_database.py::test_a_connection_opened_while_others_break_is_used",
    ),
    Mutant(
        "a-restart-keeps-the-cache",
        "core.storage.continuity:server",
        ", now - uptime",
        ",",
        _DROPPED + "the_server_restarts",
        only="mariadb",
    ),
    Mutant(
        "a-file-that-replaces-the-open-one-is-opened",
        "core.storage.continuity:identity",
        "return status.st_dev, status.st_ino",
        "return ()",
        "../storage/test_database.py::test_a_file_that_replaces_an_open_one_is_left_alone",
    ),
    Mutant(
        "a-patch-reaches-beyond-its-blob",
        "core.bits.bitfield:Group.patches",
        "self.stored != -(-issued // 8)",
        "self.stored is None",
        "test_cache.py::test_a_group_that_grew_keeps_bits_beyond_its_stored_blob",
    ),
    Mutant(
        "another-byte-is-patched",
        "core.bits.bitfield:Group.ack_one",
        "self.changed.add(index >> 3)",
        "self.changed.add(0)",
        "test_cache.py::test_processes_that_alternate_on_a_group_see_each_others_bits",
    ),
    # The feed.
    Mutant(
        "positions-as-auto-increment-gives-them",
        "core.feed:append",
        "position = lock(tx)\n    pipeline = Pipeline(tx)\n    _insert(pipeline, events, position)",
        "rows = [dict(event_id=e.id, type=e.type, batch_id=e.batch, event_key=e.key, data=e.data) for e in events]\n"
        "    with tx.engine.begin() as other:\n"
        "        other.exec_driver_sql(f'UPDATE feed_head SET position = position + {len(rows)}')\n"
        "        last = other.exec_driver_sql('SELECT position FROM feed_head').scalar()\n"
        "    position = last - len(rows)\n"
        "    for place, row in enumerate(reversed(rows)):\n"
        "        row['position'] = last - place\n"
        "    tx.execute(sa.insert(tables.feed).values(appended_at=tables.utc_now()), rows)",
        _FOLLOW,
    ),
    Mutant(
        "followers-keep-the-events-of-another-server",
        "core.service.feed:FeedService.on_doubt",
        "self._database.on_doubt(react)",
        "pass",
        _WAITING + "test_followers_read_the_events_of_the_server_that_took_over",
    ),
    Mutant(
        "followers-are-woken-all-at-once",
        "api.routes.long_polls:Waiting._wake",
        "await self._pause(",
        "abs(",
        _WAITING + "test_many_followers_share_reads_and_encoding",
    ),
    Mutant(
        "each-follower-makes-its-own-text",
        "api.routes.long_polls:text_of",
        "if not isinstance(page, SharedPage):",
        "if True:",
        _WAITING + "test_many_followers_share_reads_and_encoding",
    ),
    Mutant(
        "a-followers-wanted-position-is-not-stored",
        "api.routes.long_polls:Waiting._followers_of",
        "follower.wanted_until = last",
        "pass",
        _WAITING + "test_each_follower_gets_its_events_once_and_in_order",
    ),
    Mutant(
        "shared-pages-outlive-a-reading",
        "api.routes.long_polls:Waiting._keep",
        "self._pages.clear()",
        "pass",
        _WAITING + "test_followers_share_a_page_until_newer_events_are_read",
    ),
    Mutant(
        "a-trim-passes-a-follower-unseen",
        "api.routes.long_polls:Waiting._read_on",
        "follower.wanted_until = error.trimmed",
        "pass",
        _WAITING + "test_a_follower_that_sleeps_through_a_trim_gets_an_error",
    ),
    Mutant(
        "a-filtered-page-reads-the-whole-feed",
        "core.feed:read",
        "end = min(position, start + EXAMINED)",
        "end = position",
        _READS + "test_a_filtered_page_examines_a_bounded_part_of_the_feed",
    ),
    Mutant(
        "a-filtered-page-claims-the-whole-feed",
        "core.feed:read",
        "if has_more else end",
        "if has_more else position",
        _READS + "test_filtered_pages_continue_where_the_earlier_one_ended",
    ),
    Mutant(
        "a-page-of-commands-reads-the-whole-feed",
        "core.processes.outbox:read",
        "end = min(last, begin + feed.EXAMINED)",
        "end = last",
        _READS + "test_a_filtered_page_of_commands_examines_a_bounded_part_of_the_feed",
    ),
    Mutant(
        "a-follower-far-behind-waits-for-an-event",
        "api.routes.events:goes_on",
        "if start < page.next < page.last:",
        "if False:",
        _WAITING + "test_a_follower_far_behind_reads_on_at_once_and_waits_at_the_end",
    ),
    Mutant(
        "a-follower-reads-on-at-the-end-of-the-feed",
        "api.routes.events:goes_on",
        "page.next < page.last",
        "page.next <= page.last",
        _WAITING + "test_a_follower_far_behind_reads_on_at_once_and_waits_at_the_end",
        also=(("start <", "-1 <"),),
    ),
    Mutant(
        "a-follower-reads-on-while-the-feed-is-in-doubt",
        "api.routes.events:goes_on",
        "start < page.next",
        "start <= page.next",
        _WAITING + "test_a_follower_far_behind_waits_while_the_feed_is_in_doubt",
    ),
    Mutant(
        "a-long-poll-far-behind-has-no-end",
        "api.routes.events:goes_on",
        "return time.monotonic() < until",
        "return True",
        _WAITING + "test_a_long_poll_far_behind_ends_with_its_time",
    ),
    Mutant(
        "a-poll-behind-is-followed-by-a-pause",
        "lastbit._calls:poll_forever",
        "and not (start != after < last)",
        "",
        _SDK + "test_events.py::test_a_poll_that_ended_before_the_end_of_the_feed_is_continued_at_once",
    ),
    Mutant("the-head-is-not-locked", "core.feed:_lock", "HEAD + dialects.of(tx).for_update()", "HEAD", _FOLLOW),
    Mutant(
        "the-feed-is-read-without-a-snapshot",
        "core.service.feed:FeedService.read",
        "self._database.snapshot(",
        "self._database.read(",
        _FOLLOW,
    ),
    Mutant(
        "a-completion-makes-no-event",
        "core.acks.completion:_announce",
        "new += batches.events(",
        "[] + batches.events(",
        _MACHINE,
    ),
    Mutant(
        "trimmed-events-are-a-gap",
        "core.feed:_checked",
        "after < trimmed",
        "False",
        "test_feed.py::test_a_reader_of_trimmed_positions_gets_an_error",
    ),
    # Nested batches.
    Mutant(
        "a-held-item-is-acked",
        "core.acks.flush:flush",
        "if state.held and not unit.call.pays:",
        "if False:",
        "test_nesting.py::test_an_item_is_held_from_the_open_of_its_child_until_its_end",
    ),
    Mutant(
        "an-open-child-is-not-counted",
        "core.batches.writing:_insert",
        "if parent_columns:",
        "if False:",
        "test_nesting.py::test_an_item_is_held_from_the_open_of_its_child_until_its_end",
    ),
    Mutant(
        "a-batch-that-became-a-parent-is-not-noticed",
        "core.acks.completion:write",
        "row.journal_next or row.children",
        "row.journal_next",
        _GROWING + "test_an_item_is_held_though_its_child_was_opened_while_a_bulk_ack_waited",
    ),
    Mutant(
        "children-are-looked-for-before-the-parent-is-locked",
        "core.acks.flush:_begin",
        "completion.select(tx, state.seen, locking)",
        "completion.select(tx, state.seen)",
        _GROWING + "test_an_item_is_held_though_its_child_was_opened_while_a_bulk_ack_waited",
    ),
    Mutant(
        "a-child-that-has-ended-holds-nothing",
        "core.batches.nesting:holders",
        "(*sorted(LIVE), *Verb)",
        "sorted(LIVE)",
        "test_nesting.py::test_an_item_is_held_until_its_ended_child_has_resolved_it",
    ),
    Mutant(
        "a-paid-debt-holds-the-item",
        "core.acks.apply:_is_final",
        "return holder == Verb.FAIL",
        "return False",
        _RESOLVED_ITEM,
    ),
    Mutant(
        "a-failed-item-is-final-though-its-child-was-redriven",
        "core.acks.apply:_is_final",
        "return holder == Verb.FAIL",
        "return True",
        _RESOLVED_ITEM,
    ),
    Mutant(
        "a-child-holds-its-item-against-itself",
        "core.acks.parents:payment",
        "call.pays = True",
        "pass",
        "test_nesting.py::test_a_childs_end_resolves_its_item_in_the_parent",
    ),
    Mutant(
        "a-held-item-alarms-people",
        "lastbit.integrations._resolving:level_of",
        'getattr(rejection, "reason", None) == HELD',
        "False",
        _QUEUES + "test_settler.py::test_the_message_of_a_held_item_is_removed",
    ),
    Mutant(
        "held-bits-of-a-mask-are-listed-as-one",
        "core.acks.apply:withhold",
        "count=bits",
        "count=1",
        "test_nesting.py::test_held_items_of_a_mask_are_counted_by_group",
    ),
    Mutant(
        "a-childs-end-notifies-its-process-only",
        "core.acks.parents:sweep",
        "until is None or time.monotonic() < until",
        "False",
        _TREE,
    ),
    Mutant(
        "a-childs-payment-is-skipped",
        "core.acks.parents:Payer._pay_level",
        "= pay(",
        "= (lambda *_: PaymentResult())(",
        "test_nesting.py::test_a_childs_end_resolves_its_item_in_the_parent",
    ),
    Mutant(
        "a-flush-waits-for-payments",
        "core.service.acks:AckService._commit",
        "outcome.paid = payments.get(unit.batch)",
        "payments[unit.batch].result()",
        _LOCKED_PARENT,
    ),
    Mutant(
        "a-call-is-answered-before-its-parent-is-paid",
        "core.service.acks:AckService._commit",
        "outcome.paid = payments.get(unit.batch)",
        "pass",
        _LOCKED_PARENT,
    ),
    Mutant(
        "a-call-waits-for-a-locked-parent-without-end",
        "core.acks.parents:Payer._pay_level",
        "time.monotonic() >= bill.until",
        "False",
        _PAYMENTS + "test_a_call_whose_parent_stays_locked_is_answered_and_the_sweep_pays",
    ),
    Mutant(
        "a-sweep-tries-locked-parents-again-and-again",
        "core.acks.parents:sweep",
        "stuck_parents.add({due.item.batch for due in remaining})",
        "pass",
        _PAYMENTS + "test_a_call_whose_parent_stays_locked_is_answered_and_the_sweep_pays",
    ),
    Mutant(
        "locked-parents-are-found-one-by-one",
        "core.acks.commit:commit",
        "database.read(locked, units)",
        "frozenset()",
        _PAYMENTS + "test_a_call_whose_parent_stays_locked_is_answered_and_the_sweep_pays",
    ),
    Mutant(
        "a-round-begins-with-the-sweep",
        "core.dispatcher:Dispatcher._round",
        "self._due_times.correct(CORRECT)",
        "self._due_times.correct(CORRECT)\n    parents.sweep(self._database, stuck_parents=self._stuck, seconds=SWEEP)",
        "test_webhooks.py::test_a_round_sends_and_fires_before_it_waits_for_a_locked_parent",
    ),
    Mutant(
        "a-child-that-failed-acks-its-parent",
        "core.batches.nesting:owed",
        "if succeeded else Verb.FAIL",
        "",
        "test_nesting.py::test_a_childs_end_resolves_its_item_in_the_parent",
    ),
    Mutant(
        "a-resolved-item-gets-a-child",
        "core.batches.nesting:adopt",
        "    if resolved:",
        "    if False:",
        "test_nesting.py::test_an_open_for_an_item_that_can_have_no_child_is_refused",
    ),
    Mutant(
        "a-parent-with-live-children-is-idle",
        "core.batches.nesting:has_live_children",
        "is not None",
        "is not None and False",
        "test_nesting.py::test_a_parent_with_live_children_is_not_idle",
    ),
    Mutant(
        "every-payment-clears-every-debt",
        "core.batches.nesting:strike_out",
        "_batches.id.in_(children), _batches.parent_due == verb",
        "_batches.id.in_(children)",
        "test_nesting.py::test_a_late_payment_of_a_failure_does_not_undo_the_redrive",
    ),
    # Tallies.
    Mutant(
        "the-guards-message-counts-again",
        "core.tallies:_advance",
        "position > guard",
        "position >= guard",
        _WORLDS,
    ),
    Mutant(
        "siblings-of-a-flat-map-are-repeats",
        "core.tallies:_advance",
        "position = offset, child",
        "position = offset, 0",
        _WORLDS,
        # Without this, two siblings in one call would be refused, and the test would see nothing else.
        also=(("deltas[position] != delta", "False"),),
    ),
    Mutant(
        "one-guard-for-all-sources",
        "core.tallies:_by_counter",
        _COUNTER,
        'counter = (tally, key, "", 0, 0)',
        _WORLDS,
    ),
    Mutant(
        "a-guard-starts-over-when-the-source-changes",
        "core.tallies:_advance",
        "start, value = before",
        "start, value = before\n"
        "    first = entries[places[0]]\n"
        "    last = globals().setdefault('last_source_of', {})\n"
        "    if last.setdefault(first.key, first[2:5]) != first[2:5]:\n"
        "        start = _EMPTY[0]\n"
        "    last[first.key] = first[2:5]",
        _WORLDS,
    ),
    Mutant(
        "generations-are-one-source",
        "core.tallies:_by_counter",
        _COUNTER,
        "counter = (tally, key, topic, partition, 0)",
        _WORLDS,
    ),
    Mutant(
        "a-buffer-adds-deltas-up",
        "lastbit.tallies.buffer:Gatherer.take",
        "entries += message.entries",
        "entries += message.entries\n"
        "        sums = {}\n"
        "        for each in entries:\n"
        "            name = (each['key'], *map(each['source'].get, ('topic', 'partition', 'generation')))\n"
        "            sums[name] = each | {'delta': each['delta'] + sums.get(name, {'delta': 0})['delta']}\n"
        "        entries = list(sums.values())",
        _WORLDS,
    ),
    Mutant(
        "a-buffer-acks-unanswered-messages",
        "lastbit.tallies.buffer:TallyBuffer._work",
        "if call.entries:",
        "self._ack(call)\n            call = call._replace(acks=[])\n            if call.entries:",
        _BUFFER,
    ),
    Mutant("sub-counters-are-not-locked", "core.tallies:_select", ' + dialect.lock_looked_up("tallies")', "", _WRITERS),
    Mutant(
        "a-new-sub-counter-overwrites-anothers",
        "core.tallies:_write",
        '",".join(part) for part in packets(new)',
        '",".join(part) + upsert for part in packets(new)',
        "test_tallies.py::test_two_calls_that_create_the_same_sub_counter_both_count",
    ),
    Mutant(
        "a-call-is-applied-in-parts",
        "core.tallies:_write",
        'pipeline.later(*(_INSERT + ",".join(part) + upsert for part in packets(old)))',
        'pipeline.later(*(_INSERT + ",".join(part) + upsert for part in packets(old)), "COMMIT")',
        "test_tallies.py::test_a_call_that_dies_at_any_point_is_stored_completely_or_not_at_all",
    ),
    Mutant(
        "a-broken-order-is-a-repeat",
        "core.tallies:_advance",
        "if position not in deltas:",
        "if position not in deltas:\n                continue\n            if False:",
        "test_tallies.py::test_a_message_out_of_order_is_refused",
    ),
    Mutant(
        "a-refused-call-leaves-some-entries",
        "core.tallies:_judge",
        "steps: dict[_Counter, _Row] = {}",
        "steps = after",
        _WRITES + "test_a_refused_call_of_tally_entries_changes_nothing_and_affects_no_neighbour",
    ),
    Mutant(
        "a-call-beyond-the-limit-is-written",
        "core.tallies:write",
        'pipeline.later("ROLLBACK TO SAVEPOINT tallies")',
        "pass",
        _WRITES + "test_of_calls_that_together_pass_the_limit_of_a_total_only_the_last_is_refused",
    ),
    # Consumer groups.
    Mutant(
        "a-shared-commit-forgets-the-one-before-it",
        "core.consumer_groups.positions:Commits.write",
        "position = stored[place] = _merged(",
        "position = _merged(",
        _WRITES + "test_commits_of_positions_share_a_transaction_and_a_stale_one_changes_nothing",
    ),
    Mutant(
        "a-refused-position-refuses-its-neighbours",
        "core.consumer_groups.positions:Commits.write",
        "if fence in refused:\n            outcomes.append(refused[fence])",
        "if refused:\n            outcomes.append(next(iter(refused.values())))",
        _WRITES + "test_commits_of_positions_share_a_transaction_and_a_stale_one_changes_nothing",
    ),
    Mutant(
        "a-few-large-calls-that-wait-long-are-an-overload",
        "core.commits.lanes:Lane._admitted",
        "wait if self.waiting_calls > LEAST else 0.0",
        "wait",
        "test_admission.py::test_a_few_large_calls_that_wait_long_are_no_overload",
    ),
    Mutant(
        "the-units-of-a-call-are-taken-for-a-crowd",
        "core.commits.lanes:Lane._admitted",
        "self.waiting_calls > LEAST",
        "self.waiting > LEAST",
        "test_admission.py::test_a_call_for_many_batches_is_no_crowd",
    ),
    Mutant(
        "a-flush-tries-each-unit-that-does-not-fit",
        "core.commits.lanes:Lane.take",
        "len(passed_over) < PASSED_OVER",
        "True",
        _COMBINER + "test_a_flush_tries_few_units_that_do_not_fit",
    ),
    Mutant(
        "the-last-piece-has-a-size-of-its-own",
        "core.acks.call:Unit.take",
        "self.size if self.is_empty() else min(piece.size, self.size)",
        "min(piece.size, self.size)",
        _COMBINER + "test_nothing_waits_when_all_is_answered",
    ),
    Mutant(
        "a-call-of-many-handlings-has-one-outcome",
        "core.writes:flush",
        "Done([outcomes[handle] for handle in call.handles])",
        "Done([outcomes[call.handles[0]] for handle in call.handles])",
        _WRITES + "test_each_handling_of_a_call_of_many_has_an_outcome_of_its_own",
    ),
    Mutant(
        "an-entry-that-is-refused-for-now-is-not-tried-again",
        "lastbit.processes._lane:Lane._send",
        "must_pause = True",
        "task.is_over = True",
        _SDK + "test_processes.py::test_an_entry_that_is_refused_for_now_is_tried_again",
    ),
    Mutant(
        "one-stale-position-refuses-the-call",
        "api.routes.consumer_groups:many",
        "isinstance(result, ConsumerGroupNotFound)",
        "isinstance(result, CoreError)",
        "../http/test_consumer_groups.py::test_many_positions_are_committed_with_one_call",
    ),
    Mutant(
        "a-new-session-keeps-the-epochs",
        "core.consumer_groups.leases:sync",
        "acquired = acquired + kept",
        "pass",
        "test_consumer_groups.py::test_a_worker_restarted_under_its_name_fences_its_zombie",
    ),
    Mutant(
        "a-new-owner-keeps-the-epoch",
        "core.consumer_groups.leases:sync",
        "_positions.epoch + 1",
        "_positions.epoch + 0",
        "test_consumer_groups.py::test_each_partition_has_one_owner_and_assignments_settle",
    ),
    Mutant(
        "the-fence-asks-for-the-epoch-alone",
        "core.consumer_groups.positions:lock",
        "(fence.worker, fence.epoch)",
        "(owners.get((fence.group, fence.partition), [fence.worker])[0], fence.epoch)",
        "test_consumer_groups.py::test_a_worker_whose_partition_is_free_may_not_write",
    ),
    Mutant(
        "the-fence-asks-for-the-owner-alone",
        "core.consumer_groups.positions:lock",
        "(fence.worker, fence.epoch)",
        "(fence.worker, owners.get((fence.group, fence.partition), [fence.epoch])[-1])",
        "test_consumer_groups.py::test_a_worker_restarted_under_its_name_fences_its_zombie",
    ),
    Mutant(
        "the-fence-locks-nothing",
        "core.consumer_groups.positions:lock",
        "{dialect.for_update()}",
        "",
        "test_consumer_groups.py::test_a_commit_reaches_the_next_owner_or_is_refused",
    ),
    Mutant(
        "a-sync-does-not-lock-its-group",
        "core.consumer_groups.groups:find",
        "query.with_for_update() if locked else query",
        "query",
        "test_consumer_groups.py::test_azure_python_38812_the_first_create_makes_no_two_owners",
    ),
    Mutant(
        "the-clock-is-read-before-the-lock",
        "core.consumer_groups.leases:sync",
        "group = groups.lock(tx, name)\n    now = tables.clock(tx)",
        "now = tables.clock(tx)\n    group = groups.lock(tx, name)",
        "test_consumer_groups.py::test_a_sync_uses_the_time_after_its_lock_wait",
    ),
    Mutant(
        "the-larger-share-goes-to-newcomers",
        "core.consumer_groups.shares:targets",
        "-holding[worker]",
        "holding[worker]",
        "test_consumer_groups.py::test_a_worker_that_joins_takes_its_share_and_nothing_else_moves",
    ),
    Mutant(
        "a-newcomer-that-holds-nothing-is-not-counted",
        "core.consumer_groups.leases:_look",
        "dict.fromkeys(live, 0)",
        "dict.fromkeys(sorted(live), 0)",
        "test_consumer_groups.py::test_azure_js_6945_a_newcomer_that_holds_nothing_is_seen",
        also=(
            (
                "    return partitions",
                "    partitions.holding = {w: n for w, n in partitions.holding.items() if n or w == caller.worker}\n"
                "    return partitions",
            ),
        ),
    ),
    Mutant(
        "a-live-owner-may-drain-forever",
        "core.consumer_groups.leases:_look",
        "elif release_by <= now:",
        "elif False:",
        "test_consumer_groups.py::test_kcl_1718_1765_no_hand_over_gets_stuck",
    ),
    Mutant(
        "a-release-ends-before-the-lease-that-the-owner-knows-of",
        "core.consumer_groups.leases:sync",
        "release_by=max(now + group.release, min(before.lease_until, now + group.ttl))",
        "release_by=now + group.release",
        "test_memberships.py::test_no_two_workers_believe_that_they_own_a_partition",
    ),
    Mutant(
        "a-drain-counts-from-the-response-that-arrived",
        "lastbit.streams._membership:Membership._answered",
        "asked_since + answer.release_within",
        "sync.sent + answer.release_within",
        _SDK + "test_membership.py::test_a_drain_whose_request_was_lost_has_the_time_that_the_service_gives",
    ),
    Mutant(
        "a-sync-that-failed-is-not-handled-any-more",
        "lastbit.streams._membership:Membership._answered",
        "sync.sent if self._now() < self._late_until else math.inf",
        "math.inf",
        _SDK + "test_membership.py::test_a_drain_counts_from_the_response_before_if_a_sync_has_failed",
    ),
    Mutant(
        "each-sync-postpones-the-release",
        "core.consumer_groups.leases:_look",
        " and release_by > deadline",
        "",
        "test_consumer_groups.py::test_a_release_is_repeated_until_it_is_drained_and_keeps_its_deadline",
    ),
    Mutant(
        "any-worker-may-report-a-partition-as-drained",
        "core.consumer_groups.leases:_look",
        "elif owner not in partitions.holding:",
        "elif owner not in partitions.holding or any(number == each for each, _ in drained):",
        "test_consumer_groups.py::test_kafka_12984_no_two_members_claim_a_partition_in_one_generation",
    ),
    Mutant(
        "leases-outlast-a-clock-that-jumped-back",
        "core.consumer_groups.leases:_clamp_leases",
        "tx.execute(",
        "str(",
        "test_consumer_groups.py::test_a_clock_that_jumps_back_makes_no_worker_wait_longer",
    ),
    Mutant(
        "a-zombie-takes-its-name-back",
        "core.consumer_groups.leases:sync",
        "caller.session in before.replaced.split()",
        "False",
        "test_consumer_groups.py::test_a_worker_restarted_under_its_name_fences_its_zombie",
    ),
    Mutant(
        "a-zombies-zombie-takes-the-name",
        "core.consumer_groups.leases:_renew",
        "[before.session, *before.replaced.split()]",
        "[before.session]",
        "test_consumer_groups.py::test_a_worker_restarted_under_its_name_fences_its_zombie",
    ),
    Mutant(
        "after-an-outage-the-first-takes-it-all",
        "core.consumer_groups.leases:_gone",
        "before is not None and before.lease_until < now",
        "False",
        "test_consumer_groups.py::test_nothing_moves_when_all_workers_were_cut_off_and_return",
    ),
    Mutant(
        "an-always-late-worker-spares-dead-ones",
        "core.consumer_groups.leases:_gone",
        " and row.last_seen + group.ttl >= before.last_seen",
        "",
        "test_consumer_groups.py::test_a_worker_that_is_always_late_spares_a_dead_worker_only_once",
    ),
    Mutant(
        "a-group-that-is-created-again-starts-over",
        "core.consumer_groups.groups:put",
        "0 if row is None else row.first_epoch",
        "0",
        "test_consumer_groups.py::test_a_recreated_group_starts_above_the_earlier_groups_epochs",
    ),
    Mutant(
        "a-group-in-which-nobody-worked-is-taken-for-the-next-one",
        "core.consumer_groups.groups:delete",
        "last + 1",
        "last",
        "test_consumer_groups.py::test_each_group_of_a_name_has_an_incarnation_of_its_own",
    ),
    Mutant(
        "a-group-that-a-failover-lost-is-taken-for-the-next-one",
        "core.consumer_groups.groups:_group",
        "-{row.created_at:%Y%m%d%H%M%S%f}",
        "",
        "test_consumer_groups.py::test_each_group_of_a_name_has_an_incarnation_of_its_own",
    ),
    Mutant(
        "a-commit-reaches-the-next-group-of-its-name",
        "core.consumer_groups.groups:put",
        "0 if row is None else row.first_epoch",
        "0",
        "test_consumer_groups.py::test_no_commit_of_a_deleted_groups_worker_reaches_the_next_group_of_its_name",
    ),
    Mutant(
        "a-report-about-a-deleted-group-ends-its-worker",
        "core.consumer_groups.leases:sync",
        " and not is_of_deleted_group",
        "",
        "../http/test_consumer_groups.py::test_reports_of_drained_partitions_of_a_deleted_group_are_ignored",
    ),
    Mutant(
        "a-worker-works-in-another-group-of-the-name",
        "lastbit.streams._membership:Membership._identified",
        "self._incarnation not in {None, answer.incarnation}",
        "False",
        _SDK + "test_groups.py::test_a_group_that_is_created_again_ends_its_workers",
    ),
    Mutant(
        "a-worker-keeps-what-it-had-of-another-group",
        "lastbit.streams._membership:Membership._identified",
        "self._lose_all()",
        "pass",
        _SDK + "test_membership.py::test_a_worker_that_follows_a_name_loses_what_it_had_of_the_earlier_group",
    ),
    Mutant(
        "a-worker-joins-a-group-that-is-divided-otherwise",
        "lastbit.streams._membership:Membership._identified",
        "self._partitions not in {None, answer.partitions}",
        "False",
        _SDK + "test_groups.py::test_a_worker_does_not_join_a_group_that_is_divided_otherwise",
    ),
    Mutant(
        "a-late-commit-overwrites",
        "core.consumer_groups.positions:_merged",
        "snapshot if earlier is None else earlier.merge(snapshot)",
        "snapshot",
        "test_consumer_groups.py::test_commits_may_be_repeated_and_overtaken",
    ),
    Mutant(
        "a-replica-claims-anothers-deliveries",
        "core.webhooks.deliveries:_shared",
        "partitions is None or",
        "True or",
        "test_webhooks.py::test_replicas_share_due_deliveries",
    ),
    Mutant(
        "a-dead-replicas-deliveries-wait-for-its-lease",
        "core.webhooks.deliveries:_shared",
        "sa.or_(ours, _deliveries.due_at <= tables.clock(tx) - OVERDUE)",
        "ours",
        "test_webhooks.py::test_no_delivery_waits_for_a_replica_that_is_dead",
    ),
    Mutant(
        "a-merged-claim-takes-what-another-has-claimed",
        "core.webhooks.deliveries:claim",
        " AND due_at <= {dialects.of(tx).now}",
        "",
        _DELIVERIES + "test_concurrent_claims_never_overlap",
    ),
    Mutant(
        "a-merged-record-settles-anothers-claim",
        "core.webhooks.deliveries:record",
        "token != claim.token",
        "False",
        _DELIVERIES + "test_results_that_share_a_transaction_count_as_if_alone",
    ),
    Mutant(
        "a-record-reads-tokens-without-a-lock",
        "core.webhooks.deliveries:_lock",
        "ORDER BY id{dialect.for_update()}",
        "ORDER BY id",
        _DELIVERIES + "test_a_record_waits_for_a_claim_that_is_about_to_commit",
    ),
    Mutant(
        "a-quick-receiver-gets-every-thread",
        "core.dispatcher:Dispatcher._take",
        "free > self._threads // 2",
        "True",
        _DELIVERIES + "test_a_quick_receiver_gets_half_of_the_threads",
    ),
    Mutant(
        "a-claim-is-sent-however-long-it-has-waited",
        "core.dispatcher:Dispatcher._take",
        "time.monotonic() - since < PATIENCE",
        "True",
        _DELIVERIES + "test_a_claim_that_has_waited_too_long_is_not_sent",
    ),
    Mutant(
        "a-locked-webhook-delays-all",
        "core.webhooks.deliveries:plan",
        "skip_locked=True",
        "",
        _DELIVERIES + "test_a_locked_webhook_or_timer_does_not_delay_others",
    ),
    Mutant(
        "a-locked-timer-delays-everything",
        "core.processes.timers:_fire",
        "skip_locked=True",
        "",
        _DELIVERIES + "test_a_locked_webhook_or_timer_does_not_delay_others",
    ),
    Mutant(
        "an-open-connection-leads-to-any-address",
        "senders.connection:Kept.take",
        " and connection.address in addresses",
        "",
        "../http/test_sender.py::test_an_open_connection_to_an_address_that_the_host_has_no_more_is_not_used",
    ),
    Mutant(
        "events-are-appended-whatever-the-fence",
        "core.writes:flush",
        "{operation: operation.fence for operation in fenced if operation.fence is not None}",
        "{}",
        "test_consumer_groups.py::test_a_worker_that_was_frozen_past_its_lease_wakes_and_writes_nothing",
    ),
    Mutant(
        "the-position-of-the-callbacks-is-waited-for",
        "core.webhooks.callbacks:plan",
        "skip_locked=True",
        "skip_locked=False",
        _DELIVERIES + "test_a_locked_delivery_or_callback_does_not_delay_others",
    ),
    Mutant(
        "a-claim-waits-for-a-locked-delivery",
        "core.webhooks.deliveries:claim",
        "skip_locked=True",
        "skip_locked=False",
        _DELIVERIES + "test_a_locked_delivery_or_callback_does_not_delay_others",
    ),
    Mutant(
        "a-start-waits-for-a-locked-delivery",
        "core.webhooks.due_times:DueTimes._bring_closer",
        "skip_locked=True",
        "skip_locked=False",
        _DELIVERIES + "test_a_locked_delivery_or_callback_does_not_delay_others",
    ),
    Mutant(
        "deliveries-to-a-hanging-host-are-never-postponed",
        "core.dispatcher:Dispatcher._round",
        "self._postpone()",
        "pass",
        "test_callbacks.py::test_a_hanging_host_has_few_due_deliveries",
    ),
    Mutant(
        "a-claimed-delivery-is-postponed",
        "core.webhooks.deliveries:postpone",
        "_deliveries.token.is_(None)",
        "sa.true()",
        "test_callbacks.py::test_deliveries_to_a_slow_host_are_postponed",
        also=((" AND token IS NULL", ""),),
    ),
    Mutant(
        "deliveries-to-all-hosts-are-postponed",
        "core.webhooks.deliveries:postpone",
        "_webhooks.lane == lane",
        "sa.true()",
        "test_callbacks.py::test_deliveries_to_a_slow_host_are_postponed",
    ),
    Mutant(
        "a-dispatcher-shortens-the-claims-of-others",
        "core.webhooks.due_times:DueTimes._longest_wait",
        "lease_of(row.token)",
        "timedelta(seconds=60)",
        _DELIVERIES + "test_a_claim_has_the_lease_of_its_own_dispatcher",
    ),
    Mutant(
        "the-claims-of-earlier-releases-are-shortened",
        "core.webhooks.deliveries:lease_of",
        "return UNKNOWN_LEASE",
        "pass",
        _DELIVERIES + "test_a_claim_of_an_earlier_release_has_its_longest_lease",
    ),
    Mutant(
        "a-locked-delivery-stays-far-in-the-future",
        "core.webhooks.due_times:DueTimes.correct",
        "self._were_locked |= corrected < len(part)",
        "pass",
        _DELIVERIES + "test_a_locked_delivery_or_callback_does_not_delay_others",
    ),
    Mutant(
        "whose-a-batch-is-stays-in-the-cache",
        "core.service.batch_facts:BatchFacts._clear",
        "self._facts = {}",
        "pass",
        "test_cache.py::test_whose_a_batch_is_is_read_again_when_a_connection_breaks",
    ),
    Mutant(
        "whose-a-batch-was-is-put-into-the-cache",
        "core.service.batch_facts:BatchFacts.get",
        "cache |= rows",
        "self._facts |= rows",
        "test_cache.py::test_whose_a_batch_is_is_read_again_when_a_connection_breaks",
    ),
    # Process managers.
    Mutant(
        "commands-go-while-their-events-are-kept",
        "core.processes.retention:_gone",
        "return trimmed if first is None else min(trimmed, first - 1)",
        "return trimmed",
        _PROCESSES + "test_commands_of_a_deleted_process_are_removed_with_their_events",
    ),
    Mutant(
        "commands-go-though-their-instances-are-there",
        "core.processes.retention:_remove_orphans",
        "if row.instance is None",
        "if True",
        _PROCESSES + "test_commands_of_a_deleted_process_are_removed_with_their_events",
    ),
    Mutant(
        "the-group-of-a-process-is-taken-for-a-clients",
        "core.processes.definitions:_remove_group_of_client",
        ".first() is not None",
        ".first() is True",
        _PROCESSES + "test_a_process_that_is_being_defined_twice_is_defined_once",
    ),
    Mutant(
        "a-sweep-removes-rows-of-a-process-that-was-defined-again",
        "core.processes.definitions:_remove",
        "if not _lock(tx, name, deleted=True):",
        "if False:",
        _PROCESSES + "test_a_sweep_that_was_delayed_spares_the_process_that_was_defined_again",
    ),
    Mutant(
        "a-process-that-was-deleted-meanwhile-can-not-be-defined",
        "core.processes.definitions:define",
        "raise faults.BeginAgain from None  # it was deleted since its row was read",
        "raise",
        _PROCESSES + "test_a_process_that_is_deleted_while_it_is_defined_is_defined_anew",
    ),
    Mutant(
        "a-handling-is-refused-by-the-group-of-its-deleted-process",
        "core.processes.handling:Handlings.apply",
        "isinstance(refusal, errors.ConsumerGroupNotFound)",
        "False",
        _PROCESSES + "test_an_event_handled_while_its_process_is_deleted_is_of_no_process",
    ),
    Mutant(
        "a-deleted-process-is-removed-in-one-transaction",
        "core.processes.definitions:_remove",
        ".limit(CHUNK)",
        "",
        _PROCESSES + "test_the_rows_of_a_deleted_process_are_removed_in_small_transactions",
    ),
    Mutant(
        "a-process-that-was-defined-again-is-pruned-like-the-earlier-one",
        "core.processes.definitions:_remove_pruned",
        "row.pruned",
        "2**53",
        _PROCESSES + "test_a_pruning_that_was_delayed_spares_the_process_that_was_defined_again",
    ),
    Mutant(
        "a-process-without-its-consumer-group-begins-with-trimmed-events",
        "core.processes.definitions:all_of",
        "max(row.pruned, trimmed)",
        "row.pruned",
        _PROCESSES + "test_a_process_whose_consumer_group_was_deleted_continues_above_the_trimmed_events",
    ),
    Mutant(
        "a-process-is-past-events-that-do-not-exist-yet",
        "core.consumer_groups.positions:Commits.write",
        "commit.snapshot.high > end",
        "False",
        _PROCESSES + "test_a_worker_that_has_read_lost_events_commits_no_position_beyond_the_feeds_end",
    ),
    Mutant(
        "a-group-named-like-that-of-a-process-is-one",
        "core.consumer_groups.positions:Commits.write",
        "feed_ends.get(fence.group)",
        "feed_ends.get(fence.group, 0)",
        _PROCESSES + "test_a_group_that_is_only_named_like_that_of_a_process_has_offsets_of_its_own",
    ),
    Mutant(
        "no-inbox",
        "core.processes.inbox:LockedEvents.status",
        "if status is not None:",
        "if False:",
        _PROCESSES + _ANY_ORDER,
    ),
    Mutant(
        "a-merged-handling-does-not-see-the-version-before-it",
        "core.processes.instances:LockedInstances.get",
        "self._changed.get((process, instance)) or ",
        "",
        _WRITES + "test_handlings_of_one_instance_take_place_in_their_order",
    ),
    Mutant(
        "a-merged-handling-does-not-see-the-event-before-it",
        "core.processes.inbox:LockedEvents._change",
        "self._statuses[key] = status",
        "pass",
        _WRITES + "test_handlings_of_one_instance_take_place_in_their_order",
    ),
    Mutant(
        "a-merged-handling-does-not-see-the-commands-before-it",
        "core.processes.outbox:Issues.issue",
        "self._issuers |= dict.fromkeys(new, event)",
        "pass",
        _WRITES + "test_handlings_of_one_instance_take_place_in_their_order",
    ),
    Mutant(
        "a-refused-handling-counts",
        "core.processes.handling:Handlings._judge",
        "else instance.version",
        "else instance.version; self._inbox.record(key, handling.position, inbox.Status.LATE)",
        _WRITES + "test_a_refused_handling_does_not_affect_its_neighbours",
    ),
    Mutant(
        "a-delete-trusts-an-early-look-at-the-process",
        "core.processes.definitions:delete",
        "if partitions_of(tx, name) is not None:",
        "if False:",
        _PROCESSES + "test_a_delete_that_was_overtaken_spares_the_process_that_was_defined_again",
    ),
    Mutant(
        "a-backlog-is-planned-ahead-of-its-receiver",
        "core.webhooks.deliveries:plan",
        " or _is_ahead(tx, webhook, row.position)",
        "",
        _DELIVERIES + "test_no_more_is_planned_for_a_receiver_that_is_far_behind",
    ),
    Mutant(
        "a-claimed-delivery-holds-planning-back",
        "core.webhooks.deliveries:_is_ahead",
        " and row.token is None",
        "",
        _DELIVERIES + "test_no_more_is_planned_for_a_receiver_that_is_far_behind",
    ),
    Mutant(
        "a-failed-delivery-holds-planning-back",
        "core.webhooks.deliveries:_is_ahead",
        " and not row.attempts",
        "",
        _DELIVERIES + "test_no_more_is_planned_for_a_receiver_that_is_far_behind",
    ),
    Mutant(
        "a-round-plans-a-whole-backlog",
        "core.dispatcher:Dispatcher._prepare",
        "if time.monotonic() >= until:",
        "if False:",
        _DELIVERIES + "test_a_backlog_is_prepared_in_turns",
    ),
    Mutant(
        "a-round-with-a-backlog-is-the-last",
        "core.dispatcher:Dispatcher._prepare",
        "return bool(plans) or",
        "return",
        _DELIVERIES + "test_a_round_with_something_left_to_plan_is_not_the_last",
    ),
    Mutant(
        "a-whole-backlog-is-read-under-the-feeds-lock",
        "core.feed:trim",
        "needed(tx, first_kept)",
        "needed(tx, None)",
        _DELIVERIES + "test_the_backlog_of_a_disabled_webhook_does_not_hold_the_feed",
    ),
    Mutant(
        "the-times-of-needed-events-are-read",
        "core.feed:_first_kept",
        "position + 1 if lowest is None else min(lowest, position + 1)",
        "position + 1",
        "test_feed.py::test_times_are_read_in_chunks_and_up_to_what_is_needed",
    ),
    Mutant(
        "due-times-are-corrected-all-at-once",
        "core.webhooks.due_times:DueTimes.correct",
        "chunks(late, PAGE)",
        "[late]",
        _DELIVERIES + "test_due_times_that_are_equal_are_corrected_by_short_transactions",
    ),
    Mutant(
        "one-round-empties-the-backlog-of-a-disabled-webhook",
        "core.dispatcher:Dispatcher._claim",
        "time.monotonic() >= until",
        "False",
        _DELIVERIES + "test_the_backlog_of_a_disabled_webhook_takes_many_rounds",
    ),
    Mutant(
        "a-round-forgets-that-it-left-a-backlog",
        "core.dispatcher:Dispatcher._claim",
        "max(count, 1)",
        "count",
        _DELIVERIES + "test_the_backlog_of_a_disabled_webhook_takes_many_rounds",
    ),
    Mutant(
        "all-due-times-are-looked-through-in-one-round",
        "core.webhooks.due_times:DueTimes.correct",
        "time.monotonic() >= until",
        "False",
        _DELIVERIES + "test_due_times_are_corrected_a_page_at_a_time",
    ),
    Mutant(
        "a-second-jump-of-the-clock-corrects-only-the-rest",
        "core.webhooks.due_times:DueTimes.correct",
        "self._looking, self._before, self._were_locked = True, None, False",
        "self._looking = True",
        _DELIVERIES + "test_all_due_times_are_looked_through_again_after_a_second_jump",
    ),
    Mutant(
        "a-page-of-due-times-ends-before-its-last",
        "core.webhooks.due_times:DueTimes._look",
        "_deliveries.due_at >= before",
        "_deliveries.due_at > before",
        _DELIVERIES + "test_due_times_are_corrected_a_page_at_a_time",
    ),
    Mutant(
        "debts-are-looked-for-along-all-batches",
        "core.batches.nesting:debts",
        "child = tables.without_index(_batches.id)",
        "child = _batches.id",
        "test_nesting.py::test_a_look_for_debts_does_not_read_all_batches",
    ),
    Mutant(
        "a-retry-does-not-hold-its-partition",
        "core.processes.instances:retry",
        "positions.hold(tx, definition.group, partition_of(instance, definition.partitions))",
        "pass",
        _PROCESSES + "test_no_event_is_parked_in_the_middle_of_a_retry",
    ),
    Mutant(
        "a-full-window-ends-the-worker",
        "lastbit.processes._partition:Partition.pass_over",
        "(WindowClosed, WindowFull)",
        "(WindowClosed)",
        _SDK + "test_processes.py::test_a_full_window_does_not_end_the_worker",
    ),
    Mutant(
        "an-event-is-acked-though-its-entry-was-refused",
        "lastbit.processes._lane:Lane._handle",
        "if task.is_over:",
        "if setattr(task, 'is_handled', True) is None:",
        _SDK + "test_processes.py::test_a_refused_entry_of_a_shared_call_does_not_delay_the_others",
    ),
    Mutant(
        "commands-get-the-positions-of-other-events",
        "core.writes:flush",
        "handlings.finish(position + len(events))",
        "handlings.finish(position)",
        _WRITES + "test_a_refused_handling_does_not_affect_its_neighbours",
    ),
    Mutant(
        "no-tombstone",
        "core.processes.handling:Handlings._judge",
        "instance.status is Status.FINISHED",
        "False",
        _PROCESSES + _LATE,
    ),
    Mutant(
        "a-tombstone-goes-before-its-late-events",
        "core.processes.retention:_handled_until",
        "tx.scalar(first) or ",
        "",
        _PROCESSES + "test_a_tombstone_stays_for_late_events_that_are_not_handled_yet",
    ),
    Mutant(
        "the-janitor-reads-the-clock-while-events-are-appended",
        "core.processes.retention:_handled_until",
        "feed.hold(tx)",
        "pass",
        _PROCESSES + "test_a_late_event_is_not_appended_while_the_janitor_reads_the_clock",
    ),
    Mutant(
        "the-janitor-removes-what-it-has-chosen",
        "core.processes.retention:_remove",
        "tx.scalars(locking).all() if candidates else []",
        "candidates",
        _PROCESSES + "test_two_janitors_spare_an_instance_that_was_started_again",
    ),
    Mutant(
        "the-janitor-locks-what-it-has-chosen-and-does-not-look-again",
        "core.processes.retention:_remove",
        "_processes.instance.in_(candidates), *has_ended)",
        "_processes.instance.in_(candidates), _processes.name == name)",
        _PROCESSES + "test_two_janitors_spare_an_instance_that_was_started_again",
    ),
    Mutant(
        "the-janitor-removes-commands-that-were-issued-again",
        "core.processes.retention:_remove_orphans",
        ", _outbox.position <= rows[-1].position",
        ", _outbox.position > 0",
        _PROCESSES + "test_two_janitors_spare_a_command_that_was_issued_again",
    ),
    Mutant(
        "an-instance-is-forgotten-with-its-parked-events",
        "core.processes.retention:_remove",
        "~unsettled, ",
        "",
        _PROCESSES + "test_an_instance_with_parked_events_is_not_removed",
    ),
    Mutant(
        "the-janitor-looks-for-one-chunk-among-some-finished-instances",
        "core.processes.retention:forget",
        "database.write_in_chunks(_remove, process.name, ended_by, start, end)",
        "database.write(_remove, process.name, ended_by, start, end)",
        _PROCESSES + "test_old_instances_are_found_among_any_number_of_finished_ones",
    ),
    Mutant(
        "commands-are-forgotten-while-the-feed-has-them",
        "core.processes.retention:_remove",
        ", ~in_the_feed",
        "",
        _PROCESSES + "test_an_instance_that_ended_long_ago_is_removed_with_its_commands",
    ),
    Mutant(
        "removed-commands-are-skipped-silently",
        "core.processes.outbox:read",
        "0 < after < trimmed",
        "False",
        _PROCESSES + "test_commands_can_be_pulled_while_the_feed_has_their_events",
    ),
    Mutant(
        "no-fence",
        "core.processes.handling:Handlings.apply",
        "if refusal is not None:",
        "if False:",
        _PROCESSES + "test_a_stale_workers_every_write_is_refused",
    ),
    Mutant(
        "a-fence-is-a-plain-read",
        "core.consumer_groups.positions:lock",
        "{dialect.for_update()}",
        "",
        _PROCESSES + "test_no_worker_takes_over_in_the_middle_of_anothers_transaction",
    ),
    Mutant(
        "a-call-for-many-succeeds-without-a-database",
        "api.routes.processes:handled_many",
        "if results and all(result.error is not None for result in results):",
        "if False:",
        _HTTP_PROCESSES + "test_a_call_for_many_is_a_503_while_the_database_is_away",
    ),
    Mutant(
        "a-call-for-many-that-was-applied-in-part-fails",
        "api.routes.processes:handled_many",
        "all(result.error",
        "any(result.error",
        _HTTP_PROCESSES + "test_a_call_for_many_that_was_applied_in_part_has_its_results",
    ),
    Mutant(
        "command-ids-are-random",
        "core.processes.outbox:command_id",
        "uuid.uuid5(NAMESPACE, json.dumps([process, instance, step]))",
        "uuid.uuid4()",
        _PROCESSES + "test_a_step_is_issued_once_though_the_function_issues_it_again",
    ),
    Mutant(
        "a-step-of-another-event-is-a-repeat",
        "core.processes.outbox:Issues.issue",
        "if issuer is not None and not command.once",
        "if False",
        _PROCESSES + _REUSED,
    ),
    Mutant(
        "the-event-that-issues-a-command-is-not-stored",
        "core.processes.outbox:Issues.write",
        "command.data, now, event)",
        "command.data, now, None)",
        _PROCESSES + _REUSED,
    ),
    Mutant(
        "a-refused-handling-counts-as-handled",
        "core.processes.handling:Handlings._judge",
        "issues = self._outbox.issue(",
        "self._inbox.record(key, handling.position, inbox.Status.HANDLED)\n    issues = self._outbox.issue(",
        _PROCESSES + _REUSED,
    ),
    Mutant(
        "a-refused-handling-issues-its-first-commands",
        "core.processes.outbox:Issues.issue",
        "new: dict[str, _New] = {}",
        "new = self._new",
        "test_writes.py::test_a_handling_that_reuses_a_step_issues_none_of_its_commands",
    ),
    Mutant(
        "two-commands-of-one-event-are-one",
        "core.processes.outbox:Issues.issue",
        " or id in new)",
        ")",
        _PROCESSES + "test_two_commands_of_one_event_have_steps_of_their_own",
    ),
    Mutant(
        "an-event-may-not-issue-its-step-again",
        "core.processes.outbox:Issues.issue",
        "issuer != event or ",
        "True or ",
        _PROCESSES + "test_a_process_that_is_deleted_and_defined_again_starts_over_and_issues_nothing_twice",
    ),
    Mutant(
        "steps-of-earlier-releases-are-refused",
        "core.processes.outbox:Issues.issue",
        "if issuer is not None and ",
        "if id in {*new, *self._issuers} and ",
        _PROCESSES + "test_a_step_that_an_earlier_release_issued_is_a_repeat",
    ),
    Mutant(
        "commands-of-one-type-share-a-step",
        "core.processes.outbox:step_of",
        'step = f"{type} {number} {event}"',
        'step = f"{type} {event}"',
        _PROCESSES + "test_a_command_without_a_step_has_one_of_its_own",
    ),
    Mutant(
        "workers-of-earlier-releases-issue-commands-again",
        "api.routes.processes:_commands",
        "command.step is None and not command.once",
        "command.step is None",
        _HTTP_PROCESSES + "test_a_command_without_a_step_is_issued_for_each_event_or_once",
    ),
    Mutant(
        "a-worker-swallows-commands",
        "lastbit.processes.definition:_decided",
        '"once": action.once',
        '"once": True',
        _SDK + "test_processes.py::test_each_event_gets_its_command",
    ),
    Mutant(
        "a-worker-parks-events-because-the-service-is-older",
        "lastbit.processes._lane:Lane._send",
        "BEYOND.fullmatch(place)",
        "place == 'body.event'",
        _SDK + "test_processes.py::test_a_worker_parks_nothing_because_the_service_is_older",
    ),
    Mutant(
        "the-inbox-is-pruned-to-the-highest-floor",
        "core.processes.definitions:floor",
        "sa.func.min(_positions.floor)",
        "sa.func.max(_positions.floor)",
        _PROCESSES + _PRUNED,
    ),
    Mutant(
        "pruned-events-are-handled-again",
        "core.processes.inbox:LockedEvents.status",
        "position <= limit",
        "False",
        _PROCESSES + _PRUNED,
    ),
    Mutant(
        "pruning-is-looked-up-before-the-inbox",
        "core.processes.inbox:LockedEvents.__init__",
        "dialect = dialects.of(tx)",
        'dialect = dialects.of(tx); before = pipeline.query("SELECT name, pruned FROM process_definitions")',
        _PROCESSES + "test_a_row_that_is_pruned_while_its_event_comes_again_is_not_missed",
        also=(("self._limits = [", "self._limits = before; unused = ["),),
    ),
    Mutant(
        "versions-are-ignored",
        "core.processes.handling:Handlings._judge",
        "handling.version != version",
        "False",
        _PROCESSES + "test_a_state_that_was_computed_from_an_old_one_is_refused",
    ),
    Mutant(
        "timers-fire-again",
        "core.processes.timers:_fire",
        "tx.execute(sa.delete(tables.timers).where(*conditions))",
        "pass",
        _PROCESSES + "test_a_time_out_fires_once_when_it_is_due_and_not_before",
    ),
    Mutant(
        "timers-outlive-their-instance",
        "core.processes.handling:Handlings._judge",
        "self._timers.cancel_all(handling.process, handling.instance)",
        "pass",
        _PROCESSES + "test_a_timer_is_replaced_and_cancelled_by_its_name",
    ),
    Mutant(
        "timers-fire-from-a-plain-look",
        "core.processes.timers:_fire",
        ".with_for_update(skip_locked=True)",
        "",
        _PROCESSES + "test_two_dispatchers_fire_each_timer_once",
    ),
    # The ancestor.
    Mutant(
        "an-ack-trusts-its-id",
        "core.acks.apply:FlushState.issued",
        "size if remaining >= size else remaining if remaining > 0 else 0",
        "size",
        _ANCESTOR + "test_an_ack_does_not_trust_its_id",
    ),
    Mutant(
        "a-batch-that-is-not-sealed-completes",
        "core.acks.completion:completes",
        "state is State.SEALED and ",
        "",
        _ANCESTOR + "test_an_open_batch_is_not_complete_though_every_item_so_far_is_acked",
    ),
    Mutant(
        "a-batch-that-is-being-acked-is-reaped",
        "core.acks.completion:_update",
        '[f"updated_at = {latest}(updated_at, {now})"]',
        '["updated_at = updated_at"]',
        _ANCESTOR + "test_a_batch_that_is_being_acked_is_not_reaped",
    ),
    Mutant(
        "a-batch-key-is-compared-as-the-server-likes",
        "core.batches.search:Filter.keys",
        "column == self.key",
        "sa.func.lower(sa.func.trim(column)) == self.key.lower().strip()",
        _ANCESTOR + "test_batch_keys_that_differ_in_case_or_blanks_are_different",
    ),
    Mutant(
        "a-few-batches-are-looked-for-along-all-ids",
        "core.batches.search:page",
        "tables.without_index(_table.id) if are_few else _table.id",
        "_table.id",
        _SEARCH + "test_the_children_of_an_old_batch_are_found_without_reading_newer_batches",
    ),
    Mutant(
        "a-page-ends-where-the-lookup-ended",
        "core.batches.search:page",
        "if span.batches <= most:",
        "if True:",
        _SEARCH + "test_batches_with_a_key_or_a_parent_are_found_however_many_there_are",
    ),
    Mutant(
        "a-worker-keeps-the-definition-of-an-earlier-process",
        "lastbit.processes.worker:ProcessWorker._defined_after",
        "self._defined is None or self._defined_since <= assigned",
        "self._defined is None",
        _SDK + "test_processes.py::test_a_worker_skips_no_event_of_a_process_that_was_defined_again",
    ),
    Mutant(
        "a-refused-commit-is-taken-as-stored",
        "lastbit.streams._commits:commit_many",
        "alone += [each for each, code in codes if code != STALE]",
        "pass",
        _SDK + "test_groups.py::test_a_commit_that_is_refused_for_another_reason_loses_no_partition",
    ),
    Mutant(
        "a-refused-epoch-is-never-accepted-again",
        "lastbit.streams._membership:Membership._take",
        " and sent <= refused_at",
        "",
        _SDK + "test_membership.py::"
        "test_a_partition_is_accepted_again_if_the_service_forgot_that_another_worker_had_it",
    ),
    Mutant(
        "an-outdated-response-returns-a-refused-partition",
        "lastbit.streams._membership:Membership._take",
        "epoch <= refused_epoch and sent <= refused_at",
        "False",
        _SDK + "test_membership.py::test_a_stale_epoch_is_not_accepted_from_an_earlier_sync",
    ),
    Mutant(
        "an-event-that-the-feed-has-lost-is-handled",
        "core.processes.inbox:LockedEvents.status",
        "(position, key[2]) not in self._present",
        "False",
        _PROCESSES + "test_an_event_that_the_feed_has_lost_has_no_effect",
    ),
    Mutant(
        "an-event-is-handled-in-place-of-the-one-at-its-position",
        "core.processes.inbox:LockedEvents.status",
        "(position, key[2]) not in self._present",
        "position not in {place for place, _ in self._present}",
        _PROCESSES + "test_an_event_that_the_feed_has_lost_has_no_effect",
    ),
    Mutant(
        "events-are-trimmed-before-they-are-handled",
        "core.janitor:needed",
        "definitions.needed(tx)",
        "None",
        _PROCESSES + "test_a_valid_event_is_not_trimmed_before_it_is_handled",
    ),
    Mutant(
        "a-worker-parks-an-event-that-the-feed-has-lost",
        "lastbit.processes._lane:Lane._send",
        "BEYOND.fullmatch(place)",
        "False",
        _SDK + "test_processes.py::test_a_worker_ends_when_the_feed_has_lost_its_event",
    ),
    Mutant(
        "a-worker-goes-on-though-its-position-is-refused",
        "lastbit.processes.worker:ProcessWorker._keep_floors",
        "if not error.is_temporary:",
        "if False:",
        _SDK + "test_processes.py::test_a_worker_ends_when_its_position_is_refused",
    ),
    Mutant(
        "a-retried-add-issues-new-ids",
        "core.batches.writing:_extend",
        "if before is not None:",
        "if False:",
        _ANCESTOR + "test_a_retried_add_issues_the_same_items_and_the_batch_ends",
    ),
    # Windows and their snapshots.
    Mutant(
        "the-floor-counts-what-was-tracked-and-not-acked",
        "lastbit.streams.window:AckWindow._floor",
        "self._offsets[self._first] - 1 if self._first < len(self._offsets) else self._high",
        "self._high",
        _WINDOW,
    ),
    Mutant(
        "offsets-outside-all-pieces-are-resolved",
        "lastbit.watermark:first_unresolved",
        "position < start or ",
        "",
        _STREAMS + "test_watermark.py::test_the_watermark_is_the_first_pending_position_and_never_goes_back",
    ),
    Mutant(
        "the-first-record-after-a-restore-is-skipped",
        "lastbit.streams.window:AckWindow.track",
        "if offset <= self._restored:",
        "if offset <= self._restored + 1:",
        _STREAMS + "test_window.py::test_parallel_consumer_62_the_first_record_after_a_restore_is_not_skipped",
    ),
    Mutant(
        "outstanding-offsets-are-not-handed-out-again",
        "lastbit.streams.window:AckWindow._track_again",
        "return True",
        "return False",
        _STREAMS + "test_window.py::test_parallel_consumer_62_the_first_record_after_a_restore_is_not_skipped",
    ),
    Mutant(
        "a-full-window-takes-more",
        "lastbit.streams.window:AckWindow.track",
        "if len(self._offsets) - self._first < self._capacity:",
        "if True:",
        _WINDOW,
    ),
    Mutant(
        "a-closed-window-takes-acks",
        "lastbit.streams.window:AckWindow.ack",
        "if self._closed:",
        "if False:",
        _STREAMS + "test_window.py::test_redpanda_connect_4477_a_late_ack_after_the_partition_was_revoked_is_refused",
    ),
    Mutant(
        "a-damaged-snapshot-skips-a-record",
        "lastbit.streams.snapshot:Snapshot.decode",
        "except _Damaged:\n        return cls(floor, floor)",
        "except _Damaged:\n        return cls(floor, floor + 1)",
        _SNAPSHOT + "test_a_damaged_snapshot_replays_and_never_skips",
    ),
    Mutant(
        "a-damaged-snapshot-is-believed",
        "lastbit.streams.snapshot:_decode_rest",
        " or _SUM.unpack_from(data, end)[0] != zlib.crc32(data[:end])",
        "",
        _SNAPSHOT + "test_a_damaged_snapshot_replays_and_never_skips",
    ),
    Mutant(
        "a-hostile-snapshot-is-not-bounded",
        "lastbit.streams.snapshot:_decode_rest",
        "offset > high or len(outstanding) == MAX_OUTSTANDING",
        "offset > high or len(outstanding) == 100 * MAX_OUTSTANDING",
        _SNAPSHOT + "test_a_hostile_snapshot_costs_no_memory_and_falls_back_to_its_floor",
    ),
    Mutant(
        "offsets-beyond-a-limit-count-as-done",
        "lastbit.streams.snapshot:Snapshot.within",
        "self.outstanding[count] - 1, ",
        "self.high, ",
        _STREAMS + "test_window.py::test_pulsar_25540_a_truncated_set_of_gaps_is_logged_and_replays",
    ),
    Mutant(
        "an-offset-is-narrowed-to-32-bits",
        "lastbit.streams.snapshot:_read_varint",
        "value |= (byte & 127) << shift",
        "value |= (byte & 127) << shift & 0xFFFFFFFF",
        _SNAPSHOT + "test_rocketmq_11180_no_offset_is_narrowed",
    ),
    Mutant(
        "a-merge-takes-the-bits-of-the-lower-one",
        "lastbit.streams.snapshot:Snapshot.merge",
        "for offset in top.outstanding if offset > low.high or offset in low_outstanding",
        "for offset in low.outstanding",
        _SNAPSHOT + "test_merging_is_a_join",
    ),
    # Ordered streams.
    Mutant(
        "a-record-is-acked-before-it-is-handled",
        "lastbit.streams.ordered:_Run._work",
        "self._handle(entry.record)",
        "self._window.ack(entry.position)\n                self._handle(entry.record)",
        _STREAMS + "test_ordered.py::test_a_record_is_outstanding_while_it_is_handled",
    ),
    Mutant(
        "a-record-that-failed-is-acked",
        "lastbit.streams.ordered:_Run._give_up",
        "raise failed(entry.offset, error) from error",
        "self._window.ack(entry.position)\n        raise failed(entry.offset, error) from error",
        _ORDERED + "test_after_any_failures_events_are_handled_in_order_and_only_outstanding_ones_again[in_threads]",
    ),
    Mutant(
        "records-of-a-key-go-to-any-lane",
        "lastbit.streams._progress:Progress.lane_of",
        "hash(self._options.key(record))",
        "(self._options.key(record), self.window.high)[1]",
        _DIES,
    ),
    Mutant(
        "a-lane-goes-on-behind-the-record-that-failed",
        "lastbit.streams.ordered:_Run._work",
        "raise failed(entry.offset, error) from error",
        "self._fail(error)",
        _ORDERED + "test_a_failing_handler_stops_the_stream_after_acked_records_are_committed[in_threads]",
        also=(
            ("self._give_up(entry, error)", "self._fail(failed(entry.offset, error))"),
            (" and self._failure is None", ""),
        ),
    ),
    Mutant(
        "filtered-records-hold-the-floor",
        "lastbit.streams.ordered:_Run._route",
        "self._window.ack(entry.position)",
        "pass",
        _ORDERED + "test_eventuous_142_ignored_events_do_not_block_the_floor[in_threads]",
    ),
    Mutant(
        "records-deleted-from-the-log-hold-the-floor",
        "lastbit.streams._awaited:Awaited.pass_to",
        "vanished < offset and self._window.ack(vanished)",
        "False",
        _ORDERED + "test_restored_offsets_missing_from_the_log_do_not_hold_the_floor[in_threads]",
    ),
    Mutant(
        "an-offset-is-committed-with-an-older-floor",
        "lastbit.streams._progress:Progress.due",
        "floor, offset = self._at_floor",
        "offset = self._at_floor[1]",
        _ORDERED + "test_an_ack_while_a_commit_is_computed_does_not_commit_an_opaque_offset_twice",
    ),
    Mutant(
        "the-end-is-not-committed",
        "lastbit.streams.ordered:_Run._commit_at_the_end",
        "due is None",
        "True",
        _ORDERED + "test_the_end_is_committed_and_no_commit_goes_back[in_threads]",
    ),
    Mutant(
        "a-cancelled-stream-commits-nothing",
        "lastbit.streams.ordered_async:_Run._commit_at_the_end",
        "due is None",
        "True",
        _ORDERED + "test_a_cancelled_stream_commits_acked_records",
    ),
    Mutant(
        "an-interrupt-at-the-end-skips-the-last-commit",
        "lastbit.streams.ordered:_Run.run",
        "self._fail(error)\n            self._wait_for_lanes()\n            self._end(committer)",
        "raise",
        _ORDERED + "test_an_interrupt_at_the_end_waits_for_the_commit_under_way_and_the_last_one",
    ),
    Mutant(
        "a-cancellation-at-the-end-skips-the-last-commit",
        "lastbit.streams.ordered_async:_Run.run",
        "asyncio.shield(end)",
        "end",
        _ORDERED + "test_a_cancellation_at_the_end_waits_for_the_commit_under_way_and_the_last_one",
    ),
    Mutant(
        # Equivalent from Python 3.12 on.
        "a-reader-loses-its-cancellation",
        "lastbit.streams.ordered_async:_set_within",
        "async with asyncio.timeout(seconds):\n            return await event.wait()",
        "return await asyncio.wait_for(event.wait(), seconds)",
        _ORDERED + "test_a_full_stream_ends_when_a_lane_fails_whenever_the_other_one_acks",
    ),
    # A cluster of servers.
    Mutant(
        "a-node-gets-a-transaction-in-one-packet",
        "core.storage.dialects.mariadb:MariaDB.run",
        "if galera.is_node(tx):",
        "if False:",
        _GALERA + "test_an_aborted_transaction_is_not_continued_by_its_next_statements",
    ),
    Mutant(
        "a-node-answers-by-what-it-has-applied",
        "core.storage.galera:prepare",
        "wsrep_sync_wait = {SYNC_WAIT}",
        "wsrep_sync_wait = 0",
        _GALERA + "test_an_ack_on_one_node_right_after_the_extend_on_another_is_not_refused",
    ),
    Mutant(
        "a-fence-is-locked-on-its-node-alone",
        "core.storage.galera:guard",
        "if not is_node(tx)",
        "if True",
        _GALERA + "test_a_partition_that_moves_on_one_node_takes_along_what_was_written_on_another",
    ),
    Mutant(
        "the-head-is-locked-on-its-node-alone",
        "core.storage.galera:guard",
        "if not is_node(tx)",
        "if column.name == 'trimmed'",
        _GALERA + "test_a_trim_that_has_judged_keeps_the_events_of_a_process_defined_on_another_node",
    ),
    Mutant(
        "a-group-is-locked-on-its-node-alone",
        "core.storage.galera:guard",
        "if not is_node(tx)",
        "if column.name == 'first_epoch'",
        _GALERA + "test_a_worker_that_has_judged_gets_no_partition_of_one_that_joined_on_another_node",
    ),
    Mutant(
        "a-lost-certification-may-have-been-committed",
        "core.storage.database:Database._judge",
        "committing and fault is errors.Fault.CONFLICT",
        "False",
        _GALERA + "test_a_failed_certification_is_retried_and_costs_no_connection",
    ),
    Mutant(
        "a-refusal-is-lost-in-a-reset",
        "api.server.lingering:LingeringTransport.close",
        "not self._owner.is_client_sending or",
        "True or",
        "../http/test_lingering.py::test_a_client_that_reads_late_gets_the_413",
    ),
    Mutant(
        "any-number-of-connections-lingers",
        "api.server.watchdog:Connections.add_lingering",
        "len(self._lingering) >= MOST_LINGERING",
        "False",
        "../http/test_lingering.py::test_few_connections_linger_and_not_for_long",
    ),
    Mutant(
        "an-endless-body-is-discarded-without-end",
        "api.server.lingering:Discarding.data_received",
        "self._discarded > MOST_DISCARDED",
        "False",
        "../http/test_lingering.py::test_an_endless_body_is_cut_off",
    ),
]


def named(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


@functools.cache
def from_environment() -> None:
    """Apply the mutant that the environment names; once, though several test folders ask for it."""
    name = os.environ.get(VARIABLE)
    if name:
        named(name).put_in_place()


class Verdict(enum.Enum):
    KILLED = "KILLED"
    """The test itself has failed."""
    SURVIVED = "SURVIVED"
    NOT_THERE = "NOT THERE"
    """The test does not run on the selected database, or the mutant breaks nothing there."""


def _run(mutant: Mutant, database: str | None = None) -> tuple[Verdict, str]:
    """The verdict, and the first line of the reason. `database`: where alone the test runs."""
    if database is not None and mutant.only not in (None, database):
        return Verdict.NOT_THERE, f"it breaks only {mutant.only}"
    start = time.monotonic()
    process = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:xdist"),
            f"{Path(__file__).parent / mutant.test}",
        ],
        env={
            **os.environ,
            **({} if database is None else {"LASTBIT_TEST_DATABASES": database}),
            VARIABLE: mutant.name,
            "CI": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if database is not None and process.returncode == NO_TESTS:
        return Verdict.NOT_THERE, f"its test does not run on {database}"
    failed = process.returncode == 1 and re.search(r"^FAILED ", process.stdout, re.MULTILINE) is not None
    if not failed and process.returncode != 0:
        return Verdict.SURVIVED, f"the test did not run:\n{process.stdout}{process.stderr}"
    reason = re.search(r"^\S+:\d+: (.*)$", process.stdout, re.MULTILINE)
    return (
        Verdict.KILLED if failed else Verdict.SURVIVED,
        f"{reason[1][:120] if reason else ''} ({time.monotonic() - start:.0f} s)",
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guarantees.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument("--database", choices=["sqlite", "mariadb", "postgresql"], help="run the tests there alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    selection = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if unknown_names := set(options.names) - {mutant.name for mutant in selection}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown_names))}")
    counts = Counter[Verdict]()
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        for mutant, (verdict, reason) in zip(
            selection, pool.map(_run, selection, itertools.repeat(options.database)), strict=True
        ):
            counts[verdict] += 1
            print(f"{verdict.value:9} {mutant.name}\n          by {mutant.test}\n          {reason}", flush=True)
    tried = len(selection) - counts[Verdict.NOT_THERE]
    print(f"{counts[Verdict.KILLED]} of {tried} mutants were killed")
    return 1 if counts[Verdict.SURVIVED] else 0


if __name__ == "__main__":
    sys.exit(main())
