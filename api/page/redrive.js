// The dialog that asks the producer to send failed items again.

import * as api from "./api.js";
import { askFor } from "./dialogs.js";
import { make, say } from "./dom.js";
import { count, number } from "./format.js";
import { EMPTY } from "./pieces.js";
import { may } from "./session.js";
import { field } from "./views.js";

export const canRedrive = (batch) => batch.failed > 0 && !["expired", "cancelled"].includes(batch.state) && may("produce");

// `reason` is null for all failed items. `many` is their number; of a sample, the least that there can be. `done` gets the
// service's answer; `refresh` is called when the reasons turn out to be old.
export function askToRedrive(batch, { reason, many, isExact }, { done, refresh }) {
  // One key for the dialog: neither a second click nor a retry after a lost answer redrives twice. For that, a retry
  // must send the same note, so it can't be changed any more.
  const key = api.newKey();
  const note = field("note", "Note", { maxlength: 4000, placeholder: "what the producer should know" }, "optional");
  const amount = isExact ? count(many, "failed item") : `At least ${count(many, "failed item")}`;
  askFor({
    heading: reason === null ? "Redrive all failed items?" : "Redrive these items?",
    body: [
      make("p", {}, make("strong", {}, amount), reason === null ? "." : [" for this reason:"]),
      reason === null ? null : make("p.reason.quoted", {}, reason || EMPTY),
      make("p.quiet", {}, "Their producer is asked to send them again. They stay failed until they are acked."),
      note,
    ].filter(Boolean),
    confirm: isExact ? `Redrive ${count(many, "item")}` : "Redrive them",
    keep: "Leave them",
    async act(values) {
      const input = note.querySelector("input");
      input.readOnly = true;
      let answer;
      try {
        answer = await api.redrive(batch.id, { reason, note: values.note || null }, key);
      } catch (error) {
        if (error.code !== "nothing_failed") throw error;
        refresh();
        throw new Error("There is nothing to redrive: none of these items is failed any more.");
      }
      say(`${number(answer.count)} failed items were asked for again`);
      return () => done(answer);
    },
  });
}
