// The sections of the page: their links, for those that the session may read and that have something in them, and which
// one is open.

import * as api from "./api.js";
import { fill, make, setText } from "./dom.js";
import { number } from "./format.js";
import { repeat } from "./live.js";
import { isLimited, may } from "./session.js";

const EVERY = 30_000;
const STUCK = 600; // seconds without a change, as the section shows at first

const everybody = () => true;
const unlimited = () => !isLimited();
const operators = () => may("admin") && !isLimited();
const ifUsed = (section) => () => !isLimited() && used.includes(section);

const SECTIONS = [
  ["batches", "Batches", "#/", everybody],
  ["stuck", "Stuck", "#/stuck", everybody],
  ["failures", "Failures", "#/failures", everybody],
  ["feed", "Feed", "#/feed", everybody],
  ["processes", "Processes", "#/processes", ifUsed("processes")],
  ["commands", "Commands", "#/commands", ifUsed("commands")],
  ["consumer-groups", "Consumer groups", "#/consumer-groups", ifUsed("consumer-groups")],
  ["tallies", "Tallies", "#/tallies", ifUsed("tallies")],
  ["webhooks", "Webhooks", "#/webhooks", operators],
  ["tokens", "Tokens", "#/tokens", operators],
];

let used = []; // the sections that have something in them
let stuck = ""; // the number of stuck batches, if there are any
let counted = -Infinity; // when they were counted, which takes longer than the rest
let open = null;
let looking = null;

// `path` is that of the open view; null while nobody is signed in.
export function showSections(path) {
  open = path === null ? null : path.split("/")[1] || "batches";
  if (open === null) {
    looking?.stop();
    looking = null;
    used = [];
    stuck = "";
    counted = -Infinity;
  }
  draw();
  if (open === null) return;
  // A view says itself when the service doesn't answer.
  looking ??= repeat(look, () => {}, EVERY);
  looking.now();
}

async function look(signal) {
  if (unlimited()) {
    const { sections, ids } = await api.sections(signal);
    used = sections;
    showIds(ids);
  }
  draw();
  if (performance.now() - counted >= EVERY) {
    const { total, exact } = await api.counts({ unchanged_for: STUCK }, signal);
    counted = performance.now();
    stuck = total ? `${number(total)}${exact ? "" : "+"}` : "";
    draw();
  }
  return true;
}

// Of one of several Lastbits side by side; `ids`, such as 3/16, are null if there is one.
function showIds(ids) {
  const node = document.getElementById("ids");
  node.hidden = ids === null;
  if (ids === null) return;
  const [remainder, divisor] = ids.split("/");
  setText(node, `ids ${ids}`);
  node.title = `The ids of its batches leave ${remainder} when they are divided by ${divisor}`;
}

function draw() {
  const node = document.getElementById("sections");
  const shown = open === null ? [] : SECTIONS.filter(([section, , , isShown]) => section === open || isShown());
  const version = JSON.stringify([open, stuck, shown.map(([section]) => section)]);
  if (node.dataset.version === version) return;
  node.dataset.version = version;
  node.hidden = open === null;
  fill(
    node,
    shown.map(([section, word, href]) =>
      make(
        "a",
        { href, "data-key": section, "aria-current": section === open ? "page" : null },
        word,
        ...(section === "stuck" && stuck ? [" ", make("span.tab-count", {}, stuck)] : []),
      ),
    ),
  );
  const current = node.querySelector("[aria-current]");
  // In the middle, where it can be, so that those on both sides are seen.
  if (current) node.scrollLeft = current.offsetLeft - node.offsetLeft - (node.clientWidth - current.offsetWidth) / 2;
}
