// Why items failed: the failures of a batch grouped by reason, to copy or send again.

import * as api from "./api.js";
import { copyText } from "./dialogs.js";
import { dotted, make } from "./dom.js";
import { asText } from "./export.js";
import { count, number, since } from "./format.js";
import { panel } from "./panels.js";
import { reasonMark } from "./pieces.js";
import { askToRedrive, canRedrive, wasAsked } from "./redrive.js";

const STEP = 10;
const MOST = 1000;
const SELDOM = 4000;
const PAUSE = 20; // times as long as the last read took, and at most SELDOM

// `itemAddress(number)` returns the address that shows the item. `redriven(answer)` is called after a redrive.
export function reasonsPanel(id, { itemAddress, changed, redriven }) {
  const { node, note, draw, hide } = panel("reasons", "Why did items fail?");
  let wanted = STEP;
  let version = null; // of the batch for which the reasons were read
  let nextRead = -Infinity;
  let batch = null;
  const tool = (word, act) => make("button", { type: "button", "data-key": `reasons ${word}`, onclick: act }, word);
  const result = make("p.note", { role: "status", hidden: true });
  const all = tool("Send all again…", () => ask({ reason: null, many: batch.failed, isExact: true }));
  const tools = make("div.buttons", {}, tool("Copy", copy), all);
  note.after(tools, result); // the list below may be long

  // Read the reasons if they may have changed since, but seldom: of a large batch, they take the service a while. Return
  // whether those shown are those of this batch.
  async function look(now, signal) {
    batch = now;
    if (!now.failed) {
      version = null;
      // Its result stays, after the last failure was overridden.
      if (result.hidden) hide();
      else draw([], () => make("p.quiet", {}, "No item is failed any more."));
      tools.hidden = true;
      return true;
    }
    tools.hidden = false;
    all.hidden = !canRedrive(now);
    const current = [now.acked, now.failed, now.skipped, now.state, wanted].join();
    if (current === version) return true;
    const start = performance.now();
    if (start < nextRead) return false;
    const found = await api.reasons(id, { limit: wanted }, signal);
    const end = performance.now();
    version = current;
    nextRead = end + Math.min(SELDOM, PAUSE * (end - start));
    show(found);
    return true;
  }

  function show(found) {
    const isSample = !found.exact;
    draw(
      [found, canRedrive(batch), wanted],
      () => [
        isSample
          ? make("p.sample", {}, `A sample: ${number(found.examined)} of ${count(found.failed, "failed item")} were examined. The counts are those of the sample.`)
          : null,
        make("ul.by-reason", {}, found.reasons.map((reason, place) => line(reason, found, place))),
        found.next !== null && wanted < MOST ? make("button.more", { type: "button", "data-key": "reasons more", onclick: showMore }, "Show more") : null,
        found.next !== null && wanted >= MOST ? make("p.quiet", {}, "There are more reasons; “Copy” copies all of them.") : null,
      ],
      `${count(found.failed, "failed item")}${found.next === null ? `, ${count(found.reasons.length, "reason")}` : ""}`,
    );
  }

  function line({ reason, count: many, first_at: first, last_at: last, items }, found, place) {
    const isShort = first && Date.parse(last) - Date.parse(first) < 60_000;
    const times = first && (isShort ? [since(last)] : [make("span", {}, "first ", since(first)), make("span", {}, "last ", since(last))]);
    const examples = items.map((item) => make("a", { href: itemAddress(item), "data-key": `example ${item}` }, make("code", {}, item)));
    return make(
      "li",
      { "data-reason": reason ?? "" },
      make("strong.many", {}, number(many)),
      make(
        "div",
        {},
        make("span", { id: `why-${place}` }, reasonMark(reason)),
        make("span.facts", {}, dotted([...(times ?? []), make("span.examples", {}, examples, many > items.length ? make("span", {}, "…") : null)])),
      ),
      reason !== null && canRedrive(batch)
        ? make("button", { type: "button", "data-key": `redrive ${reason}`, "aria-describedby": `why-${place}`, onclick: () => ask({ reason, many, isExact: found.exact }) }, "Send again…")
        : null,
    );
  }

  function showMore() {
    wanted = Math.min(MOST, wanted * 10);
    nextRead = -Infinity;
    changed();
  }

  function ask(chosen) {
    askToRedrive(batch, chosen, {
      done(answer) {
        result.textContent = wasAsked("failed", answer);
        result.hidden = false;
        nextRead = -Infinity;
        version = null;
        redriven();
      },
      refresh() {
        nextRead = -Infinity;
        version = null;
        changed();
      },
    });
  }

  // All reasons, not only those shown.
  async function everything() {
    const reasons = [];
    let page;
    do {
      page = await api.reasons(id, { limit: MOST, cursor: page?.next });
      reasons.push(...page.reasons);
    } while (page.next !== null);
    return { ...page, reasons };
  }

  async function copy({ currentTarget: button }) {
    button.disabled = true;
    try {
      await copyText(asText(batch, await everything()), button);
    } catch (error) {
      result.hidden = false;
      result.textContent = error.message;
    }
    button.disabled = false;
  }

  return { node, look };
}
