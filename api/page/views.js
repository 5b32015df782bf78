// Shared by the views: heading, error message, polling while the tab is visible, lists and tables.

import { fill, make } from "./dom.js";
import { repeat } from "./live.js";
import { trouble } from "./pieces.js";

const EVERY = 2000;

// A view that reads again and again while its tab is visible. `look(signal)` reads and draws; it is called again until
// the view is stopped. `up` is a link above the heading, `actions` are buttons beside it.
export function polled(main, { heading, up = null, actions = [], every = EVERY }, look) {
  document.title = `${heading} · Lastbit`;
  const wrong = trouble();
  const waiting = skeleton(main);
  const looking = repeat(
    async (signal) => {
      await look(signal);
      waiting.remove();
      wrong.clear();
      return true;
    },
    (error) => {
      waiting.remove();
      wrong.show(error);
    },
    every,
  );
  const title = make("div.title", {}, make("h1", {}, heading), make("div.actions", {}, actions));
  main.append(...[up && make("p.up", {}, up), title, wrong.node].filter(Boolean));
  return { looking, wrong, show: () => looking.now(), stop: () => looking.stop() };
}

// Grey lines at the end of the view until its first answer is there.
export function skeleton(main) {
  const node = make("div.skeleton", { role: "status", "aria-label": "Loading" }, Array.from({ length: 6 }, () => make("span")));
  // After what the view itself appends.
  queueMicrotask(() => main.append(node));
  return node;
}

// Fills a node with lines, one an entry, and only when the entries have changed.
export function drawn(node, line) {
  let before = "";
  return (found) => {
    const now = JSON.stringify(found);
    if (now === before) return;
    before = now;
    fill(node, found.map(line));
  };
}

// A table; on a narrow screen each entry is a card, whose cells have the headings before them. `columns` are its headings; one that begins with "#" is of numbers.
// `row(entry)` returns the attributes of an entry's row and its cells, the first of which names the row.
export function table(label, columns, row) {
  const isNumber = columns.map((column) => column.startsWith("#"));
  const body = make("tbody");
  const node = make(
    "div.table",
    { role: "region", "aria-label": label },
    make(
      "table",
      {},
      make(
        "thead",
        {},
        make("tr", {}, columns.map((column, place) => make(isNumber[place] ? "th.number" : "th", { scope: "col" }, column.replace("#", "")))),
      ),
      body,
    ),
  );
  const draw = drawn(body, (entry) => {
    const { attributes = {}, cells } = row(entry);
    return make(
      "tr",
      attributes,
      cells.map((cell, place) => {
        const kind = place ? "td" : "th";
        const about = { "data-heading": columns[place].replace("#", ""), scope: place ? null : "row" };
        return make(isNumber[place] ? `${kind}.number` : kind, about, cell ?? make("span.none", {}, "–"));
      }),
    );
  });
  // What scrolls must be reached by the keyboard; what doesn't would be a stop without a use.
  const measured = new ResizeObserver(() => {
    if (node.scrollWidth > node.clientWidth) node.tabIndex = 0;
    else node.removeAttribute("tabindex");
  });
  measured.observe(node);
  measured.observe(node.firstChild);
  return { node, draw };
}

// Links that choose one of several values; the chosen one is part of the address.
export function choices(label) {
  const node = make("div.states", { role: "group", "aria-label": label });
  return {
    node,
    // `entries`: value, word, and a count or null. `to(value)` returns the address.
    show(entries, chosen, to) {
      fill(
        node,
        entries.map(([value, word, many = null]) =>
          make(
            "a",
            { href: to(value), "data-key": `${label} ${value}`, "data-value": value, "aria-current": value === chosen ? "true" : null },
            word,
            ...(many === null ? [] : [" ", make("span.tab-count", {}, many)]),
          ),
        ),
      );
    },
  };
}

export const field = (id, word, properties, hint = null) =>
  make(
    "label.field-line",
    { for: id },
    make("span", {}, word),
    make("input", { id, name: id, autocomplete: "off", autocapitalize: "off", spellcheck: "false", ...properties }),
    hint && make("small.quiet", {}, hint),
  );

// An address of the page, with those parameters that have a value.
export function address(path, parameters = {}) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of [value].flat()) if (each !== null && each !== undefined && each !== "") given.append(name, each);
  }
  const text = given.toString();
  return `#${path}${text && `?${text}`}`;
}
