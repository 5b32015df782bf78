// The list of batches that match the filter, newest first, with state and progress, and their number by state.

import * as api from "./api.js";
import { askToCancelAll, canMatchLive } from "./bulk-cancel.js";
import { fill, make, say, setText } from "./dom.js";
import { filterAddress, filterForm, isNarrow, readFilter } from "./filter.js";
import { isLive, number, percent, since, soFar, title } from "./format.js";
import { follow, repeat } from "./live.js";
import { amounts, labelLinks, progressBar, resolvedOf, stateMark, trouble } from "./pieces.js";
import { may, needsToken } from "./session.js";

const STEP = 50;
const MOST = 1000;
const HOPS = 10;
const BETWEEN_COUNTS = 1000;

export function listView(main) {
  document.title = "Batches · Lastbit";
  let filter = readFilter(new URLSearchParams());
  let shownFilter = null; // of the rows that are on the page
  let superseded = new AbortController(); // of the requests for this filter
  let wanted = STEP;
  let counting = 0;
  const rows = new Map();
  const form = filterForm();
  const cancel = make("button.cancel", { type: "button", hidden: true, onclick: askToCancel }, "Cancel these…");
  const wrong = trouble();
  const list = make("ol.batches", { "aria-label": "Batches" });
  const empty = make("div.empty", { hidden: true });
  const more = make("button.more", { type: "button", hidden: true, onclick: showMore }, "Show more");
  main.append(make("div.title", {}, make("h1", {}, "Batches"), make("div.actions", {}, cancel)), form.node, wrong.node, list, empty, more);

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
    const found = await unlessSuperseded(({ state, ...asked }, stop) => api.counts(asked, stop), signal);
    if (found) form.showCounts(found);
    return false;
  }

  const canCancel = () => may("produce") && isNarrow(filter) && canMatchLive(filter);

  function askToCancel() {
    askToCancelAll(filter, () => {
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
      const page = await api.batches({ ...asked, limit: wanted - batches.length, cursor }, signal);
      batches.push(...page.batches);
      cursor = page.next;
      if (cursor === null) break;
    }
    return { batches, isMore: cursor !== null };
  }

  function failedToLook(error) {
    wrong.show(error);
    // Rows of the previous filter would look like results of this one.
    if (shownFilter === filter) return;
    rows.clear();
    list.replaceChildren();
    list.hidden = empty.hidden = more.hidden = true;
  }

  function show(found, isMore) {
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
    cancel.hidden = !canCancel() || !(found.length || isMore);
    list.hidden = !found.length;
    empty.hidden = found.length > 0;
    if (!found.length) fill(empty, emptiness(filter, isMore));
    more.hidden = !isMore || wanted >= MOST;
  }

  return {
    show(parameters) {
      filter = readFilter(parameters);
      superseded.abort();
      superseded = new AbortController();
      wanted = STEP;
      form.show(filter);
      if (!canCancel()) cancel.hidden = true;
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
  const numbers = make("span.numbers");
  const failed = make("span.failures");
  const when = make("span.when");
  let moment = "";
  let labels = labelLinks(batch);
  let labelled = JSON.stringify(batch.labels);
  const node = make(
    "li.batch",
    { "data-batch": batch.id },
    make(
      "div.what",
      {},
      make("a.name", { href: `#/batches/${batch.id}` }, title(batch)),
      batch.key ? make("span.id", {}, `batch ${batch.id}`) : null,
    ),
    state.node,
    make("div.far", {}, bar.node, share),
    make("p.facts", {}, numbers, failed, when),
    labels,
  );
  return {
    node,
    update(now) {
      const labelledNow = JSON.stringify(now.labels);
      if (labelledNow !== labelled) {
        labelled = labelledNow;
        labels?.remove();
        labels = labelLinks(now);
        if (labels) node.append(labels);
      }
      state.update(now);
      bar.update(now);
      setText(share, now.items ? `${percent(resolvedOf(now), now.items)} %${soFar(now)}` : "");
      setText(numbers, amounts(now));
      setText(failed, now.failed ? `${number(now.failed)} failed` : "");
      const at = now.ended_at ?? now.updated_at;
      if (at !== moment) {
        moment = at;
        if (now.ended_at) when.replaceChildren("ended ", since(at));
        else when.replaceChildren("opened ", since(now.created_at), ", changed ", since(at));
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
