// Shared by the list and the batch: state, labels, progress bar, and the message of a failed call.

import { make, setText } from "./dom.js";
import { count, isLive, number } from "./format.js";
import { percent } from "./percent.js";

export const STATES = ["open", "sealed", "complete", "expired", "cancelled"];

// The state in a word: a complete batch succeeded, or some or all of its items failed.
export function stateName(batch) {
  if (batch.succeeded) return "succeeded";
  return batch.state === "complete" && batch.items > 0 && batch.failed === batch.items ? "failed" : batch.state;
}

export function stateMark() {
  const node = make("span.state");
  return {
    node,
    update(batch) {
      const name = stateName(batch);
      node.dataset.state = name;
      setText(node, name === "failed" ? "all failed" : name);
    },
  };
}

export function labelLinks(batch) {
  // Those of the adapters hold whole tasks.
  const labels = Object.entries(batch.labels).filter(([name]) => !name.startsWith("lastbit."));
  if (!labels.length) return null;
  return make(
    "ul.labels",
    { "aria-label": "Labels" },
    labels.map(([name, value]) =>
      make(
        "li",
        {},
        make(
          "a",
          { href: `#/?${new URLSearchParams({ label: `${name}:${value}` })}`, title: "All batches with this label" },
          make("span.label-name", {}, name),
          make("span.label-value", {}, value),
        ),
      ),
    ),
  );
}

export function progressBar() {
  const node = make("div.bar", { role: "img" }, make("span.acked"), make("span.failed"));
  return {
    node,
    update(batch) {
      const whole = Math.max(batch.items, 1);
      node.style.setProperty("--acked-part", (batch.acked + batch.skipped) / whole);
      node.style.setProperty("--failed-part", batch.failed / whole);
      node.classList.toggle("has-failed", batch.failed > 0);
      node.dataset.state = batch.state;
      const done = batch.items ? `${percent(resolvedOf(batch), batch.items)} % resolved` : noItems(batch);
      const words = `${done}: ${number(batch.acked)} acked, ${number(batch.failed)} failed${skippedOf(batch)}, ${number(batch.pending)} pending`;
      if (node.getAttribute("aria-label") !== words) node.setAttribute("aria-label", words);
    },
  };
}

// Acked, failed or skipped.
export const resolvedOf = (batch) => batch.items - batch.pending;

const skippedOf = (batch) => (batch.skipped ? `, ${number(batch.skipped)} skipped` : "");

export const noItems = (batch) => (isLive(batch) ? "no items yet" : "no items");

// Why an item failed. A reason may be missing, and it may be empty.
export const EMPTY = "an empty reason";
export function reasonMark(reason) {
  return reason ? make("span.reason", {}, reason) : make("span.reason.none", {}, reason === null ? "no reason given" : EMPTY);
}

export function amounts(batch) {
  if (!batch.items) return noItems(batch);
  const resolved = resolvedOf(batch);
  return batch.pending ? `${number(resolved)} of ${count(batch.items, "item")}` : `all ${count(batch.items, "item")}`;
}

// A friendly message for a refusal, or nothing.
export function trouble() {
  const node = make("p.note.trouble", { role: "alert", hidden: true });
  return {
    node,
    show(error) {
      node.hidden = false;
      const more = error.status === 0 || error.status === 503 ? " Trying again; what you see may be old." : "";
      setText(node, `${error.message || "Something went wrong."}${more}`);
      if (error.status === undefined) console.error(error);
    },
    clear() {
      node.hidden = true;
    },
  };
}
