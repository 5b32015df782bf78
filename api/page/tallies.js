// Tallies: the totals of one by key, and the sources that add up to a total.

import * as api from "./api.js";
import { make, setText } from "./dom.js";
import { number } from "./format.js";
import { address, field, polled, table } from "./views.js";

const STEP = 100;
const MOST = 1000;

const toTally = (tally, parameters) => address(`/tallies/${encodeURIComponent(tally)}`, parameters);
const toKey = (tally, key) => `${toTally(tally)}/${encodeURIComponent(key)}`;

// The service keeps no list of tallies, so this asks for a name.
export function talliesView(main) {
  document.title = "Tallies · Lastbit";
  const name = field("tally", "Tally", { required: true, pattern: "[A-Za-z0-9][A-Za-z0-9._:\\-]{0,254}", placeholder: "its name" });
  main.append(
    make("h1", {}, "Tallies"),
    make("p.quiet.lead", {}, "A tally adds up amounts by key, each message once. Open one by its name."),
    make("form.filter", { role: "search", "aria-label": "Open a tally", onsubmit: asked }, name, make("button", { type: "submit" }, "Open")),
  );

  function asked(event) {
    event.preventDefault();
    location.hash = toTally(event.target.elements.tally.value);
  }
  return { show() {}, stop() {} };
}

export function tallyView(main, tally) {
  let prefix = "";
  let wanted = STEP;
  const totals = table(`Totals of ${tally}`, ["Key", "#Total"], (total) => ({
    attributes: { "data-total": total.key },
    cells: [make("a", { href: toKey(tally, total.key), "data-key": total.key }, total.key), number(total.value)],
  }));
  const empty = make("p.empty.quiet", { hidden: true });
  const more = make("button.more", { type: "button", hidden: true, onclick: showMore }, "Show more");
  const beginning = field("prefix", "Keys that begin with", { type: "search", placeholder: "any" });
  const input = beginning.querySelector("input");
  const form = make("form.filter", { role: "search", "aria-label": "Keys", onsubmit: asked }, beginning, make("button", { type: "submit" }, "Filter"));
  const seen = polled(main, { heading: tally, up: make("a", { href: "#/tallies" }, "Tallies") }, async (signal) => {
    const asked = prefix;
    const page = await api.totals(tally, { prefix: asked, limit: wanted }, signal);
    if (asked !== prefix) return;
    totals.draw(page.totals);
    totals.node.hidden = !page.totals.length;
    empty.hidden = page.totals.length > 0;
    // The service answers alike for a tally that doesn't exist.
    setText(empty, `There is no tally ${tally}, or ${asked ? `none of its keys begins with “${asked}”` : "it has no keys"}.`);
    more.hidden = page.next === null || wanted >= MOST;
  });
  main.append(form, totals.node, empty, more);

  function asked(event) {
    event.preventDefault();
    location.hash = toTally(tally, { prefix: input.value });
  }
  function showMore() {
    wanted = Math.min(MOST, wanted + STEP);
    seen.looking.now();
  }
  return {
    show(parameters) {
      prefix = parameters.get("prefix") ?? "";
      input.value = prefix;
      wanted = STEP;
      seen.looking.now();
    },
    stop: seen.stop,
  };
}

export function totalView(main, tally, key) {
  const sum = make("p.big.total");
  const sources = table(`Sources of ${key}`, ["Topic", "#Partition", "#Generation", "#Counted up to", "#Child", "#Value"], (source) => ({
    cells: [
      source.topic,
      ...[source.partition, source.generation].map(number),
      ...(source.position === null ? [source.offset, source.child].map(number) : [source.position, ""]),
      number(source.value),
    ],
  }));
  const seen = polled(main, { heading: key, up: make("a", { href: toTally(tally) }, tally) }, async (signal) => {
    const total = await api.total(tally, key, signal);
    sum.replaceChildren(make("strong", {}, number(total.value)), make("span.words", {}, total.sources.length ? "the sum of its sources" : "nothing was ever added"));
    sources.draw(total.sources);
    sources.node.hidden = !total.sources.length;
  });
  main.append(sum, sources.node);
  return seen;
}
