// Failures of all batches whose reason has a text, the newest batch first. The search is part of the address.

import { askToActOnAll } from "./act-on-all.js";
import * as api from "./api.js";
import { fill, make, say, setText } from "./dom.js";
import { failedFor, sentAgain } from "./failed-for.js";
import { count, number, since } from "./format.js";
import { repeat } from "./live.js";
import { reasonMark, trouble } from "./pieces.js";
import { UNTIL_ACKED } from "./redrive.js";
import { may } from "./session.js";
import { address } from "./views.js";

const STEP = 100;
const REASONS = 10; // that are counted above the failures
const HOPS = 10; // calls of one search: with a rare text, most pages are empty
const AGAIN = 3000; // after this time, what was sent again is counted again
const COUNTED = 10_000; // items of a reason that are counted then
const NONE = "None is failed for this reason any more.";

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
  let leads = false; // whether the first reason that is found gets the focus
  let searching = new AbortController();
  // What was sent again is acked while the page is open.
  const looking = repeat(lookAgain, (error) => wrong.show(error), AGAIN);

  function submitted(event) {
    event.preventDefault();
    searching.abort(); // the first reason is one of the new search
    leads = [text, prefix].includes(document.activeElement);
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
    if (leads && [text, prefix].includes(document.activeElement)) main.querySelector(".by-reason button, .failures a")?.focus();
    leads = false;
  }

  // What was sent again and belongs to this search.
  const followed = () => [...sentAgain].filter(([reason, { keyPrefix }]) => keyPrefix === wanted.key_prefix && reason.toLowerCase().includes(wanted.text.toLowerCase()));

  // The list is read again, too, until somebody searches on: then it stays as it is.
  async function lookAgain(stop) {
    const { signal } = searching;
    const either = AbortSignal.any([stop, signal]);
    const isFirst = () => searches === 1 && !isSearching;
    try {
      for (const [reason, one] of followed()) {
        const before = one.now;
        one.now = await failedFor(reason, one.keyPrefix, either, { most: COUNTED });
        if (before.total && !one.now.total) say(NONE);
      }
      if (isFirst()) {
        const { failures, next } = await read(null, either);
        if (isFirst() && JSON.stringify(failures) !== JSON.stringify(found)) {
          found = failures;
          cursor = next;
          fill(list, found.map(line));
        }
      }
    } catch (error) {
      if (!signal.aborted) throw error;
    }
    if (!signal.aborted && !isSearching) show();
    return followed().some(([, { now }]) => now.total > 0);
  }

  function show() {
    more.hidden = further.hidden = cursor === null;
    fill(reasons, byReason());
    const those = wanted.text ? `whose reason contains “${wanted.text}”` : "with a reason";
    setText(status, `${found.length ? count(found.length, "failure") : "No failure"} ${those}${cursor === null ? "" : " so far; older batches are not searched yet"}.`);
  }

  // The reasons of the failures that were found, the most frequent one first. What was sent again stands before them, and
  // stays when none is left.
  function byReason() {
    const those = new Map(followed());
    const groups = new Map();
    for (const { reason, batch } of found) {
      if (!groups.has(reason)) groups.set(reason, { batches: new Set(), total: 0, isExact: cursor === null });
      const group = groups.get(reason);
      group.batches.add(batch);
      group.total++;
    }
    const largest = [...groups].filter(([reason]) => !those.has(reason)).sort(([, one], [, other]) => other.total - one.total);
    const shown = [...[...those].map(([reason, { now }]) => [reason, now]), ...largest.slice(0, REASONS)];
    return shown.map(([reason, { batches, total: many, isExact: isAll }], place) => {
      const said = those.get(reason)?.said;
      const again = reason && many && may("produce") ? make("button", { type: "button", "data-key": `send ${reason}`, "aria-describedby": `why-${place}`, onclick: () => ask(reason) }, "Send again…") : null;
      return make(
        "li",
        { "data-reason": reason ?? "", "data-key": again ? null : `send ${reason}`, tabindex: -1 }, // gets the focus of a button that goes
        make("strong.many", {}, number(many), isAll ? "" : "+"),
        make(
          "div",
          {},
          make("span", { id: `why-${place}` }, reasonMark(reason)),
          many || !isAll ? make("span.facts", {}, `in ${count(batches.size, "batch", "batches")}${isAll ? "" : " so far"}`) : null,
          said ? make("span.facts.sent", {}, `${said} ${many || !isAll ? UNTIL_ACKED : NONE}`) : null,
        ),
        again,
      );
    });
  }

  function ask(reason) {
    async function done() {
      await restart();
      const again = [...reasons.children].find((node) => node.dataset.reason === reason);
      (again?.querySelector("button") ?? again ?? main).focus();
      looking.now();
    }
    askToActOnAll({ key_prefix: wanted.key_prefix }, done, reason);
  }

  return {
    show(parameters) {
      wanted = { text: parameters.get("text") ?? "", key_prefix: parameters.get("key_prefix") ?? "" };
      text.value = wanted.text;
      prefix.value = wanted.key_prefix;
      restart();
      if (followed().length) looking.now();
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
