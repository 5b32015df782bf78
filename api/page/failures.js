// Failures of all batches whose reason has a text, the newest batch first. The search is part of the address.

import { askToActOnAll } from "./act-on-all.js";
import * as api from "./api.js";
import { fill, make, setText } from "./dom.js";
import { count, number, since } from "./format.js";
import { repeat } from "./live.js";
import { reasonMark, trouble } from "./pieces.js";
import { may } from "./session.js";
import { address } from "./views.js";

const STEP = 100;
const REASONS = 10; // that are counted above the failures
const HOPS = 10; // calls of one search: with a rare text, most pages are empty
const LARGEST = 1000; // failures of one call
const AGAIN = 3000; // after this time, what was sent again is looked for again
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
  const further = make("button", { type: "button", hidden: true, onclick: searchOn }, "Search on");
  const reasons = make("ul.by-reason", { "aria-label": "Why they failed" });
  const list = make("ul.ranges.failures", { "aria-label": "Failures" });
  const more = make("button.more", { type: "button", hidden: true, onclick: searchOn }, "Search on");
  main.append(make("div.title", {}, make("h1", {}, "Failures")), form, wrong.node, make("div.found", {}, status, further), reasons, list, more);
  let wanted = {};
  let cursor = null;
  let found = [];
  let searches = 0; // that have ended
  let isSearching = false;
  let searching = new AbortController();
  // What was sent again is acked while the page is open.
  const looking = repeat(lookAgain, (error) => wrong.show(error), AGAIN);

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
    searches = 0;
    fill(list);
    return searchOn();
  }

  // The next failures, and where those after them begin: null if there are none.
  async function read(next, signal) {
    const failures = [];
    for (let hop = 0; hop < HOPS && failures.length < STEP; hop++) {
      const page = await api.failures({ ...wanted, limit: STEP - failures.length, cursor: next }, signal);
      failures.push(...page.failures);
      next = page.next;
      if (next === null) break;
    }
    wrong.clear();
    return { failures, next };
  }

  async function searchOn() {
    const { signal } = searching;
    const isAsked = [more, further].includes(document.activeElement);
    isSearching = true;
    more.hidden = further.hidden = true;
    setText(status, "Searching…");
    try {
      const { failures, next } = await read(cursor, signal);
      list.append(...failures.map(line));
      found.push(...failures);
      cursor = next;
    } catch (error) {
      if (signal.aborted) return;
      wrong.show(error);
    }
    if (signal.aborted) return;
    isSearching = false;
    searches++;
    show();
    if (isAsked) (cursor === null ? status : further).focus();
  }

  // Once somebody has searched on, what was found stays as it is.
  async function lookAgain() {
    const isFirst = () => searches === 1 && !isSearching;
    if (!isFirst()) return false;
    const { signal } = searching;
    const { failures, next } = await read(null, signal).catch((error) => {
      if (signal.aborted) return { failures: found, next: cursor };
      throw error;
    });
    if (!isFirst() || signal.aborted) return false;
    if (JSON.stringify(failures) !== JSON.stringify(found)) {
      found = failures;
      cursor = next;
      fill(list, found.map(line));
      show();
    }
    return found.some(({ reason }) => sent.has(reason));
  }

  function show() {
    more.hidden = further.hidden = cursor === null;
    fill(reasons, byReason());
    setText(status, `${found.length ? count(found.length, "failure") : "No failure"} with a reason${cursor === null ? "" : " so far; older batches are not searched yet"}.`);
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
      (again?.querySelector("button") ?? main).focus({ preventScroll: true });
      looking.now();
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
    stop() {
      searching.abort();
      looking.stop();
    },
  };
}

const line = ({ item, batch, key, reason, failed_at: at }) =>
  make(
    "li",
    {},
    make("a.event", { href: `#/batches/${batch}`, "data-key": `batch of ${item}` }, key || `Batch ${batch}`),
    make("span.when", {}, since(at)),
    make("a.many", { href: `#/items/${encodeURIComponent(item)}`, "data-key": item }, make("code", {}, item)),
    reasonMark(reason),
  );
