/**
 * Which requests are retried, and after how long.
 *
 * Every request of this client is safe to repeat (each POST and PATCH has an Idempotency-Key that stays the same), so
 * every temporary failure is retried. Pauses grow exponentially with full jitter; Retry-After is added to them.
 */

/** At most `attempts` attempts, within `deadline` seconds of the first failure. */
export interface Retry {
  readonly attempts: number;
  readonly deadline: number;
  /** Seconds: the pause after attempt n is random between 0 and min(cap, base * 2^(n-1)), plus Retry-After. */
  readonly base: number;
  readonly cap: number;
}

export const DEFAULT_RETRY: Retry = { attempts: 8, deadline: 60, base: 0.1, cap: 10 };
export const RETRIED_STATUSES: ReadonlySet<number> = new Set([429, 502, 503, 504]);

/** Seconds to wait after the failed `attempt` (1-based); undefined to give up. `chance` is random in [0, 1). */
export function pauseAfter(
  retry: Retry,
  attempt: number,
  elapsed: number,
  retryAfter: number | undefined,
  chance: number,
): number | undefined {
  if (attempt >= retry.attempts) return undefined;
  const pause = chance * Math.min(retry.cap, retry.base * 2 ** (attempt - 1)) + (retryAfter ?? 0);
  return elapsed + pause < retry.deadline ? pause : undefined;
}

/** The Retry-After of a response in seconds; undefined if it is missing or invalid. */
export function retryAfterSeconds(headers: Headers): number | undefined {
  const text = headers.get("retry-after")?.trim() ?? "";
  if (/^[0-9]+(\.[0-9]+)?$/.test(text)) return Number.isFinite(Number(text)) ? Number(text) : undefined;
  const until = Date.parse(text);
  if (Number.isNaN(until)) return undefined;
  // Compared with the response's own date, so that a wrong clock on either side does not matter.
  const date = Date.parse(headers.get("date") ?? "");
  return Math.max(0, (until - (Number.isNaN(date) ? Date.now() : date)) / 1000);
}
