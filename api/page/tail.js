// The newest entries of a log that can only be read forwards, by position: the feed, and the commands in it.

const FIRST = 1000; // positions that are read at first
const STRIDES = 4;
const MOST = 1000; // entries that are kept

export class Tail {
  #read;
  #ends;
  #low = 0; // all entries above it are in `entries`
  #high = 0; // the last position that was read
  #begin = 0;
  #step = FIRST;

  // `read(after, limit, signal)` returns the entries after a position, in order, `next` and `last`; `ends(signal)` the
  // first and the last position.
  constructor(read, ends) {
    this.#read = read;
    this.#ends = ends;
    this.entries = []; // newest first
    this.isStarted = false;
  }

  get hasOlder() {
    return this.#low > this.#begin && this.entries.length < MOST;
  }

  async start(wanted, signal) {
    const { first, last } = await this.#ends(signal);
    this.#begin = first;
    this.#low = this.#high = last;
    this.isStarted = true;
    await this.older(wanted, signal);
  }

  // Read backwards, in ever longer strides, until `wanted` entries are there or the strides are used up.
  async older(wanted, signal) {
    for (let stride = 0; stride < STRIDES && this.hasOlder && this.entries.length < wanted; stride++) {
      const from = Math.max(this.#begin, this.#low - this.#step);
      this.entries.push(...(await this.#between(from, this.#low, signal)).reverse());
      this.#low = from;
      this.#step *= 10;
    }
    this.entries.length = Math.min(this.entries.length, MOST);
  }

  // Return whether the end is still far away: a new tail is there sooner.
  async newer(signal) {
    const { entries, next, last } = await this.#read(this.#high, MOST, signal);
    this.#high = Math.max(this.#high, next);
    if (entries.length) this.entries = [...entries.reverse(), ...this.entries].slice(0, MOST);
    return last - next > FIRST;
  }

  async #between(after, last, signal) {
    const found = [];
    for (let at = after; at < last; ) {
      const { entries, next } = await this.#read(at, Math.min(1000, last - at), signal);
      found.push(...entries.filter(({ position }) => position <= last));
      if (next <= at) break;
      at = next;
    }
    return found;
  }
}
