// What can be done with all pending or all failed items of a batch: copy their ids, save them as a file, send the pending
// ones again. (Failed ones are sent again by their reasons.)

import * as api from "./api.js";
import { copyText } from "./dialogs.js";
import { make, setText } from "./dom.js";
import { asCsv, asJson, save } from "./export.js";
import { count, itemId, number } from "./format.js";
import { askToRedrive, canRedrive, wasAsked } from "./redrive.js";

const PAGE = 1000;
const MOST_COPIED = 100_000;
const MOST_SAVED = 1_000_000;

// `kind` is "pending" or "failed". `redriven` is called after the producer was asked for the items again.
export function itemTools(kind, redriven) {
  let batch = null;
  const tool = (word, act) => make("button", { type: "button", "data-key": `${kind} ${word}`, onclick: ({ currentTarget }) => act(currentTarget) }, word);
  const again = tool("Send again…", sendAgain);
  const node = make("div.buttons", {}, tool("Copy ids", copy), tool("CSV", saveAsCsv), tool("JSON", saveAsJson), again);
  const result = make("p.note", { role: "status", hidden: true });

  function report(text) {
    result.hidden = false;
    setText(result, text);
  }

  // The items that there are, but at most `most`, and whether these are all. It ends early when the view is left.
  async function everything(most, progress) {
    const read = kind === "pending" ? api.pending : api.failed;
    const items = [];
    let page;
    do {
      page = await read(batch.id, { limit: PAGE, cursor: page?.next });
      for (const { start, end, reasons } of page.ranges) {
        for (let at = start; at < end; at++) {
          if (items.length === most) return { items, isWhole: false };
          const item = itemId(batch.id, at, batch.group_size);
          items.push(kind === "pending" ? { item } : { item, reason: reasons[item] ?? null });
        }
      }
      progress(items.length);
    } while (page.next !== null && node.isConnected);
    return { items, isWhole: page.next === null };
  }

  async function withAll(button, most, act) {
    const word = button.textContent;
    const progress = (many) => {
      if (batch[kind] > PAGE) setText(button, `${number(many)}…`);
    };
    button.disabled = true;
    try {
      const found = { kind, all: batch[kind], ...(await everything(most, progress)) };
      setText(button, word);
      if (node.isConnected) await act(found);
    } catch (error) {
      setText(button, word);
      report(error.message);
    }
    button.disabled = false;
  }

  const amount = ({ items, all, isWhole }) => (isWhole ? count(items.length, `${kind} item`) : `only the first ${number(items.length)} of ${count(all, `${kind} item`)}`);

  function copy(button) {
    withAll(button, MOST_COPIED, async (found) => {
      const isCopied = await copyText(found.items.map(({ item }) => `${item}\n`).join(""), button);
      if (isCopied) report(`Copied the ids of ${amount(found)}.`);
    });
  }

  function saveAs(button, ending, type, written) {
    withAll(button, MOST_SAVED, (found) => {
      const extent = found.isWhole ? "" : `-first-${found.items.length}`;
      save(`batch-${batch.id}-${kind}${extent}.${ending}`, type, written(batch, found));
      report(`Saved ${amount(found)}.`);
    });
  }
  function saveAsCsv(button) {
    saveAs(button, "csv", "text/csv", asCsv);
  }
  function saveAsJson(button) {
    saveAs(button, "json", "application/json", asJson);
  }

  function sendAgain() {
    const done = (answer) => {
      report(wasAsked(kind, answer));
      redriven();
    };
    askToRedrive(batch, { kind, reason: null, many: batch[kind], isExact: true }, { done, refresh: redriven });
  }

  return {
    node,
    result,
    show(now) {
      batch = now;
      node.hidden = batch[kind] === 0;
      again.hidden = kind !== "pending" || !canRedrive(batch, kind);
    },
  };
}
