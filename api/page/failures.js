// Failures of all batches whose reason has a text, the newest batch first. The search is part of the address.

import { askToActOnAll } from "./act-on-all.js";
import * as api from "./api.js";
import { fill, make, setText } from "./dom.js";
import { count, number, since } from "./format.js";
import { reasonMark, trouble } from "./pieces.js";
import { may } from "./session.js";
import { address } from "./views.js";

const STEP = 100;
const REASONS = 10; // that are counted above the failures
const HOPS = 10; // calls of one search: with a rare text, most pages are empty
const LARGEST = 1000; // failures of one call
const sent = new Map(); // what this page has sent again: by reason, what was said of it

export function failuresView(main) {
  document.title = "Failures · Lastbit";
  const text = make("input", { id: "text", type: "search", placeholder: "a part of the reason", autocomplete: "off", autocapitalize: "off", spellcheck: "false", maxlength: 4000 });
  const prefix = make("input", { id: "prefix", type: "search", placeholder: "begins with", autocomplete: "off", autocapitalize: "off", spellcheck: "false", maxlength: 255 });
  const form = make(
    "form.filter.find",
    { role: "search", "aria-label": "Search failures", onsubmit: submitted },
    make("label", { for: "text" }, make("span", {}, "Reason"), text),
    make("label", { for: "prefix" }, make("span", {}, "Key"), prefix),
    make("button", { type: "submit" }, "Search"),
  );
  const wrong = trouble();
  const status = make("p.quiet", { role: "status", tabindex: -1 });
  const further = make("button", { type: "button", hidden: true, onclick: search }, "Search on");
  const reasons = make("ul.by-reason", { "aria-label": "Why they failed" });
  const list = make("ul.ranges.failures", { "aria-label": "Failures" });
  const more = make("button.more", { type: "button", hidden: true, onclick: search }, "Search on");
  main.append(make("div.title", {}, make("h1", {}, "Failures")), form, wrong.node, make("div.found", {}, status, further), reasons, list, more);
  let wanted = {};
  let cursor = null;
  let found = [];
  let searching = new AbortController();

  function submitted(event) {
    event.preventDefault();
    const there = address("/failures", { text: text.value.trim(), key_prefix: prefix.value });
    if (there === location.hash) restart();
    else location.hash = there;
  }

  function restart() {
    searching.abort();
    searching = new AbortController();
    cursor = null;
    found = [];
    fill(list);
    return search();
  }

  async function search() {
    const { signal } = searching;
    const isAsked = [more, further].includes(document.activeElement);
    more.hidden = further.hidden = true;
    setText(status, "Searching…");
    try {
      let missing = STEP;
      for (let hop = 0; hop < HOPS && missing > 0; hop++) {
        const page = await api.failures({ ...wanted, limit: missing, cursor }, signal);
        list.append(...page.failures.map(line));
        found.push(...page.failures);
        missing -= page.failures.length;
        cursor = page.next;
        if (cursor === null) break;
      }
      wrong.clear();
    } catch (error) {
      if (signal.aborted) return;
      wrong.show(error);
    }
    if (signal.aborted) return;
    more.hidden = further.hidden = cursor === null;
    fill(reasons, byReason());
    setText(status, `${found.length ? count(found.length, "failure") : "No failure"} with a reason${cursor === null ? "" : " so far; older batches are not searched yet"}.`);
    if (isAsked) (cursor === null ? status : further).focus();
  }

  // The reasons of the failures that were found, the most frequent one first.
  function byReason() {
    const groups = new Map();
    for (const failure of found) {
      if (!groups.has(failure.reason)) groups.set(failure.reason, []);
      groups.get(failure.reason).push(failure);
    }
    const largest = [...groups].sort(([, one], [, other]) => other.length - one.length).slice(0, REASONS);
    return largest.map(([reason, failures], place) => {
      const batches = new Set(failures.map(({ batch }) => batch));
      return make(
        "li",
        { "data-reason": reason ?? "" },
        make("strong.many", {}, number(failures.length)),
        make(
          "div",
          {},
          make("span", { id: `why-${place}` }, reasonMark(reason)),
          make("span.facts", {}, `in ${count(batches.size, "batch", "batches")}${cursor === null ? "" : " so far"}`),
          sent.has(reason) ? make("span.facts.sent", {}, sent.get(reason)) : null,
        ),
        reason && may("produce") ? make("button", { type: "button", "data-key": `send ${reason}`, "aria-describedby": `why-${place}`, onclick: () => ask(reason) }, "Send again…") : null,
      );
    });
  }

  function ask(reason) {
    async function done(said) {
      sent.set(reason, said);
      await restart();
      const again = [...reasons.children].find((node) => node.dataset.reason === reason);
      (again?.querySelector("button") ?? text).focus();
    }
    askToActOnAll({ key_prefix: wanted.key_prefix }, done, { reason, find: (signal, report) => allWith(reason, signal, report) });
  }

  // The batches of all failures with this reason, each with their number: of older batches too, which the list hasn't.
  async function allWith(reason, signal, report) {
    const many = new Map();
    let total = 0;
    let next = null;
    do {
      const page = await api.failures({ key_prefix: wanted.key_prefix, text: reason, limit: LARGEST, cursor: next }, signal);
      for (const failure of page.failures) {
        if (failure.reason !== reason) continue;
        many.set(failure.batch, (many.get(failure.batch) ?? 0) + 1);
        total++;
      }
      next = page.next;
      report(total);
    } while (next !== null);
    return many;
  }

  return {
    show(parameters) {
      wanted = { text: parameters.get("text") ?? "", key_prefix: parameters.get("key_prefix") ?? "" };
      text.value = wanted.text;
      prefix.value = wanted.key_prefix;
      restart();
    },
    stop: () => searching.abort(),
  };
}

const line = ({ item, batch, key, reason, failed_at: at }) =>
  make(
    "li",
    {},
    make("a.event", { href: `#/batches/${batch}` }, key || `Batch ${batch}`),
    make("span.when", {}, since(at)),
    make("a.many", { href: `#/items/${encodeURIComponent(item)}` }, make("code", {}, item)),
    reasonMark(reason),
  );
