// The list of batches, newest first, with state, progress and a filter that is part of the address.

import * as api from "./api.js";
import { fill, make, say, setText } from "./dom.js";
import { isLive, number, percent, since, soFar, title } from "./format.js";
import { follow, repeat } from "./live.js";
import { amounts, labelLinks, progressBar, STATES, stateMark, trouble } from "./pieces.js";
import { needsToken } from "./session.js";

const STEP = 50;
const MOST = 1000;
const HOPS = 10;

export function listView(main) {
  document.title = "Batches · Lastbit";
  let filter = { state: "", key: "", label: [] };
  let shownFilter = null; // of the rows that are on the page
  let wanted = STEP;
  const rows = new Map();

  const states = make("div.states", { role: "group", "aria-label": "State" });
  const key = make("input", { id: "key", type: "search", name: "key", placeholder: "any", autocomplete: "off", maxlength: 255 });
  const label = make("input", { id: "label", name: "label", placeholder: "name:value", autocomplete: "off" });
  const chips = make("ul.chips", { "aria-label": "Labels to filter by" });
  const form = make(
    "form.filter",
    { role: "search", "aria-label": "Filter", onsubmit: asked },
    states,
    make("label", { for: "key" }, make("span", {}, "Key"), key),
    make("label", { for: "label" }, make("span", {}, "Label"), label),
    make("button", { type: "submit" }, "Filter"),
    chips,
  );
  key.addEventListener("search", () => key.value === "" && filter.key !== "" && asked());
  const wrong = trouble();
  const list = make("ol.batches", { "aria-label": "Batches" });
  const empty = make("div.empty", { hidden: true });
  const more = make("button.more", { type: "button", hidden: true, onclick: showMore }, "Show more");
  main.append(make("h1", {}, "Batches"), form, wrong.node, list, empty, more);

  const looking = repeat(look, failedToLook);
  const unfollow = follow(null, (event) => {
    if (event?.type === "batch.completed") say(`Batch ${event.batch} is complete`);
    looking.now();
  });

  function asked(event) {
    event?.preventDefault();
    const labels = [...filter.label];
    const added = label.value.trim();
    if (added && !labels.includes(added)) labels.push(added);
    label.value = "";
    location.hash = address({ ...filter, key: key.value, label: labels });
  }

  function showMore() {
    wanted = Math.min(wanted + STEP, MOST);
    looking.now();
  }

  async function look(signal) {
    const asked = filter;
    const found = [];
    let cursor = null;
    // With a filter by label, an empty page isn't necessarily the last.
    for (let hop = 0; hop < HOPS && found.length < wanted; hop++) {
      const page = await api.batches({ ...asked, limit: wanted - found.length, cursor }, signal);
      found.push(...page.batches);
      cursor = page.next;
      if (cursor === null) break;
    }
    if (asked !== filter) return true;
    wrong.clear();
    shownFilter = asked;
    show(found, cursor !== null);
    return found.some(isLive);
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
    list.hidden = !found.length;
    empty.hidden = found.length > 0;
    if (!found.length) fill(empty, emptiness(filter, isMore));
    more.hidden = !isMore || wanted >= MOST;
  }

  return {
    show(parameters) {
      filter = { state: parameters.get("state") ?? "", key: parameters.get("key") ?? "", label: parameters.getAll("label") };
      wanted = STEP;
      key.value = filter.key;
      fill(
        states,
        ["", ...STATES].map((state) =>
          make(
            "a",
            {
              href: address({ ...filter, state }),
              "data-key": `state ${state}`,
              "aria-current": state === filter.state ? "true" : null,
            },
            state || "all",
          ),
        ),
      );
      chips.hidden = !filter.label.length;
      fill(
        chips,
        filter.label.map((each) =>
          make(
            "li",
            {},
            make(
              "a",
              {
                href: address({ ...filter, label: filter.label.filter((other) => other !== each) }),
                "aria-label": `Without the label ${each}`,
                "data-key": `label ${each}`,
              },
              each,
            ),
          ),
        ),
      );
      looking.now();
    },
    stop() {
      looking.stop();
      unfollow();
    },
  };
}

function address(filter) {
  const given = new URLSearchParams();
  if (filter.state) given.set("state", filter.state);
  if (filter.key) given.set("key", filter.key);
  for (const label of filter.label) given.append("label", label);
  const text = given.toString();
  return `#/${text && `?${text}`}`;
}

function batchRow(batch) {
  const state = stateMark();
  const bar = progressBar();
  const share = make("span.share");
  const numbers = make("span.numbers");
  const failed = make("span.failures");
  const when = make("span.when");
  let moment = "";
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
    labelLinks(batch),
  );
  return {
    node,
    update(now) {
      state.update(now);
      bar.update(now);
      setText(share, now.items ? `${percent(now.acked + now.failed, now.items)} %${soFar(now)}` : "");
      setText(numbers, amounts(now));
      setText(failed, now.failed ? `${number(now.failed)} failed` : "");
      const at = now.ended_at ?? now.created_at;
      if (at !== moment) {
        moment = at;
        when.replaceChildren(now.ended_at ? "ended " : "opened ", since(at));
      }
    },
  };
}

function emptiness(filter, isMore) {
  if (isMore) return make("p", {}, "None among the newest batches. There are older ones: narrow the filter by state or key.");
  if (filter.state || filter.key || filter.label.length) {
    return [
      make("h2", {}, "No batch matches"),
      make("p", {}, "Filters need the exact key or label. ", make("a", { href: "#/" }, "All batches")),
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
