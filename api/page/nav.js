// The sections of the page: their links, for those that the session may read, and which one is open.

import { fill, make } from "./dom.js";
import { isLimited, may } from "./session.js";

const everybody = () => true;
const unlimited = () => !isLimited();
const operators = () => may("admin") && !isLimited();

const SECTIONS = [
  ["batches", "Batches", "#/", everybody],
  ["stuck", "Stuck", "#/stuck", everybody],
  ["processes", "Processes", "#/processes", unlimited],
  ["commands", "Commands", "#/commands", unlimited],
  ["consumer-groups", "Consumer groups", "#/consumer-groups", unlimited],
  ["tallies", "Tallies", "#/tallies", unlimited],
  ["feed", "Feed", "#/feed", everybody],
  ["webhooks", "Webhooks", "#/webhooks", operators],
  ["tokens", "Tokens", "#/tokens", operators],
];

// `path` is that of the open view; null while nobody is signed in.
export function showSections(path) {
  const node = document.getElementById("sections");
  node.hidden = path === null;
  if (path === null) return node.replaceChildren();
  const open = path.split("/")[1] || "batches";
  fill(
    node,
    SECTIONS.filter(([, , , isShown]) => isShown()).map(([section, word, href]) =>
      make("a", { href, "data-key": section, "aria-current": section === open ? "page" : null }, word),
    ),
  );
  const current = node.querySelector("[aria-current]");
  if (current) node.scrollLeft = current.offsetLeft - node.offsetLeft - 16;
}
