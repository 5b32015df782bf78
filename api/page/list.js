// The list of batches that match the filter, newest first, with state and progress, and their number by state.

import { actionsOn, askToActOnAll } from "./act-on-all.js";
import * as api from "./api.js";
import { fill, make, say, setText } from "./dom.js";
import { filterAddress, filterForm, isNarrow, queryOf, readFilter } from "./filter.js";
import { isLive, number, since, soFar, title } from "./format.js";
import { follow, repeat } from "./live.js";
import { sorted } from "./order.js";
import { percent } from "./percent.js";
import { labelLinks, noItems, progressBar, resolvedOf, stateMark, trouble } from "./pieces.js";
import { needsToken } from "./session.js";
import { skeleton } from "./views.js";

const STEP = 50;
const SORTED = 200; // rows that are loaded at first in another order than the service's
const MOST = 1000;
const HOPS = 10;
const BETWEEN_COUNTS = 1000;

// Each column with its heading, and whether the first click on it shows the least first.
const COLUMNS = [
  ["key", "Batch", true],
  ["state", "State", true],
  ["done", "Progress", false],
  ["items", "Items", false],
  ["failed", "Failed", false],
  ["opened", "Opened", false],
  ["changed", "Last change", false],
];
const NEWEST = { key: "opened", isRising: false };

// An order in the address is a column's name, with a minus for the other way round than its first.
function readOrder(text) {
  const found = COLUMNS.find(([key]) => key === text.replace(/^-/, ""));
  return found ? { key: found[0], isRising: found[2] !== text.startsWith("-") } : NEWEST;
}

const isNewestFirst = ({ key, isRising }) => key === NEWEST.key && isRising === NEWEST.isRising;

export function listView(main) {
  document.title = "Batches · Lastbit";
  let filter = readFilter(new URLSearchParams());
  let shownFilter = null; // of the rows that are on the page
  let order = NEWEST;
  let superseded = new AbortController(); // of the requests for this filter
  let wanted = STEP;
  let counting = 0;
  let leads = false; // whether the first row that is found gets the focus
  const rows = new Map();
  const form = filterForm(() => {
    leads = true;
    looking.now();
  });
  const act = make("button.cancel", { type: "button", hidden: true, "aria-keyshortcuts": "a", onclick: askToAct }, "Act on all…");
  const wrong = trouble();
  const heads = make("div.heads", { role: "row" });
  const list = make("div", { role: "rowgroup" });
  const table = make("div.batches", { role: "table", "aria-label": "Batches", hidden: true }, make("div", { role: "rowgroup" }, heads), list);
  const partly = make("p.quiet.partly", { hidden: true });
  const empty = make("div.empty", { hidden: true });
  const more = make("button.more", { type: "button", hidden: true, onclick: showMore }, "Show more");
  main.append(make("div.title", {}, make("h1", {}, "Batches"), make("div.actions", {}, act)), form.node, wrong.node, partly, table, empty, more);
  const waiting = skeleton(main);

  const looking = repeat(look, failedToLook);
  // Counting many batches takes longer than listing some, so it is done at most once a second.
  const counts = repeat(count, () => form.showCounts(null), 30_000);
  const unfollow = follow(null, (event) => {
    if (event?.type === "batch.completed") say(`Batch ${event.batch} is complete`);
    looking.soon();
    counting ||= setTimeout(() => {
      counting = 0;
      counts.soon();
    }, BETWEEN_COUNTS);
  });

  // Run `work` for this filter. Another filter aborts its requests; a late answer is never shown.
  async function unlessSuperseded(work, signal) {
    const asked = filter;
    try {
      const found = await work(asked, AbortSignal.any([signal, superseded.signal]));
      return asked === filter ? found : null;
    } catch (error) {
      if (asked === filter) throw error;
      return null;
    }
  }

  async function count(signal) {
    const found = await unlessSuperseded(({ state, ...asked }, stop) => api.counts(queryOf(asked), stop), signal);
    if (found) form.showCounts(found);
    return false;
  }

  const canAct = () => (filter.state || isNarrow(filter)) && actionsOn(filter).length > 0;

  function askToAct() {
    askToActOnAll(queryOf(filter), () => {
      looking.now();
      counts.now();
    });
  }

  function showMore() {
    wanted = Math.min(wanted + STEP, MOST);
    looking.now();
  }

  async function look(signal) {
    const found = await unlessSuperseded(read, signal);
    if (found === null) return true;
    wrong.clear();
    shownFilter = filter;
    show(found.batches, found.isMore);
    return found.batches.some(isLive);
  }

  async function read(asked, signal) {
    const batches = [];
    let cursor = null;
    // With some filters, an empty page isn't necessarily the last.
    for (let hop = 0; hop < HOPS && batches.length < wanted; hop++) {
      const page = await api.batches({ ...queryOf(asked), limit: wanted - batches.length, cursor }, signal);
      batches.push(...page.batches);
      cursor = page.next;
      if (cursor === null) break;
    }
    return { batches, isMore: cursor !== null };
  }

  function failedToLook(error) {
    waiting.remove();
    wrong.show(error);
    // Rows of the previous filter would look like results of this one.
    if (shownFilter === filter) return;
    rows.clear();
    list.replaceChildren();
    table.hidden = partly.hidden = empty.hidden = more.hidden = true;
  }

  function showHeads() {
    fill(
      heads,
      COLUMNS.map(([key, word, isRising]) => {
        const isChosen = key === order.key;
        const by = isChosen && order.isRising === isRising ? `-${key}` : key;
        const sort = isChosen ? (order.isRising ? "ascending" : "descending") : null;
        const href = filterAddress({ ...filter, by: isNewestFirst(readOrder(by)) ? "" : by });
        return make("span", { role: "columnheader", "aria-sort": sort }, make("a", { href, "data-key": `order ${key}` }, word));
      }),
    );
  }

  function show(all, isMore) {
    const found = isNewestFirst(order) ? all : sorted(all, order.key, order.isRising);
    const focused = list.contains(document.activeElement) ? document.activeElement : null;
    const ids = new Set(found.map((batch) => batch.id));
    for (const [id, row] of rows) {
      if (!ids.has(id)) {
        row.node.remove();
        rows.delete(id);
      }
    }
    found.forEach((batch, place) => {
      if (!rows.has(batch.id)) rows.set(batch.id, batchRow(batch));
      const row = rows.get(batch.id);
      row.update(batch);
      if (list.children[place] !== row.node) list.insertBefore(row.node, list.children[place] ?? null);
    });
    // A row that has moved has lost the focus.
    if (focused?.isConnected) focused.focus({ preventScroll: true });
    if (leads) list.querySelector(".name")?.focus();
    leads = false;
    waiting.remove();
    act.hidden = !canAct() || !(found.length || isMore);
    table.hidden = !found.length;
    partly.hidden = !isMore || !found.length || isNewestFirst(order);
    setText(partly, `Only the newest ${number(found.length)} batches are in this order; older ones are not loaded.`);
    empty.hidden = found.length > 0;
    if (!found.length) fill(empty, emptiness(filter, isMore));
    more.hidden = !isMore || wanted >= MOST;
  }

  return {
    show(parameters) {
      filter = readFilter(parameters);
      order = readOrder(filter.by);
      superseded.abort();
      superseded = new AbortController();
      wanted = isNewestFirst(order) ? STEP : SORTED;
      form.show(filter);
      showHeads();
      if (!canAct()) act.hidden = true;
      looking.now();
      counts.now();
    },
    stop() {
      looking.stop();
      counts.stop();
      clearTimeout(counting);
      form.stop();
      unfollow();
    },
  };
}

function batchRow(batch) {
  const state = stateMark();
  const bar = progressBar();
  const share = make("span.share");
  const amount = make("span");
  const failed = make("span.failures");
  const changed = make("span.when");
  const what = make(
    "div.what",
    { role: "rowheader" },
    make("a.name", { href: `#/batches/${batch.id}`, title: title(batch) }, title(batch)),
    batch.key ? make("span.id", {}, batch.id) : null,
  );
  let moment = "";
  let labels = null;
  let labelled = "";
  const cell = (name, ...content) => make(`div.${name}`, { role: "cell" }, ...content);
  const node = make(
    "div.batch",
    { role: "row", "data-batch": batch.id },
    what,
    cell("in-state", state.node),
    cell("far", bar.node, share),
    cell("items", amount),
    cell("in-failed", failed),
    cell("opened", make("span.when", {}, since(batch.created_at))),
    cell("changed", changed),
  );
  return {
    node,
    update(now) {
      const labelledNow = JSON.stringify(now.labels);
      if (labelledNow !== labelled) {
        labelled = labelledNow;
        labels?.remove();
        labels = labelLinks(now);
        if (labels) what.append(labels);
      }
      state.update(now);
      bar.update(now);
      setText(share, now.items ? `${percent(resolvedOf(now), now.items)} %${soFar(now)}` : "");
      setText(amount, now.items ? `${number(resolvedOf(now))} of ${number(now.items)}` : noItems(now));
      setText(failed, now.failed ? `${number(now.failed)} failed` : "");
      if (now.updated_at !== moment) {
        moment = now.updated_at;
        changed.replaceChildren(since(moment));
      }
    },
  };
}

function emptiness(filter, isMore) {
  if (isMore) return make("p", {}, "None among the newest batches. There are older ones: narrow the filter by state, key or time.");
  if (filter.state || isNarrow(filter)) {
    return [
      make("h2", {}, "No batch matches"),
      make("p", {}, "A key must begin with what was typed, and a label must be exact. ", make("a", { href: "#/" }, "All batches")),
    ];
  }
  const token = needsToken() ? ' -H "Authorization: Bearer $LASTBIT_TOKEN"' : "";
  const call = `curl ${location.origin}/v1/batches${token} -H 'Content-Type: application/json' \\
  -d '{"key": "catalog-42", "labels": {"team": "search"}, "items": 20000, "sealed": true}'`;
  return [
    make("h2", {}, "No batches yet"),
    make("p", {}, "Open the first one, and it will appear here:"),
    make("pre", { tabindex: 0, role: "region", "aria-label": "With curl" }, make("code", {}, call)),
    make("p", {}, "or with the command line:"),
    make("pre", { tabindex: 0, role: "region", "aria-label": "With lastbit" }, make("code", {}, `lastbit --url ${location.origin} open --key catalog-42 --label team:search --items 20000 --sealed`)),
  ];
}
