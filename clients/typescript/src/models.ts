/** The service's answers. Names are in camelCase; times are RFC 3339 texts in UTC; counts are items. */

import { DEFAULT_GROUP_SIZE, ItemIds, MAX_GROUP_SIZE, parseItemId } from "./ids.js";
import type { components } from "./schema.js";

type Schemas = components["schemas"];

type CamelCase<Name extends string> = Name extends `${infer Head}_${infer Tail}`
  ? `${Head}${Capitalize<CamelCase<Tail>>}`
  : Name;
/** `T` with the names of its own fields in camelCase. */
export type Camel<T> = { readonly [Name in keyof T as Name extends string ? CamelCase<Name> : Name]: T[Name] };

/** A batch's state at the time of the response. */
export type Batch = Camel<Schemas["Batch"]>;
/** `newly`: this seal completed the batch. `newlySucceeded`: this seal made `succeeded` true. */
export type Sealed = Camel<Schemas["SealedBatch"]>;
/** A complete batch that contains an item of the call. `newly`: this call completed it. */
export type Completed = Camel<Schemas["CompletedBatch"]>;
/** A rejection with its reason: of one `item`, or of `count` bits in the mask of one `group`. */
export type Rejected = Camel<Schemas["RejectedItem"]>;
export type Verification = Camel<Schemas["Verification"]>;
/** The sums of a batch and all of its descendants, without the items that a child stands for. */
export type TreeProgress = Camel<Schemas["Progress"]>;
/** The counts of a batch at a time. `resolved` includes `failed`, and skipped items. */
export type HistoryPoint = Camel<Schemas["Point"]>;
export type Watermark = Camel<Schemas["Watermark"]>;
/** The batches by state. `exact`: false if there are more batches than the service counts in one call. */
export type Counts = Camel<Schemas["Counts"]>;
export type Explanation = Camel<Schemas["Explanation"]>;
export type Event = Camel<Schemas["Event"]>;
export type EventPage = Camel<Schemas["EventPage"]>;
export type Appended = Camel<Schemas["AppendedEvent"]>;
export type Repair = Omit<Camel<Schemas["Repair"]>, "before" | "after"> & {
  readonly before: Camel<Schemas["BatchCounts"]>;
  readonly after: Camel<Schemas["BatchCounts"]>;
};

/** The numbers `start` to `end - 1` are pending; `first` and `last` are the ids of their ends. */
export interface PendingRange extends Camel<Schemas["Range"]> {
  /** All ids of the range, for example to publish them again. */
  readonly ids: ItemIds;
}

/** A failed item and why it failed; `key`: that of its batch. */
export type Failure = Camel<Schemas["Failure"]>;

/** A range of failed or of skipped items. `reasons` maps ids to their reasons; ids without a reason are missing. */
export interface FailedRange extends PendingRange {
  readonly reasons: Readonly<Record<string, string>>;
}

/**
 * The answer to a redrive: the `count` of the items that were asked for, the first 1,000 ranges of them, whether there are
 * `more`, and the `position` of the event in the feed.
 */
export type Redriven = Omit<Camel<Schemas["Redrive"]>, "ranges"> & { readonly ranges: readonly PendingRange[] };

const TERMINAL_STATES: ReadonlySet<string> = new Set(["complete", "expired", "cancelled"]);

/** Whether the batch is complete, expired or cancelled. */
export function hasEnded(batch: Batch): boolean {
  return TERMINAL_STATES.has(batch.state);
}

export function historyPoints(json: Schemas["History"]): readonly HistoryPoint[] {
  return json.points.map(camel);
}

/** An answer with its own fields' names in camelCase; values stay as they are. Throws `TypeError`. */
export function camel<T extends object>(json: T): Camel<T> {
  if (typeof json !== "object" || json === null || Array.isArray(json)) throw new TypeError("expected an object");
  return Object.fromEntries(
    Object.entries(json).map(([name, value]) => [
      name.replace(/_(.)/g, (_, letter: string) => letter.toUpperCase()),
      value,
    ]),
  ) as Camel<T>;
}

/** The merged result of acks, failures and skips. */
export class AckResult {
  constructor(
    /** Items whose state changed. */
    readonly applied: number = 0,
    /** Items that already had this state. */
    readonly repeated: number = 0,
    readonly completed: readonly Completed[] = [],
    readonly rejected: readonly Rejected[] = [],
  ) {}

  static from(json: Schemas["AckAnswer"]): AckResult {
    const { applied, repeated, completed, rejected } = json;
    if (!Number.isInteger(applied) || !Number.isInteger(repeated)) throw new TypeError("counts are integers");
    return new AckResult(applied, repeated, completed.map(camel), rejected.map(camel));
  }

  /** The number of rejected items; a rejected mask counts all its bits. */
  get rejectedCount(): number {
    return this.rejected.reduce((sum, rejection) => sum + (rejection.count ?? 1), 0);
  }

  /** This result and a later one of the same call. Each complete batch is listed once. */
  merged(later: AckResult): AckResult {
    const completed = new Map(this.completed.map((batch) => [batch.batch, batch]));
    for (const batch of later.completed) {
      const earlier = completed.get(batch.batch);
      completed.set(batch.batch, {
        ...batch,
        newly: batch.newly || (earlier?.newly ?? false),
        succeeded: batch.succeeded || (earlier?.succeeded ?? false),
        newlySucceeded: batch.newlySucceeded || (earlier?.newlySucceeded ?? false),
      });
    }
    return new AckResult(
      this.applied + later.applied,
      this.repeated + later.repeated,
      [...completed.values()],
      [...this.rejected, ...later.rejected],
    );
  }
}

/** Throws `TypeError` if the numbers and the ids do not belong to one range. */
export function pendingRange(json: Schemas["Range"]): PendingRange {
  const last = parseItemId(json.last);
  if (last === undefined) throw new TypeError("expected a range of items");
  const ids = new ItemIds(last.batch, groupSizeOf(json.end, last), json.start, json.end - json.start);
  if (ids.at(0) !== json.first || ids.at(-1) !== json.last) throw new TypeError("the range's ids are not its numbers");
  return { ...camel(json), ids };
}

export function failedRange(json: Schemas["FailedRange"]): FailedRange {
  return { ...pendingRange(json), reasons: json.reasons ?? {} };
}

export function redriven(json: Schemas["Redrive"]): Redriven {
  return { ...camel(json), ranges: json.ranges.map(pendingRange) };
}

function groupSizeOf(end: number, last: { group: number; index: number }): number {
  if (last.group > 0) return Math.max(1, Math.floor((end - 1 - last.index) / last.group));
  // All in group 0, where every group size that reaches this far gives the same ids.
  return last.index < DEFAULT_GROUP_SIZE ? DEFAULT_GROUP_SIZE : MAX_GROUP_SIZE;
}
