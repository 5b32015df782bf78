// Cancelling all live batches that match the filter of the list: they are collected and shown first, and exactly those
// are cancelled after a typed confirmation. Cancelling one again has no effect, so all of it can be repeated.

import * as api from "./api.js";
import { showDialog } from "./dialogs.js";
import { fill, make, say, setText } from "./dom.js";
import { count, number, title } from "./format.js";

const MOST = 5000;
const NAMED = 8;
const AT_ONCE = 4;

// A filter that could match a live batch.
export const canMatchLive = ({ state, outcome }) =>
  ["", "open", "sealed"].includes(state) && ["", "exceeded"].includes(outcome);

// `done` is called once the dialog is closed after batches were cancelled.
export function askToCancelAll(filter, done) {
  const stopped = new AbortController();
  const status = make("p.progress-line", { role: "status" }, "Looking for them…");
  const bar = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Progress" });
  const preview = make("div");
  const word = make("input", { id: "typed", autocomplete: "off", inputmode: "numeric", oninput: typed });
  const confirmation = make("label.typed", { for: "typed", hidden: true });
  const wrong = make("ul.ranges.failures", { hidden: true, "aria-label": "Not cancelled" });
  const close = make("button", { type: "button", onclick: () => dialog.close() }, "Keep them");
  const doIt = make("button.danger", { type: "submit", disabled: true }, "Cancel them");
  let waiting = []; // batches to cancel
  let needed = null; // the number to type
  let cancelled = 0;
  let ended = 0;
  const dialog = showDialog(
    "Cancel these batches?",
    make("form", { onsubmit: submitted }, status, bar, preview, confirmation, wrong, make("div.buttons", {}, close, doIt)),
  );
  dialog.addEventListener("close", () => {
    stopped.abort();
    if (cancelled) done();
  });
  collect().catch((error) => {
    if (!stopped.signal.aborted) setText(status, error.message);
  });

  async function collect() {
    const found = new Map(); // by id: a batch may be sealed between the two queries, and be in both
    let isMore = false;
    for (const state of filter.state ? [filter.state] : ["open", "sealed"]) {
      let cursor = null;
      do {
        const page = await api.batches({ ...filter, state, limit: 1000, cursor }, stopped.signal);
        for (const batch of page.batches) found.set(batch.id, batch);
        cursor = page.next;
        setText(status, `Looking for them: ${number(found.size)} so far…`);
      } while (cursor !== null && found.size < MOST);
      isMore ||= cursor !== null || found.size > MOST;
    }
    waiting = [...found.values()].slice(0, MOST);
    if (!waiting.length) return setText(status, "No live batch matches.");
    const pending = waiting.reduce((sum, batch) => sum + batch.pending, 0);
    setText(
      status,
      `${isMore ? "The first " : ""}${count(waiting.length, "live batch", "live batches")} with ${count(pending, "pending item")}. Acks that still come for ${pending === 1 ? "it" : "them"} will be rejected.`,
    );
    fill(
      preview,
      make("ul.ranges", { "aria-label": "To be cancelled" }, waiting.slice(0, NAMED).map((batch) => make("li", {}, make("span.event", {}, title(batch)), make("span.many", {}, `batch ${batch.id}`)))),
      waiting.length > NAMED ? make("p.quiet", {}, `and ${number(waiting.length - NAMED)} more`) : null,
    );
    needed = String(waiting.length);
    fill(confirmation, make("span", {}, "Type ", make("strong", {}, needed), " to confirm"), word);
    confirmation.hidden = false;
    setText(doIt, `Cancel ${count(waiting.length, "batch", "batches")}`);
    word.focus();
  }

  function typed() {
    doIt.disabled = word.value.trim() !== needed;
  }

  async function submitted(event) {
    event.preventDefault();
    if (doIt.disabled || !waiting.length) return;
    const all = waiting;
    const left = [...all];
    const failures = [];
    let finished = 0;
    waiting = [];
    doIt.disabled = true;
    confirmation.hidden = wrong.hidden = preview.hidden = true;
    bar.hidden = false;
    bar.max = all.length;
    setText(close, "Stop");
    const report = () => {
      bar.value = finished;
      setText(status, `${number(finished)} of ${number(all.length)}…`);
    };
    report();
    await Promise.all(
      Array.from({ length: AT_ONCE }, async () => {
        while (left.length && !stopped.signal.aborted) {
          const batch = left.shift();
          try {
            await api.cancel(batch.id);
            cancelled++;
          } catch (error) {
            // It ended between the preview and now.
            if (["batch_complete", "batch_expired", "batch_not_found"].includes(error.code)) ended++;
            else failures.push([batch, error]);
          }
          finished++;
          report();
        }
      }),
    );
    if (stopped.signal.aborted) return;
    waiting = failures.map(([batch]) => batch);
    bar.hidden = true;
    const parts = [`${count(cancelled, "batch", "batches")} cancelled`, ended && `${number(ended)} had ended already`, failures.length && `${number(failures.length)} not cancelled`];
    setText(status, `${parts.filter(Boolean).join(", ")}.`);
    say(status.textContent);
    wrong.hidden = !failures.length;
    fill(wrong, failures.slice(0, NAMED).map(([batch, error]) => make("li", {}, make("span.event", {}, title(batch)), make("span.many", {}, `batch ${batch.id}`), make("span.reason", {}, error.message))));
    setText(close, "Close");
    doIt.hidden = !failures.length;
    doIt.disabled = false;
    setText(doIt, `Try ${number(failures.length)} again`);
    (failures.length ? doIt : close).focus();
  }
}
