// The dialog that asks the producer to send failed or pending items again.

import * as api from "./api.js";
import { askFor } from "./dialogs.js";
import { make, say } from "./dom.js";
import { count, number, since } from "./format.js";
import { EMPTY } from "./pieces.js";
import { may } from "./session.js";
import { field } from "./views.js";

const MOST_MINUTES = 60 * 24 * 365;

// `kind` is "failed" or "pending".
export const canRedrive = (batch, kind = "failed") => batch[kind] > 0 && !["expired", "cancelled"].includes(batch.state) && may("produce");

// What to say after it.
const OTHERWISE = "If their number doesn’t go down, no producer follows redrives.";
export const UNTIL_ACKED = `They stay failed until they are acked. ${OTHERWISE}`;
export const wasAsked = (kind, answer) =>
  `Asked the producer for ${count(answer.count, `${kind} item`)} again, at position ${number(answer.position)} of the feed. ` +
  (kind === "pending" ? `Items are pending until they are acked. ${OTHERWISE}` : UNTIL_ACKED);

// `reason` is null for all items of the kind. `many` is their number; of a sample, the least that there can be. `done`
// gets the service's answer; `refresh` is called when what is shown turns out to be old.
export function askToRedrive(batch, { kind = "failed", reason, many, isExact }, { done, refresh }) {
  // One key for the dialog: neither a second click nor a retry after a lost answer redrives twice. For that, a retry
  // must send the same values, so they can't be changed then.
  const key = api.newKey();
  const isPending = kind === "pending";
  const note = field("note", "Note", { maxlength: 4000, placeholder: "what the producer should know" }, "optional");
  const quiet = isPending
    ? field("minutes", "Only if unchanged for (minutes)", { type: "number", min: 0, max: MOST_MINUTES }, ["optional; the last change was ", since(batch.updated_at)])
    : null;
  function lock(isLocked) {
    for (const line of [note, quiet]) if (line) line.querySelector("input").readOnly = isLocked;
  }
  const amount = isExact ? count(many, `${kind} item`) : `At least ${count(many, `${kind} item`)}`;
  askFor({
    heading: reason === null ? `Send all ${kind} items again?` : "Send these items again?",
    body: [
      make("p", {}, make("strong", {}, amount), reason === null ? "." : [" for this reason:"]),
      reason === null ? null : make("p.reason.quoted", {}, reason || EMPTY),
      make(
        "p.quiet",
        {},
        "The event ",
        make("code", {}, "batch.redrive"),
        " asks their producer for the messages: a program that follows the redrives in the feed and calls ",
        make("code", {}, "resend"),
        " must run, now or later. Webhooks for this event get it too.",
      ),
      make(
        "p.quiet",
        {},
        isPending
          ? "A message that is still in a queue is then handled twice, and counts once. Items that a nested batch resolves are left out."
          : "They stay failed until they are acked.",
      ),
      quiet,
      note,
    ].filter(Boolean),
    confirm: isExact && !isPending ? `Send ${count(many, "item")} again` : "Send them again",
    keep: "Leave them",
    async act(values) {
      lock(true);
      const wish = isPending ? { pending: true, unchanged_for: Math.round(60 * Number(values.minutes)) || null } : { reason };
      let answer;
      try {
        answer = await api.redrive(batch.id, { ...wish, note: values.note || null }, key);
      } catch (error) {
        lock(error.status !== 409);
        if (error.code !== "nothing_failed") throw error;
        refresh();
        throw new Error("There is nothing to send again: none of these items is failed any more.");
      }
      say(`${count(answer.count, `${kind} item`)} asked for again`);
      return () => done(answer);
    },
  });
}
