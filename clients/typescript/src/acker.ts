/**
 * Single acks, combined into few calls, without a timer.
 *
 * An acker has one call under way; items that it gets meanwhile are sent together in the next one. An idle acker sends
 * at once, a busy one sends large calls.
 *
 * It is safe to remove a message from its queue when the promise of its ack has resolved: the service has committed by
 * then, and `onCompleted` has returned for the item's batch. If it throws, the promise rejects, the message stays in
 * the queue, and its redelivery reports the completion again.
 */

import { resolvePieces } from "./calls.js";
import { type Call, Coalescer, type Kind } from "./coalescer.js";
import { AckerClosed, InvalidArgument, ItemRejected } from "./errors.js";
import { parseItemId } from "./ids.js";
import { checked } from "./masks.js";
import type { AckResult, Completed } from "./models.js";
import type { CallOptions, Service } from "./service.js";

export interface AckerOptions {
  /**
   * Called for each complete batch in a result, before the promises of its items resolve. It may pass more items to the
   * acker, but must not wait for their promises, for `room()` or for `close()`: these wait for it.
   */
  onCompleted?: (completed: Completed) => void | Promise<void>;
  /** Open promises above which `room()` waits. */
  maxPending?: number;
}

interface Waiter {
  readonly resolve: (completed: Completed | null) => void;
  readonly reject: (error: unknown) => void;
}

/** Combines acks, failures and skips into few calls; made by `client.acker(…)`. */
export class Acker {
  readonly #service: Service;
  readonly #onCompleted: AckerOptions["onCompleted"];
  readonly #maxPending: number;
  readonly #coalescer = new Coalescer<Waiter>();
  #open = 0;
  #closed = false;
  #isNotifying = false;
  #work: Promise<void> | undefined;
  #whenRoom: (() => void)[] = [];

  constructor(service: Service, options: AckerOptions) {
    this.#service = service;
    this.#onCompleted = options.onCompleted;
    this.#maxPending = options.maxPending ?? 100_000;
    if (!(this.#maxPending >= 1)) throw new InvalidArgument(`maxPending is at least 1, not ${this.#maxPending}`);
  }

  /**
   * Ack an item. The promise resolves after the commit, with the item's batch if that is complete, else with null. It
   * rejects with `MalformedItem`, `AckerClosed`, `ItemRejected`, `ServiceError`, `ServiceUnreachable`, or the error
   * of `onCompleted`. The signal ends the wait; it does not undo the ack.
   */
  ack(item: string, options: CallOptions = {}): Promise<Completed | null> {
    return this.#put(item, { verb: "acks", reason: undefined }, options.signal);
  }

  /** Mark an item as failed. Each reason needs its own call, so use few different ones. */
  fail(item: string, reason?: string, options: CallOptions = {}): Promise<Completed | null> {
    return this.#put(item, { verb: "failures", reason }, options.signal);
  }

  /** Mark an item as not needed. Each reason needs its own call, so use few different ones. */
  skip(item: string, reason?: string, options: CallOptions = {}): Promise<Completed | null> {
    return this.#put(item, { verb: "skips", reason }, options.signal);
  }

  /** Resolves when fewer than `maxPending` promises are open. Await it before you take the next message. */
  async room(): Promise<void> {
    while (this.#open >= this.#maxPending) await new Promise<void>((resolve) => this.#whenRoom.push(resolve));
  }

  /** Accept no more items, send all waiting ones, and resolve when every promise is settled. */
  async close(): Promise<void> {
    this.#closed = true;
    await this.#work;
  }

  async #put(item: string, kind: Kind, signal: AbortSignal | undefined): Promise<Completed | null> {
    checked(item);
    signal?.throwIfAborted();
    // Items that onCompleted acks while the acker is closing are still sent.
    if (this.#closed && !this.#isNotifying) throw new AckerClosed();
    const settled = new Promise<Completed | null>((resolve, reject) => {
      this.#coalescer.put(item, kind, { resolve, reject });
    });
    this.#open += 1;
    this.#work ??= this.#send();
    return signal === undefined ? settled : unlessAborted(settled, signal);
  }

  async #send(): Promise<void> {
    // So that items of the same event-loop step go in the same call.
    await null;
    for (let call = this.#coalescer.take(); call !== undefined; call = this.#coalescer.take()) {
      await this.#settle(call);
      for (const waiters of call.waiting.values()) this.#open -= waiters.length;
      for (const resolve of this.#whenRoom.splice(0)) resolve();
    }
    this.#work = undefined;
  }

  async #settle(call: Call<Waiter>): Promise<void> {
    const { kind, waiting } = call;
    let result: AckResult;
    try {
      result = await resolvePieces(this.#service, kind.verb, [{ items: [...waiting.keys()] }], kind.reason, {});
    } catch (error) {
      for (const waiters of waiting.values()) for (const waiter of waiters) waiter.reject(error);
      return;
    }
    const thrown = await this.#notify(result);
    const rejected = new Map(result.rejected.map((rejection) => [rejection.item, rejection.reason]));
    const completed = new Map(result.completed.map((batch) => [batch.batch, batch]));
    for (const [item, waiters] of waiting) {
      const reason = rejected.get(item);
      const batch = parseItemId(item)!.batch;
      for (const waiter of waiters) {
        if (reason !== undefined) waiter.reject(new ItemRejected(item, reason));
        else if (thrown.has(batch)) waiter.reject(thrown.get(batch));
        else waiter.resolve(completed.get(batch) ?? null);
      }
    }
  }

  /** Call `onCompleted` for each complete batch; returns its errors, by batch. */
  async #notify(result: AckResult): Promise<Map<number, unknown>> {
    const thrown = new Map<number, unknown>();
    this.#isNotifying = true;
    for (const completed of result.completed) {
      try {
        await this.#onCompleted?.(completed);
      } catch (error) {
        thrown.set(completed.batch, error);
      }
    }
    this.#isNotifying = false;
    return thrown;
  }
}

function unlessAborted<T>(promise: Promise<T>, signal: AbortSignal): Promise<T> {
  return new Promise((resolve, reject) => {
    const abort = () => reject(signal.reason);
    signal.addEventListener("abort", abort, { once: true });
    promise.then(resolve, reject).finally(() => signal.removeEventListener("abort", abort));
  });
}
