/** Calls of several requests: paging, long polls, and acks in pieces. */

import { InvalidArgument, LastbitError } from "./errors.js";
import { type Ids, pieces, type Piece } from "./masks.js";
import { AckResult } from "./models.js";
import { type CallOptions, type Service, now, sleep } from "./service.js";

/** Seconds of one long poll. The service allows 60, but many gateways give up by then. */
export const LONGEST_HOLD = 30;

export type Query = [string, string][];

/** The path of a batch. Throws `InvalidArgument`. */
export function batchPath(batch: number, ...rest: string[]): string {
  if (!Number.isSafeInteger(batch) || batch < 0) throw new InvalidArgument(`a batch id is a whole number, not ${batch}`);
  return ["/v1/batches", String(batch), ...rest].join("/");
}

/** The elements of a list, fetched page by page. */
export async function* pages<Json, T>(
  service: Service,
  path: string,
  field: string,
  query: Query,
  decode: (json: Json) => T,
  options: CallOptions & { pageSize?: number },
  defaultSize: number,
): AsyncGenerator<T, void, undefined> {
  const limit: Query = [["limit", String(options.pageSize ?? defaultSize)]];
  let cursor: string | null = null;
  do {
    const page: { elements: T[]; next: string | null } = await service.ask(
      "GET",
      path,
      { query: [...query, ...limit, ...(cursor === null ? [] : ([["cursor", cursor]] as Query))], ...signalOf(options) },
      (json) => {
        if (json.next !== null && typeof json.next !== "string") throw new TypeError("expected a cursor");
        return { elements: json[field].map(decode), next: json.next };
      },
    );
    yield* page.elements;
    // An empty page is not the last one; only a page without `next` is.
    cursor = page.next;
  } while (cursor !== null);
}

/** Send the ids in pieces and merge the results. An error has the merged results so far as `partial`. */
export async function resolve(
  service: Service,
  verb: "acks" | "failures" | "skips",
  ids: Ids,
  reason: string | undefined,
  options: CallOptions,
): Promise<AckResult> {
  return resolvePieces(service, verb, pieces(ids), reason, options);
}

export async function resolvePieces(
  service: Service,
  verb: "acks" | "failures" | "skips",
  bodies: Iterable<Piece>,
  reason: string | undefined,
  options: CallOptions,
): Promise<AckResult> {
  let result = new AckResult();
  try {
    for (const piece of bodies) {
      const body = reason === undefined ? piece : { ...piece, reason };
      result = result.merged(await service.ask("POST", `/v1/${verb}`, { body, ...signalOf(options) }, AckResult.from));
    }
  } catch (error) {
    if (error instanceof LastbitError) error.partial = result;
    throw error;
  }
  return result;
}

/** Rest until a second has passed since `pollStart`: a service that is stopping ends each poll at once. */
export async function rest(pollStart: number, most: number, signal: AbortSignal | undefined): Promise<void> {
  const seconds = Math.min(most, 1 - (now() - pollStart));
  if (seconds > 0) await sleep(seconds, signal);
}

export function signalOf(options: CallOptions): CallOptions {
  return options.signal === undefined ? {} : { signal: options.signal };
}
