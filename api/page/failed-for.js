// The failed items of one reason, over all batches.

import * as api from "./api.js";

const LARGEST = 1000; // failures of one call

// The items that failed for exactly this reason, in batches whose key begins so: a map of these batches to the number of
// their items, its sum, and a reason that only contains this one (null if none was seen). After `most` items, `isExact`
// is false: there may be more. `report` gets the sum so far.
export async function failedFor(reason, keyPrefix, signal, { most = Infinity, report = () => {} } = {}) {
  const batches = new Map();
  let total = 0;
  let longer = null;
  let cursor = null;
  do {
    const page = await api.failures({ key_prefix: keyPrefix, text: reason, limit: LARGEST, cursor }, signal);
    for (const failure of page.failures) {
      if (failure.reason !== reason) {
        longer ??= failure.reason;
        continue;
      }
      batches.set(failure.batch, (batches.get(failure.batch) ?? 0) + 1);
      total++;
    }
    cursor = page.next;
    report(total);
  } while (cursor !== null && total < most);
  return { batches, total, longer, isExact: cursor === null };
}
