// The live batches that have not changed for some time: since when, what is missing, and how they got on before.

import * as api from "./api.js";
import { make, setText } from "./dom.js";
import { count, number, since, title } from "./format.js";
import { smallLine } from "./history.js";
import { sorted } from "./order.js";
import { percent } from "./percent.js";
import { resolvedOf, stateMark } from "./pieces.js";
import { address, choices, polled, table } from "./views.js";

const MOST = 200;
const HOPS = 10;
const PERIODS = [
  [60, "1 min"],
  [600, "10 min"],
  [3600, "1 h"],
  [86_400, "1 d"],
];
const ORDERS = { changed: "last change", pending: "pending", failed: "failed", done: "most done" };

export function stuckView(main) {
  let period = 600;
  let order = "changed";
  const periods = choices("Without a change for");
  const orders = choices("Order");
  const heading = make("p.quiet.lead", {}, "Open and sealed batches in which nothing has happened: no ack, no failure, no new item.");
  const list = table("Stuck batches", ["Batch", "State", "Last change", "#Resolved", "#Pending", "#Failed", "Since it was opened"], row);
  const nothing = make("h2");
  const none = make("div.empty", { hidden: true }, nothing, make("p", {}, "Every open or sealed batch has changed in this time."));
  const rest = make("p.quiet", { hidden: true });
  const view = polled(main, { heading: "Stuck", every: 5000 }, look);
  main.append(heading, make("div.filter", {}, periods.node, make("div.order", {}, make("span.quiet", {}, "by"), orders.node)), list.node, none, rest);

  async function look(signal) {
    const asked = [period, order];
    const found = [];
    let cursor = null;
    // An empty page isn't necessarily the last.
    for (let hop = 0; hop < HOPS && found.length < MOST; hop++) {
      const page = await api.batches({ unchanged_for: period, history: true, limit: MOST - found.length, cursor }, signal);
      found.push(...page.batches);
      cursor = page.next;
      if (cursor === null) break;
    }
    if (asked[0] !== period || asked[1] !== order) return;
    list.draw(sorted(found, order, order === "changed"));
    list.node.hidden = !found.length;
    none.hidden = found.length > 0 || cursor !== null;
    setText(nothing, `Nothing has been stuck for ${PERIODS.find(([seconds]) => seconds === period)[1]}`);
    rest.hidden = cursor === null;
    setText(rest, `The newest ${count(found.length, "batch", "batches")} of these; there are older ones.`);
  }

  return {
    show(parameters) {
      const given = Number(parameters.get("for"));
      period = PERIODS.some(([value]) => value === given) ? given : 600;
      order = Object.hasOwn(ORDERS, parameters.get("by") ?? "") ? parameters.get("by") : "changed";
      const to = (change) => address("/stuck", { for: period, by: order, ...change });
      periods.show(PERIODS, period, (value) => to({ for: value }));
      orders.show(Object.entries(ORDERS), order, (name) => to({ by: name }));
      view.show();
    },
    stop: view.stop,
  };
}

function row(batch) {
  const state = stateMark();
  state.update(batch);
  const resolved = resolvedOf(batch);
  return {
    attributes: { "data-batch": batch.id },
    cells: [
      make("a", { href: `#/batches/${batch.id}` }, title(batch)),
      state.node,
      since(batch.updated_at),
      batch.items ? `${percent(resolved, batch.items)} %` : null,
      number(batch.pending),
      make(batch.failed ? "span.failures" : "span", {}, number(batch.failed)),
      smallLine(batch.history, Math.max(batch.items, resolved)),
    ],
  };
}
