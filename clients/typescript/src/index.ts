/** The client of Lastbit. Start with `Client`. */

export { Acker, type AckerOptions } from "./acker.js";
export { BatchHandle, type CancelOptions, type ExtendOptions, type PageOptions, type RedriveOptions, type ReopenOptions, type UpdateOptions, type WaitOptions } from "./batch.js";
export { type BatchesOptions, Client, type CountsOptions, type EventsOptions, type FailuresOptions, type Fence, type Filters, type FollowOptions, type NewEvent, type OpenOptions } from "./client.js";
export * from "./errors.js";
export { DEFAULT_GROUP_SIZE, type ItemId, ItemIds, itemId, parseItemId } from "./ids.js";
export type { Ids } from "./masks.js";
export {
  AckResult,
  type Appended,
  type Batch,
  type Completed,
  type Counts,
  type Event,
  type EventPage,
  type Explanation,
  type FailedRange,
  type Failure,
  type HistoryPoint,
  type PendingRange,
  type Redriven,
  type Rejected,
  type Repair,
  type Sealed,
  type TreeProgress,
  type Verification,
  type Watermark,
} from "./models.js";
export type { Retry } from "./retry.js";
/** The contract's own types, generated from openapi.yaml, for calls that this client has no method for. */
export type { components, operations, paths } from "./schema.js";
export type { CallOptions, ClientOptions, KeyOptions } from "./service.js";
