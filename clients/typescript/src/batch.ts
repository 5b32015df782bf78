/** A producer's handle for a batch: from `client.open(…)` or `client.batch(7)`. */

import { LONGEST_HOLD, type Query, batchPath, pages, rest, signalOf } from "./calls.js";
import { InvalidArgument, NotRefreshed, WaitTimeout } from "./errors.js";
import { DEFAULT_GROUP_SIZE, ItemIds } from "./ids.js";
import {
  type Batch,
  type Explanation,
  type FailedRange,
  type HistoryPoint,
  type PendingRange,
  type Redriven,
  type Repair,
  type Sealed,
  type TreeProgress,
  type Verification,
  type Watermark,
  camel,
  failedRange,
  hasEnded,
  historyPoints,
  pendingRange,
  redriven,
} from "./models.js";
import type { components } from "./schema.js";
import { type CallOptions, type KeyOptions, type Service, now } from "./service.js";

type Schemas = components["schemas"];

export interface WaitOptions extends CallOptions {
  /**
   * Seconds after which the wait rejects with `WaitTimeout`; by default it waits without end. If the service doesn't
   * answer then, it rejects with `ServiceUnreachable`, up to the client's `timeout` later.
   */
  timeout?: number;
  /** Called with the batch's state about once a second. */
  onProgress?: (batch: Batch) => void;
}

export interface PageOptions extends CallOptions {
  /** Ranges or batches of one request. */
  pageSize?: number;
}

export interface ExtendOptions extends KeyOptions {
  /**
   * The item of this batch that adds them. As long as it is pending, the batch may be sealed. Its idempotency keys are its
   * own: each item may have the same key.
   */
  by?: string | undefined;
  /**
   * Up to 64 visible ASCII characters that stand for what the items are for. With the same idempotency key and another
   * digest, nothing is issued, and the call rejects with `IdempotencyKeyReused`.
   */
  digest?: string | undefined;
}

/** The fields to change: undefined ones stay as they are, and null removes. */
export interface UpdateOptions extends KeyOptions {
  /** Names to add or change, with their values, or to remove, with null. Other labels stay; null removes them all. */
  labels?: Record<string, string | null> | null | undefined;
  /** The number of failed items with which the batch succeeds nonetheless. */
  toleratedFailures?: number | null | undefined;
  /** The percentage of failed items with which the batch succeeds, judged once it is sealed. */
  toleratedFailurePercentage?: number | null | undefined;
  /** Whether the batch continues or is cancelled when its failures exceed the tolerance. */
  onExceeded?: "continue" | "cancel" | null | undefined;
  /** When the batch expires if it is unfinished, however busy it is. */
  deadline?: Date | null | undefined;
}

export interface ReopenOptions extends KeyOptions {
  /** When the batch expires if it is unfinished; null: never. Without it, the deadline stays as it is. */
  deadline?: Date | null | undefined;
  /** Why, for readers of the event. */
  reason?: string | undefined;
}

export interface RedriveOptions extends KeyOptions {
  /** Only items that failed for this reason. */
  reason?: string | undefined;
  /** Only these, at most 1,000, as far as they have failed. */
  items?: Iterable<string> | undefined;
  /** A text for the producer. */
  note?: string | undefined;
  /** The pending items instead, except those that another batch resolves. */
  pending?: boolean | undefined;
  /** With `pending`: only if nothing has changed for these seconds. */
  unchangedFor?: number | undefined;
}

export interface CancelOptions extends KeyOptions {
  /** Why, for people. A repeat keeps the first reason. */
  reason?: string | undefined;
  /** Whether the live batches that stand for its items are cancelled too, at any depth. */
  children?: boolean | undefined;
}

/** A handle stores the last known state (`info`); only its methods send requests. */
export class BatchHandle {
  readonly id: number;
  /** The ids issued by `open({ items })`. */
  readonly ids: ItemIds;
  /** Whether opening completed the batch, because it was sealed and empty. */
  readonly newly: boolean;
  /** Whether the open was a repeat: an earlier one with the same idempotency key opened this batch. */
  readonly replayed: boolean;
  /** The callback that the open made, with its secret. */
  readonly callback: Schemas["OpenedCallback"] | null;
  readonly #service: Service;
  #info: Batch | undefined;

  /** Made by a client. */
  constructor(service: Service, id: number, opened?: Schemas["OpenedBatch"], replayed: boolean = false) {
    batchPath(id);
    this.#service = service;
    this.id = id;
    this.replayed = replayed;
    this.newly = opened?.newly ?? false;
    this.callback = opened?.callback ?? null;
    this.ids = new ItemIds(id, opened?.group_size ?? DEFAULT_GROUP_SIZE, opened?.start ?? 0, opened?.count ?? 0);
    if (opened !== undefined) {
      const { start: _start, count: _count, newly: _newly, callback: _callback, ...batch } = opened;
      this.#info = camel(batch);
    }
  }

  /** The batch's last known state. Throws `NotRefreshed` if there is none. */
  get info(): Batch {
    if (this.#info === undefined) throw new NotRefreshed(this.id);
    return this.#info;
  }

  get key(): string | null {
    return this.info.key;
  }

  get state(): Batch["state"] {
    return this.info.state;
  }

  get items(): number {
    return this.info.items;
  }

  get complete(): boolean {
    return this.info.complete;
  }

  get succeeded(): boolean {
    return this.info.succeeded;
  }

  /** Issue `count` more ids. With the same idempotency key it returns the same ids while the batch lives. */
  async extend(count: number, options: ExtendOptions = {}): Promise<ItemIds> {
    const { by, digest, ...call } = options;
    return this.#service.ask(
      "POST",
      batchPath(this.id, "items"),
      { ...call, body: { count, digest, by } satisfies Schemas["ExtendBody"] },
      (json: Schemas["Extension"]) => new ItemIds(json.batch, json.group_size, json.start, json.count),
    );
  }

  /**
   * Change the tolerance, deadline and labels of a batch that is open or sealed. If its failures exceed the new tolerance,
   * it is exceeded, and with `onExceeded: "cancel"` it is cancelled.
   */
  async update(options: UpdateOptions): Promise<Batch> {
    const { labels, toleratedFailures, toleratedFailurePercentage, onExceeded, deadline, ...call } = options;
    const body: Schemas["PatchBody"] = {
      labels,
      tolerated_failures: toleratedFailures,
      tolerated_failure_percentage: toleratedFailurePercentage,
      on_exceeded: onExceeded,
      deadline: deadline instanceof Date ? deadline.toISOString() : deadline,
    };
    return (this.#info = await this.#service.ask<Batch>("PATCH", batchPath(this.id), { ...call, body }, camel));
  }

  /** Declare that no more items will come. `newly` in the result means that this seal completed the batch. */
  async seal(options: CallOptions = {}): Promise<Sealed> {
    const sealed: Sealed = await this.#service.ask("POST", batchPath(this.id, "seal"), signalOf(options), camel);
    this.#info = sealed;
    return sealed;
  }

  /** End the batch without its pending items. Later acks are rejected. */
  async cancel(options: CancelOptions = {}): Promise<Batch> {
    const { reason, children, ...call } = options;
    const body: Schemas["CancelBody"] = { reason, children };
    return (this.#info = await this.#service.ask<Batch>("POST", batchPath(this.id, "cancel"), { ...call, body }, camel));
  }

  /**
   * Bring back a batch that was cancelled or has expired: it is open or sealed again, as before. A deadline that has
   * passed must be replaced, or removed with null.
   */
  async reopen(options: ReopenOptions = {}): Promise<Batch> {
    const { deadline, reason, ...call } = options;
    const body: Schemas["ReopenBody"] = { deadline: deadline instanceof Date ? deadline.toISOString() : deadline, reason };
    return (this.#info = await this.#service.ask<Batch>("POST", batchPath(this.id, "reopen"), { ...call, body }, camel));
  }

  /**
   * Ask the producer to send failed items again, or pending ones, whose messages were lost. It is the event
   * `batch.redrive`; no item changes until it is acked. Rejects with a `ServiceError` of the code `nothing_failed` or
   * `nothing_pending` if there are none, or if the batch has changed within `unchangedFor`.
   */
  async redrive(options: RedriveOptions = {}): Promise<Redriven> {
    const { reason, items, note, pending, unchangedFor, ...call } = options;
    const body: Schemas["RedriveBody"] = { reason, items: items && [...items], note, pending, unchanged_for: unchangedFor };
    return this.#service.ask("POST", batchPath(this.id, "redrive"), { ...call, body }, redriven);
  }

  /**
   * Delete the batch. A live batch is cancelled first. `state`: only if it is in this state; else rejects with a
   * `Conflict` of the code `state_conflict`.
   */
  async delete(options: CallOptions & { state?: Batch["state"] } = {}): Promise<void> {
    const query: Query = options.state === undefined ? [] : [["state", options.state]];
    await this.#service.call("DELETE", batchPath(this.id), { ...signalOf(options), query });
  }

  /** Fetch the current state of the batch. */
  async refresh(options: CallOptions = {}): Promise<Batch> {
    return (this.#info = await this.#service.ask<Batch>("GET", batchPath(this.id), signalOf(options), camel));
  }

  /** Wait until the batch is complete, expired or cancelled. Rejects with `WaitTimeout`. */
  async wait(options: WaitOptions = {}): Promise<Batch> {
    const { timeout = Infinity, onProgress, signal } = options;
    if (!(timeout >= 0)) throw new InvalidArgument(`a timeout is a number of seconds, not ${timeout}`);
    const start = now();
    let remaining = timeout;
    for (let isPatient = false; ; isPatient = true) {
      const pollStart = now();
      const hold = Math.floor(Math.min(onProgress === undefined ? LONGEST_HOLD : 1, remaining));
      const batch: Batch = await this.#service.ask(
        "GET",
        batchPath(this.id),
        {
          ...signalOf(options),
          query: hold > 0 ? [["wait", String(hold)]] : [],
          hold,
          // The retry deadline applies if it is earlier; a wait of 5 s does not retry for a minute.
          within: Math.max(remaining, 1),
          isPatient,
        },
        camel,
      );
      this.#info = batch;
      onProgress?.(batch);
      if (hasEnded(batch)) return batch;
      remaining = timeout - (now() - start);
      if (remaining <= 0) throw new WaitTimeout(batch, timeout);
      await rest(pollStart, remaining, signal);
      remaining = Math.max(0, timeout - (now() - start));
    }
  }

  /** The ranges of pending items, ascending, fetched page by page. */
  pending(options: PageOptions = {}): AsyncGenerator<PendingRange, void, undefined> {
    return pages(this.#service, batchPath(this.id, "pending"), "ranges", [], pendingRange, options, 1000);
  }

  /** The ranges of failed items with their reasons, ascending, fetched page by page. */
  failed(options: PageOptions = {}): AsyncGenerator<FailedRange, void, undefined> {
    return pages(this.#service, batchPath(this.id, "failed"), "ranges", [], failedRange, options, 1000);
  }

  /** The ranges of skipped items with their reasons, ascending, fetched page by page. */
  skipped(options: PageOptions = {}): AsyncGenerator<FailedRange, void, undefined> {
    return pages(this.#service, batchPath(this.id, "skipped"), "ranges", [], failedRange, options, 1000);
  }

  /** The sums of the batch and all of its descendants. */
  async progress(options: CallOptions = {}): Promise<TreeProgress> {
    return this.#service.ask("GET", batchPath(this.id, "progress"), signalOf(options), camel);
  }

  /**
   * How the batch got on, from its open until it ended, or until now: at most 132 points, between which the counts
   * changed steadily, as far as is known.
   */
  async history(options: CallOptions = {}): Promise<readonly HistoryPoint[]> {
    return this.#service.ask("GET", batchPath(this.id, "history"), signalOf(options), historyPoints);
  }

  /** The reasons why the batch is not done. */
  async explain(options: CallOptions = {}): Promise<Explanation> {
    return this.#service.ask("GET", batchPath(this.id, "explain"), signalOf(options), camel);
  }

  /** Make the service recount the batch's bits and compare them with its counts. */
  async verify(options: CallOptions = {}): Promise<Verification> {
    return this.#service.ask("GET", batchPath(this.id, "verify"), signalOf(options), camel);
  }

  /** Restore the counts and the state of the batch from its bits. `dryRun` changes nothing. Needs the role admin. */
  async repair(options: CallOptions & { dryRun?: boolean } = {}): Promise<Repair> {
    return this.#service.ask(
      "POST",
      batchPath(this.id, "repair"),
      { ...signalOf(options), body: { dry_run: options.dryRun ?? false } satisfies Schemas["RepairBody"] },
      (json: Schemas["Repair"]) => ({ ...camel(json), before: camel(json.before), after: camel(json.after) }),
    );
  }

  /** The smallest pending item number: all items below it are resolved. */
  async watermark(options: CallOptions = {}): Promise<Watermark> {
    return this.#service.ask("GET", batchPath(this.id, "watermark"), signalOf(options), camel);
  }
}
