/** Item ids in requests: a list, or, for a range of numbers, one bitfield per group. All are made piece by piece. */

import { MalformedItem } from "./errors.js";
import { ItemIds, parseItemId } from "./ids.js";
import type { components } from "./schema.js";

type GroupMask = components["schemas"]["GroupMask"];
export type Piece = { items: string[] } | { groups: GroupMask[] };

export const MOST_ITEMS = 10_000;
export const MOST_GROUPS = 4_096;
/** Bytes of bitfields in a request. The service accepts 8 MiB; the rest is for the reason and the punctuation. */
const MOST_BYTES = 8 * 2 ** 20 - 64 * 2 ** 10;

/** One id, ids, or a range of ids. */
export type Ids = string | ItemIds | Iterable<string>;

/**
 * Request bodies for `ids`, each within the limits of one request.
 *
 * An array or a set is checked as a whole first, and each id in it is sent once. Another iterable is checked and
 * deduplicated piece by piece, so it may be endless. Throws `MalformedItem`.
 */
export function pieces(ids: Ids): Iterable<Piece> {
  if (ids instanceof ItemIds) return groupPieces(ids);
  if (typeof ids === "string" || ids === null || typeof ids !== "object" || !(Symbol.iterator in ids)) {
    return [{ items: [checked(ids, 0)] }];
  }
  if (Array.isArray(ids) || ids instanceof Set) {
    let position = 0;
    const unique = new Set<string>();
    for (const id of ids) unique.add(checked(id, position++));
    return itemPieces(unique);
  }
  return itemPieces(ids);
}

/** The id, if it is one. Throws `MalformedItem`. */
export function checked(id: unknown, position: number = 0): string {
  if (parseItemId(id) === undefined) throw new MalformedItem(id, position);
  return id as string;
}

function* itemPieces(ids: Iterable<string>): Iterable<Piece> {
  let items = new Set<string>();
  let count = 0;
  for (const id of ids) {
    items.add(checked(id, count++));
    if (count % MOST_ITEMS === 0) {
      yield { items: [...items] };
      items = new Set();
    }
  }
  if (items.size > 0) yield { items: [...items] };
}

function* groupPieces(ids: ItemIds): Iterable<Piece> {
  let groups: GroupMask[] = [];
  let size = 0;
  for (const mask of masks(ids)) {
    const length = mask.bits.length + 80; // the longest batch and group number, names and punctuation
    if (groups.length === MOST_GROUPS || (groups.length > 0 && size + length > MOST_BYTES)) {
      yield { groups };
      groups = [];
      size = 0;
    }
    groups.push(mask);
    size += length;
  }
  if (groups.length > 0) yield { groups };
}

/** One mask for each group that the range touches, in ascending order. */
export function* masks(ids: ItemIds): Iterable<GroupMask> {
  const { batch, groupSize } = ids;
  const end = ids.start + ids.size;
  let full: string | undefined;
  for (let number = ids.start; number < end; ) {
    const group = Math.floor(number / groupSize);
    const low = number - group * groupSize;
    const high = Math.min(groupSize, low + end - number);
    const isFull = low === 0 && high === groupSize;
    // Most groups of a long range are full, and all of these have the same mask.
    const bits = isFull ? (full ??= bitsOf(0, groupSize)) : bitsOf(low, high);
    yield { batch, group, bits };
    number += high - low;
  }
}

/** base64 of the bitfield with the bits `low` to `high - 1`, in little-endian bit order. */
function bitsOf(low: number, high: number): string {
  const bytes = new Uint8Array(Math.ceil(high / 8)).fill(0xff);
  bytes.fill(0, 0, Math.floor(low / 8));
  const first = Math.floor(low / 8);
  bytes[first] = bytes[first]! & (0xff << low % 8);
  if (high % 8 > 0) bytes[bytes.length - 1] = bytes[bytes.length - 1]! & (0xff >> (8 - (high % 8)));
  return btoa(String.fromCharCode(...bytes));
}
