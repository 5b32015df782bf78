/** Item ids: `batch:group:index`, three decimal integers. An item's number is its 0-based position in the batch. */

import { InvalidArgument } from "./errors.js";

export const DEFAULT_GROUP_SIZE = 8192;
export const MAX_GROUP_SIZE = 32768;
/** Every integer on the wire is smaller than this. */
export const INTEGER_LIMIT = 2 ** 53;

const ITEM_ID = /^(0|[1-9][0-9]{0,15}):(0|[1-9][0-9]{0,15}):(0|[1-9][0-9]{0,15})$/;

export interface ItemId {
  readonly batch: number;
  readonly group: number;
  readonly index: number;
}

/** The id of the item at `number` in `batch`. */
export function itemId(batch: number, number: number, groupSize: number = DEFAULT_GROUP_SIZE): string {
  return `${batch}:${Math.floor(number / groupSize)}:${number % groupSize}`;
}

/** The parts of an id; undefined for anything that is not exactly one. */
export function parseItemId(text: unknown): ItemId | undefined {
  // `$` alone would also match before a final line break in other languages; in JavaScript it does not.
  const match = typeof text === "string" ? ITEM_ID.exec(text) : null;
  if (match === null) return undefined;
  const [batch, group, index] = match.slice(1).map(Number) as [number, number, number];
  return batch < INTEGER_LIMIT && group < INTEGER_LIMIT && index < INTEGER_LIMIT ? { batch, group, index } : undefined;
}

/**
 * The ids of a range of numbers, computed on demand: a billion ids take no memory.
 *
 * It can be iterated any number of times. `at`, `has`, `indexOf` and `slice` take constant time.
 */
export class ItemIds implements Iterable<string> {
  readonly batch: number;
  readonly groupSize: number;
  /** The number of the first item. */
  readonly start: number;
  /** The number of ids. */
  readonly size: number;

  constructor(batch: number, groupSize: number, start: number, size: number) {
    const isWhole = [batch, groupSize, start, size].every((value) => Number.isSafeInteger(value) && value >= 0);
    if (!isWhole || groupSize < 1 || start + size > INTEGER_LIMIT) {
      throw new InvalidArgument(`these are no item ids: ${size} from ${start}, in groups of ${groupSize}`);
    }
    this.batch = batch;
    this.groupSize = groupSize;
    this.start = start;
    this.size = size;
  }

  /** The id at a position; a negative one counts from the end. Undefined beyond the ends. */
  at(position: number): string | undefined {
    const offset = Math.trunc(position) + (position < 0 ? this.size : 0);
    return offset >= 0 && offset < this.size ? itemId(this.batch, this.start + offset, this.groupSize) : undefined;
  }

  /** The ids from position `start` up to `end`, as `Array.prototype.slice` counts them. */
  slice(start: number = 0, end: number = this.size): ItemIds {
    const [first, last] = [start, end].map((position) =>
      Math.min(Math.max(Math.trunc(position) + (position < 0 ? this.size : 0), 0), this.size),
    ) as [number, number];
    return new ItemIds(this.batch, this.groupSize, this.start + first, Math.max(0, last - first));
  }

  /** The position of an id, or -1. */
  indexOf(id: string): number {
    const item = parseItemId(id);
    if (item === undefined || item.batch !== this.batch || item.index >= this.groupSize) return -1;
    const position = item.group * this.groupSize + item.index - this.start;
    return position >= 0 && position < this.size ? position : -1;
  }

  has(id: string): boolean {
    return this.indexOf(id) >= 0;
  }

  *[Symbol.iterator](): IterableIterator<string> {
    const end = this.start + this.size;
    let group = Math.floor(this.start / this.groupSize);
    let index = this.start % this.groupSize;
    for (let number = this.start; number < end; number += 1) {
      yield `${this.batch}:${group}:${index}`;
      index += 1;
      if (index === this.groupSize) {
        index = 0;
        group += 1;
      }
    }
  }

  toString(): string {
    return this.size <= 2 ? [...this].join(", ") : `${this.at(0)} … ${this.at(-1)}, ${this.size} items`;
  }
}
