// The orders of a list of batches. The service lists them by their opening, newest first; any other order is one of those
// that are loaded.

import { title } from "./format.js";
import { resolvedOf, stateName } from "./pieces.js";

const KEYS = {
  key: title,
  state: stateName,
  done: (batch) => (batch.items ? resolvedOf(batch) / batch.items : 0),
  items: (batch) => batch.items,
  pending: (batch) => batch.pending,
  failed: (batch) => batch.failed,
  opened: (batch) => batch.id,
  changed: (batch) => Date.parse(batch.updated_at),
};

const compare = (one, other) => (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);

// `isRising`: the least first. Batches that are alike stay newest first.
export function sorted(batches, key, isRising) {
  const of = KEYS[key];
  const sign = isRising ? 1 : -1;
  return batches.toSorted((one, other) => sign * compare(of(one), of(other)) || other.id - one.id);
}
