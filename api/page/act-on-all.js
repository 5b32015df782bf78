// Acting on all batches that match the filter of the list: they are collected and shown first, and exactly those are
// acted on after a typed confirmation, each by a call of its own. The service judges each once more, so one that has
// changed since is left alone, and all of it can be repeated.

import * as api from "./api.js";
import { showDialog } from "./dialogs.js";
import { fill, make, say, setText } from "./dom.js";
import { failedFor, sentAgain } from "./failed-for.js";
import { count, number, title } from "./format.js";
import { reasonMark } from "./pieces.js";
import { UNTIL_ACKED } from "./redrive.js";
import { may } from "./session.js";
import { address } from "./views.js";

const MOST = 5000;
const NAMED = 8;
const PROPOSED = 5; // reasons
const AT_ONCE = 4;

// What has become of a batch that doesn't take the action any more.
const CHANGED = ["batch_complete", "batch_expired", "batch_cancelled", "batch_live", "batch_not_found", "state_conflict", "nothing_failed"];

// `states`: those in which a batch takes the action; `has`: the items that make it worth it; `asks`: the label of the text
// that goes with it; `send`: the call for a batch.
const ACTIONS = [
  {
    name: "Cancel",
    done: "cancelled",
    role: "produce",
    states: ["open", "sealed"],
    kind: ["live batch", "live batches"],
    has: "pending",
    asks: "Reason for cancelling",
    words: (pending) => `Acks that still come for ${pending === 1 ? "it" : "them"} will be rejected.`,
    send: (batch, { text, key }) => api.cancel(batch.id, { reason: text }, key),
  },
  {
    name: "Send failed items again",
    button: (batches) => `Send items of ${batches} again`,
    role: "produce",
    states: ["open", "sealed", "complete"],
    kind: ["batch", "batches"],
    has: "failed",
    only: { failed: true },
    asks: "Note for the producers",
    words: () => "Their producers are asked for them, by an event for each batch. They stay failed until they are acked.",
    result: (acted) => `${count(total(acted), "item")} of ${count(acted.size, "batch", "batches")} asked for again`,
    next: UNTIL_ACKED,
    send: (batch, { text, key, reason }) => api.redrive(batch.id, { note: text, reason }, key),
  },
  {
    name: "Reopen",
    done: "reopened",
    role: "produce",
    states: ["cancelled", "expired"],
    kind: ["batch", "batches"],
    has: "pending",
    asks: "Reason for reopening",
    words: () => "They take acks again. One whose deadline has passed is refused: reopen it by itself.",
    send: (batch, { text, key }) => api.reopen(batch.id, { reason: text }, key),
  },
  {
    name: "Delete",
    done: "deleted",
    role: "admin",
    states: ["open", "sealed", "complete", "expired", "cancelled"],
    kind: ["batch", "batches"],
    has: "pending",
    words: () => "All that is known of these batches will be gone, and can’t be restored.",
    send: (batch) => api.deleteBatch(batch.id, batch.state),
  },
];

// Of the items that the answers of redrives tell, by batch.
const total = (acted) => [...acted.values()].reduce((sum, answer) => sum + answer.count, 0);

// The states of the filter in which batches take the action.
const statesOf = (action, { state, outcome }) =>
  action.states.filter((each) => (!state || state === each) && (!["succeeded", "failed"].includes(outcome) || each === "complete"));

// The actions that fit the filter, and that the session may do.
export const actionsOn = (filter) => ACTIONS.filter((action) => may(action.role) && statesOf(action, filter).length);

// `done` is called once the dialog is closed after batches were acted on. With `only`, a reason, the items that failed for
// it are sent again, and nothing else is offered: the caller shows what becomes of them, so the dialog closes by itself.
export function askToActOnAll(filter, done, only = null) {
  const keyPrefix = filter.key || filter.key_prefix || "";
  const closed = new AbortController();
  const key = api.newKey(); // neither a second try nor a lost answer redrives a batch twice
  const actions = actionsOn(filter).filter((action) => only === null || action.only);
  const isFree = actions.length > 1;
  const choice = make(
    "select",
    { id: "action", onchange: chosen },
    isFree ? make("option", { value: "" }, "choose…") : null,
    actions.map(({ name }) => make("option", { value: name }, name)),
  );
  const status = make("p.progress-line", { role: "status" });
  const bar = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Progress" });
  const preview = make("div");
  const text = make("input", { id: "reason", maxlength: 4000, autocomplete: "off" });
  const textWord = make("span");
  const texts = make("label.typed", { for: "reason", hidden: true }, textWord, text);
  const cause = make("input", { id: "cause", maxlength: 4000, autocomplete: "off", placeholder: "any reason", value: only ?? "", onchange: recount });
  const causes = make("label.typed", { for: "cause", hidden: true }, make("span", {}, "Only those that failed for"), cause);
  const word = make("input", { id: "typed", autocomplete: "off", inputmode: "numeric", oninput: typed });
  const confirmation = make("label.typed", { for: "typed", hidden: true });
  const wrong = make("ul.ranges.failures", { hidden: true, "aria-label": "Refused" });
  const close = make("button", { type: "button", onclick: () => dialog.close() }, "Leave them");
  const doIt = make("button.danger", { type: "submit", disabled: true });
  const follow = make("button", { type: "button", hidden: true, onclick: followed }, "Follow them");
  const chooser = make("label.typed", { for: "action", hidden: !isFree }, make("span", {}, "What to do"), choice);
  let action = null;
  let collecting = new AbortController();
  let waiting = []; // batches to act on
  let needed = null; // the number to type
  const acted = new Map(); // the answers, by the batch's id
  let changed = 0;
  let result = null; // what was said in the end
  const dialog = showDialog(
    only ? "Send these items again" : "Act on all that match",
    make("form", { onsubmit: submitted }, chooser, status, bar, preview, causes, texts, confirmation, wrong, make("div.buttons", {}, close, follow, doIt)),
  );
  dialog.addEventListener("close", () => {
    closed.abort();
    if (result === null) remember(); // it was stopped
    if (acted.size) done();
  });
  chosen();

  function chosen() {
    action = actions.find(({ name }) => name === choice.value) ?? null;
    cause.value = only ?? "";
    causes.hidden = !action?.only || only !== null;
    recount();
  }

  function recount() {
    collecting.abort();
    collecting = new AbortController();
    waiting = [];
    needed = null;
    doIt.disabled = true;
    doIt.hidden = action === null;
    confirmation.hidden = texts.hidden = true;
    word.value = "";
    fill(preview);
    setText(status, "");
    if (action === null) return;
    setText(doIt, action.name);
    setText(status, "Looking for them…");
    const signal = AbortSignal.any([closed.signal, collecting.signal]);
    collect(signal).catch((error) => {
      if (!signal.aborted) setText(status, error.message);
    });
  }

  async function collect(signal) {
    const report = (many) => setText(status, `Looking for them: ${count(many, "item")} so far…`);
    const those = cause.value ? await failedFor(cause.value, keyPrefix, signal, { report }) : null;
    const found = new Map(); // by id: a batch may be sealed between two queries, and be in both
    let isMore = false;
    for (const state of statesOf(action, filter)) {
      let cursor = null;
      do {
        const page = await api.batches({ ...filter, ...action.only, state, limit: 1000, cursor }, signal);
        for (const batch of page.batches) if (!those || those.batches.has(batch.id)) found.set(batch.id, batch);
        cursor = page.next;
        setText(status, `Looking for them: ${count(found.size, ...action.kind)} so far…`);
      } while (cursor !== null && found.size < MOST);
      isMore ||= cursor !== null || found.size > MOST;
    }
    waiting = [...found.values()].sort((one, other) => other.id - one.id).slice(0, MOST);
    if (!waiting.length) return those ? noneFor(those) : setText(status, `No ${action.kind[0]} matches.`);
    const items = waiting.reduce((sum, batch) => sum + batch[action.has], 0);
    const chosen = waiting.reduce((sum, batch) => sum + (those?.batches.get(batch.id) ?? 0), 0);
    const what = those ? `${count(chosen, "item")} that failed for this reason` : count(items, `${action.has} item`);
    setText(status, `${isMore ? "The first " : ""}${count(waiting.length, ...action.kind)} with ${what}. ${action.words(items)}`);
    fill(
      preview,
      only && make("p.reason.quoted", {}, only),
      make("ul.ranges", { "aria-label": "Chosen" }, waiting.slice(0, NAMED).map((batch) => make("li", {}, ...named(batch)))),
      waiting.length > NAMED ? make("p.quiet", {}, `and ${number(waiting.length - NAMED)} more`) : null,
    );
    texts.hidden = !action.asks;
    setText(textWord, action.asks ?? "");
    needed = String(waiting.length);
    fill(confirmation, make("span", {}, "Type ", make("strong", {}, needed), " to confirm"), word);
    confirmation.hidden = false;
    const batches = count(waiting.length, "batch", "batches");
    setText(doIt, those ? `Send ${count(chosen, "item")} again` : (action.button?.(batches) ?? `${action.name} ${batches}`));
    // The choice keeps the focus: another one may follow.
    if (document.activeElement !== choice) word.focus({ preventScroll: true });
  }

  function noneFor({ total, longer }) {
    if (only) return setText(status, "No item is failed for this reason any more.");
    const frequent = total ? [] : [...longer].sort(([, one], [, other]) => other - one).slice(0, PROPOSED);
    setText(status, frequent.length ? "No item failed for exactly this reason. Choose one that contains it:" : "No item of these batches failed for this reason.");
    const taken = (reason) => () => {
      cause.value = reason;
      recount();
    };
    const proposed = frequent.map(([reason, many]) => make("li", {}, make("button.proposed", { type: "button", onclick: taken(reason) }, reasonMark(reason)), make("span.many", {}, count(many, "item"))));
    if (proposed.length) fill(preview, make("ul.ranges", { "aria-label": "Reasons that contain it" }, proposed));
    (preview.querySelector("button") ?? cause).focus({ preventScroll: true });
  }

  const named = (batch) => [make("span.event", {}, title(batch)), make("span.many", {}, `batch ${batch.id}`)];

  // For the view of failures, which counts what is left of them.
  function remember() {
    if (!acted.size || !cause.value) return;
    const batches = new Map([...acted].map(([id, answer]) => [id, answer.count]));
    sentAgain.set(cause.value, { keyPrefix, said: result ?? `${action.result(acted)}.`, now: { batches, total: total(acted), isExact: true } });
  }

  function followed() {
    dialog.close();
    location.hash = address("/failures", { text: cause.value, key_prefix: keyPrefix });
  }

  function typed() {
    doIt.disabled = word.value.trim() !== needed;
  }

  async function submitted(event) {
    event.preventDefault();
    if (doIt.disabled || !waiting.length) return;
    const all = waiting;
    const left = [...all];
    const refusals = [];
    let finished = 0;
    waiting = [];
    doIt.disabled = true;
    chooser.hidden = texts.hidden = causes.hidden = confirmation.hidden = wrong.hidden = preview.hidden = true;
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
        while (left.length && !closed.signal.aborted) {
          const batch = left.shift();
          try {
            acted.set(batch.id, await action.send(batch, { text: text.value || null, key, reason: cause.value || null }));
          } catch (error) {
            if (CHANGED.includes(error.code)) changed++;
            else refusals.push([batch, error]);
          }
          finished++;
          report();
        }
      }),
    );
    if (closed.signal.aborted) return;
    waiting = refusals.map(([batch]) => batch);
    bar.hidden = true;
    const parts = [action.result?.(acted) ?? `${count(acted.size, "batch", "batches")} ${action.done}`, changed && `${count(changed, "batch", "batches")} had changed and ${changed === 1 ? "was" : "were"} left alone`, refusals.length && `${number(refusals.length)} refused`];
    result = `${parts.filter(Boolean).join(", ")}.`;
    setText(status, acted.size && action.next ? `${result} ${action.next}` : result);
    say(status.textContent);
    remember();
    follow.hidden = !acted.size || !cause.value;
    if (only && acted.size && !refusals.length) return dialog.close();
    wrong.hidden = !refusals.length;
    fill(wrong, refusals.slice(0, NAMED).map(([batch, error]) => make("li", {}, ...named(batch), make("span.reason", {}, error.message))));
    setText(close, "Close");
    doIt.hidden = !refusals.length;
    doIt.disabled = false;
    setText(doIt, `Try ${number(refusals.length)} again`);
    (refusals.length ? doIt : follow.hidden ? close : follow).focus();
  }
}
