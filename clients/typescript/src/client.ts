/** The client: make one and share it. */

import { Acker, type AckerOptions } from "./acker.js";
import { BatchHandle, type PageOptions } from "./batch.js";
import { LONGEST_HOLD, type Query, pages, resolve, rest, signalOf } from "./calls.js";
import { InvalidArgument } from "./errors.js";
import type { Ids } from "./masks.js";
import { type AckResult, type Appended, type Batch, type Counts, type Event, type EventPage, type Failure, camel } from "./models.js";
import type { components } from "./schema.js";
import { type CallOptions, type ClientOptions, type KeyOptions, Service, now } from "./service.js";

type Schemas = components["schemas"];

/** Events of one page. */
const MOST_EVENTS = 1000;

export interface OpenOptions extends KeyOptions {
  /** A name of your choice; need not be unique. */
  key?: string;
  labels?: Record<string, string>;
  /** Items of one bitfield: a multiple of 8 from 64 to 32768. */
  groupSize?: number;
  /** Issue this many ids at once: `.ids`. */
  items?: number;
  /** Also seal the batch, in the same transaction. */
  sealed?: boolean;
  /** The number of items with which the batch seals itself, and which it can't exceed. */
  sealAt?: number;
  /** The item of another batch that this batch resolves. */
  parent?: string;
  /** Seconds of idleness after which the batch expires. */
  expiresIn?: number;
  /** When the batch expires if it is unfinished, however busy it is: a time in the future. */
  deadline?: Date;
  /** The number of failed items with which the batch succeeds. */
  toleratedFailures?: number;
  /** The percentage of failed items with which the batch succeeds, judged once it is sealed. */
  toleratedFailurePercentage?: number;
  /** Whether the batch continues or is cancelled when its failures exceed the tolerance. */
  onExceeded?: Batch["onExceeded"];
  /**
   * A URL that gets a signed webhook with each event that tells how the batch ended, or with events of other `types`.
   * The handle's `callback` has its secret.
   */
  callback?: string | { url: string; types?: readonly string[] };
}

/** The conditions for a batch; all that are given must hold. */
export interface Filters {
  key?: string;
  /** The beginning of the key. */
  keyPrefix?: string;
  /** A batch must have all of them. */
  labels?: Record<string, string>;
  /** Opened at this time or later. A text has a time zone, like `2026-05-04T17:30:00Z`. */
  openedAfter?: Date | string;
  /** Opened earlier than this. */
  openedBefore?: Date | string;
  /**
   * `succeeded` or `failed`: complete batches with this result. `exceeded`: batches in any state whose failures exceeded
   * their tolerance.
   */
  outcome?: "succeeded" | "failed" | "exceeded";
  /** A batch's id or one of its items, for the batches that resolve items of it. */
  parent?: number | string;
  /** Seconds for which an open or sealed batch has not changed. */
  unchangedFor?: number;
  /** If true, batches with failed items, in any state. */
  failed?: boolean;
}

export interface BatchesOptions extends PageOptions, Filters {
  state?: Batch["state"];
}

export interface FailuresOptions extends BatchesOptions {
  /** A part of the reason. */
  text?: string;
}

export interface CountsOptions extends CallOptions, Filters {}

function filtered(filters: Filters): Query {
  const { key, keyPrefix, openedAfter, openedBefore, outcome, parent, unchangedFor, failed } = filters;
  const values = {
    key,
    key_prefix: keyPrefix,
    opened_after: openedAfter,
    opened_before: openedBefore,
    outcome,
    parent,
    unchanged_for: unchangedFor,
    failed: failed === true ? true : undefined,
  };
  const query: Query = [];
  for (const [name, value] of Object.entries(values)) {
    if (value !== undefined) query.push([name, value instanceof Date ? moment(name, value) : String(value)]);
  }
  for (const [name, value] of Object.entries(filters.labels ?? {})) query.push(["label", `${name}:${value}`]);
  return query;
}

function moment(name: string, time: Date): string {
  if (Number.isNaN(time.getTime())) throw new InvalidArgument(`${name} is not a valid Date`);
  return time.toISOString();
}

export interface FollowOptions extends CallOptions {
  /** Only events above this position; by default all that are stored. */
  after?: number;
  /** One or several event types; by default all. */
  types?: string | readonly string[];
  batch?: number;
}

export interface EventsOptions extends FollowOptions {
  /** Seconds to wait, up to 60, if there is no event yet. */
  wait?: number;
  limit?: number;
}

/** An event of your own. */
export type NewEvent = Schemas["NewEvent"];
/** Write only while this worker owns the partition at this epoch. */
export type Fence = Schemas["Fence"];

function callbackOf(callback: NonNullable<OpenOptions["callback"]>): Schemas["NewCallback"] {
  if (typeof callback === "string") return { url: callback };
  return { url: callback.url, ...(callback.types === undefined ? {} : { types: [...callback.types] }) };
}

/**
 * A connection to a service. Its methods reject with `ServiceError` if the service refuses, and with
 * `ServiceUnreachable` if it does not answer. Throws `InvalidArgument`.
 */
export class Client {
  readonly #service: Service;

  constructor(options: ClientOptions = {}) {
    this.#service = new Service(options);
  }

  get url(): string {
    return this.#service.url;
  }

  /** Open a batch. With the same `idempotencyKey`, the same batch with the same ids is returned (`.replayed`). */
  async open(options: OpenOptions = {}): Promise<BatchHandle> {
    const { key, labels, groupSize, items, sealed, sealAt, parent, expiresIn, idempotencyKey } = options;
    const { toleratedFailures, toleratedFailurePercentage, onExceeded, callback, deadline } = options;
    // Undefined fields are left out of the JSON, so that the service's defaults apply.
    const body: Schemas["OpenBody"] = {
      key,
      labels,
      group_size: groupSize,
      items,
      sealed,
      seal_at: sealAt,
      parent,
      expires_in: expiresIn,
      tolerated_failures: toleratedFailures,
      tolerated_failure_percentage: toleratedFailurePercentage,
      on_exceeded: onExceeded,
      callback: callback === undefined ? undefined : callbackOf(callback),
      deadline: deadline?.toISOString(),
    };
    return this.#service.ask(
      "POST",
      "/v1/batches",
      { ...signalOf(options), ...(idempotencyKey === undefined ? {} : { idempotencyKey }), body },
      (json: Schemas["OpenedBatch"], answer) =>
        new BatchHandle(this.#service, json.id, json, answer.headers.get("idempotency-replayed") === "true"),
    );
  }

  /** A handle for an existing batch. Sends no request. */
  batch(id: number): BatchHandle {
    return new BatchHandle(this.#service, id);
  }

  /** The batches, newest first, fetched page by page. */
  batches(options: BatchesOptions = {}): AsyncGenerator<Batch, void, undefined> {
    const query = filtered(options);
    if (options.state !== undefined) query.push(["state", options.state]);
    return pages(this.#service, "/v1/batches", "batches", query, camel<Schemas["Batch"]>, options, 100);
  }

  /**
   * The failed items whose reason has this text, in upper or lower case, or all that have a reason: the newest batch
   * first. `state` and the filters choose batches as in `batches`. The service has no index of reasons, so this reads all
   * failures of these batches, some thousands per request.
   */
  failures(options: FailuresOptions = {}): AsyncGenerator<Failure, void, undefined> {
    const query = filtered(options);
    if (options.state !== undefined) query.push(["state", options.state]);
    if (options.text !== undefined) query.push(["text", options.text]);
    return pages(this.#service, "/v1/failures", "failures", query, camel<Schemas["Failure"]>, options, 100);
  }

  /** The number of batches in each state, with the filters of `batches`. */
  async counts(options: CountsOptions = {}): Promise<Counts> {
    return this.#service.ask(
      "GET",
      "/v1/batches/counts",
      { ...signalOf(options), query: filtered(options) },
      camel<Schemas["Counts"]>,
    );
  }

  /**
   * Ack items: one id, an iterable of ids, or `ItemIds` (sent as bitfields, any number).
   *
   * Large calls are split and the results merged. If a later part fails, earlier ones are applied (`error.partial`);
   * it is safe to repeat the whole call. Rejects with `MalformedItem`.
   */
  async ack(ids: Ids, options: CallOptions = {}): Promise<AckResult> {
    return resolve(this.#service, "acks", ids, undefined, options);
  }

  /** Mark items as failed; otherwise like `ack`. An acked item stays acked; a failed item can still be acked. */
  async fail(ids: Ids, reason?: string, options: CallOptions = {}): Promise<AckResult> {
    return resolve(this.#service, "failures", ids, reason, options);
  }

  /**
   * Mark items as not needed: deliberately not done, and no failures. Otherwise like `ack`. A failed item becomes
   * skipped; an acked item stays acked, and a skipped item can still be acked.
   */
  async skip(ids: Ids, reason?: string, options: CallOptions = {}): Promise<AckResult> {
    return resolve(this.#service, "skips", ids, reason, options);
  }

  /** One page of the feed in commit order. Rejects with `PositionTrimmed`. */
  async events(options: EventsOptions = {}): Promise<EventPage> {
    return this.#events(options, false);
  }

  async #events(options: EventsOptions, isPatient: boolean): Promise<EventPage> {
    const query: Query = [];
    for (const name of ["after", "batch", "wait", "limit"] as const) {
      if (options[name] !== undefined) query.push([name, String(options[name])]);
    }
    const { types = [] } = options;
    for (const type of typeof types === "string" ? [types] : types) query.push(["type", type]);
    const request = { ...signalOf(options), query, hold: options.wait ?? 0, isPatient };
    return this.#service.ask("GET", "/v1/events", request, (json) => {
      if (!Array.isArray(json.events) || !Number.isSafeInteger(json.next)) throw new TypeError("expected events");
      return camel(json as Schemas["EventPage"]);
    });
  }

  /**
   * The events above the position `after`, and then new ones as they arrive, without end. After the service was
   * unreachable it continues where it stopped. Store the `position` of the last event you finished, and pass it as
   * `after` next time. Rejects with `PositionTrimmed`.
   */
  async *follow(options: FollowOptions = {}): AsyncGenerator<Event, void, undefined> {
    let { after } = options;
    for (let isPatient = false; ; isPatient = true) {
      const pollStart = now();
      const poll: EventsOptions = { ...options, wait: LONGEST_HOLD, limit: MOST_EVENTS };
      const start = after;
      const page = await this.#events(start === undefined ? poll : { ...poll, after: start }, isPatient);
      yield* page.events;
      after = page.next;
      const isBehind = after !== start && after < page.last;
      if (page.events.length === 0 && !isBehind) await rest(pollStart, 1, options.signal);
    }
  }

  /** Append up to 1,000 events of your own in one transaction. An id that exists already is a repeat. */
  async append(events: Iterable<NewEvent>, options: CallOptions & { fence?: Fence } = {}): Promise<Appended[]> {
    const body: Schemas["NewEvents"] = { events: [...events] };
    if (options.fence !== undefined) body.fence = options.fence;
    return this.#service.ask("POST", "/v1/events", { ...signalOf(options), body }, (json: Schemas["AppendedEvents"]) =>
      json.events.map(camel),
    );
  }

  /** Collects single acks into few calls. Close it when the consumer stops. */
  acker(options: AckerOptions = {}): Acker {
    return new Acker(this.#service, options);
  }
}
