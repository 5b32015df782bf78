// The dialog that brings back a batch that was cancelled or has expired.

import * as api from "./api.js";
import { askFor } from "./dialogs.js";
import { make, say } from "./dom.js";
import { localTime, number, title, utcTime } from "./format.js";
import { may } from "./session.js";
import { field } from "./views.js";

export const canReopen = (batch) => ["cancelled", "expired"].includes(batch.state) && may("produce");

// `done` is called after it.
export function askToReopen(batch, done) {
  const key = api.newKey(); // a retry after a lost answer doesn't reopen it once more
  const before = localTime(batch.deadline ?? "");
  const isOverdue = batch.deadline !== null && Date.parse(batch.deadline) <= Date.now();
  const body = make(
    "div.edit",
    {},
    make("p", {}, `It takes acks again, with all that was resolved. ${number(batch.pending)} of its items ${batch.pending === 1 ? "is" : "are"} pending.`),
    field("deadline", "Deadline", { type: "datetime-local", max: "9999-12-31T23:59", value: isOverdue ? "" : before }, isOverdue ? "it has passed; in your time zone, or empty for none" : "in your time zone"),
    field("reason", "Reason", { maxlength: 4000, placeholder: "why; in the event" }, "optional"),
  );
  askFor({
    heading: `Reopen ${title(batch)}?`,
    body,
    confirm: "Reopen the batch",
    keep: "Leave it",
    async act(values) {
      const wanted = { reason: values.reason || null };
      if (isOverdue || values.deadline !== before) wanted.deadline = utcTime(values.deadline) || null;
      await api.reopen(batch.id, wanted, key);
      say(`Batch ${batch.id} is live again`);
      done();
    },
  });
}
