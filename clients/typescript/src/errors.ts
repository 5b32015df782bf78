/**
 * The errors of this package. Catch the branch that you can handle.
 *
 *     LastbitError
 *     ├── ServiceError            the service answered with a problem: status, code, detail, errors, retryAfter
 *     │   ├── InvalidRequest      IdempotencyKeyReused, TooLarge
 *     │   ├── Unauthorized
 *     │   ├── Forbidden
 *     │   ├── NotFound            BatchNotFound, ConsumerGroupNotFound, InstanceNotFound, ProcessNotFound, WebhookNotFound
 *     │   ├── Conflict            BatchSealed, BatchEnded, ItemResolved, ConsumerGroupInUse, PartitionsFixed,
 *     │   │                       SessionReplaced, StaleEpoch, VersionConflict
 *     │   ├── PositionTrimmed     the requested events are no longer stored
 *     │   ├── OutOfOrder          a message reached its tally after a later one of its source
 *     │   ├── RateLimited
 *     │   └── Unavailable         overloaded, or its database is unreachable; also a gateway's 502 or 504
 *     ├── ServiceUnreachable      no response at all
 *     ├── UnexpectedAnswer        a response that does not follow the contract
 *     ├── WaitTimeout             has the batch as last seen
 *     ├── ItemRejected            an acker's item was not applied, with the service's reason
 *     ├── AckerClosed
 *     ├── NotRefreshed            a handle's state was read before it was fetched
 *     └── InvalidArgument         detected locally, nothing was sent
 *         └── MalformedItem       has the position in the call
 *
 * A call that is aborted by a signal rejects with the reason of that signal.
 */

import type { AckResult, Batch } from "./models.js";
import type { components } from "./schema.js";

export type Problem = components["schemas"]["Problem"];
/** One error in a request: its location, and the expected value. */
export type Place = components["schemas"]["PlacedProblem"]["errors"][number];

/** The base class of all errors of this package. */
export class LastbitError extends Error {
  /** The merged results of the requests that succeeded, if a call of several requests failed after some of them. */
  partial: AckResult | undefined;

  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The service refused the request. `code` is stable, for programs; `detail` is for people. */
export class ServiceError extends LastbitError {
  readonly status: number;
  readonly code: string;
  readonly detail: string;
  /** The places in the request. */
  readonly errors: readonly Place[];
  /** Seconds after which the service accepts another attempt. */
  readonly retryAfter: number | undefined;
  /** The whole answer, if it came from the service. A check of `problem.code` selects its further fields. */
  readonly problem: Problem | undefined;

  constructor(status: number, code: string, detail: string, retryAfter?: number, problem?: Problem) {
    super(`${detail} (${status} ${code})`);
    this.status = status;
    this.code = code;
    this.detail = detail;
    const errors: unknown = problem === undefined ? undefined : (problem as { errors?: unknown }).errors;
    this.errors = Array.isArray(errors) ? errors : [];
    this.retryAfter = retryAfter;
    this.problem = problem;
  }
}

/** The request is malformed. `errors` lists the places. Nothing was applied. */
export class InvalidRequest extends ServiceError {}
/** The idempotency key was used before with another body. */
export class IdempotencyKeyReused extends InvalidRequest {}
/** The request is larger than the service accepts. */
export class TooLarge extends InvalidRequest {}
/** The token is missing or unknown: set LASTBIT_TOKEN, or pass `token` to the client. */
export class Unauthorized extends ServiceError {}
/** The token lacks the role that `detail` names, or is limited to other keys. */
export class Forbidden extends ServiceError {}
export class NotFound extends ServiceError {}
/** There is no such batch: it was never opened, or it was deleted. */
export class BatchNotFound extends NotFound {}
export class ConsumerGroupNotFound extends NotFound {}
export class ProcessNotFound extends NotFound {}
export class InstanceNotFound extends NotFound {}
export class WebhookNotFound extends NotFound {}
/** The current state does not allow the request. */
export class Conflict extends ServiceError {}
/** A sealed batch can be extended only by one of its pending items. */
export class BatchSealed extends Conflict {}
/** The batch is complete, expired or cancelled; see `code`. */
export class BatchEnded extends Conflict {}
/** The item that was to add items is resolved already. Nothing was issued. */
export class ItemResolved extends Conflict {}
export class ConsumerGroupInUse extends Conflict {}
export class PartitionsFixed extends Conflict {}
export class SessionReplaced extends Conflict {}
export class StaleEpoch extends Conflict {}
export class VersionConflict extends Conflict {}
/** The events after the requested position are no longer stored; `problem` has the position to continue from. */
export class PositionTrimmed extends ServiceError {}
export class OutOfOrder extends ServiceError {}
/** The token makes more calls than its rate allows. */
export class RateLimited extends ServiceError {}
/** The service is overloaded, or its database is unreachable. */
export class Unavailable extends ServiceError {}

const BY_CODE: Record<string, typeof ServiceError> = {
  invalid_request: InvalidRequest,
  method_not_allowed: InvalidRequest,
  unsupported_media_type: InvalidRequest,
  idempotency_key_reused: IdempotencyKeyReused,
  step_reused: InvalidRequest,
  too_large: TooLarge,
  unauthorized: Unauthorized,
  forbidden: Forbidden,
  not_found: NotFound,
  group_not_found: NotFound,
  batch_not_found: BatchNotFound,
  consumer_group_not_found: ConsumerGroupNotFound,
  process_not_found: ProcessNotFound,
  instance_not_found: InstanceNotFound,
  webhook_not_found: WebhookNotFound,
  batch_sealed: BatchSealed,
  batch_complete: BatchEnded,
  batch_expired: BatchEnded,
  batch_cancelled: BatchEnded,
  item_resolved: ItemResolved,
  consumer_group_in_use: ConsumerGroupInUse,
  partitions_fixed: PartitionsFixed,
  session_replaced: SessionReplaced,
  stale_epoch: StaleEpoch,
  version_conflict: VersionConflict,
  position_trimmed: PositionTrimmed,
  out_of_order: OutOfOrder,
  rate_limited: RateLimited,
  unavailable: Unavailable,
};

/** For codes newer than this client, and for gateways that know no codes. */
const BY_STATUS: Record<number, typeof ServiceError> = {
  400: InvalidRequest,
  401: Unauthorized,
  403: Forbidden,
  404: NotFound,
  405: InvalidRequest,
  409: Conflict,
  413: TooLarge,
  415: InvalidRequest,
  422: InvalidRequest,
  429: RateLimited,
  502: Unavailable,
  503: Unavailable,
  504: Unavailable,
};

/** The error for `code`, or for `status` if the code is unknown. */
export function serviceError(
  status: number,
  code: string,
  detail: string,
  retryAfter?: number,
  problem?: Problem,
): ServiceError {
  const byCode = Object.hasOwn(BY_CODE, code) ? BY_CODE[code] : undefined;
  return new (byCode ?? BY_STATUS[status] ?? ServiceError)(status, code, detail, retryAfter, problem);
}

/**
 * No response arrived. Sending the call again is safe, except an `open` or `extend` without an `idempotencyKey` of your
 * own, which may have been carried out.
 */
export class ServiceUnreachable extends LastbitError {
  constructor(
    readonly url: string,
    readonly request: string,
    cause: string,
    readonly attempts: number,
    readonly elapsed: number,
  ) {
    super(`${url} did not answer ${request}: ${cause} (${attempts} attempts in ${elapsed.toFixed(1)} s)`);
  }
}

/** The response does not follow the contract: something else listens at this address. */
export class UnexpectedAnswer extends LastbitError {
  constructor(
    readonly url: string,
    readonly request: string,
    readonly status: number,
    fault: string,
  ) {
    super(`${url} answered ${status} to ${request}, ${fault}; is it a Lastbit service?`);
  }
}

/** The batch did not end in time. */
export class WaitTimeout extends LastbitError {
  constructor(
    readonly batch: Batch,
    readonly timeout: number,
  ) {
    super(`batch ${batch.id} is ${batch.state} after ${timeout} s, with ${batch.pending} items pending`);
  }
}

/** The service did not apply an acker's item. With the reason `held`, a nested batch stands for it and resolves it. */
export class ItemRejected extends LastbitError {
  constructor(
    readonly item: string,
    readonly reason: string,
  ) {
    super(`item ${item} was rejected: ${reason}`);
  }
}

/** The acker accepts no more items. */
export class AckerClosed extends LastbitError {
  constructor() {
    super("the acker is closed");
  }
}

/** The handle's state was not fetched yet. */
export class NotRefreshed extends LastbitError {
  constructor(batch: number) {
    super(`the state of batch ${batch} was not fetched yet: call refresh() first`);
  }
}

/** An argument is invalid; nothing was sent. */
export class InvalidArgument extends LastbitError {}

/** An item id is malformed; nothing of its request was sent. */
export class MalformedItem extends InvalidArgument {
  constructor(
    readonly item: unknown,
    readonly position: number,
  ) {
    const text = (typeof item === "string" ? JSON.stringify(item) : String(item)).slice(0, 80);
    super(`${text} at position ${position} is not an item id: expected batch:group:index, like 7:0:42`);
  }
}
