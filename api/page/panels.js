// The panels below a batch's picture: ranges, failures, events, deliveries, and why it isn't complete.

import { ask } from "./dialogs.js";
import * as api from "./api.js";
import { dotted, fill, make, say } from "./dom.js";
import { count, itemId, number, since, until, withTimes } from "./format.js";
import { itemTools } from "./items.js";
import { reasonMark } from "./pieces.js";
import { may } from "./session.js";

export function panel(name, heading) {
  const note = make("span.facts");
  const body = make("div.panel-body");
  const node = make(
    "section.panel",
    { "aria-labelledby": `${name}-heading`, hidden: true, "data-panel": name },
    make("div.section-head", {}, make("h2", { id: `${name}-heading` }, heading), note),
    body,
  );
  let drawn = "";
  return {
    node,
    note,
    // Redraw only what has changed.
    draw(data, children, text = "") {
      node.hidden = false;
      const now = JSON.stringify(data);
      if (now === drawn) return;
      drawn = now;
      note.textContent = text;
      fill(body, children());
    },
    hide() {
      node.hidden = true;
      drawn = "";
    },
  };
}

const more = (isMore, key, act) =>
  isMore ? make("button.more", { type: "button", "data-key": key, onclick: act }, "Show more") : null;

// Why the batch isn't complete, in the service's words. Deliveries don't delay a batch; they have a panel of their own.
export function whyPanel() {
  const { node, draw, hide } = panel("why", "Why is it not done?");
  return {
    node,
    show(found) {
      if (found.done) return hide();
      const texts = found.reasons.filter(({ code }) => code !== "webhook_not_delivered").map(({ text }) => text);
      draw(texts, () => make("ul.reasons", {}, texts.map((text) => make("li", {}, withTimes(text)))));
    },
  };
}

// `itemAddress(number)` returns the address that shows the item, selected among its group's bits. `redriven` is called
// after the producer was asked for the items again.
export function pendingPanel(itemAddress, showMore, redriven) {
  const { node, note, draw, hide } = panel("pending", "Pending");
  const tools = itemTools("pending", redriven);
  note.after(tools.node);
  node.append(tools.result);
  return {
    node,
    show(batch, page) {
      tools.show(batch);
      if (!batch.pending) return hide();
      draw(
        [page, batch.pending],
        () => [
          make(
            "ul.ranges",
            {},
            page.ranges.map((range) =>
              make(
                "li",
                {},
                make(
                  "a.range",
                  { href: itemAddress(range.start), "data-key": `pending ${range.start}` },
                  make("code", {}, range.first),
                  range.end - range.start > 1 ? [" – ", make("code", {}, range.last)] : null,
                ),
                range.end - range.start > 1 ? make("span.many", {}, number(range.end - range.start)) : null,
              ),
            ),
          ),
          more(page.next !== null, "pending more", showMore),
        ],
        count(batch.pending, "item"),
      );
    },
  };
}

// Consecutive items that failed for the same reason share a line.
function failures(batch, ranges) {
  const lines = [];
  const add = (start, end, reason) => {
    const last = lines.at(-1);
    if (last && last.end === start && last.reason === reason) last.end = end;
    else lines.push({ start, end, reason });
  };
  for (const range of ranges) {
    let at = range.start;
    const reasons = Object.entries(range.reasons).map(([id, reason]) => {
      const [, group, index] = id.split(":").map(Number);
      return [group * batch.group_size + index, reason];
    });
    for (const [where, reason] of reasons.sort((one, other) => one[0] - other[0])) {
      if (at < where) add(at, where, null);
      add(where, where + 1, reason);
      at = where + 1;
    }
    if (at < range.end) add(at, range.end, null);
  }
  return lines;
}

export function failedPanel(itemAddress, showMore) {
  const { node, note, draw, hide } = panel("failed", "Failed");
  const tools = itemTools("failed");
  note.after(tools.node);
  node.append(tools.result);
  let known = new Map();
  return {
    node,
    reasonOf: (id) => known.get(id),
    show(batch, page) {
      tools.show(batch);
      if (!batch.failed) {
        known = new Map();
        return hide();
      }
      known = new Map(page.ranges.flatMap((range) => Object.entries(range.reasons)));
      draw(
        [page, batch.failed],
        () => [
          make(
            "ul.ranges.failures",
            {},
            failures(batch, page.ranges).map(({ start, end, reason }) =>
              make(
                "li",
                {},
                make(
                  "a.range",
                  { href: itemAddress(start), "data-key": `failed ${start}` },
                  make("code", {}, itemId(batch.id, start, batch.group_size)),
                  end - start > 1 ? [" – ", make("code", {}, itemId(batch.id, end - 1, batch.group_size))] : null,
                ),
                end - start > 1 ? make("span.many", {}, number(end - start)) : null,
                reasonMark(reason),
              ),
            ),
          ),
          more(page.next !== null, "failed more", showMore),
        ],
        count(batch.failed, "item"),
      );
    },
  };
}

const HAPPENED = {
  "batch.opened": "opened",
  "batch.updated": "updated",
  "batch.sealed": "sealed",
  "batch.completed": "completed",
  "batch.succeeded": "succeeded",
  "batch.expired": "expired",
  "batch.cancelled": "cancelled",
  "batch.reopened": "reopened",
  "batch.repaired": "repaired",
  "batch.failures_exceeded": "failures exceeded the tolerance",
  "batch.redrive": "asked for again",
};

// A field of an update, in words. Labels are a patch of their own.
function changed([name, value]) {
  const text = (value) => (value === null ? "removed" : String(value));
  const entries = name === "labels" && value !== null ? Object.entries(value).map(([label, value]) => `${label}: ${text(value)}`) : [text(value)];
  return `${name.replaceAll("_", " ")}: ${entries.join(", ")}`;
}

// What an event says beyond its type.
export function eventDetails({ type, data }) {
  if (type === "batch.redrive") {
    return [count(data.count, data.pending ? "pending item" : "failed item"), typeof data.reason === "string" && reasonMark(data.reason), data.note && `“${data.note}”`].filter(Boolean);
  }
  if (type === "batch.updated" && data?.patch) return Object.entries(data.patch).map(changed);
  if (type === "batch.cancelled") {
    return [data?.ended_by && `because of batch ${data.ended_by}`, typeof data?.reason === "string" && reasonMark(data.reason)].filter(Boolean);
  }
  if (type === "batch.reopened" && typeof data?.reason === "string") return [reasonMark(data.reason)];
  if (type === "batch.expired" && data?.cause) return [data.cause === "deadline" ? "at its deadline" : "as nothing happened for too long"];
  return [];
}

function shownDetails(event) {
  const lines = eventDetails(event);
  return lines.length ? make("ul.facts.details", {}, lines.map((line) => make("li", {}, line))) : null;
}

export function eventsPanel() {
  const { node, draw } = panel("events", "Events");
  return {
    node,
    show({ events, trimmed }) {
      draw({ events, trimmed }, () => [
        trimmed ? make("p.quiet", {}, "Older events may have left the feed.") : null,
        events.length
          ? make(
              "ol.events",
              {},
              events.map((event) =>
                make(
                  "li",
                  { "data-type": event.type },
                  make("span.event", {}, HAPPENED[event.type] ?? event.type),
                  since(event.at),
                  make("span.position", { title: "Position in the feed" }, number(event.position)),
                  shownDetails(event),
                ),
              ),
            )
          : trimmed
            ? null
            : make("p.quiet", {}, "None yet."),
      ]);
    },
  };
}

export const isUnderWay = (found) => found.deliveries.some(({ state }) => state === "pending");

// The receiver, the number of attempts, the last result and the next attempt. While an attempt runs, the next one is
// due when the running one counts as lost, so a first attempt shows no next.
function facts({ webhook, state, attempts, next_attempt_at: next, log }, callback, isDisabled) {
  const last = log.at(-1);
  return [
    webhook === callback?.id ? "callback" : `webhook ${webhook}`,
    attempts ? count(attempts, "attempt") : last ? "redelivered" : "not tried yet",
    last && [last.status && `answered ${last.status}`, last.error].filter(Boolean).join(", "),
    last && since(last.at),
    state === "pending" && attempts > 0 && make("span", {}, "next attempt ", until(next)),
    isDisabled && "the webhook is disabled",
  ].filter(Boolean);
}

// `changed` is called after a redelivery was requested.
export function deliveriesPanel(changed) {
  const { node, draw, hide } = panel("deliveries", "Deliveries");

  function redeliver(delivery) {
    ask({
      heading: "Deliver it again?",
      body: make(
        "p",
        {},
        `“${HAPPENED[delivery.type] ?? delivery.type}” is sent to webhook ${delivery.webhook} once more. `,
        "A receiver that already has the event sees the same webhook-id again.",
      ),
      confirm: "Deliver again",
      keep: "Leave it",
      async act() {
        await api.redeliver(delivery.webhook, delivery.position);
        say("The delivery will be tried again");
        changed();
      },
    });
  }

  return {
    node,
    // `callback` is the batch's own webhook, or null. `disabled` are the ids of disabled webhooks; the service refuses to
    // redeliver to them.
    show({ deliveries }, callback, disabled) {
      if (!deliveries.length) return hide();
      const isDisabled = ({ webhook, state }) => state === "dead" && disabled.has(webhook);
      draw([deliveries, callback?.id, deliveries.map(isDisabled)], () =>
        make(
          "ul.deliveries",
          {},
          deliveries.map((delivery) =>
            make(
              "li",
              { "data-state": delivery.state },
              make("span.delivery-state", {}, delivery.state),
              make("span.event", {}, HAPPENED[delivery.type] ?? delivery.type),
              make("span.tried", {}, dotted(facts(delivery, callback, isDisabled(delivery)))),
              delivery.state === "dead" && may("admin") && !isDisabled(delivery)
                ? make(
                    "button",
                    {
                      type: "button",
                      "data-key": `redeliver ${delivery.webhook} ${delivery.position}`,
                      onclick: () => redeliver(delivery),
                    },
                    "Redeliver…",
                  )
                : null,
            ),
          ),
        ),
      );
    },
  };
}
