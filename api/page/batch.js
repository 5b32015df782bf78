// One batch: its counts, why it isn't complete, its picture and its events.

import * as api from "./api.js";
import { bitsPanel } from "./bits.js";
import { callbackPanel } from "./callback.js";
import { ask } from "./dialogs.js";
import { dotted, fill, make, say, setText } from "./dom.js";
import { askToEdit } from "./edit.js";
import { count, duration, isLive, number, rate, since, soFar, title, until } from "./format.js";
import { chart } from "./history.js";
import { follow, Pace, repeat } from "./live.js";
import { canNotify, dontNotify, isAsked, notifyAtEnd } from "./notify.js";
import { deliveriesPanel, eventsPanel, failedPanel, isUnderWay, pendingPanel, whyPanel } from "./panels.js";
import { percent } from "./percent.js";
import { pictureSection } from "./picture.js";
import { labelLinks, progressBar, resolvedOf, stateMark, stateName, trouble } from "./pieces.js";
import { reasonsPanel } from "./reasons.js";
import { askToReopen, canReopen } from "./reopen.js";
import { isLimited, may } from "./session.js";
import { ancestors, children, childrenPanel, showAncestors } from "./tree.js";
import { field, skeleton } from "./views.js";

const STEP = 12;
const MOST = 1000;
const SELDOM = 4000;

export function batchView(main, id) {
  document.title = `Batch ${id} · Lastbit`;
  const pace = new Pace();
  let batch = null;
  let drawn = null;
  let explained = -Infinity;
  let zoom = null;
  let group = null;
  let item = null; // the index in the group that the address names
  let isStale = false; // the service has not answered the last look
  let bits = null;
  let asked = false;
  let hasChildren = false;
  let newest = 0; // the position of the newest event that is shown
  let isRedriven = false; // acks may override failures of a batch that is complete
  const shown = { pending: STEP, failed: STEP };

  // The address says which groups the picture shows, which group's bits are open, and which item is selected.
  const address = ({ groups, group: one, item: index }) => {
    const given = new URLSearchParams();
    if (groups) given.set("groups", groups.join("-"));
    if (one !== null && one !== undefined) given.set("group", one);
    if (index !== null && index !== undefined) given.set("item", index);
    const text = given.toString();
    return `#/batches/${id}${text && `?${text}`}`;
  };
  const go = (to) => {
    location.hash = address(to);
  };
  go.address = address;
  const itemAddress = (number) =>
    address({ groups: zoom, group: Math.floor(number / batch.group_size), item: number % batch.group_size });
  const showMore = (name) => () => {
    shown[name] = Math.min(MOST, shown[name] * 5);
    looking.now();
  };

  const name = make("h1", {}, `Batch ${id}`);
  const state = stateMark();
  const about = make("p.facts.about");
  const reason = make("p.quiet.quoted", { hidden: true });
  const labels = make("div");
  const notify = make("button", { type: "button", hidden: true, onclick: askToNotify }, "Notify me");
  const edit = make("button", { type: "button", hidden: true, onclick: () => askToEdit(batch, changed) }, "Edit…");
  const seal = make("button", { type: "button", hidden: true, onclick: askToSeal }, "Seal…");
  const cancel = make("button.cancel", { type: "button", hidden: true, onclick: askToCancel }, "Cancel…");
  const reopen = make("button", { type: "button", hidden: true, onclick: () => askToReopen(batch, changed) }, "Reopen…");
  const wrong = trouble();
  const bar = progressBar();
  const share = make("p.big", {});
  const numbers = make("dl.numbers");
  const line = chart();
  const picture = pictureSection(id, go);
  const why = whyPanel();
  const reasons = reasonsPanel(id, { itemAddress: addressOf, changed: () => looking.now(), redriven });
  const pending = pendingPanel(itemAddress, showMore("pending"), redriven);
  const failed = failedPanel(itemAddress, showMore("failed"));
  const events = eventsPanel();
  const callback = callbackPanel();
  const deliveries = deliveriesPanel(() => aside.now());
  const below = childrenPanel();
  const above = make("p.up");
  showAncestors(above, []);
  let isPlaced = false; // the ancestors are shown; they never change
  const body = make(
    "div.batch-body",
    { hidden: true },
    make("section.progress", { "aria-label": "Progress" }, share, bar.node, numbers, line.node),
    why.node,
    reasons.node,
    picture.node,
    below.node,
    make("div.panels", {}, make("div", {}, pending.node), make("div", {}, failed.node, events.node, callback.node, deliveries.node)),
  );
  main.append(
    above,
    make("div.title", {}, name, state.node, make("div.actions", {}, notify, edit, seal, cancel, reopen)),
    about,
    reason,
    labels,
    wrong.node,
    body,
  );
  const waiting = skeleton(main);

  const looking = repeat(look, failedToLook);
  // Acks don't change these, so they are fetched less often.
  const aside = repeat(lookAside, failedToLook, SELDOM);
  const unfollow = follow(id, (event) => {
    if (event?.type === "batch.completed") say(`Batch ${id} is complete`);
    looking.soon();
    aside.soon();
  });

  async function look(signal) {
    const now = await api.batch(id, signal);
    batch = now;
    isStale = false;
    pace.saw(resolvedOf(now));
    showHead();
    const version = [now.items, now.acked, now.failed, now.skipped, now.state, shown.pending, shown.failed, zoom, group, item].join();
    if (version !== drawn) {
      const wanted = group;
      const [one, open, lost] = await Promise.all([
        wanted === null ? null : groupOrNothing(wanted, signal),
        now.pending ? api.pending(id, { limit: shown.pending }, signal) : null,
        now.failed ? api.failed(id, { limit: shown.failed }, signal) : null,
        picture.load(zoom, signal, isLive(now)),
      ]);
      pending.show(now, open);
      failed.show(now, lost);
      if (wanted === group) showBits(one);
      drawn = version;
      explained = -Infinity;
    }
    // The reasons contain counts of their own and the time since the last change.
    if (performance.now() - explained > SELDOM) {
      why.show(await api.explain(id, signal));
      explained = performance.now();
    }
    const areCurrent = await reasons.look(now, signal);
    body.hidden = false;
    waiting.remove();
    wrong.clear();
    return isLive(now) || !areCurrent || (isRedriven && now.failed > 0);
  }

  async function lookAside(signal) {
    // Only operators may read webhooks; others see no planned deliveries.
    const [happened, webhooks, { callback: own }] = await Promise.all([
      api.events(id, signal),
      may("admin") && !isLimited() ? api.planned(signal) : { lowest: Infinity, disabled: [] },
      api.callback(id, signal),
    ]);
    const planned = own?.state === "active" && !isLimited() ? Math.min(webhooks.lowest, own.position) : webhooks.lowest;
    // Fetched after the planned position, so that a delivery planned in between isn't missed.
    const sent = isLimited() ? { deliveries: [] } : await api.deliveries(id, signal);
    events.show(happened);
    callback.show(own);
    deliveries.show(sent, own, new Set([...webhooks.disabled, ...(own?.state === "disabled" ? [own.id] : [])]));
    isRedriven = happened.events.some(({ type }) => type === "batch.redrive");
    const last = happened.events.at(-1)?.position ?? 0;
    // The counts must not be older than the events beside them.
    if (last > newest) looking.now();
    newest = last;
    const [nested, { points }] = await Promise.all([children(id, signal), api.history(id, signal)]);
    below.show(id, nested, nested.batches.length ? await api.progress(id, signal) : null);
    line.show(batch ?? (await api.batch(id, signal)), points);
    hasChildren = nested.batches.length > 0;
    if (!isPlaced) {
      showAncestors(above, await ancestors(batch ?? (await api.batch(id, signal)), signal));
      isPlaced = true;
    }
    return batch === null || isLive(batch) || nested.batches.some(isLive) || planned < last || isUnderWay(sent);
  }

  function failedToLook(error) {
    waiting.remove();
    if (error.code !== "batch_not_found") {
      wrong.show(error);
      // The last counts stay, below the message; a rate or an estimate would look current.
      isStale = true;
      pace.forget();
      if (batch) showShare();
      return;
    }
    looking.stop();
    aside.stop();
    wrong.clear();
    body.hidden = true;
    notify.hidden = edit.hidden = seal.hidden = cancel.hidden = reopen.hidden = true;
    document.title = `No batch ${id} · Lastbit`;
    state.node.hidden = true;
    labels.hidden = reason.hidden = true;
    setText(name, `There is no batch ${id}`);
    fill(about, "It was deleted, or never opened. ", make("a", { href: "#/" }, "All batches"));
  }

  async function groupOrNothing(number, signal) {
    try {
      return await api.group(id, number, signal);
    } catch (error) {
      if (error.code === "group_not_found") return null;
      throw error;
    }
  }

  function showHead() {
    document.title = [brief(), title(batch), "Lastbit"].filter(Boolean).join(" · ");
    setText(name, title(batch));
    state.update(batch);
    notify.hidden = !isLive(batch) || !canNotify();
    notify.setAttribute("aria-pressed", isAsked(id));
    seal.hidden = batch.state !== "open" || !may("produce");
    edit.hidden = cancel.hidden = !isLive(batch) || !may("produce");
    reopen.hidden = !canReopen(batch);
    const facts = [`batch ${id}`, ...times(), parent(), sealing(), tolerance(), deadline()].filter(Boolean);
    const policy = [batch.tolerated_failures, batch.tolerated_failure_percentage, batch.on_exceeded, batch.deadline];
    const key = JSON.stringify([batch.state, batch.sealed_at, batch.ended_at, batch.exceeded, ...policy, batch.labels]);
    if (about.dataset.version !== key) {
      about.dataset.version = key;
      fill(about, dotted(facts));
      fill(labels, labelLinks(batch));
      setText(reason, batch.reason ?? "");
      reason.hidden = !batch.reason;
    }
    bar.update(batch);
    showShare();
    showNumbers();
  }

  // How the batch is, for the browser's tab.
  function brief() {
    if (!isLive(batch)) return stateName(batch);
    return batch.items ? `${percent(resolvedOf(batch), batch.items)} %` : null;
  }

  function times() {
    const say = (word, at) => at && make("span", {}, `${word} `, since(at));
    const took = batch.ended_at && (Date.parse(batch.ended_at) - Date.parse(batch.created_at)) / 1000;
    return [
      say("opened", batch.created_at),
      say("sealed", batch.sealed_at),
      say(batch.state === "complete" ? "completed" : batch.state, batch.ended_at),
      took === null ? null : `after ${duration(took)}`,
      batch.ended_by === null ? null : make("span", {}, "because of ", make("a", { href: `#/batches/${batch.ended_by}` }, `batch ${batch.ended_by}`)),
    ];
  }

  function parent() {
    if (batch.parent === null) return null;
    const [of] = batch.parent.split(":");
    return make("span", {}, "is item ", make("a", { href: `#/batches/${of}` }, make("code", {}, batch.parent)));
  }

  function sealing() {
    return batch.state === "open" && batch.seal_at !== null ? `seals itself at ${count(batch.seal_at, "item")}` : null;
  }

  function tolerance() {
    const bounds = [];
    if (batch.tolerated_failures !== null) bounds.push(count(batch.tolerated_failures, "item"));
    if (batch.tolerated_failure_percentage !== null) bounds.push(`${batch.tolerated_failure_percentage}%`);
    if (!bounds.length) return null;
    return `tolerates ${bounds.join(" and ")} failed${batch.exceeded ? ", which was exceeded" : ""}`;
  }

  function deadline() {
    return batch.deadline && make("span", {}, "deadline ", isLive(batch) ? until(batch.deadline) : since(batch.deadline));
  }

  function showShare() {
    if (!batch.items) {
      fill(share, make("span.words", {}, isLive(batch) ? "No items yet" : "No items"));
      return;
    }
    fill(share, make("strong", {}, percent(resolvedOf(batch), batch.items)), make("span.unit", {}, `%${soFar(batch)}`), make("span.words", {}, forecast()));
  }

  // Only a sealed batch has an estimate; an open one may still grow.
  function forecast() {
    if (batch.state === "complete") {
      if (batch.succeeded && batch.skipped) return `${number(batch.skipped)} skipped, ${number(batch.failed)} failed`;
      if (batch.succeeded) return batch.failed ? `${number(batch.failed)} failed, within the tolerance` : "everything is acked";
      return batch.failed === batch.items ? "every item failed" : `everything is resolved, ${number(batch.failed)} failed`;
    }
    if (!isLive(batch)) return batch.state === "cancelled" ? "it was cancelled" : "it expired";
    if (isStale) return "";
    if (!batch.pending) return "all that was issued is resolved; not sealed yet";
    const speed = pace.rate;
    if (speed === null) return batch.state === "open" ? "not sealed yet" : "";
    if (speed <= 0) return batch.state === "open" ? "waiting for acks; not sealed yet" : "waiting for acks";
    if (batch.state === "open") return `${rate(speed)}; not sealed yet`;
    const left = batch.pending / speed;
    const isLate = batch.deadline && Date.now() + 1000 * left > Date.parse(batch.deadline);
    return `${rate(speed)}, about ${duration(left)} left${isLate ? ", after the deadline" : ""}`;
  }

  function showNumbers() {
    const entries = [
      ["items", batch.items],
      ["acked", batch.acked],
      ["failed", batch.failed],
      ...(batch.skipped ? [["skipped", batch.skipped]] : []),
      ["pending", batch.pending],
    ];
    if (numbers.children.length !== entries.length) {
      numbers.replaceChildren(
        ...entries.map(([word]) => make("div", { "data-number": word }, make("dt", {}, word), make("dd"))),
      );
    }
    entries.forEach(([, value], place) => {
      const entry = numbers.children[place];
      setText(entry.lastChild, number(value));
      entry.classList.toggle("zero", value === 0);
    });
  }

  function showBits(found) {
    picture.mark(found?.group ?? null);
    if (!found) {
      bits?.stop();
      bits = null;
      return;
    }
    if (!bits) {
      bits = bitsPanel(batch, { reasonOf: failed.reasonOf, close: closeBits });
      picture.detail.append(bits.node);
    }
    bits.show(found, item);
    if (asked) {
      asked = false;
      bits.focus();
      bits.node.scrollIntoView({ block: "nearest" });
    }
  }

  function closeBits() {
    picture.focusOn(group);
    go({ groups: zoom });
  }

  function addressOf(example) {
    const [, at, index] = example.split(":").map(Number);
    return address({ groups: zoom, group: at, item: index });
  }

  function redriven() {
    isRedriven = true;
    changed();
  }

  function changed() {
    looking.now();
    aside.now();
  }

  async function askToNotify() {
    if (isAsked(id)) dontNotify(id);
    else if (!(await notifyAtEnd(id))) {
      notify.disabled = true;
      setText(notify, "This browser blocks notifications");
    }
    notify.setAttribute("aria-pressed", isAsked(id));
  }

  function askToSeal() {
    ask({
      heading: `Seal ${title(batch)}?`,
      body: make("p", {}, "A sealed batch gets no more items, and completes when every item is resolved. A producer that still adds items will be refused. ", "This can’t be undone."),
      confirm: "Seal the batch",
      keep: "Leave it open",
      async act() {
        await api.seal(id);
        say(`Batch ${id} is sealed`);
        changed();
      },
    });
  }

  function askToCancel() {
    ask({
      heading: `Cancel ${title(batch)}?`,
      body: make(
        "p",
        {},
        batch.pending
          ? `${number(batch.pending)} of its items are pending; acks that still come for them will be rejected. `
          : "It will not complete. ",
        "It can be reopened.",
      ),
      fields: [
        field("reason", "Reason", { maxlength: 4000, placeholder: "why; shown to everybody" }, "optional"),
        hasChildren && make("label.check", { for: "children" }, make("input", { id: "children", name: "children", type: "checkbox" }), make("span", {}, "Also cancel the live batches below it")),
      ],
      typed: String(id),
      confirm: "Cancel the batch",
      keep: "Keep it",
      async act(values) {
        await api.cancel(id, { reason: values.reason || null, children: values.children === "on" });
        say(`Batch ${id} is cancelled`);
        changed();
      },
    });
  }

  return {
    show(parameters) {
      const range = /^([0-9]{1,15})-([0-9]{1,15})$/.exec(parameters.get("groups") ?? "");
      zoom = range && Number(range[1]) <= Number(range[2]) ? [Number(range[1]), Number(range[2])] : null;
      const one = /^(0|[1-9][0-9]{0,14})$/.exec(parameters.get("group") ?? "");
      const index = /^(0|[1-9][0-9]{0,4})$/.exec(parameters.get("item") ?? "");
      const before = [group, item].join();
      group = one ? Number(one[1]) : null;
      item = one && index ? Number(index[1]) : null;
      // A click scrolls to the bits; opening the address starts at the top of the page.
      if (group !== null && [group, item].join() !== before && batch !== null) asked = true;
      changed();
    },
    stop() {
      looking.stop();
      aside.stop();
      unfollow();
      bits?.stop();
    },
  };
}
