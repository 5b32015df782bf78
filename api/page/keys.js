// Single keys: / searches, j and k go through the rows, ? lists them all. None is heard while something is typed, in a
// dialog, or if the user turned them off.

import { showDialog } from "./dialogs.js";
import { make } from "./dom.js";
import { prefer, preferred } from "./preferences.js";

const ROWS = ".batches .name, .table tbody th a, .processes .named, .log .of a, .by-reason button, .ranges .range, .failures a.event, .tree .named a";
const SEARCH = "[role='search'] input";

const main = document.getElementById("main");

const KEYS = [
  ["/", "search", search],
  ["j", "next row or reason", () => move(1)],
  ["k", "previous row or reason", () => move(-1)],
  ["a", "act on all batches that match", () => main.querySelector("[aria-keyshortcuts='a']:not([hidden])")?.click()],
  ["b", "all batches", () => go("#/")],
  ["s", "stuck batches", () => go("#/stuck")],
  ["f", "failures", () => go("#/failures")],
  ["t", "times as ages or as dates", () => prefer("times", preferred("times") === "ages" ? "dates" : "ages")],
  ["?", "this list", list],
];
const FIXED = [
  ["Enter", "open it"],
  ["Esc", "leave the search, or close a dialog"],
];

function go(address) {
  location.hash = address;
}

// A view without a search leads to that of the list.
function search() {
  if (focusSearch()) return;
  addEventListener("hashchange", focusSearch, { once: true });
  go("#/");
}

function focusSearch() {
  const input = main.querySelector(SEARCH);
  input?.focus();
  input?.select();
  return input !== null;
}

function move(step) {
  const rows = [...main.querySelectorAll(ROWS)].filter((row) => row.checkVisibility());
  const at = rows.indexOf(document.activeElement);
  const next = at < 0 ? rows[0] : rows[at + step];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function list() {
  const close = make("button", { type: "button", onclick: () => node.close() }, "Close");
  const lines = [...KEYS, ...FIXED].map(([key, word]) => make("div", {}, make("dt", {}, make("kbd", {}, key)), make("dd", {}, word)));
  const node = showDialog("Keys", make("dl.keys", {}, lines), make("p.quiet", {}, "They can be turned off in the settings."), make("div.buttons", {}, close));
}

const isTyped = (node) => node.matches("input:not([type='radio'], [type='checkbox']), select, textarea");

export function listenForKeys() {
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || document.querySelector("dialog[open]")) return;
    if (isTyped(event.target)) {
      // Otherwise the browser would empty the field.
      if (event.key === "Escape" && event.target.closest("[role='search']")) {
        event.preventDefault();
        main.focus({ preventScroll: true });
      }
      return;
    }
    const found = preferred("keys") === "on" && !main.querySelector(".sign-in") && KEYS.find(([key]) => key === event.key);
    if (!found) return;
    event.preventDefault();
    found[2]();
  });
}
