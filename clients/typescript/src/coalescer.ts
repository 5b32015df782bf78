/**
 * Selects the ids of an acker's next call.
 *
 * Waiting ids are grouped by kind: all acks in one call, failures in one call per reason. An ack and a failure of the
 * same item must reach the service in the order in which they were made. So the ids wait in rounds. In a round, an item
 * has only one kind, so the calls may go in any order. An id that would break this opens the next round.
 */

import { MOST_ITEMS } from "./masks.js";

/** How an item is resolved. */
export interface Kind {
  readonly verb: "acks" | "failures" | "skips";
  readonly reason: string | undefined;
}

/** The ids of one request, with those that wait for each. */
export interface Call<Waiter> {
  readonly kind: Kind;
  readonly waiting: Map<string, Waiter[]>;
}

interface Round<Waiter> {
  /** By the name of their kind. */
  readonly calls: Map<string, Call<Waiter>>;
  /** Item id → the name of its kind. */
  readonly kinds: Map<string, string>;
}

export class Coalescer<Waiter> {
  readonly #rounds: Round<Waiter>[] = [];

  put(item: string, kind: Kind, waiter: Waiter): void {
    const name = JSON.stringify([kind.verb, kind.reason ?? null]);
    let last = this.#rounds.at(-1);
    if (last === undefined || (last.kinds.get(item) ?? name) !== name) {
      last = { calls: new Map(), kinds: new Map() };
      this.#rounds.push(last);
    }
    last.kinds.set(item, name);
    let call = last.calls.get(name);
    if (call === undefined) last.calls.set(name, (call = { kind, waiting: new Map() }));
    const waiters = call.waiting.get(item);
    if (waiters === undefined) call.waiting.set(item, [waiter]);
    else waiters.push(waiter);
  }

  /**
   * The next call, or undefined if nothing waits. The kind that has waited longest goes first. If its ids exceed one
   * call, the kind goes to the end, so that a flood of acks does not delay failures.
   */
  take(): Call<Waiter> | undefined {
    const first = this.#rounds[0];
    if (first === undefined) return undefined;
    const [name, call] = first.calls.entries().next().value!;
    first.calls.delete(name);
    let selected = call.waiting;
    if (selected.size > MOST_ITEMS) {
      selected = new Map();
      for (const [item, waiters] of call.waiting) {
        if (selected.size === MOST_ITEMS) break;
        selected.set(item, waiters);
        call.waiting.delete(item);
      }
      first.calls.set(name, call);
    }
    for (const item of selected.keys()) first.kinds.delete(item);
    if (first.calls.size === 0) this.#rounds.shift();
    return { kind: call.kind, waiting: selected };
  }
}
