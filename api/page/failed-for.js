// The failed items of one reason, over all batches, and what was sent again of them.

import * as api from "./api.js";

const LARGEST = 1000; // failures of one call
const LONGER = 100; // reasons that contain the one looked for, and are counted

// What this page has sent again: by reason, the beginning of the batches' keys, what was said of it, and the items that
// were failed for it when they were last counted, as `failedFor` returns them.
export const sentAgain = new Map();

// The items that failed for exactly this reason, in batches whose key begins so: a map of these batches to the number of
// their items, and its sum. `longer` maps reasons that only contain this one to their number of items. After `most`
// items, `isExact` is false: there may be more. `report` gets the sum so far.
export async function failedFor(reason, keyPrefix, signal, { most = Infinity, report = () => {} } = {}) {
  const batches = new Map();
  const longer = new Map();
  let total = 0;
  let cursor = null;
  do {
    const page = await api.failures({ key_prefix: keyPrefix, text: reason, limit: LARGEST, cursor }, signal);
    for (const failure of page.failures) {
      if (failure.reason === reason) {
        batches.set(failure.batch, (batches.get(failure.batch) ?? 0) + 1);
        total++;
      } else if (longer.size < LONGER || longer.has(failure.reason)) longer.set(failure.reason, (longer.get(failure.reason) ?? 0) + 1);
    }
    cursor = page.next;
    report(total);
  } while (cursor !== null && total < most);
  return { batches, total, longer, isExact: cursor === null };
}
