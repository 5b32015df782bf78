/** Requests and responses, with retries. */

import { InvalidArgument, ServiceUnreachable, UnexpectedAnswer, serviceError, type LastbitError } from "./errors.js";
import type { Problem } from "./errors.js";
import { DEFAULT_RETRY, RETRIED_STATUSES, type Retry, pauseAfter, retryAfterSeconds } from "./retry.js";

const DEFAULT_URL = "http://127.0.0.1:8000";
const MAX_TIMER = 2 ** 31 - 1;

export interface ClientOptions {
  /** The service's address; by default LASTBIT_URL, else http://127.0.0.1:8000. */
  url?: string;
  /** Sent as `Authorization: Bearer`; by default LASTBIT_TOKEN. */
  token?: string;
  /** Seconds of one attempt, from the connection to the end of the response. */
  timeout?: number;
  retry?: Partial<Retry>;
  /** Another `fetch`, for example with a proxy. */
  fetch?: typeof globalThis.fetch;
}

/** The options of each call. */
export interface CallOptions {
  /** Aborts the call, which then rejects with the signal's reason. The request may have been carried out. */
  signal?: AbortSignal;
}

/** A call with your own idempotency key. */
export interface KeyOptions extends CallOptions {
  idempotencyKey?: string;
}

interface Request extends KeyOptions {
  query?: readonly (readonly [string, string])[];
  body?: unknown;
  /** Seconds for which the service may delay the response. */
  hold?: number;
  /** Seconds after which no retry starts, if that is earlier than the retry policy's deadline. */
  within?: number;
  /** Whether it is retried until the deadline, however many attempts that takes: an earlier poll was answered. */
  isPatient?: boolean;
}

export interface Answer {
  readonly status: number;
  readonly headers: Headers;
  readonly text: string;
}

interface Failure {
  readonly cause: string;
}

/** The service's address, with the client's token, timeout and retry policy. */
export class Service {
  readonly url: string;
  readonly #token: string | undefined;
  readonly #timeout: number;
  readonly #retry: Retry;
  readonly #fetch: typeof globalThis.fetch;

  constructor(options: ClientOptions) {
    this.url = baseUrl(options.url ?? (environment("LASTBIT_URL") || DEFAULT_URL));
    const token = options.token ?? environment("LASTBIT_TOKEN");
    this.#token = token ? visibleAscii("a token", token, 8192) : undefined;
    this.#timeout = options.timeout ?? 30;
    if (!(this.#timeout > 0 && this.#timeout * 1000 <= MAX_TIMER)) {
      throw new InvalidArgument(`a timeout is a number of seconds above 0, not ${this.#timeout}`);
    }
    this.#retry = { ...DEFAULT_RETRY, ...options.retry };
    // Called without `this`, as browsers require.
    const fetch = options.fetch ?? globalThis.fetch;
    this.#fetch = (input, init) => fetch(input, init);
  }

  /**
   * Send a request, with retries; the result is the decoded JSON of a 2xx response. Rejects with
   * `InvalidArgument`, `ServiceError`, `ServiceUnreachable`, `UnexpectedAnswer`, or the reason of the signal.
   */
  async ask<T>(method: string, path: string, request: Request, decode: (json: any, answer: Answer) => T): Promise<T> {
    const answer = await this.call(method, path, request);
    try {
      return decode(JSON.parse(answer.text), answer);
    } catch (cause) {
      const fault = `without the expected content (${String(cause).slice(0, 300)})`;
      throw new UnexpectedAnswer(this.url, `${method} ${path}`, answer.status, fault);
    }
  }

  async call(method: string, path: string, request: Request = {}): Promise<Answer> {
    const { signal, hold = 0, within = Infinity, isPatient = false } = request;
    signal?.throwIfAborted();
    const headers: Record<string, string> = { accept: "application/json, application/problem+json" };
    if (this.#token !== undefined) headers["authorization"] = `Bearer ${this.#token}`;
    const batch = batchOf(path, request);
    if (batch !== undefined) headers["lastbit-batch"] = batch;
    if (method === "POST" || method === "PATCH") {
      // Chosen before the first attempt, so that retries are safe.
      const key = request.idempotencyKey;
      headers["idempotency-key"] = key === undefined ? randomKey() : visibleAscii("an idempotency key", key, 255);
    }
    const init: RequestInit = { method, headers, redirect: "manual", credentials: "omit", cache: "no-store" };
    if (request.body !== undefined || method === "POST") {
      headers["content-type"] = "application/json";
      init.body = encoded(request.body ?? {});
    }
    const query = new URLSearchParams((request.query ?? []).map(([name, value]) => [name, value])).toString();
    const address = this.url + path + (query && `?${query}`);
    const line = `${method} ${path}`;
    const start = now();
    let firstTrouble = start;
    for (let attempt = 1; ; attempt += 1) {
      const outcome = await this.#attempt(address, init, this.#timeout + hold, signal);
      if ("status" in outcome && !RETRIED_STATUSES.has(outcome.status)) {
        if (outcome.status >= 200 && outcome.status < 300) return outcome;
        // An earlier attempt deleted it and its response was lost, so the request has succeeded.
        if (method === "DELETE" && outcome.status === 404 && attempt > 1) return { ...outcome, status: 204, text: "" };
        throw this.#error(line, outcome);
      }
      // The time of a long poll does not count: if it breaks at its end, the full retry deadline remains.
      if (hold > 0 && attempt === 1) firstTrouble = now();
      const elapsed = now() - start;
      const retryAfter = "status" in outcome ? retryAfterSeconds(outcome.headers) : undefined;
      // A rate-limited request has not failed, and is retried until the deadline.
      const goesOn = isPatient || ("status" in outcome && outcome.status === 429);
      const failed = goesOn ? Math.min(attempt, Math.max(1, this.#retry.attempts - 1)) : attempt;
      const pause = pauseAfter(this.#retry, failed, now() - firstTrouble, retryAfter, Math.random());
      if (pause === undefined || elapsed + pause > within) {
        if ("status" in outcome) throw this.#error(line, outcome);
        throw new ServiceUnreachable(this.url, line, outcome.cause, attempt, elapsed);
      }
      await sleep(pause, signal);
    }
  }

  async #attempt(
    address: string,
    init: RequestInit,
    timeout: number,
    signal: AbortSignal | undefined,
  ): Promise<Answer | Failure> {
    // Not AbortSignal.any: a signal that outlives many calls would keep all of them in memory on some platforms.
    const controller = new AbortController();
    const abort = () => controller.abort();
    signal?.addEventListener("abort", abort);
    let isLate = false;
    const timer = setTimeout(() => {
      isLate = true;
      abort();
    }, timeout * 1000);
    try {
      const response = await this.#fetch(address, { ...init, signal: controller.signal });
      return { status: response.status, headers: response.headers, text: await response.text() };
    } catch (error) {
      signal?.throwIfAborted();
      return { cause: isLate ? `nothing came within ${timeout} s` : described(error) };
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
    }
  }

  #error(line: string, answer: Answer): LastbitError {
    const retryAfter = retryAfterSeconds(answer.headers);
    let problem: Partial<Problem> | null | undefined;
    try {
      problem = JSON.parse(answer.text);
    } catch {
      // Not from the service; see below.
    }
    const code = problem?.code;
    const detail = problem?.detail ?? problem?.title ?? code;
    if (typeof code === "string" && typeof detail === "string") {
      return serviceError(answer.status, code, detail, retryAfter, problem as Problem);
    }
    if (answer.status < 400) return new UnexpectedAnswer(this.url, line, answer.status, "Lastbit never answers so");
    const silent = `${this.url} answered ${answer.status} to ${line} without saying why; a Lastbit service does`;
    return serviceError(answer.status, `http_${answer.status}`, silent, retryAfter);
  }
}

/** Wait for some seconds. Rejects with the signal's reason when it is aborted. */
export function sleep(seconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const abort = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(
      () => {
        signal?.removeEventListener("abort", abort);
        resolve();
      },
      Math.min(seconds * 1000, MAX_TIMER),
    );
    signal?.addEventListener("abort", abort, { once: true });
  });
}

/** Seconds of a clock that never goes back. */
export function now(): number {
  return performance.now() / 1000;
}

function encoded(body: unknown): string {
  try {
    return JSON.stringify(body);
  } catch (cause) {
    throw new InvalidArgument(`the argument can't be encoded as JSON: ${described(cause)}`, { cause });
  }
}

function described(error: unknown): string {
  const cause = error instanceof Error && error.cause instanceof Error ? error.cause : error;
  if (!(cause instanceof Error)) return String(cause);
  return cause.message || (cause as { code?: string }).code || cause.name;
}

function environment(name: string): string | undefined {
  return (globalThis as { process?: { env?: Record<string, string | undefined> } }).process?.env?.[name];
}

/**
 * The id of the batch that a request concerns, or of the first one: proxies send the calls of one batch to one process.
 * An open of a nested batch concerns its parent's.
 */
function batchOf(path: string, request: Request): string | undefined {
  const inPath = /^\/v1\/batches\/([0-9]+)(?:\/|$)/.exec(path);
  if (inPath !== null) return inPath[1];
  const { groups, items, parent } = (request.body ?? {}) as {
    groups?: { batch: number }[];
    items?: string[];
    parent?: string;
  };
  if (/^\/v1\/(acks|failures|skips)$/.test(path)) {
    return groups?.length ? String(groups[0]!.batch) : items?.[0]?.split(":")[0];
  }
  if (path === "/v1/batches" && parent) return parent.split(":")[0];
  return request.query?.find(([name]) => name === "batch")?.[1];
}

function baseUrl(text: string): string {
  let url: URL | undefined;
  try {
    url = new URL(text);
  } catch {
    // Refused below.
  }
  const fits = url !== undefined && /^https?:$/.test(url.protocol) && !url.search && !url.hash && !url.username;
  if (!fits) throw new InvalidArgument(`${text} is not the address of a service: expected a URL like ${DEFAULT_URL}`);
  return text.replace(/\/+$/, "");
}

function visibleAscii(name: string, text: string, longest: number): string {
  if (typeof text !== "string" || text.length > longest || !/^[\x21-\x7e]+$/.test(text)) {
    throw new InvalidArgument(`${name} is 1 to ${longest} visible ASCII characters without blanks`);
  }
  return text;
}

function randomKey(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
